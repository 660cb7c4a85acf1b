"""The fork server of a launch: it imports PyTorch once for all processes, and blocks the launcher's signals.

It imports while the launcher reads its command line and imports. Otherwise its two seconds would follow those.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

from hetero_pp.core.files import print_without_fail
from hetero_pp.core.shipped import is_config
from hetero_pp.core.sockets import place_sockets_of_multiprocessing
from hetero_pp.program.report.encoding import make_printable
from hetero_pp.rpc.memory import keep_freed_memory

PRELOADED = ["hetero_pp.program.launch.preloaded"]  # modules imported once for all processes

ALONE = frozenset({"--in-process", "--print-commands", "--help"})
"""Options of `launch` with which it starts no other process."""

SAFE_PATH = "PYTHONSAFEPATH"  # environment variable with the meaning of `python -P`

UNHEARD = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a terminal or Slurm sends to every process of a run.

The launcher alone acts on them, and ends the others.
"""


def fork_server() -> ForkServerContext:
    """Return a context that forks processes from the fork server. Start them within `unheard`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_fork_server() -> None:
    """Start the fork server, so that it has imported by the time at which its first process is needed."""
    fork_server()
    with unheard():
        multiprocessing.forkserver.ensure_running()


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while the block imports, nor later among what it imported: a quarter of a second each time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def begin_imports(arguments: Sequence[str]) -> None:
    """Start the fork server of `launch` with these arguments, before the command line is read and torch is imported.

    Nothing starts for arguments that need no server, or in a process that has imported torch already and is about to
    start it. The server is ended with this process. Otherwise it would import to the end after an error in the
    configuration, and keep the program's output open.
    """
    starts = any(map(is_config, arguments)) and ALONE.isdisjoint(arguments)
    if not starts or "torch" in sys.modules:
        return
    start_fork_server()
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]

    def end() -> None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGTERM)

    atexit.register(end)


@contextmanager
def unheard() -> Iterator[None]:
    """Block the signals of UNHEARD in processes that the block starts, the fork server among them.

    Otherwise Ctrl-C prints tracebacks of the fork server's imports, and SIGUSR1 and SIGHUP end it. This process gets a
    blocked signal when the block ends. The processes import nothing from the working folder.
    """
    place_sockets_of_multiprocessing()
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
    try:
        with safe_path():
            resource_tracker.ensure_running()  # this call unblocks SIGINT after it has started its process
            signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep the working folder off the module path of processes that the block starts, and of those below them.

    multiprocessing starts the fork server and the resource tracker with `python -c`, which would import a file of that
    folder in place of a module of the same name. The variable does not stay, because other programs of a notebook may
    import from their folder.
    """
    kept = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if kept is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = kept


def begin_forked(output: Path, goes_on: bool, open_files: tuple[int, int] | None = None) -> None:
    """Set up a forked process: signals, memory, and a file for its output. `goes_on`: the file is not emptied.

    It is in a session of its own, so that Ctrl-C reaches the launcher only, which then ends this process. `open_files`:
    the launcher's limits of open files, which it may have raised after the fork server had started.
    """
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)
    os.setsid()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        emptied = 0 if goes_on else os.O_TRUNC
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | emptied, 0o666)  # ranks share one file
    except OSError:  # output that the disk does not take is dropped
        descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    print_without_fail()
    make_printable()
    keep_freed_memory()


def share_fork_server() -> None:
    """Let this forked process fork others from the same server. By default it would start another one.

    From Python 3.14 on it does, because the server asks for a key that forked processes do not have.
    """
    place_sockets_of_multiprocessing()
    fork_server()
    if sys.version_info < (3, 14):
        server = multiprocessing.forkserver._forkserver
        server.ensure_running = lambda: None  # type: ignore[method-assign]
