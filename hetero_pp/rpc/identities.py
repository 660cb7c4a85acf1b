"""Identity of a process: certificates of one run, credentials, and tickets. All follow from the run's secret.

An authority that follows from it signs the certificates. Each process keeps its key to itself. Keys are of the curve
P-256, which every TLS library supports. With its key a member also signs statements, so that others can prove what the
member said.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Protocol

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

from hetero_pp.config.lines import EXCHANGE, VALIDATOR, LinkSpec
from hetero_pp.core.bounded import parse_json
from hetero_pp.core.errors import MalformedMessage, Refused
from hetero_pp.core.text import MOST_CHARACTERS, PREFIX, bodies
from hetero_pp.messages.messages_pb2 import Statement

AS_LONG_AS_THE_SECRET = 20 * 365 * 86400.0
"""Seconds for which a certificate is valid if its process was started with the run's secret."""

CLOCKS_DIFFER = 3600.0  # seconds by which a certificate is valid before it was signed, because clocks differ

_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve's group: FIPS 186-4, D.1.2.3."""
_SEED_BYTES = 48  # more bytes than the order has, so that all keys are equally likely (FIPS 186-4, B.4.1)
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the run's authority")])
_FIRST, _LAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)


_CERTIFICATE_BYTES_MAX = 4096  # largest certificate of a statement that is read; a member's takes less than 1000 bytes


@dataclass(frozen=True)
class Identity:
    """Key and certificate of a process, and the certificate of its run's authority. All PEM."""

    certificate: str
    key: str
    authority: str
    kept_in: str = ""  # file in which renewed certificates replace this one

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

    name: str  # name of the process, as in Credentials
    holder: int  # holder number at its slot; 0 if it was started with the run's secret
    since: float = 0.0
    until: float = math.inf  # seconds since 1970

    @property
    def signed(self) -> float:
        """Time of the signature, in seconds since 1970."""
        return self.since + CLOCKS_DIFFER


class Authority:
    """Authority of one run, which follows from the run's secret."""

    def __init__(self, secret: str) -> None:
        seed = HKDF(SHA256(), _SEED_BYTES, None, b"hetero-pp: the authority of a run").derive(secret.encode())
        self._key = ec.derive_private_key(int.from_bytes(seed, "big") % (_ORDER - 1) + 1, _CURVE)
        key = self._key.public_key()
        own = _certificate(_AUTHORITY, key, _FIRST, _LAST)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        own = own.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        self.certificate = own.sign(self._key, SHA256()).public_bytes(Encoding.PEM).decode()
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
    return Shown(str(name.value), int(holder.value), since, until)


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    since = since.replace(microsecond=0)
    return x509.CertificateBuilder(_AUTHORITY, subject, key, x509.random_serial_number(), since, until)


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


@dataclass(frozen=True)
class Credentials:
    """Credentials of one process. They are valid for its name only."""

    name: str  # a member, a replica (launcher of its members), `launcher`, `exchange`, or a validator
    token: str = ""  # token, used without an identity
    links: Mapping[str, str] = field(default_factory=dict)
    """Link name -> token that only its two ends know, used without an identity."""
    identity: Identity | None = None  # key and certificate for TLS

    def of_link(self, link: str) -> Credentials:
        """Return the credentials of this process at one end of a link: its token is the link's."""
        return replace(self, token=self.links.get(link, ""), links={})

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        """Return these, for a launcher with a ticket, which has those of one slot. Implements Keys."""
        assert name == self.name
        return self

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Credentials:
        found = json.loads(text)
        return cls(**found | {"identity": Identity(**found["identity"]) if found["identity"] else None})


class Secret:
    """Secret of one run, from which the credentials of all its processes follow."""

    def __init__(self, text: str) -> None:
        self.text, self._key = text, text.encode()

    @cached_property
    def authority(self) -> Authority:
        """Authority that signs the certificates of the run."""
        return Authority(self.text)

    def credentials(self, name: str, links: Iterable[LinkSpec] = (), encrypted: bool = False) -> Credentials:
        """Return the credentials of a process, which include those of its ends of these links."""
        if encrypted:
            return Credentials(name, identity=self.authority.identity(name))
        own = {link.name: self._derived("link", link.name) for link in links if name in (link.source, link.target)}
        return Credentials(name, self._derived("name", name), own)

    def is_of(self, name: str, token: str) -> bool:
        """Return whether a token belongs to a name, in constant time."""
        return hmac.compare_digest(self._derived("name", name).encode(), token.encode())

    def _derived(self, kind: str, name: str) -> str:
        return hmac.new(self._key, f"{kind} {name}".encode(), hashlib.sha256).hexdigest()


class Keys(Protocol):
    """Source of credentials for the processes that a launcher starts."""

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        """Return the credentials of a process, which include those of its ends of these links."""


@dataclass(frozen=True)
class SecretKeys:
    """Credentials of all processes, for a launcher with the run's secret."""

    secret: Secret
    encrypted: bool  # whether processes connect by TLS

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        return self.secret.credentials(name, links, self.encrypted)


def is_validators(name: str) -> bool:
    """Return whether a process of this name is a validator. None is called as the one beside the exchange."""
    own = name.removeprefix(VALIDATOR)
    return own not in (name, EXCHANGE) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,39}", own) is not None


def new_secret() -> str:
    """Return a new secret, for a run that begins."""
    return secrets.token_hex(16)


_CHECK_BYTES = 4
MOST_PORT = 65535
_SCHEMES = ("unix", "unix-abstract", "vsock", "dns", "xds", "ipv4", "ipv6")
"""Prefixes of addresses that gRPC does not take as HOST:PORT."""
MOST_TIME = 1e11  # seconds since 1970: three thousand years

TICKET_SECONDS = 365 * 24 * 3600.0  # seconds for which the host that has used a ticket may come again

_NAME = "ticket."
_OF_A_TICKET = re.compile(r"ticket\.([0-9a-f]{16})")  # a number that no stage of a replica named `ticket` has


@dataclass(frozen=True)
class Ticket:
    """Ticket to a run. Its first bearer takes a slot, so it is a secret."""

    run: str  # name of the run
    address: str  # HOST:PORT of each host that may serve the exchange, with commas between them
    identity: Identity  # key and certificate with which the exchange is asked for a slot, and nothing else
    until: float  # seconds since 1970 until which a host may use it first. The exchange decides, not this number.
    good_for: str = ""  # Slots that it admits to, in words. The exchange decides, not this text.
    store: str = ""
    """URL of the run's store, if the exchange signs URLs of it; members follow signed URLs to no other store."""
    rehearsal: bool = False  # whether the run is a rehearsal, which trains nothing

    def to_text(self) -> str:
        """Return the ticket on one line of letters, digits, `-` and `_`."""
        data = zlib.compress(json.dumps(asdict(self)).encode(), 9)
        checked = hashlib.sha256(data).digest()[:_CHECK_BYTES] + data
        return PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> Ticket:
        """Parse a ticket as it was pasted. Raises Refused for a text that is no ticket, or not whole."""
        candidates = list(bodies(text))
        if not candidates:
            begin = f"{text[:12]!r}{'...' if len(text) > 12 else ''}"
            expected = f"expected a ticket, which begins with {PREFIX}; to read it from a file"
            raise Refused(f"found {begin}, {expected}: hetero-pp join - < FILE")
        for body in candidates:
            try:
                data = base64.b64decode(body + "=" * (-len(body) % 4), b"-_", validate=True)
                check, data = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
                if hashlib.sha256(data).digest()[:_CHECK_BYTES] != check:
                    raise ValueError
                content = parse_json(zlib.decompressobj().decompress(data, MOST_CHARACTERS))
                run, address, shown = content["run"], content["address"], content["identity"]
                # The identity can name no file of the host that reads it.
                pem = [shown[key] for key in ("certificate", "key", "authority")]
                if not all(isinstance(text, str) for text in (run, address, *pem)):
                    raise TypeError
                for host, _, port in (one.rpartition(":") for one in address.split(",")):
                    if not host or not port.isdigit() or int(port) > MOST_PORT or host in _SCHEMES or "/" in host:
                        raise ValueError
                if not 0 < (until := float(content["until"])) < MOST_TIME:
                    raise ValueError
                told = str(content["good_for"]), str(content["store"]), content["rehearsal"] is True
                ticket = cls(run, address, Identity(*pem), until, *told)
                ticket.id  # noqa: B018 (its certificate can be read)
            except (ValueError, KeyError, TypeError, zlib.error, binascii.Error):
                continue
            return ticket
        raise Refused("the ticket is incomplete: copy all of it, as one line")

    @property
    def id(self) -> str:
        """Id of the ticket. Raises ValueError for a certificate that is no ticket's."""
        found = ticket_of(self.identity.shown.name)
        if found is None:
            raise ValueError("not issued for a ticket")
        return found

    @property
    def is_over(self) -> bool:
        """Whether it has expired for a host that has not used it."""
        return time.time() > self.until


def make_ticket(
    run: str,
    address: str,
    authority: Authority,
    ticket: str,
    until: float,
    good_for: str = "",
    store: str = "",
    rehearsal: bool = False,
) -> Ticket:
    """Return a ticket with this id, which a host may use from now until `until`."""
    key = new_key()
    certificate = authority.sign(key.public_key(), _NAME + ticket, 0, time.time() + TICKET_SECONDS)
    identity = Identity(certificate, as_text(key), authority.certificate)
    return Ticket(run, address, identity, until, good_for, store, rehearsal)


def ticket_of(name: str) -> str | None:
    """Return the ticket's id that a certificate's name contains; None for a member's."""
    found = _OF_A_TICKET.fullmatch(name)
    return None if found is None else found[1]
