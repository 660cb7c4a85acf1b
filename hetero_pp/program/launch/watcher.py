"""Follows a run's reports in a thread, while another thread waits for the end of the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from hetero_pp.core.errors import LinkError, Refused, RunFailed
from hetero_pp.messages.messages_pb2 import Report


class Watcher:
    """A thread that hands on every report until there are no more."""

    def __init__(
        self,
        watch: Callable[[], Iterator[Report]],
        on_report: Callable[[Report], None],
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the thread. `on_lost` is called with the cause if no further report can arrive."""
        self._watch, self._on_report, self._on_lost = watch, on_report, on_lost
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._handed_on = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def catch_up(self, reports: int) -> None:
        """Wait until this many reports were handed on, or there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._handed_on >= reports)

    def wait(self) -> None:
        """Wait for the last report."""
        self._thread.join()

    def join(self) -> None:
        """Wait for the last report. Raises RunFailed if a report could not be handed on."""
        self.wait()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise RunFailed if a report could not be handed on."""
        if self._error is not None:
            told = "the launcher stopped receiving the run's reports before the run was over"
            raise RunFailed(f"{told} ({type(self._error).__name__}: {self._error})")

    def _run(self) -> None:
        try:
            for report in self._watch():
                self._on_report(report)
                with self._changed:
                    self._handed_on += 1
                    self._changed.notify_all()
        except (LinkError, Refused, RunFailed) as error:
            # The supervisor reports the cause, and the record shows whether the run ended early.
            self._on_lost(str(error))
        except Exception as error:  # noqa: BLE001 (a bug: members train on, and the end of the run reports it)
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
