"""Follows a run that this host has joined, by the reports that its exchange passes on."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.program.join.membership import Membership
from hetero_pp.program.launch.over import read_over
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.run_view import RunView
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec

_SECONDS_BETWEEN_TRIES = 5.0


class Watched:
    """A run elsewhere. A thread follows its reports until `close`. Implements Source."""

    predicts = False

    def __init__(self, spec: RunSpec, membership: Membership, folder: RunFolder) -> None:
        """`folder`: of the run on this host, which keeps that the run is over."""
        self._spec, self._membership, self._folder = spec, membership, folder
        self.view = self._new_view()
        self._heard, self._ended = threading.Event(), threading.Event()
        self._client: ExchangeClient | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {spec.config.name}", daemon=True)

    @property
    def prediction(self) -> dict[str, Any] | None:
        return self.view.prediction()

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the first report or a complaint; return whether there was one."""
        return self._heard.wait(seconds)

    def close(self) -> None:
        self._ended.set()
        if self._client is not None:
            self._client.close()
        self._thread.join()

    def _run(self) -> None:
        """Follow the run until it is over. After a break the exchange tells its counters and last reports again."""
        complaint = ""
        while not self._ended.is_set():
            self._client = ExchangeClient(self._membership.address, self._membership.credentials)
            try:
                if self._follow(self._client):
                    return
                complaint = f"the exchange at {self._membership.address} ended the connection; trying again"
            except HeteroPPError as error:
                if (over := read_over(self._folder)) is not None:
                    self._end(over.told)
                    return
                complaint = f"{error}; trying again"
            except Exception as error:  # noqa: BLE001 (the page shows what it has, and says what went wrong)
                complaint = f"a report does not fit the run ({type(error).__name__}: {error}); trying again"
            finally:
                with suppress(HeteroPPError):
                    self._client.close()
            if not self._ended.is_set():
                self.view.complain(complaint)
            self._heard.set()
            self._ended.wait(_SECONDS_BETWEEN_TRIES)

    def _end(self, told: str) -> None:
        """Note that the run is over and no longer served, so that nothing more will be known of it."""
        self.view.complain(f"{told}; its exchange no longer answers, and only its host has the record")
        self.view.end("over", False)
        self._heard.set()

    def _follow(self, client: ExchangeClient) -> bool:
        """Take in reports until the connection ends. Return whether the run is over."""
        view: RunView | None = None
        for report in client.watch(so_far=True):
            if view is None:  # the counters come first, and again after the reports that the exchange remembers
                view = self.view = self._new_view()
            with view.state.lock:
                if view.state.apply(report):
                    view.take(report)
                if report.HasField("so_far") and view.state.closed:
                    view.complain_of_missing_rounds()
            self._heard.set()
        if view is None or not (view.state.is_over or view.state.failed or view.has_told_the_end):
            return False
        view.end("over" if view.state.failed is None else f"failed: {view.state.failed}", False)
        return True

    def _new_view(self) -> RunView:
        view = RunView(RunState(self._spec))
        view.own = (self._membership.slot,)
        return view
