"""A switch with latency: each packet leaves later, by the latencies of the two machines' lines.

    python benchmarks/slow_switch.py SECONDS ...

SECONDS has a number for each port `port0`, `port1`, ... of this network namespace. The switch is a process because tc's
netem is a module that not every kernel has. Machines have the addresses `mac(0)`, `mac(1)`, and so on. A packet to any
other address, such as a broadcast, leaves by all other ports. The switch prints a line when it is ready, and ends with
its standard input.
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
"""Constants of AF_PACKET for which Python has no names."""
OFFLOADS = 10
"""Bytes before a packet that say what is still missing in its checksum. They are forwarded unchanged."""
LONGEST = 1 << 16
BUFFER = 16 << 20
"""Bytes that may wait at a port in each direction, if the kernel allows as many."""


def mac(number: int) -> str:
    """Return the Ethernet address of the machine at a port."""
    return f"02:00:00:00:00:{number:02x}"


def open_port(number: int) -> socket.socket:
    """Open a socket that receives and sends by a port. Raises OSError."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    for option in (PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING):
        opened.setsockopt(SOL_PACKET, option, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        opened.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    opened.bind((f"port{number}", ALL_PROTOCOLS))
    opened.setblocking(False)
    return opened


def targets(packet: bytes, source: int, ports: int) -> Sequence[int]:
    """Return the ports by which a packet leaves."""
    target = packet[OFFLOADS : OFFLOADS + 6]
    number = target[-1]
    if target == bytes.fromhex(mac(number).replace(":", "")) and number < ports:
        return [number]
    return [port for port in range(ports) if port != source]


def arrived(port: socket.socket) -> Iterator[bytes]:
    """Yield the packets that wait at a port."""
    with suppress(BlockingIOError):
        while True:
            yield port.recv(LONGEST)


def switch(delays: Sequence[float]) -> None:
    """Forward packets until the standard input ends. Packets for which a queue has no room are dropped."""
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
    parser.add_argument("seconds", nargs="+", type=float, help="latency of each port's line, one way")
    switch(parser.parse_args().seconds)
