"""The launcher names this function for its processes. It imports nothing of what they need: the fork server has it."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from hetero_pp.program.launch.job import ProcessJob
from hetero_pp.store.faults import Faults


def start_job(launcher: Connection, job: ProcessJob, make_faults: Callable[[], Faults]) -> NoReturn:
    """Run one member of the run until it is over, then end the process."""
    from hetero_pp.program.launch.member_process import process_main

    process_main(launcher, job, make_faults)
