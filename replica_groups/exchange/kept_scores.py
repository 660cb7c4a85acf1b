"""Scores and exclusions after judged rounds, in the store, from which a restarted exchange goes on.

audited/scores-000007.json
"""

from __future__ import annotations

import hashlib
import re

from google.protobuf.json_format import MessageToDict, ParseDict
from pydantic import BaseModel, ValidationError

from hetero_pp.core.errors import DamagedFile
from hetero_pp.messages.messages_pb2 import Scores
from hetero_pp.store.store import Store
from replica_groups.exchange.audits import FOLDER

KEPT = 4
"""Number of newest files that stay in the store."""


class Exclusion(BaseModel):
    """A replica that rounds do not include."""

    until: int
    """First round that may include it again."""
    cause: str


class KeptScores(BaseModel):
    """State of the audits after a judged round: an exchange goes on from it, and `hetero-pp scores` shows it."""

    round: int
    book: str | None
    """State of the score book; None if the run is audited by recomputation alone."""
    table: dict[str, object]
    """The message Scores, as JSON."""
    excluded: dict[str, Exclusion]
    sha256: str = ""
    """sha256 over the other fields, checked when the file is read."""

    def sealed(self) -> KeptScores:
        """Return a copy with its digest."""
        text = self.model_copy(update={"sha256": ""}).model_dump_json()
        return self.model_copy(update={"sha256": hashlib.sha256(text.encode()).hexdigest()})

    @property
    def scores(self) -> Scores:
        """Scores of all replicas."""
        return ParseDict(self.table, Scores(), ignore_unknown_fields=True)


def keep_scores(store: Store, scores: Scores, book: str | None, excluded: dict[str, Exclusion]) -> None:
    """Write the scores after a round, and remove those of rounds long before. Raises StoreError."""
    table = MessageToDict(scores, preserving_proto_field_name=True)
    kept = KeptScores(round=scores.round, book=book, table=table, excluded=excluded).sealed()
    store.put(scores_key(kept.round), kept.model_dump_json(indent=1).encode())
    store.delete([scores_key(round_) for round_ in sorted(scored(store))[:-KEPT]])


def newest_scores(store: Store, last_round: int | None = None) -> KeptScores | None:
    """Return the newest scores, up to a round; None if there are none. Raises DamagedFile if they were altered."""
    rounds = [round_ for round_ in scored(store) if last_round is None or round_ <= last_round]
    if not rounds:
        return None
    where, data = store.url(scores_key(max(rounds))), store.get(scores_key(max(rounds)))
    try:
        kept = KeptScores.model_validate_json(data)
    except ValidationError:
        raise DamagedFile(f"{where} is damaged: it cannot be read") from None
    if kept.round != max(rounds) or kept != kept.sealed():
        raise DamagedFile(f"{where} is damaged: it does not match its digest")
    return kept


def scored(store: Store) -> set[int]:
    """Return the rounds that have scores."""
    found = (re.fullmatch(r"scores-(\d{6,12})\.json", name) for name in store.names(FOLDER))
    return {int(match[1]) for match in found if match}


def scores_key(round_: int) -> str:
    return f"{FOLDER}/scores-{round_:06d}.json"
