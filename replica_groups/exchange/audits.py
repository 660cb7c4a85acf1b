"""Results of audits, in the store: what the auditor computed after each round, and the scores after judged rounds.

audited/round-000007.json     a later replay of the log is compared with it
audited/scores-000007.json    a restarted exchange goes on from it
"""

from __future__ import annotations

import hashlib
import re
from typing import TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import BaseModel, ValidationError

from hetero_pp.core.errors import DamagedFile, HeteroPPError
from hetero_pp.messages.messages_pb2 import Scores
from hetero_pp.store.store import Store

FOLDER = "audited"

SCORES_KEPT = 4  # number of newest files of scores that stay in the store


class Audit(BaseModel):
    """Digests of one round, as hexadecimal digits."""

    round: int
    record_sha256: str  # sha256 of the record that was replayed
    parameters_sha256: str  # sha256 of theta after the round: over sorted (name, sha256) of all parameters
    sha256: str = ""  # sha256 over the other fields, checked when the audit is read

    def sealed(self) -> Audit:
        """Return a copy with its digest."""
        text = f"{self.round} {self.record_sha256} {self.parameters_sha256}"
        return self.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})


class Exclusion(BaseModel):
    """A replica that rounds do not include."""

    until: int  # first round that may include it again
    cause: str


class KeptScores(BaseModel):
    """State of the audits after a judged round: an exchange goes on from it, and `hetero-pp audit scores` shows it."""

    round: int
    book: str | None  # state of the score book; None if the run is audited by recomputation alone
    table: dict[str, object]  # the message Scores, as JSON
    excluded: dict[str, Exclusion]
    sha256: str = ""  # sha256 over the other fields, checked when the file is read

    def sealed(self) -> KeptScores:
        """Return a copy with its digest."""
        text = self.model_copy(update={"sha256": ""}).model_dump_json()
        return self.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})

    @property
    def scores(self) -> Scores:
        return ParseDict(self.table, Scores(), ignore_unknown_fields=True)


_Sealed = TypeVar("_Sealed", Audit, KeptScores)


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
    return _read(store, audit_key(round_), round_, Audit)


def keep_scores(store: Store, scores: Scores, book: str | None, excluded: dict[str, Exclusion]) -> None:
    """Write the scores after a round, and remove those of rounds long before. Raises StoreError."""
    table = MessageToDict(scores, preserving_proto_field_name=True)
    kept = KeptScores(round=scores.round, book=book, table=table, excluded=excluded).sealed()
    store.put(scores_key(kept.round), kept.model_dump_json(indent=1).encode())
    store.delete([scores_key(round_) for round_ in sorted(scored(store))[:-SCORES_KEPT]])


def newest_scores(store: Store, last_round: int | None = None) -> KeptScores | None:
    """Return the newest scores, up to a round; None if there are none. Raises DamagedFile if they were altered."""
    rounds = [round_ for round_ in scored(store) if last_round is None or round_ <= last_round]
    return _read(store, scores_key(max(rounds)), max(rounds), KeptScores) if rounds else None


def audited(store: Store) -> set[int]:
    return _rounds(store, "round")


def scored(store: Store) -> set[int]:
    return _rounds(store, "scores")


def audit_key(round_: int) -> str:
    return f"{FOLDER}/round-{round_:06d}.json"


def scores_key(round_: int) -> str:
    return f"{FOLDER}/scores-{round_:06d}.json"


def _read(store: Store, key: str, round_: int, kind: type[_Sealed]) -> _Sealed:
    where, data = store.url(key), store.get(key)
    try:
        found = kind.model_validate_json(data)
    except ValidationError:
        raise DamagedFile(f"{where} is damaged: it cannot be read") from None
    if found.round != round_ or found != found.sealed():
        raise DamagedFile(f"{where} is damaged: it does not match its digest")
    return found


def _rounds(store: Store, name: str) -> set[int]:
    found = (re.fullmatch(rf"{name}-(\d{{6,12}})\.json", one) for one in store.names(FOLDER))
    return {int(match[1]) for match in found if match}
