"""A switch whose cables are long: every packet comes out later, by what its two machines' lines take.

    python benchmarks/slow_switch.py SECONDS ...

A number for every port, `port0`, `port1`, ..., of this network namespace. It is a process because tc's netem is a
module that not every kernel has. Machines have the addresses `mac(0)`, `mac(1)`, ...; whatever goes to another one, as
a broadcast does, goes to all. Prints a line when it is ready, and ends with its standard input.
"""

from __future__ import annotations

import argparse
import heapq
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count

ALL_PROTOCOLS = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Of AF_PACKET; Python has no names for them."""
OFFLOADS = 10
"""Bytes before a packet, which say what of its checksum is left to do; given on as they came."""
LONGEST = 1 << 16
BUFFER = 16 << 20
"""Bytes that may wait at a port each way, if the kernel allows so many."""


def mac(number: int) -> str:
    """The Ethernet address of the machine at a port."""
    return f"02:00:00:00:00:{number:02x}"


def open_port(number: int) -> socket.socket:
    """Everything that comes in by a port; what is sent goes out by it. Raises OSError."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        opened.setsockopt(SOL_PACKET, option, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        opened.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    opened.bind((f"port{number}", ALL_PROTOCOLS))
    opened.setblocking(False)
    return opened


def targets(packet: bytes, source: int, ports: int) -> Sequence[int]:
    """The ports by which a packet leaves."""
    target = packet[OFFLOADS : OFFLOADS + 6]
    number = target[-1]
    if target == bytes.fromhex(mac(number).replace(":", "")) and number < ports:
        return [number]
    return [port for port in range(ports) if port != source]


def arrived(port: socket.socket) -> Iterator[bytes]:
    """Packets that wait at a port."""
    with suppress(BlockingIOError):
        while True:
            yield port.recv(LONGEST)


def switch(delays: Sequence[float]) -> None:
    """Until the standard input ends. Packets that a queue has no room for are lost."""
    ports = [open_port(number) for number in range(len(delays))]
    print("ready", flush=True)
    order = count()
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select([sys.stdin, *ports], [], [], pause)[0]
        if sys.stdin in readable:
            return
        now = time.monotonic()
        for source in (number for number, port in enumerate(ports) if port in readable):
            for packet in arrived(ports[source]):
                for target in targets(packet, source, len(ports)):
                    heapq.heappush(waiting, (now + delays[source] + delays[target], next(order), target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            with suppress(OSError):
                ports[target].send(packet)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", nargs="+", type=float, help="of each port's line, one way")
    switch(parser.parse_args().seconds)
