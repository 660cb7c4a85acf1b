"""The run of a launcher on a page that the launcher itself serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.recorder import INTERRUPTED
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.run_view import RunView
from hetero_pp.program.view.serving import Served


class Launched:
    """A run in this process. An error of the page never reaches the run. Implements Source."""

    predicts = False

    def __init__(self, state: RunState) -> None:
        self.view = RunView(state)
        self._is_broken = False

    @property
    def prediction(self) -> dict[str, Any] | None:
        return self.view.prediction()

    def start(self) -> None:
        """Do nothing: the launcher gives it the reports."""

    def wait(self, seconds: float) -> bool:
        return True

    def close(self) -> None:
        """Do nothing."""

    def take(self, report: Report) -> None:
        """Take in a report that the state has accepted."""
        if self._is_broken:
            return
        try:
            self.view.take(report)
        except Exception as error:  # noqa: BLE001 (an error in the page must not fail the run)
            self._is_broken = True
            self.view.complain(f"the page stopped following the run: {type(error).__name__}: {error}")

    def end(self, failed: str | None) -> None:
        """Note that the run has ended. `failed`: why it ended early."""
        cause = failed or self.view.state.failed
        self.view.end("over" if cause is None else f"failed: {cause}", False)


@contextmanager
def on_a_page(state: RunState, say: Callable[[str], None]) -> Iterator[Callable[[Report], None]]:
    """Serve the page of a run on loopback while the block runs, and print its address. Implements Page."""
    launched, failed = Launched(state), None
    served = Served({state.spec.config.name: launched})
    say(f"the run is shown at {served.url}")
    with served.in_background():
        try:
            yield launched.take
        except BaseException as error:
            failed = str(error) or INTERRUPTED
            raise
        finally:
            launched.end(failed)
            served.tell_the_end()
