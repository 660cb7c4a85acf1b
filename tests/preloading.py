"""The fork server of tests, and the modules that it imports, so that no process of a test imports them again.

All workers of pytest-xdist share one server. Its imports take eight seconds of CPU.
"""

from __future__ import annotations

import ipaddress
import multiprocessing.forkserver
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

from hetero_pp.program.launch import fork_server

OF_COMMANDS = [
    "hetero_pp.program.cli",
    "hetero_pp.program.launch.command",
    "hetero_pp.program.join.command",
    "hetero_pp.program.rehearse",
    "hetero_pp.program.run_log",
    "hetero_pp.research.experiments.command",
    "hetero_pp.research.experiments.training",
    "tensorboard.summary.writer.record_writer",
    "matplotlib.figure",
]
"""Further modules of commands, and those that a launcher imports to record and draw."""
WITHOUT_FLUSHES = "tests.flushing"
"""Module of this folder. A server that is not started in the repository's root does not find it, and its processes are
slower."""
OF_ENGINES = ["replica_groups.engines.titan", "replica_groups.engines.zero"]
"""Modules that import torchtitan and DeepSpeed, which takes each rank of such a replica three seconds.

Both look for a GPU as they are imported. A process that is forked afterwards could use none.
"""


INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with the interface on which ranks listen."""


def preload() -> None:
    """Let the fork server import these modules too, whichever test starts it.

    Its environment names a public interface. Ranks of a launch would listen there, unless the launch overrides it.

    The program's own modules come last, because they leave all imported objects out of garbage collections.
    """
    more = [WITHOUT_FLUSHES, *OF_COMMANDS, *([] if _looks_for_gpus() else OF_ENGINES)]
    fork_server.PRELOADED[:] = [*more, *(name for name in fork_server.PRELOADED if name not in more)]
    if (public := _public_interface()) is not None:
        os.environ[INTERFACE] = public


def start_shared_server() -> tuple[str, int] | None:
    """Start the fork server in the process that controls the workers. Return its address and its process.

    Return None if each worker needs its own server: from Python 3.14 on, a server asks for a key that workers do not
    have.
    """
    if sys.version_info >= (3, 14):
        return None
    preload()
    fork_server.fork_server()
    with fork_server.unheard(), _output_dropped():
        multiprocessing.forkserver.ensure_running()
    server = multiprocessing.forkserver._forkserver
    return server._forkserver_address, server._forkserver_pid  # type: ignore[attr-defined]


def use_shared_server(address: str, process: int) -> None:
    """Let this worker fork its processes from the controller's server.

    The server ends with the controller, which holds its pipe. A worker sends the server another file in its place.
    """
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address, server._forkserver_pid = address, process  # type: ignore[attr-defined]
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # type: ignore[attr-defined]
    server.ensure_running = lambda: None  # type: ignore[method-assign]


def forked_processes() -> list[psutil.Process]:
    """Return all current processes that were forked from the server, by the tests of any worker."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return psutil.Process(server).children(recursive=True)


@contextmanager
def _output_dropped() -> Iterator[None]:
    """Drop the output of processes that the block starts: DeepSpeed warns that it has found no GPU."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        with Path(os.devnull).open("wb") as nothing:
            for descriptor in (1, 2):
                os.dup2(nothing.fileno(), descriptor)
        yield
    finally:
        for descriptor, one in zip((1, 2), kept, strict=True):
            os.dup2(one, descriptor)
            os.close(one)


def _looks_for_gpus() -> bool:
    """Return whether PyTorch is built for GPUs, without the two seconds of its import."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    built = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return any(built.get(kind) for kind in ("cuda", "hip", "xpu"))


def is_loopback(ip: str) -> bool:
    """Return whether only this machine reaches an address."""
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _public_interface() -> str | None:
    """Return an interface that other machines may reach, if there is one."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and not is_loopback(one.address) for one in addresses):
            return interface
    return None
