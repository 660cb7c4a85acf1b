"""`hetero-pp view --compare`: several runs in one table, and a picture of their validation losses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero_pp.config.folder import RunFolder, recorded_run
from hetero_pp.config.yaml_file import read_trained
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import FORMATS, format_bytes, format_number, format_seconds
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.report.recorder import recorded
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.simulator.charts import HEIGHT, STYLE, draw_curve, new_figure, palette, quantity_of, save_figure

_ABSENT = "–"


class ComparedRun:
    """One run as far as its record goes."""

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.name, self.state = name, RunState(read_trained(folder))
        for report in recorded(folder):
            if report.HasField("begun"):  # the specification has all changes, checked
                report.begun.ClearField("changes")
            self.state.apply(report)
        settings = self.state.spec.latest.model_dump(mode="json", exclude={"name"})
        self.keys = dict(leaves(settings))  # dotted keys with single values; entries of `replicas` by name
        means, closed = self.state.mean_validation_losses(), {0, *self.state.closed}
        self.losses = {at: mean for at, mean in means.items() if at in closed and math.isfinite(mean)}
        """Mean validation loss by round, where it is finite; round 0 is before training."""

    def results(self) -> dict[str, str]:
        """Return what the run has reached, formatted, by the name of the quantity."""
        state, losses = self.state, self.losses
        last, best = max(losses, default=None), min(losses, key=losses.__getitem__, default=None)
        return {
            "rounds": f"{state.rounds} of {state.rounds_planned}",
            "tokens": f"{sum(replica.tokens for replica in state.replicas.values()):,}",
            "last validation loss": _ABSENT if last is None else f"{losses[last]:.4f}",
            "best validation loss": _ABSENT if best is None else f"{losses[best]:.4f} (round {best})",
            "training time": format_seconds(state.training_seconds()),
            "sent on the wire": format_bytes(sum(link.wire_bytes for link in state.links.values())),
            "tokens per second": f"{state.tokens_per_second():,.0f}",
        }


def compare(runs: Path, named: Sequence[str], chart: Path) -> None:
    """Print a table of the runs' differing keys and results, and draw their validation losses.

    Raises ConfigError for a name that is no run, and for a run that is named twice.
    """
    if len(named) < 2:
        raise ConfigError((), f"found one run, `{named[0]}`, expected at least two")
    folders = [recorded_run(runs, name) for name in named]
    paths = [folder.path.resolve() for folder in folders]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise ConfigError((), f"{named[index]}: found the run {folders[index].path} twice, expected different runs")
    names = [path.name for path in paths]
    labels = names if len(set(names)) == len(names) else [str(folder.path) for folder in folders]
    found = [ComparedRun(label, folder) for label, folder in zip(labels, folders, strict=True)]
    console = standard_output()
    table = PlainTable(["", *(run.name for run in found)], [])
    # A replica that some runs lack contributes only to the list of names.
    common = set.intersection(*(set(run.keys["replicas"]) for run in found))
    for key in dict.fromkeys(key for run in found for key in run.keys):
        shown = [_shown(run.keys[key]) if key in run.keys else _ABSENT for run in found]
        is_common = not key.startswith("replicas.") or key.split(".")[1] in common
        if is_common and len(set(shown)) > 1:  # left out or empty is the same to a reader
            table.add_row(key, *shown)
    table.add_row("")
    results = [run.results() for run in found]
    for key in results[0]:
        table.add_row(key, *(result[key] for result in results))
    console.print(table)
    told = f"Settings that differ, and what each run has reached. {_ABSENT}: not set, or no value yet."
    say(console, told, style="dim")
    if any(one.losses for one in found):
        _draw(found, chart)
        say(console, f"The validation losses are drawn in {chart}.")
    else:
        say(console, "No picture is drawn, because no run has a validation loss yet.")


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value that is neither a mapping nor a list of named entries."""
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        names = [one["name"] for one in value]
        yield key, names
        value = {
            name: {part: one[part] for part in one if part != "name"} for name, one in zip(names, value, strict=True)
        }
    if isinstance(value, dict) and value:
        for part, below in value.items():
            yield from leaves(below, f"{key}.{part}" if key else str(part))
    else:
        yield key, value


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or _ABSENT
    if isinstance(value, float):
        return format_number(value, 6)
    if not isinstance(value, str):
        return _ABSENT if value in (None, {}) else json.dumps(value)
    quantity = quantity_of(value) if value.endswith(tuple(f" {unit}" for unit in FORMATS)) else None
    return value if quantity is None else FORMATS[quantity[1]](quantity[0])


def _draw(found: Sequence[ComparedRun], path: Path) -> None:
    """Draw one curve per run: validation loss over tokens on the left, over training time on the right."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = new_figure(0.6 * HEIGHT)
        by_tokens, by_time = figure.subplots(1, 2, sharey=True)
        for colour, run in zip(palette(len(found)), found, strict=True):
            ends = {round_: run.state.closed.get(round_) for round_ in run.losses}  # none before training
            tokens = [0 if end is None else end.tokens_until for end in ends.values()]
            seconds = [0 if end is None else run.state.training_seconds(end.time) for end in ends.values()]
            for axes, places in ((by_tokens, tokens), (by_time, seconds)):
                if points := list(zip(places, run.losses.values(), strict=True)):
                    draw_curve(axes, points, 60, color=colour, lw=2, ms=4, label=run.name)
        for axes in (by_tokens, by_time):
            axes.grid()
            axes.tick_params(labelleft=True)
        by_tokens.set_title("validation loss of the synced model")
        by_tokens.set_ylabel("nats per token")
        by_tokens.set_xlabel("tokens of all replicas")
        by_tokens.xaxis.set_major_formatter(lambda value, _: _short(value))
        by_time.set_xlabel("training time without pauses (from a minute on: min:s or h:min:s)")
        by_time.xaxis.set_major_formatter(lambda value, _: format_seconds(value) if value else "0 s")
        handles, names = by_time.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4))
        save_figure(figure, path)


def _short(value: float) -> str:
    """Format a number with a suffix: 1234567 -> "1.23M"."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
