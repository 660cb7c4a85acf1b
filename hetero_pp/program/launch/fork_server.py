"""The fork server of a launch: it imports PyTorch once for all processes, and blocks the launcher's signals."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext

from hetero_pp.core.sockets import place_sockets_of_multiprocessing

PRELOADED = ["hetero_pp.program.launch.member_process", "torch._dynamo"]
"""Modules imported once for all processes. The first optimizer would import torch._dynamo in each of them."""

UNHEARD = (signal.SIGINT, signal.SIGUSR1)
"""Signals that a terminal or Slurm sends to every process of a run.

The launcher alone acts on them, and ends the others.
"""


def fork_server() -> ForkServerContext:
    """Return a context that forks processes from the fork server. Start them within `unheard`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def unheard() -> Iterator[None]:
    """Block the signals of UNHEARD in processes that the block starts, the fork server among them.

    Otherwise Ctrl-C prints tracebacks of the fork server's imports, and SIGUSR1 ends it. This process gets a blocked
    signal when the block ends.
    """
    place_sockets_of_multiprocessing()
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        resource_tracker.ensure_running()  # this call unblocks SIGINT after it has started its process
        signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def ignore_unheard() -> None:
    """Ignore the signals of UNHEARD from now on, in this process and in those that it starts, such as ranks."""
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)
