"""Opens and closes the tools that an operator asked for: metrics, traces and further boards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from hetero_pp.core.errors import ConfigError
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.operate.observed import Observed
from hetero_pp.program.report.boards import MakeSink, makers_of
from hetero_pp.program.report.output import announce
from hetero_pp.program.report.state import RunState

Page = Callable[[RunState, Callable[[str], None]], AbstractContextManager[Callable[[Report], None]]]
"""(state, say) -> while a block runs, a function for the reports that the state has accepted; it raises nothing."""


@dataclass
class Operations:
    """Follows a run for an operator. By default it does nothing."""

    boards: Mapping[str, MakeSink] = field(default_factory=dict)
    """Further sinks of the scalars that TensorBoard gets, by name."""
    observed: Observed = field(default_factory=Observed)
    followers: list[Callable[[Report], None]] = field(default_factory=list)
    """Functions that get each report of this start of the run. One that fails gets no more."""
    complain: Callable[[str], None] = print
    page: Page | None = None

    @property
    def needs_all(self) -> bool:
        """Whether something needs the reports of all members, which only the exchange's host gets."""
        return bool(self.boards or self.followers)

    def on_report(self, report: Report) -> None:
        """Take in a report, after the state has."""
        self.observed.on_report(report)
        for follower in [*self.followers]:
            try:
                follower(report)
            except Exception as error:  # noqa: BLE001 (a bug in it must not fail the run)
                self.followers.remove(follower)
                self.complain(f"traces end here, but the run continues: {type(error).__name__}: {error}")


@contextmanager
def operated(
    metrics: str | None = None, otlp: str | None = None, boards: Sequence[str] = (), page: Page | None = None
) -> Iterator[Operations]:
    """Open what the operator asked for while the block runs.

    `metrics`: [ADDRESS:]PORT to serve; `otlp`: URL of a collector of traces; `boards`: names of further sinks;
    `page`: shows the run on a page. Raises ConfigError before anything starts if the port is in use, or if an extra is
    not installed.
    """
    observed, makers = Observed(), makers_of(boards)
    with ExitStack() as stack:
        followers: list[Callable[[Report], None]] = []
        if metrics is not None:
            from hetero_pp.program.operate.metrics import served

            url = stack.enter_context(served(metrics, observed))
            announce(f"metrics: {url}/metrics, health: {url}/healthz")
        if otlp is not None:
            try:
                from hetero_pp.program.operate.traces import traced
            except ImportError as error:
                needed = "install it with: pip install 'hetero-pp[otel]'"
                raise ConfigError((), f"--otlp: {error.name} is not installed; {needed}") from None
            followers.append(stack.enter_context(traced(otlp, observed, announce)))
        yield Operations(makers, observed, followers, announce, page)
