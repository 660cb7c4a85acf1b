"""Modules that the fork server of tests imports, so that no process of a test imports them again."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil
import torch

from hetero_pp.program.launch import fork_server

OF_COMMANDS = [
    "hetero_pp.program.cli",
    "hetero_pp.program.launch.command",
    "hetero_pp.program.join.command",
    "hetero_pp.program.rehearse.command",
    "hetero_pp.program.replay",
    "hetero_pp.research.experiments.command",
    "hetero_pp.research.experiments.jobs",
    "tensorboard.summary.writer.record_writer",
    "matplotlib.figure",
]
"""Further modules of commands, and those that a launcher imports to record and draw."""
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
    more = OF_COMMANDS if torch.backends.cuda.is_built() else [*OF_COMMANDS, *OF_ENGINES]
    fork_server.PRELOADED[:] = [*more, *(name for name in fork_server.PRELOADED if name not in more)]
    if (public := _public_interface()) is not None:
        os.environ[INTERFACE] = public


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
