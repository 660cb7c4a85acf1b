"""Predict the bytes that the processes of a run on one host keep on disk, by purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero_pp.config.links import EXCHANGE
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.loads import blob_sizes
from hetero_pp.simulator.memory import moment_bytes, outer_moment_bytes, parameters_of_model

_MEMBER_CHECKPOINTS = 2
"""Newest member checkpoints that are kept: replica_groups/loop/saved_states.py."""
_STEP_BYTES, _ROUND_BYTES = 220, 1_000
"""Bytes in metrics.jsonl for an inner step of a member, and for a round of a member."""
_LINK_BYTES, _ACTIVITY_BYTES = 220, 110
"""Bytes in metrics.jsonl for the use of one direction of a link, and for an activity of a member."""
_A_SECOND = 2
"""Most reports of each activity and each direction a second: replica_groups/loop/reporter.py, training_loop.py."""


def disk_bytes(spec: RunSpec, names: Sequence[str]) -> dict[str, float]:
    """Return the bytes that these members, and the exchange if it is among them, keep at the end of the run.

    Encoded text is not included. A member checkpoint has the optimizer's moments and the error feedback of each
    parameter. That of a whole replica has the parameters, too, and so has any with `outer.overlap`.
    """
    config, found = spec.config, {"member checkpoints": 0.0, "the start of the round": 0.0}
    for member in (spec.members[name] for name in names if name in spec.members):
        parameters = sum(math.prod(spec.parameter_shapes[name]) for name in member.owned)
        moments = moment_bytes(spec, member)
        kept = moments + 4 * (1 + (member.stage is None) + config.outer.overlap) * parameters
        found["member checkpoints"] += _MEMBER_CHECKPOINTS * kept
        found["the start of the round"] += 4 * parameters + (moments if config.states.undo else 0)
    if EXCHANGE not in names:
        return found
    rounds = spec.latest.outer.rounds
    found["metrics"] = rounds * _metrics_bytes(spec)
    if config.store.url is None:
        snapshots = min(config.snapshots.keep, -(-rounds // config.snapshots.every))
        model = parameters_of_model(spec)
        found["run checkpoints"] = (1 + snapshots) * (4 + outer_moment_bytes(config)) * model
        recent = (config.snapshots.keep + 1) * config.snapshots.every
        held = min(rounds, recent) if config.store.history == "recent" else rounds
        found["contributions"] = held * sum(sum(blobs.values()) for blobs in blob_sizes(spec).values())
    return found


def _metrics_bytes(spec: RunSpec) -> float:
    """Return the most bytes of a round in metrics.jsonl. Where the round's duration is unknown, a step takes a second.

    The use of a link is reported after an inner step, and at the end of the round.
    """
    inner, members, directions = spec.config.inner, len(spec.members), 2 * len(spec.links)
    seconds = inner.seconds or float(inner.steps or 0)
    steps = inner.steps or _A_SECOND * seconds
    uses = 1 + min(steps, _A_SECOND * seconds)
    per_second = _A_SECOND * _ACTIVITY_BYTES * members
    return (_ROUND_BYTES + _STEP_BYTES * steps) * members + _LINK_BYTES * uses * directions + per_second * seconds
