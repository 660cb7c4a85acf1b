"""A network namespace whose loopback the kernel shapes. It needs root, `ip` and `tc`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

NAMESPACE = f"hetero-pp-links-{os.getpid()}"

Tc = Callable[[str], None]
"""Runs `tc` in the namespace with the given arguments."""


@contextmanager
def namespace(mtu: int) -> Iterator[tuple[list[str], Tc]]:
    """Yield the command prefix that enters the namespace, and its `tc`.

    The loopback sorts packets into classes by filters that the caller adds. The classes are as good as unlimited.
    Packets that match no filter go to 1:999. Raises OSError with the system's message.
    """
    inside = ["ip", "netns", "exec", NAMESPACE]

    def tc(text: str) -> None:
        call([*inside, "tc", *text.split()])

    call(["ip", "netns", "add", NAMESPACE])
    try:
        call([*inside, "ip", "link", "set", "lo", "up", "mtu", str(mtu)])
        tc("qdisc add dev lo root handle 1: htb default 999")
        tc("class add dev lo parent 1: classid 1:999 htb rate 10gbit burst 1m")
        yield inside, tc
    finally:
        call(["ip", "netns", "delete", NAMESPACE])


def call(command: Sequence[str]) -> None:
    """Run a command. Raises OSError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
