"""Processes that benchmarks measure, and those that they run beside themselves."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from hetero_pp.program.launch.fork_server import safe_path

SECONDS_TO_END = 60.0


def status_bytes(key: str, pid: int | str = "self") -> int:
    """Return a size of /proc/PID/status in bytes: `VmRSS`, or its peak `VmHWM`. Raises OSError if it has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    size = next((line.split()[1] for line in lines if line.startswith(f"{key}:")), None)
    if size is None:  # a zombie has no memory
        raise ProcessLookupError(f"process {pid} has ended")
    return 1024 * int(size)


def reset_peak() -> int:
    """Set this process's peak of memory to what it holds, and return that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def cpu_seconds(pid: int | None = None) -> float:
    """Return user and system time of a process, by default this one, and of all processes below it."""
    top = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:2]) for one in (top, *top.children(recursive=True)))


def when_idle(device: torch.device) -> float:
    """Wait until all work on the device is done. Return the wall clock in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def writers_to(logs: Path) -> Iterator[tuple[int, str]]:
    """Yield (process id, member) of the processes of a run, which write their errors to files of this folder.

    Not only children are found, because a launch may use a fork server.
    """
    folder = logs.resolve()
    for pid in psutil.pids():
        try:
            said = Path(f"/proc/{pid}/fd/2").resolve()
        except OSError:
            continue
        if said.parent == folder:
            yield pid, said.stem


@contextmanager
def serving(serve: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """Run `serve(pipe, *arguments)` in another process while the block runs. Yields what it sends first.

    The pipe closes at the end of the block, which ends a wait of the other process for more.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hetero_pp.rpc.stage_link"])  # imports torch and grpc, once for all processes
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, *arguments), daemon=True)
    with safe_path():
        process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        here.close()
        process.join(SECONDS_TO_END)
        process.kill()


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work(is_over)` in a thread until the block ends, which sets `is_over`."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
