"""Where the runs of a page come from: a record on this disk, this launcher, an exchange elsewhere, or a prediction."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from contextlib import suppress
from typing import IO, Any

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.bounded import parse_json, read_json_object
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.units import format_bytes, format_seconds
from hetero_pp.program.join.membership import Membership, is_running
from hetero_pp.program.launch.earlier import read_over
from hetero_pp.program.report.recorder import LINE_BYTES_MAX, STRANGE, report_of
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.prediction import NOT_MEASURED, PredictedStep, measured_of_rehearsal, measured_of_run
from hetero_pp.program.view.run_view import RunView
from hetero_pp.rpc.exchange_client import ExchangeClient
from replica_groups.exchange.text import shown_digest

_BATCH = 1000  # lines of a record after which readers of the view get their turn
_SECONDS_BETWEEN_READS = 0.2
_SECONDS_BETWEEN_LOOKS = 2.0  # interval at which it is checked whether the run's processes are still there
_SECONDS_UNTIL_STALE = 60.0
_BYTES_OF_A_FULL_DISK = 2**20
_SECONDS_BETWEEN_TRIES = 5.0  # interval at which an exchange is asked again


class Source:
    """A run or a prediction on the page. This one follows nothing: a prediction alone, or a run of this process."""

    folder: RunFolder | None = None

    def __init__(self, view: RunView | None, predicted: PredictedStep | None = None) -> None:
        """`predicted`: the prediction, if it is what the user asked for."""
        self.view = view
        """The run as far as it is known; None for a prediction alone. It is replaced when the run begins anew."""
        self._step, self.predicts = predicted, predicted is not None
        self._is_known, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="page of a run", daemon=True)

    def prediction(self) -> dict[str, Any] | None:
        """Return the predicted step beside what the run or its rehearsal measured; None if it cannot be predicted.

        It takes a second when it is first asked for.
        """
        view, measured = self.view, NOT_MEASURED
        is_rehearsal = view is not None and view.state.spec.config.rehearsal is not None
        if self._step is None and view is not None and not is_rehearsal:
            with suppress(ConfigError):
                self._step = PredictedStep(view.state.spec)
        if self._step is None:
            return None
        if is_rehearsal and self.folder is not None:
            # It may still go on, or the file may be damaged.
            with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
                measured = measured_of_rehearsal(read_json_object(self.folder.rehearsal), self._step.found)
        elif view is not None:
            measured = measured_of_run(view.state)
        return self._step.beside(*measured)

    def start(self) -> None:
        """Begin to follow the run, until `close`."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until the present end of the record has been read, or an exchange has answered or failed to."""
        return self._is_known.wait(seconds)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        self._is_known.set()


class Record(Source):
    """The run in a folder, also while a launcher writes its record."""

    view: RunView
    folder: RunFolder

    def __init__(self, folder: RunFolder, predicted: PredictedStep | None = None) -> None:
        """Raises ConfigError if the configuration in the folder cannot be read."""
        self.folder = folder
        super().__init__(RunView(RunState(read_run(folder))), predicted)
        self._file: IO[bytes] | None = None
        self._line = 0  # number of the last line that was read
        self._half = b""
        self._looked = -_SECONDS_BETWEEN_LOOKS

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                # Asked before the record is read, so that the last lines of a run that has just ended are read before
                # viewers are told of its end: after it they are told nothing.
                is_due = time.monotonic() >= self._looked + _SECONDS_BETWEEN_LOOKS
                runs = is_due and is_running(self.folder)
                self._open()
                while self._file is not None and self._read(self._file) and not self._ended.is_set():
                    pass
                if is_due:
                    self._look(runs)
            except (OSError, HeteroPPError) as error:
                self.view.complain(f"{self.folder.path}: cannot be read now: {error}")
            self._is_known.set()
            self._ended.wait(_SECONDS_BETWEEN_READS)

    def _open(self) -> None:
        """Open the record, or the one that has replaced it: a run was resumed, or began anew."""
        path = self.folder.metrics
        missing = f"{path.name} is missing: nothing is known of the run but its configuration"
        try:
            found = path.stat()
        except FileNotFoundError:
            if self._file is None:
                self.view.complain(missing)
            return
        if not stat.S_ISREG(found.st_mode):  # a pipe without a writer would never open
            self.view.complain(f"{path.name} was skipped: found a pipe or a device, expected a file")
            return
        if self._file is not None:
            own = os.fstat(self._file.fileno())
            if (own.st_ino, own.st_dev) == (found.st_ino, found.st_dev) and found.st_size >= self._file.tell():
                return
            self._file.close()
            self.view = RunView(RunState(read_run(self.folder)))
            self._step = self._step if self.predicts else None  # its settings may have changed
        self._file, self._line, self._half = path.open("rb"), 0, b""
        self.view.problems = [one for one in self.view.problems if one != missing]

    def _read(self, file: IO[bytes]) -> bool:
        """Apply the next lines. Return whether there may be more now."""
        with self.view.state.lock:
            for _ in range(_BATCH):
                line = self._half + file.readline(LINE_BYTES_MAX)
                if not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
                    self._half = line  # a half line: its other half is being written
                    break
                self._half, self._line = b"", self._line + 1
                wrong = "is damaged and was skipped"  # such as a number that this run cannot have
                try:
                    report = report_of(parse_json(line))
                    if self.view.state.apply(report):
                        self.view.take(report)
                        continue
                except STRANGE:
                    pass
                except Exception as error:  # noqa: BLE001 (the page shows what it has)
                    wrong = f"does not fit the run ({type(error).__name__}: {error})"
                self.view.complain(f"{self.folder.metrics.name}: line {self._line} {wrong}")
        return not self._half and bool(line)

    def _look(self, runs: bool) -> None:
        """Note whether the run still goes on, or how it ended, once its record is read to the end."""
        self._looked, view = time.monotonic(), self.view
        view.text = shown_digest(self.folder.text)
        if runs:
            # The record may lack what happens now: its disk is full, or nothing was written for a while.
            path, why = self.folder.metrics, ""
            with suppress(OSError):
                silent, free = time.time() - path.stat().st_mtime, shutil.disk_usage(self.folder.path).free
                if silent >= (_SECONDS_UNTIL_STALE if free > _BYTES_OF_A_FULL_DISK else _SECONDS_BETWEEN_LOOKS):
                    ask = f"`hetero-pp status {self.folder.path.name}` asks the exchange"
                    since = f"{path.name} has had no new line for {format_seconds(round(silent))}"
                    why = f"{since}; {format_bytes(free)} are free on its disk; {ask}"
            view.note_stale(why)
            view.end(None, True)
            return
        view.note_stale("")
        if self.folder.summary.is_file():
            with suppress(OSError):
                try:
                    failed = str(read_json_object(self.folder.summary).get("failed") or "")
                    view.end("failed" if failed else "over", False, failed)
                    return
                except ValueError as error:
                    view.complain(f"{self.folder.summary.name} was skipped: {error}")
        with view.state.lock:
            if view.state.is_over:
                view.end("over", False)
            else:
                killed = "it ended without a summary: it was killed, or its host stopped; --resume continues it"
                view.end("failed", False, view.state.failed or killed)


class Watched(Source):
    """A run that this host has joined, by the reports that its exchange passes on."""

    view: RunView

    def __init__(self, spec: RunSpec, membership: Membership, folder: RunFolder) -> None:
        """`folder`: of the run on this host, which keeps that the run is over."""
        self._spec, self._membership, self._folder = spec, membership, folder
        self._client: ExchangeClient | None = None
        super().__init__(self._new_view())

    def close(self) -> None:
        self._ended.set()
        if self._client is not None:
            self._client.close()
        super().close()

    def _run(self) -> None:
        """Follow the run until it is over. After a break the exchange tells its counters and last reports again."""
        complaint = ""
        while not self._ended.is_set():
            self._client = ExchangeClient(self._membership.address, self._membership.credentials)
            try:
                # `close` may have ended the client before: it sets the flag first, so that one of both sees the other.
                if self._ended.is_set() or self._follow(self._client):
                    return
                complaint = f"the exchange at {self._membership.address} ended the connection; trying again"
            except HeteroPPError as error:
                if (over := read_over(self._folder)) is not None:
                    told = f"{over.told}; its exchange no longer answers, and only its host has the record"
                    self.view.complain(told)
                    self.view.end("over", False)
                    self._is_known.set()
                    return
                complaint = f"{error}; trying again"
            except Exception as error:  # noqa: BLE001 (the page shows what it has, and says what went wrong)
                complaint = f"a report does not fit the run ({type(error).__name__}: {error}); trying again"
            finally:
                with suppress(HeteroPPError):
                    self._client.close()
            if not self._ended.is_set():
                self.view.complain(complaint)
            self._is_known.set()
            self._ended.wait(_SECONDS_BETWEEN_TRIES)

    def _follow(self, client: ExchangeClient) -> bool:
        """Take in reports until the connection ends. Return whether the run is over."""
        view: RunView | None = None
        for report in client.watch(so_far=True):
            if view is None:  # the counters come first, and again after the reports that the exchange remembers
                view = self.view = self._new_view()
            state = view.state
            with state.lock:
                if state.apply(report):
                    view.take(report)
                if report.HasField("so_far") and state.closed and (missing := min(state.closed) - 1):
                    told = f"curves and events of rounds 1 to {missing} are missing"
                    view.complain(f"{told}: the exchange has its last 10,000 reports; counters are of the whole run")
            self._is_known.set()
        if view is None or not (view.state.is_over or view.state.failed or view.state.over is not None):
            return False
        failed = view.state.failed
        view.end("over" if failed is None else "failed", False, failed or "")
        return True

    def _new_view(self) -> RunView:
        view = RunView(RunState(self._spec))
        view.own = (self._membership.slot,)
        return view
