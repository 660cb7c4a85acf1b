"""Results of the auditor after each round, in the store, with which a later replay of the log is compared.

audited/round-000007.json
"""

from __future__ import annotations

import hashlib
import re

from pydantic import BaseModel, ValidationError

from hetero_pp.core.errors import DamagedFile, HeteroPPError
from hetero_pp.store.store import Store

FOLDER = "audited"


class Audit(BaseModel):
    """Digests of one round, as hexadecimal digits."""

    round: int
    record_sha256: str
    """sha256 of the record that was replayed."""
    parameters_sha256: str
    """sha256 of theta after the round: over sorted (name, sha256) of all parameters."""
    sha256: str = ""
    """sha256 over the other fields, checked when the audit is read."""

    def sealed(self) -> Audit:
        """Return a copy with its digest."""
        text = f"{self.round} {self.record_sha256} {self.parameters_sha256}"
        return self.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})


def write_audit(store: Store, round_: int, record: bytes, parameters: bytes) -> None:
    """Write the digests of a round's record and of the parameters after it.

    Raises HeteroPPError if an earlier audit differs, because arithmetic then differs between two machines.
    """
    audit = Audit(round=round_, record_sha256=record.hex(), parameters_sha256=parameters.hex()).sealed()
    if store.create(audit_key(round_), audit.model_dump_json(indent=1).encode()):
        return
    known = read_audit(store, round_)
    if known != audit:
        raise HeteroPPError(
            f"{store.url(audit_key(round_))}: found parameters after round {round_} with sha256 "
            f"{audit.parameters_sha256}, expected {known.parameters_sha256} as audited before"
        )


def read_audit(store: Store, round_: int) -> Audit:
    """Read a round's audit. Raises FileNotFoundError if there is none, DamagedFile if it was altered."""
    where, data = store.url(audit_key(round_)), store.get(audit_key(round_))
    try:
        audit = Audit.model_validate_json(data)
    except ValidationError:
        raise DamagedFile(f"{where} is damaged: it cannot be read") from None
    if audit.round != round_ or audit != audit.sealed():
        raise DamagedFile(f"{where} is damaged: it does not match its digest")
    return audit


def audited(store: Store) -> set[int]:
    """Return the audited rounds."""
    found = (re.fullmatch(r"round-(\d{6,12})\.json", name) for name in store.names(FOLDER))
    return {int(match[1]) for match in found if match}


def audit_key(round_: int) -> str:
    return f"{FOLDER}/round-{round_:06d}.json"
