"""Certificates of one run, signed by an authority that follows from the run's secret.

Each process keeps its key to itself. Keys are of the curve P-256, which every TLS library supports. With its key a
member also signs statements, so that others can prove what the member said.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from hetero_pp.core.errors import MalformedMessage
from hetero_pp.messages.messages_pb2 import Statement

AS_LONG_AS_THE_SECRET = 20 * 365 * 86400.0
"""Seconds for which a certificate is valid if its process was started with the run's secret."""

CLOCKS_DIFFER = 3600.0
"""Seconds by which a certificate is valid before it was signed, because clocks differ."""

_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve's group: FIPS 186-4, D.1.2.3."""
_SEED_BYTES = 48
"""More bytes than the order has, so that all keys are equally likely (FIPS 186-4, B.4.1)."""
_AUTHORITY = "the run's authority"
_FIRST, _LAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)


_CERTIFICATE_BYTES_MAX = 4096
"""Largest certificate of a statement that is read; a member's takes less than 1000 bytes."""


@dataclass(frozen=True)
class Identity:
    """Key and certificate of a process, and the certificate of its run's authority. All PEM."""

    certificate: str
    key: str
    authority: str
    kept_in: str = ""
    """File in which renewed certificates replace this one."""

    @property
    def latest(self) -> Identity:
        """The identity with its newest certificate."""
        return replace(self, certificate=Path(self.kept_in).read_text(encoding="utf-8")) if self.kept_in else self

    @property
    def shown(self) -> Shown:
        """Content of its certificate."""
        return read_certificate(self.certificate.encode())


@dataclass(frozen=True)
class Shown:
    """Content of a certificate."""

    name: str
    """Name of the process, as in Credentials."""
    holder: int
    """Holder number at its slot; 0 if it was started with the run's secret."""
    since: float = 0.0
    until: float = math.inf
    """Seconds since 1970."""
    names_holder: bool = True
    """Whether it has the DNS name of `holder_name`; older certificates have none."""

    @property
    def signed(self) -> float:
        """Time of the signature, in seconds since 1970."""
        return self.since + CLOCKS_DIFFER


class Authority:
    """Authority of one run, which follows from the run's secret."""

    def __init__(self, secret: str) -> None:
        seed = HKDF(SHA256(), _SEED_BYTES, None, b"hetero-pp: the authority of a run").derive(secret.encode())
        self._key = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, _CURVE)
        self.certificate = self._own().decode()
        """Its certificate as PEM. It differs each time, and each verifies all signatures of the authority."""

    def identity(self, name: str) -> Identity:
        """Return a new identity of a process that is started with the run's secret."""
        key = new_key()
        certificate = self.sign(key.public_key(), name, 0, time.time() + AS_LONG_AS_THE_SECRET)
        return Identity(certificate, as_text(key), self.certificate)

    def sign(
        self, key: ec.EllipticCurvePublicKey, name: str, holder: int, until: float, now: float | None = None
    ) -> str:
        """Return a certificate (PEM) that binds the key to a member name and holder number until `until`.

        `now`: the date on which it is signed; by default that of this machine.
        """
        subject = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, name), x509.NameAttribute(NameOID.SERIAL_NUMBER, str(holder))]
        )
        signed = datetime.now(UTC) if now is None else datetime.fromtimestamp(now, UTC)
        since = signed - timedelta(seconds=CLOCKS_DIFFER)
        builder = _certificate(subject, key, since, datetime.fromtimestamp(until, UTC))
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        names = [x509.DNSName(one) for one in (name, holder_name(name, holder))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM).decode()

    def _own(self) -> bytes:
        key = self._key.public_key()
        builder = _certificate(_issuer(), key, _FIRST, _LAST)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        return builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)


def holder_name(name: str, holder: int) -> str:
    """Return the DNS name that the certificates of one holder of a slot have.

    TLS compares it before anything crosses, so a former holder of the slot cannot answer for the present one. No slot
    has this name, because slots have at most one dot.
    """
    return f"{holder}.holder.{name}"


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a certificate request for a key: PKCS #10, DER."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, SHA256()).public_bytes(Encoding.DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a request. Raises MalformedMessage unless it is on the curve and signed with the key."""
    try:
        found = x509.load_der_x509_csr(request)
        key = found.public_key()
        if found.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == _CURVE.name:
            return key
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        pass
    raise MalformedMessage("found no certificate request with a P-256 key")


def certified_key(pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a signed certificate."""
    key = x509.load_pem_x509_certificate(pem).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def digest_of(key: ec.EllipticCurvePublicKey) -> bytes:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(_CURVE)


def key_from_text(text: str) -> ec.EllipticCurvePrivateKey:
    """Return the key of a PEM text. Raises ValueError for other texts."""
    key = load_pem_private_key(text.encode(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("expected a P-256 key")
    return key


def as_text(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a key as PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def read_certificate(pem: bytes) -> Shown:
    """Parse a certificate that an authority has signed. Raises ValueError for other texts."""
    found = x509.load_pem_x509_certificate(pem)
    (name,) = found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    (holder,) = found.subject.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    since, until = found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    names_holder = holder_name(str(name.value), int(holder.value)) in names.get_values_for_type(x509.DNSName)
    return Shown(str(name.value), int(holder.value), since, until, names_holder)


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    return x509.CertificateBuilder(
        _issuer(), subject, key, x509.random_serial_number(), since.replace(microsecond=0), until
    )


def _issuer() -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY)])


class IdentitySigner:
    """Signs in the name of one member. Implements Signer."""

    def __init__(self, identity: Identity) -> None:
        self._identity, self._key = identity, key_from_text(identity.key)

    def sign(self, data: bytes) -> Statement:
        signature = self._key.sign(data, ec.ECDSA(SHA256()))
        return Statement(certificate=self._identity.latest.certificate.encode(), signature=signature)

    def check(self, statement: Statement, data: bytes, member: str, holder: int | None = None) -> None:
        found = check_statement(statement, data, member, self._identity.authority)
        if holder not in (None, found):
            raise MalformedMessage(f"found the signature of holder {found} of {member}, expected {holder}")


def check_statement(statement: Statement, data: bytes, member: str, authority: str) -> int:
    """Return the holder number of the certificate with which `member` signed these bytes.

    `authority` (PEM) signed the certificate. Raises MalformedMessage if it did not, or the member has not signed.
    """
    pem = statement.certificate
    try:
        if len(pem) > _CERTIFICATE_BYTES_MAX:
            raise ValueError(f"found a certificate of {len(pem)} bytes")
        x509.load_pem_x509_certificate(pem).verify_directly_issued_by(
            x509.load_pem_x509_certificate(authority.encode())
        )
        certified_key(pem).verify(statement.signature, data, ec.ECDSA(SHA256()))
        shown = read_certificate(pem)
    except (ValueError, TypeError, AssertionError, InvalidSignature, UnsupportedAlgorithm, x509.ExtensionNotFound):
        raise MalformedMessage(f"found no signature of {member} under what it sent") from None
    if shown.name != member:
        raise MalformedMessage(f"found the signature of {shown.name} under what {member} sent")
    return shown.holder
