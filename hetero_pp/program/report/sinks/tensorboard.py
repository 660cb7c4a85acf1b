"""TensorBoard's event file of a run."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_pp.core.files import LastingLog
from hetero_pp.program.report.sinks.sink import Scalar
from hetero_pp.program.report.state import RunState
from hetero_pp.run.yaml_file import config_text

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


class TensorBoard:
    def __init__(self, folder: Path, state: RunState) -> None:
        self._folder = folder
        self._state = state
        self._before = list(folder.glob("events.*"))
        """Files of earlier starts of the run."""
        self.log: LastingLog | None = None
        """The open file; None until there is something to write."""

    def write(self, scalar: Scalar) -> None:
        """Write one scalar; `log.failure` shows whether it still waits for the disk."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=scalar.tag, simple_value=scalar.value)])
        self._write(Event(wall_time=scalar.time, step=scalar.step, summary=summary))

    def _write(self, event: Event) -> None:
        """Write an event. The file is created with the first one, so that a failed resume leaves no file.

        TensorBoard's own writer is not used: it writes in a thread, which ends for good when a disk is full for a
        moment.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self.log is None:
            from torch.utils.tensorboard.summary import text

            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
            self.log = LastingLog(self._folder / name)
            config = self._state.spec.with_changes(self._state.changes).latest
            summary = text("configuration", f"```yaml\n{config_text(config)}```")
            for first in (
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                Event(wall_time=event.wall_time, step=0, summary=summary),
            ):
                RecordWriter(self.log).write(first.SerializeToString())
        RecordWriter(self.log).write(event.SerializeToString())

    def go_on(self) -> None:
        """Remove the files of earlier starts, after all reports to keep from them were reported again."""
        for path in self._before:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Flush. Raises OSError if the disk does not take the rest."""
        if self.log is not None:
            self.log.close()
