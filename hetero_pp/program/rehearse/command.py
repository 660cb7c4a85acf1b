"""`hetero-pp rehearse`: starts a rehearsal, and prints and writes how it compares with the prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError, RunFailed
from hetero_pp.core.files import write_json
from hetero_pp.core.units import format_count, format_duration, format_percent
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.mode import Mode
from hetero_pp.program.rehearse.comparison import NOTHING_TIMED, Timings, compare
from hetero_pp.program.rehearse.show import MARK, print_comparison
from hetero_pp.program.report.output import announce, say
from hetero_pp.program.report.state import RunState
from hetero_pp.program.show_prediction import print_assumption
from hetero_pp.simulator.costs import assumed_in
from hetero_pp.simulator.prediction import Prediction, predict

BUSY = 0.8
"""Share of the processors' time in use from which they may have delayed members, which need them promptly."""
ROUNDS, STEPS = 3, 4
"""Most rounds, and inner steps of each, that are rehearsed. The first round is not timed."""


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rounds of a rehearsal, and for the rounds of the run that it stands for."""

    rehearsed: Prediction
    whole: Prediction

    @classmethod
    def of(cls, spec: RunSpec) -> Predictions:
        """Raises ConfigError for what `predict` refuses, such as unknown hardware."""
        run, config = spec.config.rehearsal, spec.config
        assert run is not None, "not a rehearsal"
        rehearsed = predict(spec)
        if run.steps == config.inner.steps:
            return cls(rehearsed, rehearsed)
        longer = config.model_copy(update={"inner": config.inner.model_copy(update={"steps": run.steps})})
        return cls(rehearsed, predict(RunSpec(longer, spec.shape.vocabulary)))


class AsRehearsal(Mode):
    """The rehearsal of a run: its rounds are few and short, and nothing is trained."""

    resumes = False

    def __init__(self, rounds: int, steps: int, json_path: Path | None = None) -> None:
        """`json_path`: file for the comparison, beside `rehearsal.json` in the folder."""
        self._rounds, self._steps, self._json = rounds, steps, json_path
        self._located: Callable[[ConfigError], ConfigError] = lambda error: error
        self._processors: Any = None  # times of all processors when the first step ended
        self._left_out: Sequence[str] = ()

    def of(self, file: ConfigFile) -> ConfigFile:
        self._located, self._left_out = file.located, list(not_rehearsed(file.config))
        return file.as_rehearsal(self._rounds, self._steps)

    def begin(self, spec: RunSpec) -> None:
        try:
            self._predictions = Predictions.of(spec)
        except ConfigError as error:
            raise self._located(error) from None
        self._spec, self._timings = spec, Timings(spec)
        lasts = spec.config.outer.rounds * self._predictions.rehearsed.round_seconds
        name, until = spec.config.name, format_duration(lasts)
        announce(f"{name}: a rehearsal, which trains nothing; its rounds should take {until}")
        for line in self._left_out:
            announce(f"{name}: {line}")

    def on_report(self, report: Report) -> None:
        self._timings.apply(report)
        if report.HasField("inner_step") and self._processors is None:
            self._processors = psutil.cpu_times()

    def conclude(self, console: Console, state: RunState, folder: RunFolder) -> None:
        if not self._timings.timed:
            raise RunFailed(f"{self._spec.config.name}: {NOTHING_TIMED}")
        found = compare(self._spec, self._timings, self._predictions.rehearsed, self._predictions.whole)
        if self._processors is not None:
            passed = [now - then for now, then in zip(psutil.cpu_times(), self._processors, strict=True)]
            idle = passed[self._processors._fields.index("idle")]
            found = replace(found, busy=1 - idle / sum(passed) if sum(passed) else 0.0)
        print_comparison(console, found)
        if found.busy > BUSY:
            busy = f"The processors of this machine were busy for {format_percent(found.busy)} of the rehearsal"
            say(console, f"{MARK} {busy}, so members may have been late: repeat it while nothing else runs here.")
        print_assumption(console, assumed_in(self._spec))
        for path in (folder.rehearsal, self._json):
            write_json(path, found.as_json())
        say(console, f"Files: {folder.path} (rehearsal.json, metrics.jsonl)")


def served_rehearsal(resume: bool) -> AsRehearsal:
    """Return the rehearsal that `serve` starts. Raises ConfigError with `--resume`."""
    if resume:
        raise ConfigError((), "--resume: found --rehearse, too, expected only one of them: no rehearsal is resumed")
    return AsRehearsal(ROUNDS, STEPS)


def not_rehearsed(config: RunConfig) -> Iterator[str]:
    """Yield lines about what a rehearsal leaves out."""
    simulate, optional = config.simulate, [replica.name for replica in config.replicas if replica.optional]
    for name in simulate.fleets:
        yield f"simulate.fleets.{name} is not rehearsed: one replica {name} takes part"
    for name in simulate.sites:
        yield f"simulate.sites.{name} is not rehearsed: each member has an uplink of its own"
    if simulate.exchange != "gather":
        yield f"simulate.exchange: {simulate.exchange} is not rehearsed: a run gathers contributions"
    if simulate.exchange_bandwidth is not None:
        yield "simulate.exchange_bandwidth is not rehearsed: set `exchange.line`, which is"
    if optional:
        how = "to rehearse some, set their number, as with `--set replicas.home.count=2`"
        yield f"{format_count(len(optional), 'optional replica')} left out: {how}"
