"""Tells a host that joined a rehearsal whether its line is good enough for the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from hetero_pp.config.lines import EXCHANGE, WAYS, Way
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.units import format_bits_per_second, format_bytes, format_percent
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.mode import Mode
from hetero_pp.program.rehearse.command import Predictions
from hetero_pp.program.rehearse.comparison import NOTHING_TIMED, RehearsalComparison, Timings, compare, share
from hetero_pp.rpc.admission_client import Rate

ENOUGH = 0.05
"""Share of a step up to which a line may hold its neighbours up."""


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

SHORT = 0.9
"""Share of the YAML's line that a measured line has to reach: a measurement is short, and includes headers."""


def shown_rates(rates: Mapping[Way, Rate]) -> str:
    return ", ".join(f"{rates[way]} {way}" for way in WAYS)


def too_slow(spec: RunSpec, member: str, rates: Mapping[Way, Rate]) -> str:
    """Return the rates of the YAML that a member's line does not reach: `20 Mbit/s up`; empty if it reaches them."""
    line = next((one for one in spec.lines.values() if member in one.members), None)
    wanted = {} if line is None else {way: line.bandwidth(way) for way in WAYS}
    return " and ".join(
        f"{format_bits_per_second(rate)} {way}"
        for way, rate in wanted.items()
        if rate is not None and rates[way].is_less_than(SHORT * rate)
    )
