"""Statements of members, signed with the keys of their certificates, so that others can prove what a member said."""

from __future__ import annotations

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from hetero_pp.core.errors import MalformedMessage
from hetero_pp.messages.messages_pb2 import Statement
from hetero_pp.rpc.certificates import Identity, certified_key, key_from_text, read_certificate

_MOST_BYTES = 4096
"""Largest certificate that is read; a member's takes less than 1000 bytes."""


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
        if len(pem) > _MOST_BYTES:
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
