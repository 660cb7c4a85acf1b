"""Follows the record of a run in its folder, also while a launcher writes it."""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from contextlib import suppress
from typing import IO, Any

from hetero_pp.core.bounded import parse_json, read_json_object
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.core.units import format_bytes, format_seconds
from hetero_pp.program.join.on_disk import is_running
from hetero_pp.program.report.events import LINE_BYTES_MAX, STRANGE, report_of
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.run_view import RunView
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.read import read_run
from replica_groups.exchange.joining import shown_digest

_BATCH = 1000
"""Lines after which readers of the view get their turn."""
_SECONDS_BETWEEN_READS = 0.2
_SECONDS_BETWEEN_LOOKS = 2.0
"""Interval at which it is checked whether the run's processes are still there."""
_SECONDS_UNTIL_STALE = 60.0
_BYTES_OF_A_FULL_DISK = 2**20


class RecordedRun:
    """The run in a folder. A thread follows its record until `close`. Implements Source."""

    predicts = False

    def __init__(self, folder: RunFolder) -> None:
        """Raises ConfigError if the configuration in the folder cannot be read."""
        self.folder = folder
        self.view = self._new_view()
        self._caught_up = threading.Event()
        """Set once the record has been read to its present end."""
        self._ended = threading.Event()
        self._file: IO[bytes] | None = None
        self._line = 0
        """Number of the last line that was read."""
        self._half = b""
        self._looked = -_SECONDS_BETWEEN_LOOKS
        self._thread = threading.Thread(target=self._run, name=f"record {folder.path.name}", daemon=True)

    @property
    def prediction(self) -> dict[str, Any] | None:
        return self.view.prediction()

    def start(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until the record has been read to its present end; return whether it has."""
        return self._caught_up.wait(seconds)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._open()
                while self._file is not None and self._read(self._file) and not self._ended.is_set():
                    pass
                self._look()
            except (OSError, HeteroPPError) as error:
                self.view.complain(f"{self.folder.path}: cannot be read now: {error}")
            self._caught_up.set()
            self._ended.wait(_SECONDS_BETWEEN_READS)

    def _new_view(self) -> RunView:
        view = RunView(RunState(read_run(self.folder)))
        view.is_live = is_running(self.folder)
        return view

    def _open(self) -> None:
        """Open the record, or the one that has replaced it: a run was resumed, or began anew."""
        path = self.folder.metrics
        try:
            found = path.stat()
        except FileNotFoundError:
            if self._file is None:
                self.view.complain(f"{path.name} is missing: nothing is known of the run but its configuration")
            return
        if not stat.S_ISREG(found.st_mode):  # a pipe without a writer would never open
            self.view.complain(f"{path.name} was skipped: found a pipe or a device, expected a file")
            return
        if self._file is not None:
            own = os.fstat(self._file.fileno())
            if (own.st_ino, own.st_dev) == (found.st_ino, found.st_dev) and found.st_size >= self._file.tell():
                return
            self._file.close()
            self.view = self._new_view()
        self._file, self._line, self._half = path.open("rb"), 0, b""
        self.view.problems = [one for one in self.view.problems if not one.startswith(f"{path.name} is missing")]

    def _read(self, file: IO[bytes]) -> bool:
        """Apply the next lines. Return whether there may be more now."""
        with self.view.state.lock:
            for _ in range(_BATCH):
                line = self._half + file.readline(LINE_BYTES_MAX)
                if not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
                    self._half = line  # a half line: its other half is being written
                    break
                self._half, self._line = b"", self._line + 1
                self._take(line)
        return not self._half and bool(line)

    def _take(self, line: bytes) -> None:
        """Apply the report of a line. One that this run cannot have is skipped: a damaged line may hold any number."""
        view, here = self.view, f"{self.folder.metrics.name}: line {self._line}"
        try:
            report = report_of(parse_json(line))
            if view.state.apply(report):
                view.take(report)
                return
        except STRANGE:
            pass
        except Exception as error:  # noqa: BLE001 (the page shows what it has)
            view.complain(f"{here} does not fit the run ({type(error).__name__}: {error})")
            return
        view.complain(f"{here} is damaged and was skipped")

    def _look(self) -> None:
        """Note whether the run still goes on, or how it ended."""
        if time.monotonic() < self._looked + _SECONDS_BETWEEN_LOOKS:
            return
        self._looked = time.monotonic()
        running = is_running(self.folder)
        self.view.text = shown_digest(self.folder.text)
        summary = None
        if self.folder.summary.is_file():
            with suppress(OSError):
                try:
                    summary = read_json_object(self.folder.summary)
                except ValueError as error:
                    self.view.complain(f"{self.folder.summary.name} was skipped: {error}")
        self.view.note_stale(self._behind() if running else "")
        self.view.end(self._outcome(running, summary), running)

    def _behind(self) -> str:
        """Return why the record may lack what happens now: its disk is full, or nothing was written for a while."""
        try:
            silent = time.time() - self.folder.metrics.stat().st_mtime
            free = shutil.disk_usage(self.folder.path).free
        except OSError:
            return ""
        if silent < (_SECONDS_UNTIL_STALE if free > _BYTES_OF_A_FULL_DISK else _SECONDS_BETWEEN_LOOKS):
            return ""
        ask = f"`hetero-pp status {self.folder.path.name}` asks the exchange"
        since = f"{self.folder.metrics.name} has had no new line for {format_seconds(round(silent))}"
        return f"{since}; {format_bytes(free)} are free on its disk; {ask}"

    def _outcome(self, running: bool, summary: dict[str, object] | None) -> str | None:
        if running:
            return None
        if summary is not None:
            return f"failed: {summary['failed']}" if summary.get("failed") else "over"
        with self.view.state.lock:
            if self.view.state.is_over:
                return "over"
            killed = "it ended without a summary: it was killed, or its host stopped; --resume continues it"
            return f"failed: {self.view.state.failed or killed}"
