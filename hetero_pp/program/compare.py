"""`hetero-pp view --compare`: several runs in one table, and a picture of their validation losses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_pp.config.folder import recorded_run
from hetero_pp.config.yaml_file import read_trained
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import FORMATS, format_bytes, format_number, format_seconds
from hetero_pp.program.report.output import say, standard_output
from hetero_pp.program.report.recorder import recorded
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.simulator.charts import HEIGHT, STYLE, draw_curve, new_figure, palette, quantity_of, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ABSENT = "–"


@dataclass(frozen=True)
class ComparedRun:
    """One run as far as its record goes."""

    name: str
    state: RunState

    @cached_property
    def losses(self) -> dict[int, float]:
        """Mean validation loss by round, where it is finite; round 0 is before training."""
        means, closed = self.state.mean_validation_losses(), {0, *self.state.closed}
        return {round_: mean for round_, mean in means.items() if round_ in closed and math.isfinite(mean)}

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The configuration as dotted keys with single values; entries of `replicas` are keyed by name."""
        return dict(leaves(self.state.spec.latest.model_dump(mode="json", exclude={"name"})))

    def tokens(self, round_: int) -> float:
        """Return the tokens that all replicas had trained on by the end of a round."""
        return self.state.closed[round_].tokens_until if round_ in self.state.closed else 0

    def seconds(self, round_: int) -> float:
        """Return the training seconds until the end of a round, without pauses."""
        return self.state.training_seconds(self.state.closed[round_].time) if round_ in self.state.closed else 0.0

    def results(self) -> dict[str, str]:
        """Return what the run has reached, formatted, by the name of the quantity."""
        state, losses = self.state, self.losses
        sent = sum(link.wire_bytes for link in state.links.values())
        last, best = max(losses, default=None), min(losses, key=losses.__getitem__, default=None)
        return {
            "rounds": f"{state.rounds} of {state.rounds_planned}",
            "tokens": f"{sum(replica.tokens for replica in state.replicas.values()):,}",
            "last validation loss": _ABSENT if last is None else f"{losses[last]:.4f}",
            "best validation loss": _ABSENT if best is None else f"{losses[best]:.4f} (round {best})",
            "training time": format_seconds(state.training_seconds()),
            "sent on the wire": format_bytes(sent),
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
    found = [ComparedRun(label, RunState(read_trained(folder))) for label, folder in zip(labels, folders, strict=True)]
    for run, folder in zip(found, folders, strict=True):
        for report in recorded(folder):
            if report.HasField("begun"):  # the specification has all changes, checked
                report.begun.ClearField("changes")
            run.state.apply(report)
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
        _draw_curves(by_tokens, found, ComparedRun.tokens)
        _draw_curves(by_time, found, ComparedRun.seconds)
        by_tokens.set_title("validation loss of the synced model")
        by_tokens.set_ylabel("nats per token")
        by_tokens.set_xlabel("tokens of all replicas")
        by_tokens.xaxis.set_major_formatter(lambda value, _: _short(value))
        by_time.set_xlabel("training time without pauses (from a minute on: min:s or h:min:s)")
        by_time.xaxis.set_major_formatter(lambda value, _: format_seconds(value) if value else "0 s")
        handles, names = by_time.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4))
        save_figure(figure, path)


def _draw_curves(axes: Axes, found: Sequence[ComparedRun], where: Callable[[ComparedRun, int], float]) -> None:
    for colour, run in zip(palette(len(found)), found, strict=True):
        points = [(where(run, round_), loss) for round_, loss in run.losses.items()]
        if points:
            draw_curve(axes, points, 60, color=colour, lw=2, ms=4, label=run.name)
    axes.grid()
    axes.tick_params(labelleft=True)


def _short(value: float) -> str:
    """Format a number with a suffix: 1234567 -> "1.23M"."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
