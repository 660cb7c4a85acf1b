"""A network namespace whose loopback the kernel shapes: needs root, `ip` and `tc`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

NAMESPACE = f"hetero-pp-links-{os.getpid()}"

Tc = Callable[[str], None]
"""`tc` in the namespace, by its arguments."""


@contextmanager
def namespace(mtu: int) -> Iterator[tuple[list[str], Tc]]:
    """What to put before a command to run it in there, and its `tc`. Raises OSError, with what the system says.

    Its loopback sorts packets, by filters that the caller adds, into classes that are as good as unlimited; what no
    filter wants goes to 1:999.
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
    """Run a command. Raises OSError, with what it says, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
