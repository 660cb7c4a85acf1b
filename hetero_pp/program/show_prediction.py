"""A prediction on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from hetero_pp.lines import WAYS
from hetero_pp.links import DIRECTIONS, Direction
from hetero_pp.program.report.output import say
from hetero_pp.program.report.tables import PlainTable, heads_of
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.prediction import Prediction
from hetero_pp.simulator.published import Comparison
from hetero_pp.simulator.sweep import Sweep
from hetero_pp.sweeps import changes_nothing
from hetero_pp.units import format_bits_per_second, format_bytes, format_count, format_percent, format_seconds


def print_prediction(console: Console, path: Path, spec: RunSpec, prediction: Prediction) -> None:
    """What it comes to, then members and links."""
    use = prediction.utilization
    parameters = sum(_numbers(shape) for shape in spec.parameter_shapes.values())
    replicas = format_count(sum(replica.count for replica in prediction.replicas), "replica")
    members = format_count(prediction.members, "member")
    say(console, f"{path}: {parameters:,} parameters, {replicas}, {members}.", bold=str(path))
    times = (prediction.step_seconds, prediction.round_seconds, prediction.outer_seconds)
    step, round_, outer = map(format_seconds, times)
    steps, rounds = spec.config.inner.length, format_count(round(prediction.rounds), "outer round")
    say(console, f"A step takes {step}; a round of {steps} takes {round_}, of which the outer round {outer}.")
    say(
        console,
        f"Members train {format_percent(use['absolute'])} of the time, {format_percent(use['relative'])} of what links "
        "that cost nothing would allow.",
    )
    say(
        console,
        f"{prediction.tokens_per_second:,.0f} tokens a second: {prediction.tokens:,} tokens in {prediction.days:.3g} "
        f"days, {prediction.accelerator_hours:,.3g} accelerator-hours.",
    )
    say(
        console,
        f"In {rounds} a replica sends {format_bytes(prediction.sent_bytes)} and receives "
        f"{format_bytes(prediction.received_bytes)}.",
    )
    _print_replicas(console, prediction)
    _print_members(console, prediction)
    _print_links(console, spec, prediction)
    if prediction.lines:
        _print_lines(console, prediction)
    _print_published(console, "", {"": prediction.published})


def print_assumption(console: Console, assumed: str) -> None:
    """What the prediction takes machines for that nobody named."""
    if assumed:
        say(console, f"Note: {assumed}.")


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _print_replicas(console: Console, prediction: Prediction) -> None:
    columns = ["count", "lost", "steps", "tokens", "a step", "inner loop", "of a round"]
    table = PlainTable(["replica"], [*columns, "bubble", "exposed communication"])
    for replica in prediction.replicas:
        times = format_seconds(replica.step_seconds), format_seconds(replica.inner_seconds)
        shares = map(format_percent, (replica.training, replica.bubble, replica.exposed_communication))
        trained = f"{replica.steps:,.1f}".removesuffix(".0"), f"{replica.tokens:,.0f}"
        table.add_row(replica.name, f"{replica.count:,}", f"{replica.lost:,}", *trained, *times, *shares)
    console.print(table)


def _print_members(console: Console, prediction: Prediction) -> None:
    table = PlainTable(["member"], ["trains", "memory", "of", "sends", "in", "receives", "in"])
    for replica in prediction.replicas:
        for stage in replica.stages:
            memory = format_bytes(sum(stage.memory_bytes.values())), format_bytes(stage.memory_capacity_bytes)
            sent = format_bytes(stage.sent_bytes), format_seconds(stage.sent_seconds)
            received = format_bytes(stage.received_bytes), format_seconds(stage.received_seconds)
            table.add_row(stage.member, format_percent(stage.utilization), *memory, *sent, *received)
    console.print(table)


def _print_links(console: Console, spec: RunSpec, prediction: Prediction) -> None:
    table = PlainTable(["link"], heads_of(DIRECTIONS, "a round", "busy"))
    for replica in prediction.replicas:
        for link in replica.links:
            sizes = format_bytes(link.forward_bytes), format_bytes(link.backward_bytes)
            ways: dict[Direction, float] = {"forward": link.forward_busy, "backward": link.backward_busy}
            limits = [spec.links[link.name].shape(way).bandwidth for way in ways]
            busy = [format_percent(share) if limit else "–" for share, limit in zip(ways.values(), limits, strict=True)]
            table.add_row(link.name, *sizes, *busy)
    console.print(table)


def _print_lines(console: Console, prediction: Prediction) -> None:
    table = PlainTable(["line", "kind"], heads_of(WAYS, "a round", "busy"))
    for line in prediction.lines:
        sizes = format_bytes(line.up_bytes), format_bytes(line.down_bytes)
        table.add_row(line.name, line.kind, *sizes, format_percent(line.up_busy), format_percent(line.down_busy))
    console.print(table)


def print_sweep(
    console: Console, sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, Prediction]]
) -> None:
    """A table for each curve, with a line for each value."""
    for curve, predictions in found.items():
        if curves is not None:
            say(console, title := f"{curves.key} = {curve}", bold=title)
        columns = ["a step", "a round", "outer", "trains", "of the possible", "tokens/s", "days"]
        table = PlainTable([sweep.key], [*columns, "sends", "receives"])
        for value, prediction in predictions.items():
            table.add_row(_short(value), *_row(prediction))
        console.print(table)
        _print_published(console, sweep.key, {_short(value): one.published for value, one in predictions.items()})
    say(console, "`sends` and `receives`: a replica, in all outer rounds.", style="dim")
    _print_without_effect(console, sweep, curves, found)


def _row(prediction: Prediction) -> list[str]:
    use = prediction.utilization
    seconds = (prediction.step_seconds, prediction.round_seconds, prediction.outer_seconds)
    shares = format_percent(use["absolute"]), format_percent(use["relative"])
    rate = f"{prediction.tokens_per_second:,.0f}", f"{prediction.days:.3g}"
    volume = format_bytes(prediction.sent_bytes), format_bytes(prediction.received_bytes)
    return [*map(format_seconds, seconds), *shares, *rate, *volume]


def _print_without_effect(
    console: Console, sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, Prediction]]
) -> None:
    """What was varied in vain, if it was."""
    plain = {curve: {value: replace(one, published=()) for value, one in of.items()} for curve, of in found.items()}
    shown = {curve: {value: _row(one) for value, one in of.items()} for curve, of in found.items()}
    in_vain = _without_effect(sweep, curves, plain)
    for varied in _without_effect(sweep, curves, shown):
        what = "nothing that is predicted" if varied in in_vain else "little, and none of these numbers"
        say(console, f"{varied.title} changes {what}: its {len(varied.values)} values come to the same.")


def _without_effect(sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, object]]) -> list[Sweep]:
    """Of what is varied, what makes no difference in what was found."""
    idle = [sweep] if all(changes_nothing(of.values()) for of in found.values()) else []
    if curves is not None and all(changes_nothing(of[value] for of in found.values()) for value in sweep.values):
        idle.append(curves)
    return idle


def _print_published(console: Console, key: str, found: Mapping[str, Sequence[Comparison]]) -> None:
    """By value of a sweep (one without a name, where there is none)."""
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
            table.add_row(*named, f"{one.what}{where}", *numbers, f"{one.ratio:.3g}", holds)
    console.print(table)
    if len(places) == 1:
        say(console, f"Published: {places.pop()}.")


def _formatted(what: str, value: float) -> str:
    """As people write what has this name in the JSON."""
    name = what.rpartition(".")[2]
    if name.endswith("_seconds"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_percent(value) if "utilization" in what else f"{value:,.6g}"


def _short(value: str) -> str:
    """`1234567.8 bit/s` as people write it."""
    number, _, unit = value.partition(" ")
    formats = {"bit/s": format_bits_per_second, "s": format_seconds, "B": format_bytes}
    return formats[unit](float(number)) if unit in formats else value
