"""A prediction on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from hetero_pp.program.report.display import plain_table
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.prediction import Prediction
from hetero_pp.simulator.published import Comparison
from hetero_pp.simulator.sweep import Sweep
from hetero_pp.units import format_bits_per_second, format_bytes, format_seconds


def print_prediction(console: Console, path: Path, spec: RunSpec, prediction: Prediction) -> None:
    """What it comes to, then members and links."""
    use = prediction.utilization
    parameters = sum(_numbers(shape) for shape in spec.parameter_shapes.values())
    console.print(
        f"[bold]{path}[/bold]: {parameters:,} parameters, {sum(r.count for r in prediction.replicas):,} replicas, "
        f"{prediction.members:,} members."
    )
    times = (prediction.step_seconds, prediction.round_seconds, prediction.outer_seconds)
    step, round_, outer = map(format_seconds, times)
    console.print(
        f"A step takes {step}, a round of {spec.config.inner.steps} steps {round_}, of which the outer round {outer}."
    )
    console.print(
        f"Members train {use['absolute']:.1%} of the time, {use['relative']:.1%} of what links that cost nothing "
        f"would allow."
    )
    console.print(
        f"{prediction.tokens_per_second:,.0f} tokens a second: {prediction.tokens:,} tokens in {prediction.days:.3g} "
        f"days, {prediction.accelerator_hours:,.3g} accelerator-hours."
    )
    console.print(
        f"In {prediction.rounds:,.0f} outer rounds a replica sends {format_bytes(prediction.sent_bytes)} and receives "
        f"{format_bytes(prediction.received_bytes)}."
    )
    _print_replicas(console, prediction)
    _print_members(console, prediction)
    _print_links(console, prediction)
    _print_published(console, "", {"": prediction.published})


def _numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _print_replicas(console: Console, prediction: Prediction) -> None:
    table = plain_table(["replica"], ["count", "lost", "a step", "inner loop", "bubble", "exposed communication"])
    for replica in prediction.replicas:
        times = format_seconds(replica.step_seconds), format_seconds(replica.inner_seconds)
        shares = f"{replica.bubble:.1%}", f"{replica.exposed_communication:.1%}"
        table.add_row(replica.name, f"{replica.count:,}", f"{replica.lost:,}", *times, *shares)
    console.print(table)


def _print_members(console: Console, prediction: Prediction) -> None:
    table = plain_table(["member"], ["trains", "memory", "of", "sends", "in", "receives", "in"])
    for replica in prediction.replicas:
        for stage in replica.stages:
            memory = format_bytes(sum(stage.memory_bytes.values())), format_bytes(stage.memory_capacity_bytes)
            sent = format_bytes(stage.sent_bytes), format_seconds(stage.sent_seconds)
            received = format_bytes(stage.received_bytes), format_seconds(stage.received_seconds)
            table.add_row(stage.member, f"{stage.utilization:.1%}", *memory, *sent, *received)
    console.print(table)


def _print_links(console: Console, prediction: Prediction) -> None:
    table = plain_table(["link"], ["a round →", "a round ←", "busy →", "busy ←"])
    for replica in prediction.replicas:
        for link in replica.links:
            sizes = format_bytes(link.forward_bytes), format_bytes(link.backward_bytes)
            table.add_row(link.name, *sizes, f"{link.forward_busy:.1%}", f"{link.backward_busy:.1%}")
    console.print(table)


def print_sweep(
    console: Console, sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, Prediction]]
) -> None:
    """A table for each curve, with a line for each value."""
    for curve, predictions in found.items():
        if curves is not None:
            console.print(f"[bold]{curves.key} = {curve}[/bold]")
        columns = ["a step", "a round", "outer", "trains", "of the possible", "tokens a second", "days"]
        table = plain_table([sweep.key], [*columns, "sends", "receives"])
        for value, prediction in predictions.items():
            use = prediction.utilization
            seconds = (prediction.step_seconds, prediction.round_seconds, prediction.outer_seconds)
            shares = f"{use['absolute']:.1%}", f"{use['relative']:.1%}"
            rate = f"{prediction.tokens_per_second:,.0f}", f"{prediction.days:.3g}"
            volume = format_bytes(prediction.sent_bytes), format_bytes(prediction.received_bytes)
            table.add_row(_short(value), *map(format_seconds, seconds), *shares, *rate, *volume)
        console.print(table)
        _print_published(console, sweep.key, {_short(value): one.published for value, one in predictions.items()})
    console.print("`sends` and `receives`: a replica, in all outer rounds.", style="dim")


def _print_published(console: Console, key: str, found: Mapping[str, Sequence[Comparison]]) -> None:
    """By value of a sweep (one without a name, where there is none)."""
    if not any(found.values()):
        return
    table = plain_table([*([key] if key else []), "what"], ["published", "predicted", "ratio", ""])
    for value, comparisons in found.items():
        for one in comparisons:
            bound = "" if one.bound == "equal" else f"{one.bound} "
            verdict = {None: "", True: "holds", False: "does not hold"}[one.holds]
            numbers = f"{bound}{_formatted(one.what, one.published)}", _formatted(one.what, one.predicted)
            named = [value] if key else []
            table.add_row(*named, f"{one.what} ({one.where})", *numbers, f"{one.ratio:.3g}", verdict)
    console.print(table)


def _formatted(what: str, value: float) -> str:
    """As people write what has this name in the JSON."""
    name = what.rpartition(".")[2]
    if name.endswith("_seconds"):
        return format_seconds(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.1%}" if "utilization" in what else f"{value:,.6g}"


def _short(value: str) -> str:
    """`1234567.8 bit/s` as people write it."""
    number, _, unit = value.partition(" ")
    formats = {"bit/s": format_bits_per_second, "s": format_seconds, "B": format_bytes}
    return formats[unit](float(number)) if unit in formats else value
