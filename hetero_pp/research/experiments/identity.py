"""Settings of a row that determine its outcome."""

from __future__ import annotations

from typing import Any

from hetero_pp.config.settings import NotPartOf, meaning
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.run.config import RunConfig


def settings_of(config: RunConfig, vocabulary: int) -> Any:
    """Return the outcome-relevant part of a configuration as JSON, with ranks as numbers and without defaults."""
    width = config.model.resolve(vocabulary).width
    replicas = [_in_dimensions(replica, width) for replica in config.replicas]
    said = meaning(config.model_copy(update={"replicas": replicas}), NotPartOf.OUTCOME, defaults=False)
    return _with_embedding_of_all(said)


def _with_embedding_of_all(said: dict[str, Any]) -> dict[str, Any]:
    """Move an `embedding` that all boundaries share to `research.ablations`, where older outcomes have it."""
    boundaries = [one.get("boundary", {}) for one in said["replicas"] if one["kind"] == "participants"]
    found = {one.get("embedding") for one in boundaries}
    if found and len(found) == 1 and found != {None}:
        ablations = said.setdefault("research", {}).setdefault("ablations", {})
        ablations["embedding"] = found.pop()
        for one in boundaries:
            del one["embedding"]
    return said


def _in_dimensions(replica: ReplicaSettings, width: int) -> ReplicaSettings:
    """Return the replica with its rank as a number: 1/8 of 64 is 8."""
    if not isinstance(replica, ParticipantsReplica):
        return replica
    boundary = replica.boundary
    rank = boundary.dimensions(width) or "full"
    return replica.model_copy(update={"boundary": boundary.model_copy(update={"rank": rank})})
