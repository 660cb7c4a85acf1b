"""Measures the time that each member of a run needs on this machine.

The trainer of every member is built with its real weights and boundaries and run in this process, one member after the
other. It makes the same calls as a stage worker and an outer round, without links. Times are medians.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.config.predictions import MeasuredCost
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.device import CPU
from hetero_pp.link.protocol import pack_tokens, unpack_tokens
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.pipeline.coefficients import noise_key
from hetero_pp.pseudo_gradient.contribution import entry_of
from replica_groups.engines.build import build_model
from replica_groups.engines.engine import LocalParameters
from replica_groups.engines.plain import WholeReplica
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import Start, build_stage
from stages.stage import Stage

REPEATS = 9


def measure_all(spec: RunSpec) -> Iterator[tuple[str, MeasuredCost]]:
    """Yield the measured cost of every member, with the member's name."""
    checkpoint = initial_checkpoint(spec.shape, spec.largest_rank, spec.config.seed)
    for replica in spec.config.replicas:
        members = [member for member in spec.members.values() if member.replica is replica]
        if not isinstance(replica, ParticipantsReplica) or len(members) == 1:
            yield members[0].name, _measure_whole(spec, members[0], checkpoint)
            continue
        start = Start(checkpoint.parameters, checkpoint.basis)
        stages = [build_stage(spec, replica, member.stage, start) for member in members if member.stage is not None]
        for stage in stages:
            stage.split_embedding(checkpoint.parameters[EMBEDDING])
        tokens = _tokens(spec, replica.batch_size // replica.micro_batches)
        spent = [defaultdict[str, list[float]](list) for _ in stages]
        for step in range(REPEATS):
            _pass(stages, tokens, step, spent)
        for member, stage, own in zip(members, stages, spent, strict=True):
            yield member.name, _cost(own, *_measure_outer(spec, member, dict(stage.parameters), checkpoint))


def _tokens(spec: RunSpec, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(spec.shape.vocabulary, (rows, spec.config.data.sequence_length + 1), generator=generator)


def _measure_whole(spec: RunSpec, member: MemberSpec, checkpoint: RunCheckpoint) -> MeasuredCost:
    replica, config = member.replica, spec.config
    module = build_model(replica, spec.shape, checkpoint.parameters, CPU)
    whole = WholeReplica(replica.name, module, config.inner, spec.total_steps)
    tokens = _tokens(spec, replica.batch_size // replica.micro_batches)
    spent: dict[str, list[float]] = {"forward": [], "backward": [], "update": []}
    for step in range(REPEATS):
        started = time.perf_counter()
        loss = whole.loss(tokens)
        middle = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        whole.optimizer.step(step, whole.optimizer.gradient_norm())
        spent["forward"].append(middle - started)
        spent["backward"].append(ended - middle)
        spent["update"].append(time.perf_counter() - ended)
    spent["evaluate"] = [median_seconds(lambda: whole.evaluate([tokens]))]
    return _cost(spent, *_measure_outer(spec, member, dict(whole.parameters), checkpoint))


def _cost(spent: Mapping[str, Sequence[float]], contribute: float, apply: float) -> MeasuredCost:
    """Return the cost of a member from the seconds of each repetition, by kind of work."""
    medians: dict[str, Any] = {kind: median(seconds) for kind, seconds in spent.items()}
    return MeasuredCost.model_construct(**medians, contribute=contribute, apply=apply)


def _pass(stages: list[Stage], tokens: Tensor, step: int, spent: list[defaultdict[str, list[float]]]) -> None:
    """Time a forward and backward pass of one micro-batch, an optimizer step and an evaluation, per stage.

    Encoding and decoding of the messages between stages is included.
    """
    vocabulary, (rows, length) = stages[0].module.shape.vocabulary, tokens.shape
    packed, wire = pack_tokens(tokens, vocabulary), None
    for evaluates in (True, False):
        wire = None
        for index, stage in enumerate(stages):
            started = time.perf_counter()
            shape = (rows, length - 1, stage.boundary.dimensions)
            own = tokens if wire is None else unpack_tokens(packed, vocabulary, rows, length - 1)
            came = None if wire is None else stage.boundary.format.from_wire(wire, shape)
            output = stage.evaluate(own, came) if evaluates else stage.forward(0, own, came, 1)
            if not stage.spec.is_last:
                packed = pack_tokens(own, vocabulary)
                wire = stage.boundary.format.to_wire(stage.boundary.encode_activation(output))
            spent[index]["evaluate" if evaluates else "forward"].append(time.perf_counter() - started)
    wire = None
    for index, stage in reversed(list(enumerate(stages))):
        started = time.perf_counter()
        shape = (rows, length - 1, stage.boundary.dimensions)
        came = None if wire is None else stage.boundary.format.from_wire(wire, shape)
        symbols = stage.backward(0, came, noise_key(0, "calibration", index, step, 0))
        wire = None if symbols is None else stage.boundary.format.to_wire(symbols)
        spent[index]["backward"].append(time.perf_counter() - started)
        started = time.perf_counter()
        stage.step(step, stage.optimizer.gradient_norm())
        spent[index]["update"].append(time.perf_counter() - started)


def _measure_outer(
    spec: RunSpec, member: MemberSpec, parameters: dict[str, torch.nn.Parameter], checkpoint: RunCheckpoint
) -> tuple[float, float]:
    """Return the seconds to make a contribution, and to apply the contributions of all replicas."""
    start = {name: checkpoint.parameters[name] for name in parameters}
    session = MemberSession(None, member.name, member.replica.name, spec.run)
    outer = OuterRound(session, LocalParameters(parameters), start, spec.config.outer)
    contribute = median_seconds(lambda: outer.contribute(1))
    own = outer.contribute(1)
    # This member's contribution takes the place of those of all replicas.
    blobs = [entry_of(block, sha256(data).digest(), len(data), ()) for block, data in own.items()]
    entry = ContributionEntry(replica=member.replica.name, weight=1.0, blobs=blobs)
    record = RoundRecord(round=1, contributions=[entry] * len(spec.config.replicas))
    return contribute, median_seconds(lambda: outer.apply(record, own))


def median_seconds(run: Callable[[], object]) -> float:
    """Return the median time of REPEATS calls, in seconds, after one warm-up call."""
    run()
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
