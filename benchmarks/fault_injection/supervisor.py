"""Launches a run with a supervisor that injects the faults of a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fault_injection.director import Director
from fault_injection.schedule import Schedule
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.store.faults import Faults


class FaultySupervisor(Supervisor):
    """A supervisor that injects the faults of a schedule into the processes that it starts."""

    def __init__(
        self, schedule: Schedule, spec: RunSpec, folder: RunFolder, on_report: Callable[[Report], None], *more: Any
    ) -> None:
        """`more`: the other arguments of `Supervisor`."""
        super().__init__(spec, folder, on_report, *more)
        self._director = Director(schedule, folder, on_report)

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        self._director.close()
        super().__exit__(kind, *more)

    def faults_of(self, member: str) -> Callable[[], Faults]:
        return self._director.faults_of(member)

    def start(self, members: Sequence[str], again: bool = False) -> None:
        super().start(members, again)
        for member in members:
            pid = self._processes[member].pid
            assert pid is not None
            self._director.started(member, pid)

    def on_report(self, report: Report) -> None:
        self._director.on_report(report)
        super().on_report(report)
