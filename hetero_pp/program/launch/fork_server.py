"""The fork server of a launch: imports PyTorch once for all processes, and hears no interrupts."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext

from hetero_pp.sockets import place_sockets_of_multiprocessing

PRELOADED = ["hetero_pp.program.launch.member_process", "torch._dynamo"]
"""Imported once for all processes; the first optimizer that is made imports torch._dynamo."""

UNHEARD = (signal.SIGINT, signal.SIGUSR1)
"""What a terminal, or Slurm, sends to every process of a run. The launcher alone acts on it, and ends the others."""


def fork_server() -> ForkServerContext:
    """Return the context whose processes are forked from the fork server. Start them within `unheard`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextmanager
def unheard() -> Iterator[None]:
    """Block the signals of UNHEARD for processes that are started in the block, the fork server among them.

    Without this Ctrl-C prints tracebacks of the imports in the fork server, and SIGUSR1 ends it. This process gets the
    signal when the block is left.
    """
    place_sockets_of_multiprocessing()
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        resource_tracker.ensure_running()  # which unblocks SIGINT when it has started its process
        signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def ignore_unheard() -> None:
    """Ignore these signals from now on, in this process and in those that it starts, such as ranks."""
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)
