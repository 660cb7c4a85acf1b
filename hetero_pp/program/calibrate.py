"""`hetero-pp calibrate`: measure what each member of a YAML costs on this machine, and the machine's speed.

The trainer of every member is built with its real weights and boundaries and run in this process, one member after the
other. It makes the same calls as a stage worker and an outer round, without links. Times are medians.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any

import torch
from ruamel.yaml import YAML
from torch import Tensor

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.config.overrides import Override
from hetero_pp.config.predictions import MeasuredCost
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.device import CPU
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import whole
from hetero_pp.core.units import format_count, format_seconds
from hetero_pp.core.yaml_reader import read_yaml, yaml_complaint
from hetero_pp.link.protocol import pack_tokens, unpack_tokens
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.pipeline.coefficients import noise_key
from hetero_pp.program.launch.host_memory import host_memory
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.pseudo_gradient.contribution import entry_of
from hetero_pp.simulator.costs import forward_flops, part_of
from replica_groups.engines.build import build_model
from replica_groups.engines.engine import LocalParameters
from replica_groups.engines.plain import WholeReplica
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import Start, build_stage
from stages.stage import Stage

REPEATS = 9


def calibrate(path: Path, overrides: list[str], write: Path | None) -> None:
    """Measure every member, print the costs, and write a YAML that `simulate --calibration` reads."""
    spec = spec_of(ConfigFile(path, overrides))
    torch.set_num_threads(spec.config.threads)
    measured = dict(measure_all(spec))
    console = standard_output()
    names = list(MeasuredCost.model_fields)
    table = PlainTable(["member"], names)
    operations = seconds = 0.0  # of forward and backward, over all members
    for member, cost in measured.items():
        table.add_row(member, *(format_seconds(getattr(cost, name)) for name in names))
        replica, part = spec.members[member].replica, part_of(spec, spec.members[member])
        rows, length = replica.batch_size // replica.micro_batches, spec.config.data.sequence_length
        operations += 3 * forward_flops(spec.shape, part, rows, length)
        seconds += cost.forward + cost.backward
    console.print(table)
    speed = operations / seconds
    threads = format_count(spec.config.threads, "thread")
    say(console, f"{speed / 1e9:.3g} GFLOP/s reached in forward and backward, with {threads}.")
    if write is not None:
        costs = {member: cost.model_dump(mode="json") for member, cost in measured.items()}
        copied = torch.empty(1 << 25)
        other = torch.empty_like(copied)
        bandwidth = 2 * copied.numel() * copied.element_size() / median_seconds(lambda: other.copy_(copied))
        machine = {
            "flops": f"{speed / 1e9:.4g} GFLOP/s",
            "mfu": 1.0,
            "memory": f"{host_memory().total / 1e9:.4g} GB",
            "memory_bandwidth": f"{bandwidth / 1e9:.4g} GB/s",
            "source": "measured by hetero-pp calibrate",
        }
        with whole(write) as new, new.open("w", encoding="utf-8") as file:
            YAML().dump({"hardware": {"this-machine": machine}, "measured": costs}, file)
        say(console, f"written to {write}", style="dim")


def load_calibration(path: Path) -> dict[str, object]:
    """Return the content of a file that `calibrate` wrote, for the `simulate` section.

    Raises ConfigError if the file is anything else.
    """
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError((), yaml_complaint(path, error)) from None
    if not isinstance(content, dict) or set(content) != {"hardware", "measured"}:
        expected = "expected the output of `hetero-pp calibrate --write`, with `hardware` and `measured`"
        raise ConfigError((), f"{path}: {expected}")
    return content


def calibrated(path: Path | None) -> list[Override]:
    """Return what the file of `--calibration` sets in the section `simulate`; nothing without a file."""
    measured = {} if path is None else load_calibration(path)
    return [Override(("simulate", key), value, f"--calibration {path}") for key, value in measured.items()]


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
