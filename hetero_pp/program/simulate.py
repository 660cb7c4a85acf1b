"""`hetero-pp simulate`: predict a YAML's topology, print the prediction, and write the requested files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from hetero_pp.config.alike import alike, each_alike, label_of, range_of, table_rows
from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, WAYS
from hetero_pp.config.overrides import Given
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_json
from hetero_pp.core.units import (
    format_bits_per_second,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_percent,
    format_seconds,
)
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.report.tables import PlainTable, heads_of, spanned
from hetero_pp.simulator.charts import Sweep, Timeline, changes_nothing, draw_prediction, draw_sweep, require_format
from hetero_pp.simulator.costs import assumed_in
from hetero_pp.simulator.exchange_load import (
    CALL_SECONDS,
    POSITION_SECONDS,
    RELAY_SECONDS_A_GIGABYTE,
    TRANSFER_SECONDS_A_GIGABYTE,
    VALUE_SECONDS,
    ExchangeLoad,
)
from hetero_pp.simulator.memory import by_kind, memory_assumptions
from hetero_pp.simulator.prediction import (
    Prediction,
    PublishedComparison,
    ReplicaPrediction,
    ReplicaWaits,
    predict,
    waiting,
)
from hetero_pp.simulator.traffic import RINGS


@dataclass(frozen=True)
class Outputs:
    """Files to write; None for those that were not requested."""

    json: Path | None = None
    timeline: Path | None = None
    chart: Path | None = None


def simulate(path: Path, overrides: Sequence[Given], sweep: str | None, curves: str | None, outputs: Outputs) -> None:
    """Predict once, or at every value of a sweep, or for every row of `simulate.rows`.

    Options of the command line take precedence over the `simulate` section of the YAML.
    """
    require_format(outputs.chart)
    file = ConfigFile(path, overrides)
    settings = file.config.simulate
    by_sweep, by_curves = ("--sweep" if sweep else "simulate.sweep"), ("--curves" if curves else "simulate.curves")
    sweep, curves = sweep or settings.sweep, curves or settings.curves
    if sweep is not None or settings.rows:
        values = Sweep.of_rows(settings.rows) if sweep is None else Sweep.parse(sweep, by_sweep)
        _simulate_sweep(path, overrides, values, None if curves is None else Sweep.parse(curves, by_curves), outputs)
        return
    if curves is not None:
        raise ConfigError((), f"--curves {curves}: expected --sweep, too")
    spec = spec_of(file)
    timeline = None if outputs.timeline is None else Timeline()
    prediction = _predict(file, spec, timeline)
    console = standard_output()
    waits = waiting(spec, prediction)
    print_prediction(console, path, spec, prediction, waits)
    print_assumption(console, assumed_in(spec))
    if timeline is not None and outputs.timeline is not None:
        timeline.write(outputs.timeline)
    write_json(outputs.json, prediction.as_json() | {"waiting": None if waits is None else asdict(waits)})
    if outputs.chart is not None:
        draw_prediction(spec, prediction, outputs.chart)


def _simulate_sweep(
    path: Path, overrides: Sequence[Given], sweep: Sweep, curves: Sweep | None, outputs: Outputs
) -> None:
    if outputs.timeline is not None:
        raise ConfigError((), "--timeline: found a sweep, which has no single timeline; leave out one of them")
    found: dict[str, dict[str, Prediction]] = {}
    assumed = ""
    for curve in [""] if curves is None else curves.values:
        changed = [*overrides, *([] if curves is None else curves.overrides(curve))]
        for value in sweep.values:
            file = ConfigFile(path, [*changed, *sweep.overrides(value)])
            spec = spec_of(file)
            assumed = assumed_in(spec) or assumed
            found.setdefault(curve, {})[value] = _predict(file, spec, None)
    console = standard_output()
    print_sweep(console, sweep, curves, found)
    print_assumption(console, assumed)
    points = {
        curve: [sweep.point(value) | prediction.as_point() for value, prediction in predictions.items()]
        for curve, predictions in found.items()
    }
    curves_of = None if curves is None else curves.key
    write_json(outputs.json, {"sweep": sweep.key, "curves_of": curves_of, "curves": points})
    if outputs.chart is not None:
        draw_sweep(sweep, curves, found, outputs.chart)


def _predict(file: ConfigFile, spec: RunSpec, timeline: Timeline | None) -> Prediction:
    try:
        return predict(spec, None if timeline is None else timeline.of)
    except ConfigError as error:
        raise file.located(error) from None


# ---- a prediction on the terminal ----


def print_prediction(
    console: Console, path: Path, spec: RunSpec, prediction: Prediction, waits: ReplicaWaits | None
) -> None:
    """Print the times of a step and a round, then tables of replicas, members, links, lines and the exchange."""
    use = prediction.utilization
    replicas = format_count(sum(replica.count for replica in prediction.replicas), "replica")
    members = format_count(prediction.members, "member")
    say(console, f"{path}: {spec.parameter_count:,} parameters, {replicas}, {members}.", bold=str(path))
    times = (prediction.step_seconds, prediction.round_seconds, prediction.outer_seconds)
    step, round_, outer = map(format_seconds, times)
    steps, rounds = spec.config.inner.length, format_count(round(prediction.rounds), "outer round")
    say(console, f"A step takes {step}; a round of {steps} takes {round_}, including {outer} for the outer round.")
    absolute, relative = format_percent(use["absolute"]), format_percent(use["relative"])
    say(console, f"Members train {absolute} of the time, {relative} of the share that free links allow.")
    whole = f"{prediction.tokens:,} tokens in {format_duration(prediction.days * 86400)}"
    hours = prediction.accelerator_hours
    of_accelerators = (
        f"{format_number(hours)} accelerator-hours"
        if hours >= 1
        else f"{format_duration(3600 * hours)} of accelerators"
    )
    say(console, f"{prediction.tokens_per_second:,.0f} tokens per second: {whole}; {of_accelerators}.")
    print_waiting(console, waits)
    has_stages = any(link.target != EXCHANGE for link in spec.links.values())
    between = "; the tables below have the traffic between stages" if has_stages else ""
    sent, received = format_bytes(prediction.sent_bytes), format_bytes(prediction.received_bytes)
    say(console, f"In {rounds}, a replica sends {sent} of contributions and receives {received}{between}.")
    if len(each := prediction.fragments) > 1:
        largest = max(range(len(each)), key=lambda one: each[one].sent_bytes)
        which, most = spec.fragments.describe(largest + 1), each[largest]
        sent, received = format_bytes(most.sent_bytes), format_bytes(most.received_bytes)
        took = f"takes {format_seconds(most.round_seconds)}"
        say(console, f"The largest round, of {which}, {took}: a replica sends {sent} and receives {received}.")
    # The label of every table row, and the predictions of its replicas.
    named = {replica.name: replica for replica in prediction.replicas}
    classes: list[tuple[str, Alike]] = []
    for same in table_rows(spec):
        own, label = [named[replica.name] for replica in same], label_of(same)
        behind = own[0].count if len(own) == 1 else 1
        classes.append((f"{label} ({behind:,} of them)" if behind > 1 else label, own))
    _print_replicas(console, classes)
    _print_members(console, classes)
    _print_memory(console, spec, classes)
    _print_links(console, spec, prediction)
    if prediction.lines:
        _print_lines(console, spec, prediction)
    rows = table_rows(spec)
    if len(rows) < len(alike(spec)) and any(rows):
        told = "Rows with ranges are for replicas that differ; `--json FILE` lists each replica."
        draw = "To predict many equal replicas without listing them, use simulate.fleets."
        say(console, f"{told} {draw}", style="dim")
    print_exchange(console, prediction.exchange)
    _print_published(console, "", {"": prediction.published})


def print_waiting(console: Console, waits: ReplicaWaits | None) -> None:
    """Print which replicas wait, and what rounds of a given time would change."""
    for line in () if waits is None else waits.told():
        say(console, line)


def print_assumption(console: Console, assumed: str) -> None:
    """Print the hardware that the prediction assumes for members without `hardware`."""
    if assumed:
        say(console, f"Note: {assumed}.")


Alike = Sequence[ReplicaPrediction]  # predictions of replicas that share one row of the tables


def _print_replicas(console: Console, classes: Sequence[tuple[str, Alike]]) -> None:
    has_losses = any(replica.lost for _, own in classes for replica in own)
    columns = [*(["lost"] if has_losses else []), "steps", "tokens", "a step", "inner loop", "of a round"]
    table = PlainTable(["replica"], [*columns, "bubble", "waits"])
    formats = {
        "steps": lambda steps: f"{steps:,.1f}".removesuffix(".0"),
        "tokens": lambda tokens: f"{tokens:,.0f}",
        **dict.fromkeys(("step_seconds", "inner_seconds"), format_seconds),
        **dict.fromkeys(("training", "bubble", "exposed_communication"), format_percent),
    }
    for label, own in classes:
        lost = [f"{sum(replica.lost for replica in own):,}"] if has_losses else []
        table.add_row(label, *lost, *_spans(own, formats))
    console.print(table)
    explained = [
        "steps, tokens: per replica and round",
        "inner loop, of a round: time of a round's inner steps, and its share of the round",
        "bubble: share of the inner loop in which stages wait for each other, even with free links",
        "waits: share of the inner loop that links add (exposed communication)",
    ]
    if has_losses:
        explained.insert(0, "lost: replicas with a member that leaves within the round")
    _explain(console, *explained)


def _spans(rows: Sequence[object], formats: Mapping[str, Callable[[float], str]]) -> list[str]:
    """Format each of these attributes of some rows: once where all are equal, else as a range."""
    return [spanned((getattr(row, name) for row in rows), shown) for name, shown in formats.items()]


def _explain(console: Console, *columns: str) -> None:
    for column in columns:
        say(console, column, style="dim", indent="  ")


def _print_members(console: Console, classes: Sequence[tuple[str, Alike]]) -> None:
    table = PlainTable(["member"], ["trains", "sends", "in", "receives", "in"])
    formats = {"utilization": format_percent, "sent_bytes": format_bytes, "sent_seconds": format_seconds}
    formats |= {"received_bytes": format_bytes, "received_seconds": format_seconds}
    for _, own in classes:
        for same in zip(*(replica.stages for replica in own), strict=True):
            table.add_row(range_of([stage.member for stage in same]), *_spans(same, formats))
    console.print(table)
    _explain(
        console,
        "trains: share of the round in forward, backward and optimizer",
        "sends, receives: contributions per round, and the time for which they occupy the member's link",
    )


def _print_memory(console: Console, spec: RunSpec, classes: Sequence[tuple[str, Alike]]) -> None:
    every = [by_kind(stage.memory_bytes) for _, own in classes for replica in own for stage in replica.stages]
    kinds = [kind for kind in every[0] if any(held[kind] for held in every)]
    table = PlainTable(["memory"], [*kinds, "sum", "of"])
    for _, own in classes:
        for same in zip(*(replica.stages for replica in own), strict=True):
            by_kinds = [by_kind(stage.memory_bytes) for stage in same]
            table.add_row(
                range_of([stage.member for stage in same]),
                *(spanned((held[kind] for held in by_kinds), format_bytes) for kind in kinds),
                spanned((sum(held.values()) for held in by_kinds), format_bytes),
                spanned((stage.memory_capacity_bytes for stage in same), format_bytes),
            )
    console.print(table)
    _explain(console, *memory_assumptions(spec.config))


def _print_links(console: Console, spec: RunSpec, prediction: Prediction) -> None:
    table = PlainTable(["link"], heads_of(DIRECTIONS, "a round", "busy"))
    links = (link for replica in prediction.replicas for link in replica.links)
    for same in each_alike(spec, links, table_rows(spec)):
        limits = [[spec.links[one.name].shape(way).bandwidth for one in same] for way in DIRECTIONS]
        forward, backward = (any(limit is not None for limit in of_way) for of_way in limits)
        table.add_row(
            range_of([one.name for one in same]),
            *_spans(same, dict.fromkeys(("forward_bytes", "backward_bytes"), format_bytes)),
            spanned((one.forward_busy for one in same), format_percent) if forward else "–",
            spanned((one.backward_busy for one in same), format_percent) if backward else "–",
        )
    console.print(table)
    has_lines = any(link.has_lines for link in spec.links.values())
    limit = "it has no limit itself; the table of lines has the limits of its lines" if has_lines else "it has no limit"
    _explain(
        console,
        "a round: bytes that the link carries in a round; →: towards later stages or the exchange, ←: back",
        f"busy: share of the round in which the link carries bytes; –: {limit}",
    )


def _print_lines(console: Console, spec: RunSpec, prediction: Prediction) -> None:
    table = PlainTable(["line", "kind"], heads_of(WAYS, "a round", "busy"))
    for same in each_alike(spec, prediction.lines, table_rows(spec)):
        table.add_row(
            range_of([line.name for line in same]),
            range_of(list(dict.fromkeys(line.kind for line in same))),
            *_spans(same, dict.fromkeys(("up_bytes", "down_bytes"), format_bytes)),
            *_spans(same, dict.fromkeys(("up_busy", "down_busy"), format_percent)),
        )
    console.print(table)
    _explain(console, "a round, busy: bytes that the line carries in a round, and its share of the round; ↑ up, ↓ down")


def print_sweep(
    console: Console, sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, Prediction]]
) -> None:
    """Print one table per curve, with one row per value of the sweep, and which varied keys have no effect."""
    for curve, predictions in found.items():
        if curves is not None:
            say(console, title := f"{curves.key} = {curve}", bold=title)
        columns = ["a step", "a round", "outer", "trains", "relative", "tokens/s", "in total"]
        table = PlainTable([sweep.key], [*columns, "sends", "receives"])
        for value, prediction in predictions.items():
            table.add_row(_short(value), *_row(prediction))
        console.print(table)
        _print_published(console, sweep.key, {_short(value): one.published for value, one in predictions.items()})
    _explain(
        console,
        "outer: outer round, a part of the round",
        "trains: share of the time in which members train; relative: relative to free links",
        "in total: time of all rounds; sends, receives: contributions per replica, in all rounds",
    )

    def idle(form: Callable[[Prediction], object]) -> list[Sweep]:
        """Return the varied sweeps that change nothing in this form of the predictions."""
        of = {curve: {value: form(one) for value, one in row.items()} for curve, row in found.items()}
        still = [sweep] if all(changes_nothing(row.values()) for row in of.values()) else []
        if curves is not None and all(changes_nothing(row[value] for row in of.values()) for value in sweep.values):
            still.append(curves)
        return still

    in_vain = idle(lambda one: replace(one, published=()))
    for varied in idle(_row):
        what = "no predicted number" if varied in in_vain else "almost nothing, and none of these numbers"
        say(console, f"{varied.title} changes {what}: its {len(varied.values)} values give the same.")


def _row(prediction: Prediction) -> list[str]:
    use = prediction.utilization
    seconds = (prediction.step_seconds, prediction.round_seconds, prediction.outer_seconds)
    shares = format_percent(use["absolute"]), format_percent(use["relative"])
    rate = f"{prediction.tokens_per_second:,.0f}", format_duration(86400 * prediction.days)
    volume = format_bytes(prediction.sent_bytes), format_bytes(prediction.received_bytes)
    return [*map(format_seconds, seconds), *shares, *rate, *volume]


def _print_published(console: Console, key: str, found: Mapping[str, Sequence[PublishedComparison]]) -> None:
    """Print published values beside predicted ones, by value of the sweep.

    Without a sweep, `key` and the only key of `found` are empty.
    """
    if not any(found.values()):
        return
    places = {one.where for comparisons in found.values() for one in comparisons}
    table = PlainTable([*([key] if key else []), "what"], ["published", "predicted", "ratio", "holds"])
    for value, comparisons in found.items():
        for first, one in enumerate(comparisons):
            bound = {"at least": "≥ ", "at most": "≤ "}.get(one.bound, "")
            numbers = f"{bound}{_formatted(one.what, one.published)}", _formatted(one.what, one.predicted)
            named = [value if first == 0 else ""] if key else []
            where = f" ({one.where})" if len(places) > 1 else ""
            holds = {None: "", True: "yes", False: "no"}[one.holds]
            table.add_row(*named, f"{one.what}{where}", *numbers, format_number(one.ratio), holds)
    console.print(table)
    _explain(console, "ratio: predicted over published; holds: whether the prediction keeps a published bound")
    if len(places) == 1:
        say(console, f"Published: {places.pop()}.")


def _formatted(what: str, value: float) -> str:
    """Format a value by the name of its key in the JSON: seconds, bytes, percent, or a plain number."""
    name = what.rpartition(".")[2]
    if name.endswith("_seconds"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_percent(value) if "utilization" in what else format_number(value, 6)


def _short(value: str) -> str:
    """Format a value of a sweep for reading, such as `1234567.8 bit/s` as `1.235 Mbit/s`."""
    number, _, unit = value.partition(" ")
    formats = {"bit/s": format_bits_per_second, "s": format_seconds, "B": format_bytes}
    return formats[unit](float(number)) if unit in formats else value


# ---- the exchange ----

ASSUMED_LINE = 1e9  # bits per second that the table assumes for an exchange without a line


def print_exchange(console: Console, load: ExchangeLoad) -> None:
    """Print the bytes that cross the exchange's line in a round, their transfer time, memory and CPU time."""
    table = PlainTable(["exchange, a round"], ["receives", "sends"], ["line"])
    table.add_row("contributions", format_bytes(load.contributions.received), format_bytes(load.contributions.sent))
    if load.relayed_links:
        relayed = load.relayed
        both = ("?", "?") if relayed is None else (format_bytes(relayed.received), format_bytes(relayed.sent))
        table.add_row(format_count(load.relayed_links, "relayed stage link"), *both)
    limits = load.received_bits_a_second, load.sent_bits_a_second
    if load.is_limited:
        down, up = map(format_bits_per_second, limits)
        name = f"{load.line}: {down} down, {up} up"
    else:
        given = "none given" if load.line is None else f"{load.line}: unlimited"
        limits, name = (ASSUMED_LINE, ASSUMED_LINE), f"{given}; shown: {format_bits_per_second(ASSUMED_LINE)}"
    took = load.seconds(*limits)
    table.add_row("takes, at its line", format_duration(took.received), format_duration(took.sent), name)
    console.print(table)
    way = ""
    if load.way in RINGS:
        way = f"Contributions go from replica to replica (simulate.exchange: {load.way}), not through the exchange."
    elif load.way == "store":
        way = (
            "Contributions go through store.url: members upload and download them there. The exchange "
            "reads each one twice, to check it and to audit the round."
        )
    elif load.relayed_links:
        way = (
            "Stage links are relayed if neither stage has an address (listen) that the other can dial. "
            "Times of steps do not include the relay."
        )
    if way:
        say(console, way, style="dim")
    largest, first = format_bytes(load.largest_checkpoint_bytes), format_bytes(load.first_checkpoint_bytes)
    at_start = f"{first} to all members at the start of the run"
    joining = f"It also sends run checkpoints: up to {largest} to each member that joins, and {at_start}."
    say(console, joining, style="dim")
    memory = ", ".join(f"{part} {format_bytes(size)}" for part, size in load.memory_bytes.items() if size)
    cpu = ", ".join(f"{part} {format_duration(seconds)}" for part, seconds in load.cpu_seconds.items() if seconds)
    bytes_ = f"{TRANSFER_SECONDS_A_GIGABYTE:g} s per GB of TLS, {RELAY_SECONDS_A_GIGABYTE:g} s per GB relayed"
    values = f"{1e9 * VALUE_SECONDS:g} ns per decoded value and {1e9 * POSITION_SECONDS:g} ns for its position"
    costs = f"{bytes_}, {format_seconds(CALL_SECONDS)} per call, {values} (benchmarks/exchange_load.py)"
    holds = f"{format_bytes(sum(load.memory_bytes.values()))} of memory ({memory})"
    takes = f"{format_duration(sum(load.cpu_seconds.values()))} of CPU time per round ({cpu})"
    say(console, f"Its process needs about {holds} and {takes}. Assumed CPU time: {costs}.", style="dim")
    if load.is_limited or load.way in RINGS:
        return
    carried = load.carried
    sends = carried.sent >= carried.received
    what = f"sends {format_bytes(carried.sent)}" if sends else f"receives {format_bytes(carried.received)}"
    lacks, remedy = "no line is set", "set exchange.line"
    if load.line is not None:
        lacks, remedy = f"its line `{load.line}` has no bandwidth", f"set lines.{load.line}.bandwidth"
    seconds = format_duration(max(took.received, took.sent))
    slow = f"at {format_bits_per_second(ASSUMED_LINE)} that takes {seconds}"
    assumed = f"exchange: {lacks}, so its bandwidth is assumed to be unlimited; it {what} per round: {slow}; {remedy}"
    say(console, assumed, bold="exchange:")
