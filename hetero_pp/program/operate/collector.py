"""Collects the metrics of a run from its state at each scrape, so that nothing is counted twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hetero_pp.program.operate.observed import Observed
from hetero_pp.program.report.membership_state import MembershipState, Outcome
from hetero_pp.program.report.replica_state import STILL_TOLD
from hetero_pp.program.report.state import RunState

Samples = Iterable[tuple[Sequence[str], float | None]]
"""Label values and value; a value of None is not known, and is left out."""


class Outcomes:
    """Number of contributions by replica and outcome. Old rounds are counted once, so that a scrape stays short."""

    def __init__(self) -> None:
        self._until = 0
        self._settled: Counter[tuple[str, Outcome]] = Counter()

    def count(self, membership_state: MembershipState) -> Counter[tuple[str, Outcome]]:
        """Return the counts over all closed rounds."""
        old, found = max(membership_state.rounds, default=0) - STILL_TOLD, Counter[tuple[str, Outcome]]()
        for round_ in (one for one in membership_state.rounds if one > self._until):
            (self._settled if round_ <= old else found).update(membership_state.outcomes(round_).items())
        self._until = max(self._until, old)
        return self._settled + found


@dataclass(frozen=True)
class ScrapedState:
    """The data that a scrape reads. The collector holds the state's lock meanwhile."""

    observed: Observed
    state: RunState
    outcomes: Outcomes


@dataclass(frozen=True)
class Described:
    """A metric: its name, labels, unit and meaning, and how its samples follow from a run."""

    name: str
    labels: Sequence[str]
    unit: str
    meaning: str
    samples: Callable[[ScrapedState], Samples]
    needs_all: bool = False
    """Whether it needs the reports of all members, which `join` does not get."""

    @property
    def is_counter(self) -> bool:
        """Whether its values never fall while the process lives."""
        return self.name.endswith("_total")

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return its family, without samples."""
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        return kind(self.name, self.meaning, labels=self.labels)


class RunCollector(Collector):
    """Yields the metrics of one run."""

    def __init__(self, observed: Observed, metrics: Sequence[Described], build: Metric) -> None:
        """`build`: the family about the program, which is yielded before the run is known, too."""
        self._observed, self._metrics, self._build = observed, metrics, build
        self._outcomes = Outcomes()
        self._highest: dict[tuple[str, ...], float] = {}
        """Largest value of each sample of a counter. A process that is restarted counts its round anew, which lowers a
        sum. Prometheus would take that for a counter that began at 0 again."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration reads no state."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._build
        state = self._observed.state
        if state is not None:
            with state.lock:
                view = ScrapedState(self._observed, state, self._outcomes)
                found = [self._filled(one, view) for one in self._metrics if self._is_shown(one, state)]
            yield from found

    def _is_shown(self, metric: Described, state: RunState) -> bool:
        """Return whether a metric has values now.

        Counters appear once the run begins or resumes. They would otherwise jump from 0 when a resumed run takes in its
        earlier reports.
        """
        is_known = self._observed.sees_all or not metric.needs_all
        return is_known and (state.membership_state.has_begun or not metric.is_counter)

    def _filled(self, metric: Described, view: ScrapedState) -> Metric:
        family = metric.family()
        for labels, value in metric.samples(view):
            if value is not None:
                shown = self._rising((metric.name, *labels), value) if metric.is_counter else value
                family.add_metric(labels, shown)
        return family

    def _rising(self, key: tuple[str, ...], value: float) -> float:
        self._highest[key] = max(value, self._highest.get(key, value))
        return self._highest[key]
