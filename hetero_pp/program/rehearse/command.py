"""Rehearsals: what `rehearse` starts and prints, what a joined host is told, and what `plan --measured` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, WAYS, LineSettings, Way
from hetero_pp.config.predictions import SimulateSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings, StageSettings
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError, RunFailed
from hetero_pp.core.files import write_json
from hetero_pp.core.units import format_bits_per_second, format_bytes, format_count, format_duration, format_percent
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.command import Mode
from hetero_pp.program.rehearse.comparison import (
    MARK,
    NOTHING_TIMED,
    RehearsalComparison,
    Timings,
    compare,
    print_comparison,
    share,
)
from hetero_pp.program.report.output import announce, say
from hetero_pp.program.report.state import RunState
from hetero_pp.program.show_prediction import print_assumption
from hetero_pp.rpc.admission_client import Rate
from hetero_pp.simulator.costs import assumed_in
from hetero_pp.simulator.prediction import Prediction, predict

BUSY = 0.8  # share of the processors' time in use from which they may have delayed members, which need them promptly
ROUNDS, STEPS = 3, 4  # Most rounds, and inner steps of each, that are rehearsed. The first round is not timed.


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


# ---- a host that joined a rehearsal: whether its line is good enough for the run ----

ENOUGH = 0.05  # share of a step up to which a line may hold its neighbours up


class OwnLine(Mode):
    """A host in a rehearsal. It follows all members, because it compares its neighbours' waits with the prediction."""

    resumes = False

    def __init__(self, spec: RunSpec, member: str, rates: Mapping[Way, Rate]) -> None:
        """`rates`: what the host measured of its line; empty if it could not. Raises ConfigError as `predict` does."""
        self._spec, self._member, self._rates = spec, member, rates
        self._predictions, self._timings = Predictions.of(spec), Timings(spec)

    def watched(self, spec: RunSpec, members: Sequence[str]) -> Sequence[str]:
        return [EXCHANGE, *(name for name in spec.needed if name not in members)]

    def on_report(self, report: Report) -> None:
        self._timings.apply(report)

    def lines(self) -> Iterator[str]:
        """Yield one or two lines: what the line reached, and whether it is good enough."""
        if self._rates:
            shown, slow = shown_rates(self._rates), too_slow(self._spec, self._member, self._rates)
            yield f"the line of this host reached {shown}" + (f"; the run's YAML expects {slow}" if slow else "")
        if not self._timings.timed:
            yield NOTHING_TIMED
            return
        found = compare(self._spec, self._timings, self._predictions.rehearsed, self._predictions.whole)
        yield verdict(self._spec, self._member, found)


def verdict(spec: RunSpec, member: str, found: RehearsalComparison) -> str:
    """Return one line: how long others waited for a member, and the utilization that its group would have."""
    held_share, other = held_up(spec, member, found)
    own = spec.members[member].replica
    trained = fmean(found.members[name]["compute"] for name in own.members)
    absolute = found.whole_run.utilization["absolute"] * share(
        trained, fmean(one["compute"] for one in found.members.values())
    )
    free = share(absolute, found.whole_run.utilization["relative"])
    group = f"{own.name} would train {format_percent(absolute)} of the time ({format_percent(free)} with free links)"
    if not other:
        return f"{member} has no neighbours to hold up; {group}"
    # What the member's links to its neighbours carried in a step, evaluations included.
    carried: dict[Way, float] = dict.fromkeys(WAYS, 0.0)
    inner, step = (found.measured[f"replicas.{own.name}.{key}"] for key in ("inner_seconds", "step_seconds"))
    timed = share(inner, step)
    steps = spec.config.inner.steps or max(round(timed), 1)
    for link in spec.links.values():
        if member in (link.source, link.target) and spec.members.keys() >= {link.source, link.target}:
            up, down = ("forward", "backward") if link.source == member else ("backward", "forward")
            carried["up"] += found.measured[f"links.{link.name}.{up}_bytes"] / steps
            carried["down"] += found.measured[f"links.{link.name}.{down}_bytes"] / steps
    sizes = ", ".join(f"{format_bytes(size)} {way}" for way, size in carried.items())
    held = f"{other} waited {format_percent(held_share)} of a step for {member}, beyond what free links leave idle"
    enough = "good enough" if held_share <= ENOUGH else "too slow for this boundary"
    return f"the line is {enough} ({sizes} a step): {held}; {group}"


def held_up(spec: RunSpec, member: str, found: RehearsalComparison) -> tuple[float, str]:
    """Return the share of a step for which a neighbour waited for a member, and that neighbour; 0 and "" without one.

    The wait counts as far as the neighbour was idle for longer than free links would leave it. It cannot tell a late
    member from a late line, so a member behind this one may have caused it.
    """
    own, held = spec.members[member], (0.0, "")
    if own.stage is None or own.stage.count == 1:
        return held
    names, index = own.replica.members, own.stage.index
    inner = found.measured[f"replicas.{own.replica.name}.inner_seconds"]
    exposed = max(found.measured[f"replicas.{own.replica.name}.exposed_communication"], 0.0)
    for neighbour, part in ((index - 1, "wait_next"), (index + 1, "wait_previous")):
        if 0 <= neighbour < len(names):
            waited = found.members[names[neighbour]][part]
            held = max(held, (min(share(waited, inner), exposed), names[neighbour]))
    return held


# ---- measured rates of an access line beside those of the YAML ----

SHORT = 0.9  # share of the YAML's line that a measured line has to reach: a measurement is short, and includes headers


def shown_rates(rates: Mapping[Way, Rate]) -> str:
    return ", ".join(f"{rates[way]} {way}" for way in WAYS)


def too_slow(spec: RunSpec, member: str, rates: Mapping[Way, Rate]) -> str:
    """Return the rates of the YAML that a member's line does not reach: `20 Mbit/s up`; empty if it reaches them."""
    line = next((one for one in spec.lines.values() if member in one.members), None)
    wanted = {} if line is None else {way: line.bandwidth_of(way) for way in WAYS}
    return " and ".join(
        f"{format_bits_per_second(rate)} {way}"
        for way, rate in wanted.items()
        if rate is not None and rates[way].is_less_than(SHORT * rate)
    )


# ---- what plan --measured takes from a rehearsal: lines that hosts measured, and costs of compute ----

_RATES = TypeAdapter(dict[str, dict[str, float]])


class MeasuredInput:
    """The file that `rehearse` or `serve --rehearse` wrote."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for any other file."""
        self._path = path
        try:
            found = read_json_object(path)
            self._lines = _RATES.validate_python(found["lines"])
            self._members = list(_RATES.validate_python(found["members"]))
            costs: Any = found["costs"]
            self._costs = SimulateSettings.model_validate({key: costs[key] for key in ("hardware", "measured")})
            for rates in self._lines.values():
                LineSettings.model_validate(_shown(rates))
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            reason = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
            expected = "expected the rehearsal.json of `hetero-pp rehearse` or `serve --rehearse`"
            raise ConfigError((), f"--measured {path}: found no rehearsal ({reason}), {expected}") from None

    def told(self) -> str:
        """Return a line on what is taken."""
        lines = ", ".join(f"{name} {_both(rates)}" for name, rates in self._lines.items())
        costs = format_count(len(self._costs.measured), "member")
        taken = f"lines of {lines}" if lines else "no lines, because no host joined and measured one"
        return f"Measured by a rehearsal: {taken}; measured costs of {costs}."

    def applied(self, config: RunConfig, layers: int) -> RunConfig:
        """Return the configuration with measured lines and costs.

        Latencies remain as in the YAML. Raises ConfigError for a member of another run, and for one at a site, because
        the line belongs to the site.
        """
        own = {member: replica for replica in config.replicas for member in replica.members}
        if strange := [name for name in self._members if name not in own]:
            raise ConfigError((), f"--measured {self._path}: found {strange[0]}, which is not a member of this run")
        sites = {member: name for name, site in config.sites.items() for member in site.members}
        for name in self._lines:
            if (site := sites.get(name) or sites.get(own[name].name)) is not None:
                raise ConfigError((), f"--measured {self._path}: found a line of {name}, expected one of site {site}")
        kinds = dict(config.lines)
        for name, rates in self._lines.items():
            before = _line_of(own[name], name)
            was = LineSettings() if before is None else config.lines[before]
            kinds[_kind(name)] = was.model_copy(update={"bandwidth": None, **rates})
        replicas = [self._with_lines(replica, layers) for replica in config.replicas]
        simulate = config.simulate
        costs = {
            "hardware": {**simulate.hardware, **self._costs.hardware},
            "measured": {**simulate.measured, **self._costs.measured},
        }
        changed = {"lines": kinds, "replicas": replicas, "simulate": simulate.model_copy(update=costs)}
        return config.model_copy(update=changed)

    def _with_lines(self, replica: ReplicaSettings, layers: int) -> ReplicaSettings:
        measured = [name for name in replica.members if name in self._lines]
        if not measured:
            return replica
        if isinstance(replica, DatacenterReplica):
            return replica.model_copy(update={"line": _kind(replica.name)})
        stages = replica.stages
        if not isinstance(stages, list):
            ranges = replica.layer_ranges(layers)
            stages = [StageSettings(layers=len(ranges[one]), line=replica.line_of(one)) for one in range(len(ranges))]
        named = zip(replica.members, stages, strict=True)
        own = [one.model_copy(update={"line": _kind(name)}) if name in measured else one for name, one in named]
        return replica.model_copy(update={"stages": own})


def _kind(member: str) -> str:
    return f"measured-{member}"


def _line_of(replica: ReplicaSettings, member: str) -> str | None:
    if isinstance(replica, ParticipantsReplica):
        return replica.line_of(replica.members.index(member))
    return replica.line


def _shown(rates: Mapping[str, float]) -> dict[str, str]:
    return {way: f"{rates[way]} bit/s" for way in ("up", "down")}


def _both(rates: Mapping[str, float]) -> str:
    return " and ".join(f"{format_bits_per_second(rates[way])} {way}" for way in ("up", "down"))
