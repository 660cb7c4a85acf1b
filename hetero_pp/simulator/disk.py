"""Predict the bytes and the files that the processes of a run on one host keep on disk, by purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import RunSpec
from hetero_pp.pseudo_gradient.blob_batches import batches
from hetero_pp.simulator.memory import moment_bytes, outer_moment_bytes, parameters_of_model
from hetero_pp.simulator.traffic import blob_sizes

OF_THE_ROUND = "the start of the round"  # purpose of what is removed when the run ends

_MEMBER_CHECKPOINTS = 2  # newest saved states that are kept: replica_groups/member/saved_states.py
_STEP_BYTES, _ROUND_BYTES = 220, 1_000
"""Bytes in metrics.jsonl for an inner step of a member, and for a round of a member."""
_LINK_BYTES, _ACTIVITY_BYTES = 220, 110
"""Bytes in metrics.jsonl for the use of one direction of a link, and for an activity of a member."""
_ENTRY_BYTES, _RECORD_BYTES = 230, 850
"""Bytes of a round's record for one blob, and for all else with the auditor's record of the round."""
_DISK_BLOCK_BYTES = 4096  # unit in which usual file systems give space to a file
_OTHER_FILES = 10  # files of any run: its configuration, charts, summary and the like
_A_SECOND = 2
"""Most reports of each activity and each direction a second: replica_groups/member/reporter.py, take_part.py."""


def disk_bytes(spec: RunSpec, names: Sequence[str]) -> dict[str, float]:
    """Return the bytes that these members, and the exchange if it is among them, keep at the end of the run.

    Encoded text is not included. A saved state has the optimizer's moments and the error feedback of each
    parameter. That of a whole replica has the parameters, too, and so has any with `outer.overlap`.
    """
    config, found = spec.config, {"saved states": 0.0, OF_THE_ROUND: 0.0}
    for member in (spec.members[name] for name in names if name in spec.members):
        parameters = sum(math.prod(spec.parameter_shapes[name]) for name in member.owned)
        moments = moment_bytes(spec, member)
        kept = moments + 4 * (1 + (member.stage is None) + config.outer.overlap) * parameters
        found["saved states"] += _MEMBER_CHECKPOINTS * kept
        found[OF_THE_ROUND] += 4 * parameters + (moments if config.states.undo else 0)
    if EXCHANGE not in names:
        return found
    rounds = spec.latest.outer.rounds
    # In metrics.jsonl the use of a link is reported after an inner step, and at the end of the round. Where the round's
    # duration is unknown, a step takes a second.
    members, seconds = len(spec.members), config.inner.seconds or float(config.inner.steps or 0)
    steps = config.inner.steps or _A_SECOND * seconds
    uses = 2 * len(spec.links) * (1 + min(steps, _A_SECOND * seconds))
    of_members = members * (_ROUND_BYTES + _STEP_BYTES * steps + _A_SECOND * _ACTIVITY_BYTES * seconds)
    found["metrics"] = rounds * (of_members + _LINK_BYTES * uses)
    if config.store.url is None:
        checkpoints = min(config.checkpoints.keep, -(-rounds // config.checkpoints.every))
        model = parameters_of_model(spec)
        found["run checkpoints"] = (1 + checkpoints) * (4 + outer_moment_bytes(config)) * model
        blobs = blob_sizes(spec).values()
        found["contributions"] = _held_rounds(spec) * sum(sum(one.values()) for one in blobs)
        found["records"] = rounds * (_RECORD_BYTES + _ENTRY_BYTES * sum(map(len, blobs)))
    return found


def disk_files(spec: RunSpec, names: Sequence[str]) -> dict[str, int]:
    """Return the number of files that these members, and the exchange if it is among them, keep at the end of the run.

    The purposes are those of `disk_bytes`, and few other files.
    """
    config, rounds = spec.config, spec.latest.outer.rounds
    here = [spec.members[name] for name in names if name in spec.members]
    saves = min(_MEMBER_CHECKPOINTS, -(-rounds // config.states_every))
    found = {"saved states": saves * sum(3 + member.reads_data for member in here)}
    if EXCHANGE not in names:
        return found
    found["other"] = _OTHER_FILES
    if config.store.url is None:
        found["run checkpoints"] = 1 + min(config.checkpoints.keep, -(-rounds // config.checkpoints.every))
        deposits = 0  # a file for each deposit of a member in a round
        for member in spec.members.values():
            blocks, sizes = spec.roster.blocks[member.name], blob_sizes(spec)[member.replica.name]
            blobs = ((block, range(size)) for block, size in sizes.items() if block in blocks)
            deposits += sum(1 for _ in batches(blobs))
        found["contributions"] = _held_rounds(spec) * deposits
        found["records"] = 2 * rounds
        found["other"] += len(spec.members)  # the incarnation of each slot
    return found


def space_on_disk(spec: RunSpec, names: Sequence[str]) -> dict[str, float]:
    """Return the bytes of `disk_bytes` in whole blocks of the file system, which small files fill badly."""
    files, space = disk_files(spec, names), dict[str, float]()
    for purpose, size in disk_bytes(spec, names).items():
        count = max(1, files.get(purpose, 1))
        space[purpose] = count * _DISK_BLOCK_BYTES * math.ceil(size / count / _DISK_BLOCK_BYTES)
    return space


def _held_rounds(spec: RunSpec) -> int:
    """Return how many rounds keep their contributions."""
    config, rounds = spec.config, spec.latest.outer.rounds
    recent = (config.checkpoints.keep + 1) * config.checkpoints.every
    return min(rounds, recent) if config.store.history == "recent" else rounds
