"""Prints what a YAML describes and how many bytes the run will send, without training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean

from rich.console import Console

from hetero_pp.config.alike import alike, each_alike, range_of, table_rows
from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, WAYS, Direction, Way, exchange_link_name, stage_link_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bits_per_second, format_bytes, format_count, format_ratio, format_seconds
from hetero_pp.link.protocol import raw_frames, wire_bytes
from hetero_pp.model.transformer import ModelShape
from hetero_pp.program.defences import defence_lines
from hetero_pp.program.launch.inputs import Prepared
from hetero_pp.program.report.output import say, standard_output, tell
from hetero_pp.program.report.tables import PlainTable, format_bandwidth, spanned
from hetero_pp.program.simulate import print_assumption, print_exchange, print_waiting
from hetero_pp.simulator.costs import assumed_in
from hetero_pp.simulator.exchange_load import exchange_load
from hetero_pp.simulator.memory import OF_THE_ROUND, disk_use
from hetero_pp.simulator.prediction import predict, waiting
from hetero_pp.simulator.traffic import LinkLoad, blob_sizes, exchange_link_loads, stage_link_loads


def print_run(told: str, prepared: Prepared) -> None:
    """Print the topology and the loads of a run to the terminal. `told`: its YAML and name."""
    console, spec = standard_output(), prepared.spec
    _print_run(console, told, prepared)
    console.print(_members_table(spec))
    loads: dict[str, Mapping[Direction, LinkLoad]] = {}  # of each link
    for replicas in alike(spec):
        if isinstance(replicas[0], ParticipantsReplica):
            of_each_hop = stage_link_loads(spec, replicas[0])
            hops = range(len(replicas[0].members) - 1)
            loads |= {stage_link_name(replica.name, hop): of_each_hop for replica in replicas for hop in hops}
    for member in spec.members.values():
        each = [exchange_link_loads(spec, member, round_) for round_ in range(1, spec.fragments.count + 1)]
        means = {way: round(fmean(one[way].outer_round for one in each)) for way in DIRECTIONS}
        loads[exchange_link_name(member.name)] = {way: LinkLoad(outer_round=mean) for way, mean in means.items()}
    console.print(_links_table(spec, loads))
    if spec.lines:
        console.print(_lines_table(spec, loads))
    print_exchange(console, exchange_load(spec))
    with suppress(ConfigError):  # members that fit no memory, for example: `simulate` and `launch` say so
        if (waits := waiting(spec, predict(spec))) is not None:
            print_waiting(console, waits)
            print_assumption(console, assumed_in(spec))
    notes = (
        "→ is from the first to the second endpoint. Sizes are those of tensors and contributions, "
        "without headers and framing. `takes` is the least time for a round's bytes on the link or "
        "access line; –: it has no bandwidth limit. All links of a machine share its line, ↑ for sending and ↓ for "
        "receiving. Links with the bandwidth `lines` are limited by these lines alone."
    )
    if spec.config.inner.steps is None:
        notes += " The number of steps per round is not known in advance, so `a round` and `takes` are without them."
    say(console, notes, style="dim")


def _print_run(console: Console, told: str, prepared: Prepared) -> None:
    spec = prepared.spec
    config, shape = spec.config, spec.shape
    per_step = sum(replica.batch_size for replica in config.replicas) * config.data.sequence_length
    in_rounds = [spec.steps_of(one.name) for one in config.replicas]
    taken = sum((n or 0) * one.batch_size for n, one in zip(in_rounds, config.replicas, strict=True))
    tokens = None if spec.total_steps is None else config.rounds * taken * config.data.sequence_length
    compression = config.outer.compression
    say(console, f"{told} is valid.", bold=told.partition(": the run ")[0])
    shared = "" if shape.groups == shape.heads else f" that share {shape.groups} of keys and values"
    heads = f"{shape.heads} heads{shared}, vocabulary {shape.vocabulary}"
    parameters = f"{spec.parameter_count:,} parameters"
    say(console, f"Model: {parameters}, width {shape.width}, {shape.layers} layers, {heads}.")
    rounds = f"{config.in_rounds(config.rounds)} of {config.inner.length}"
    total = "" if tokens is None else f", {tokens:,} in total"
    if config.outer.tokens is not None:
        total = f", until contributions come to {config.outer.tokens:,}"
    say(console, f"Schedule: {rounds}, {per_step:,} tokens per step over all replicas{total}.")
    fewer = [f"{one.name} takes {one.steps}" for one in config.replicas if one.steps is not None]
    if fewer:
        say(console, f"Of the inner steps of a round, {', '.join(fewer)}.")
    warmup = config.inner.warmup_steps or 0
    if spec.total_steps is not None and warmup >= spec.total_steps:
        told = f"the run has {format_count(spec.total_steps, 'step')}, so the learning rate never reaches its peak"
        say(console, f"Note: inner.warmup_steps: found {warmup:,}, but {told}.")
    elif (config.inner.warmup_rounds or 0) >= config.rounds:
        told = f"the run has {format_count(config.rounds, 'round')}, so the learning rate never reaches its peak"
        say(console, f"Note: inner.warmup_rounds: found {config.inner.warmup_rounds:g}, but {told}.")
    if prepared.source is not None:
        say(console, f"Data: {config.data.corpus}, {prepared.source.describe(tokens)}.")
        for note in prepared.notes:
            tell(console, note)
    choices: dict[tuple[str, str], list[str]] = {}  # engine (datacenters) or boundary (groups) -> labels of replicas
    for replicas in table_rows(spec):
        of_row: dict[tuple[str, str], list[str]] = {}
        for replica in replicas:
            if isinstance(replica, DatacenterReplica):
                ranks = f", {replica.world} ranks" if replica.world > 1 else ""
                of_row.setdefault(("Engine", f"{replica.engine}{ranks}"), []).append(replica.name)
            elif replica.stage_count > 1:
                of_row.setdefault(("Boundaries", _boundary_of(replica, spec.shape)), []).append(replica.name)
        for choice, names in of_row.items():
            choices.setdefault(choice, []).append(range_of(names))
    for (what, chosen), names in choices.items():
        say(console, f"{what} of {', '.join(names)}: {chosen}.")
    signs = "signs and one magnitude per chunk"
    values = signs if compression.quantiser == "signs" else f"{format_count(compression.value_bits, 'bit')} per value"
    kept = f"density {format_ratio(compression.density)}, {values}"
    count = spec.fragments.count
    size = format_bytes(max(sum(blobs.values()) for blobs in blob_sizes(spec).values()) / count)
    told = "" if count == 1 else f", in the mean over {count} fragments"
    say(console, f"Contributions: {kept}, about {size} per replica and round{told}.")
    # What the run leaves on all hosts together, without its encoded text.
    hosts = [EXCHANGE, *spec.members]
    uses = {purpose: use for purpose, use in disk_use(spec, hosts).items() if purpose != OF_THE_ROUND}
    files, written = sum(use.files for use in uses.values()), sum(use.n_bytes for use in uses.values())
    parts = ", ".join(f"{purpose} {format_bytes(use.n_bytes)}" for purpose, use in uses.items() if use.n_bytes >= 1)
    whole = f"{format_bytes(sum(use.space for use in uses.values()))} in blocks of the file system"
    left = f"about {files:,} files and {format_bytes(written)} ({parts}); {whole}"
    say(console, f"Disk: the run leaves {left}.")
    for line in defence_lines(spec):
        say(console, f"{line}.")


def _boundary_of(replica: ParticipantsReplica, shape: ModelShape) -> str:
    boundary = replica.boundary
    rank = boundary.dimensions(shape.width)
    crosses = "all dimensions" if rank is None else f"rank {rank} of {shape.width}"
    if isinstance(boundary.rank, float) and (exact := boundary.rank * shape.width) != rank:
        crosses += f" ({format_ratio(boundary.rank)} of it is {exact:.4g}, rounded)"
    values = f"{boundary.bits} bits" if boundary.bits else boundary.dtype
    if (anchors := boundary.anchors) is None:
        return f"{crosses}, {values}"
    rank, numbers = anchors.dimensions(shape.width), anchors.numbers(shape.vocabulary, shape.width)
    wide = "as wide as the model" if rank is None else f"of rank {rank}"
    fades = "" if anchors.fade is None else f", fading from {anchors.fade[0]:.0%} to {anchors.fade[1]:.0%} of the run"
    return f"{crosses}, {values}, anchors {wide} ({numbers:,} numbers at each later stage, never sent{fades})"


def _members_table(spec: RunSpec) -> PlainTable:
    table = PlainTable(["member", "kind", "owns"], ["parameters", "micro-batches"])
    for replicas in table_rows(spec):
        for same in zip(*(replica.members for replica in replicas), strict=True):
            kinds, owned, batches, counts = list[str](), list[str](), list[str](), list[int]()
            for member in (spec.members[name] for name in same):
                stage, replica = member.stage, member.replica
                if stage is None:
                    kinds.append("datacenter")
                    owned.append("whole model")
                else:
                    layers = stage.layers
                    last = "" if len(layers) == 1 else f"-{layers.stop - 1}"
                    owns = f"layer{'s' if last else ''} {layers.start}{last}"
                    ends = ("embedding, " if stage.is_first else "", ", head" if stage.is_last else "")
                    kinds.append(f"stage {stage.index + 1}/{stage.count}")
                    owned.append(f"{ends[0]}{owns}{ends[1]}")
                batches.append(f"{replica.micro_batches} x {replica.batch_size // replica.micro_batches}")
                counts.append(sum(math.prod(spec.parameter_shapes[name]) for name in member.owned))
            parameters = spanned(counts, lambda count: f"{count:,.0f}")
            kind, owns, batch = (range_of(list(dict.fromkeys(cells))) for cells in (kinds, owned, batches))
            table.add_row(range_of(same), kind, owns, parameters, batch)
    return table


_LOADS = ("bandwidth", "latency", "a step", "a round", "takes")


def _links_table(spec: RunSpec, loads_of: Mapping[str, Mapping[Direction, LinkLoad]]) -> PlainTable:
    table = PlainTable(["link", ""], _LOADS)
    steps = spec.config.inner.steps or 0
    for same in each_alike(spec, spec.links.values(), table_rows(spec)):
        shapes = [[link.shape(way) for link in same] for way in DIRECTIONS]
        both = [[loads_of[link.name][way] for link in same] for way in DIRECTIONS]
        rounds = [[steps * load.step + load.evaluation + load.outer_round for load in loads] for loads in both]

        def shown(bandwidth: float | None, has_lines: bool = same[0].has_lines) -> str:
            return format_bandwidth(bandwidth, has_lines)

        table.add_both(
            range_of([one.name for one in same]),
            DIRECTIONS,
            [spanned((shape.bandwidth for shape in of_way), shown) for of_way in shapes],
            [spanned((shape.latency for shape in of_way), format_seconds) for of_way in shapes],
            [_sizes([load.step for load in loads]) for loads in both],
            [spanned(sizes, format_bytes) for sizes in rounds],
            [
                _least_times([one.bandwidth for one in of_way], sizes)
                for of_way, sizes in zip(shapes, rounds, strict=True)
            ],
        )
    return table


def _lines_table(spec: RunSpec, loads_of: Mapping[str, Mapping[Direction, LinkLoad]]) -> PlainTable:
    """Return a table of the bytes that all links passing a line add up to, per line and direction."""
    table = PlainTable(["line", ""], [one for one in _LOADS if one != "latency"])
    steps = spec.config.inner.steps or 0
    step, round_ = Counter[tuple[str, Way]](), Counter[tuple[str, Way]]()
    for name, loads in loads_of.items():
        for direction, load in loads.items():
            for way, passed in zip(WAYS, spec.links[name].lines(direction), strict=True):
                if passed is not None:
                    step[passed.name, way] += load.step
                    round_[passed.name, way] += steps * load.step + load.evaluation + load.outer_round
    for same in each_alike(spec, spec.lines.values(), table_rows(spec)):
        kinds = range_of(list(dict.fromkeys(line.kind for line in same)))
        rates = [[line.bandwidth_of(way) for line in same] for way in WAYS]
        a_step, a_round = ([[found[line.name, way] for line in same] for way in WAYS] for found in (step, round_))
        table.add_both(
            f"{range_of([one.name for one in same])} ({kinds})",
            WAYS,
            [spanned(of_way, format_bits_per_second) for of_way in rates],
            [_sizes(sizes) for sizes in a_step],
            [spanned(sizes, format_bytes) for sizes in a_round],
            [_least_times(of_way, sizes) for of_way, sizes in zip(rates, a_round, strict=True)],
        )
    return table


def _sizes(sizes: Sequence[int]) -> str:
    return spanned(sizes, format_bytes) if any(sizes) else ""


def _least_times(bandwidths: Sequence[float | None], sizes: Sequence[int]) -> str:
    """Format the least seconds that bandwidth-limited links need for these bytes; `–` if no link has a limit."""
    found = [
        wire_bytes(raw_frames(size)) * 8 / bandwidth
        for bandwidth, size in zip(bandwidths, sizes, strict=True)
        if bandwidth is not None
    ]
    return spanned(found, format_seconds) if found else "–"
