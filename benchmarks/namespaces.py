"""A network of machines inside this one: a namespace each, with one line each to a switch, shaped by the kernel.

Each machine has one interface. So all that it sends passes one token bucket of `tc` (tbf), and all that it receives
passes another one at the switch. If lines have a latency, benchmarks/slow_switch.py is the switch. Needs Linux with
`ip`, `tc`, `unshare` and `nsenter`, and either root or user namespaces. A namespace lives as long as the process that
holds it. This process lives as long as its standard input is open. So nothing is left behind, however the program ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slow_switch import mac

MTU = 1500
"""With `gso_max_segs 1`, packets cross one by one, as on a wire."""
HEADERS = 14 + 20 + 32
"""Bytes of a packet that are not TCP's data: Ethernet, which `tc` counts, IPv4, and TCP with its timestamps."""
BURST = 10_000
"""Bytes that a bucket lets through at once after a pause, which a line would not.

They are more than the kernel needs to keep the rate, and a few percent of a message.
"""
QUEUE = "200ms"
"""Longest wait of a packet for its bucket, as in a home's router. Later packets are dropped, and TCP slows down."""
HOLDER = ["sh", "-c", "echo ready; exec cat"]
CONGESTION_CONTROL = "reno"
"""Congestion control of all machines. BBR would send below the rate of a bucket while it estimates the rate."""


@dataclass(frozen=True)
class Line:
    """Line of a machine to the others: rates in bit/s, and seconds of latency each way."""

    up: float
    down: float
    latency: float = 0.0


@dataclass(frozen=True)
class Counted:
    """Kernel's counts on a machine's line since it was made, headers included."""

    up_bytes: int
    up_packets: int
    down_bytes: int
    down_packets: int


@dataclass(frozen=True)
class Machine:
    """One namespace: its address in the network, and the process that holds it."""

    address: str
    holder: int

    @property
    def inside(self) -> list[str]:
        """Command prefix that enters the namespace."""
        return ["nsenter", f"--target={self.holder}", "--user", "--net", "--preserve-credentials"]

    def call(self, command: str) -> None:
        """Run a command in the namespace. Raises OSError with its error output if it fails."""
        done = subprocess.run([*self.inside, *command.split()], capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"{command}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Network:
    """Machines by name, and the switch between them."""

    machines: Mapping[str, Machine]
    switch: Machine

    def counted(self) -> dict[str, Counted]:
        """Return the counts by machine at the switch's ports: after the upload's bucket, and after the download's."""
        lines = Path(f"/proc/{self.switch.holder}/net/dev").read_text().splitlines()
        ports = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines[2:])}
        return {
            name: Counted(*(int(ports[_port(number)][column]) for column in (0, 1, 8, 9)))
            for number, name in enumerate(self.machines)
        }


@contextmanager
def network(lines: Mapping[str, Line | None], counts_headers: bool) -> Iterator[Network]:
    """Yield a network with a machine for every name, each with its line. Without a line, it is as fast as the kernel.

    With `counts_headers`, a rate is one of packets, as a provider's is. Else it is one of the bytes that TCP carries,
    and acknowledgements are free. Raises OSError with the system's message where such a network is not possible.
    """
    with ExitStack() as stack:
        switch = Machine("", stack.enter_context(_running(["unshare", "--user", "--map-root-user", "--net", *HOLDER])))
        machines: dict[str, Machine] = {}
        for number, (name, line) in enumerate(lines.items()):
            holder = stack.enter_context(_running([*switch.inside, "unshare", "--net", *HOLDER]))
            machines[name] = Machine(f"10.47.0.{number + 1}", holder)
            _connect(machines[name], switch, number, f"mtu {MTU} gso_max_segs 1", f"address {mac(number)}")
            machines[name].call(f"sysctl -qw net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")
            if line is not None:
                _shape(machines[name], "line", line.up, counts_headers)
                _shape(switch, _port(number), line.down, counts_headers)
        latencies = [0.0 if line is None else line.latency for line in lines.values()]
        if any(latencies):
            program = [sys.executable, str(Path(__file__).with_name("slow_switch.py")), *map(str, latencies)]
            stack.enter_context(_running([*switch.inside, *program]))
        else:
            _bridge(switch, len(lines))
        yield Network(machines, switch)


@contextmanager
def apart(names: Sequence[str]) -> Iterator[tuple[Machine, dict[str, Machine]]]:
    """Yield a machine, and others by name that are connected to it alone, as homes are behind routers.

    The others do not reach each other. Each dials the machine in the middle at its `gateway`. Raises OSError with the
    system's message where such a network is not possible.
    """
    with ExitStack() as stack:
        middle = Machine("", stack.enter_context(_running(["unshare", "--user", "--map-root-user", "--net", *HOLDER])))
        middle.call("ip link set lo up")
        middle.call("sysctl -qw net.ipv4.ip_forward=0")
        homes: dict[str, Machine] = {}
        for number, name in enumerate(names):
            holder = stack.enter_context(_running([*middle.inside, "unshare", "--net", *HOLDER]))
            homes[name] = home = Machine(f"10.48.{number}.2", holder)
            _connect(home, middle, number)
            middle.call(f"ip address add {gateway(home)}/24 dev {_port(number)}")
        yield middle, homes


def gateway(home: Machine) -> str:
    """Return the address of the machine in the middle, as seen from a home."""
    return home.address.removesuffix("2") + "1"


def _port(number: int) -> str:
    return f"port{number}"


@contextmanager
def _running(command: Sequence[str]) -> Iterator[int]:
    """Run a process that prints a line when it is ready and ends with its standard input. Yields its process id."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise OSError(process.stderr.read().strip())
        yield process.pid


def _connect(machine: Machine, other: Machine, number: int, wire: str = "", own: str = "") -> None:
    """Connect a machine to a port of another one. `wire`: settings of both ends; `own`: further ones of the machine."""
    other.call(f"ip link add {_port(number)} {wire} type veth peer name line {own} {wire} netns {machine.holder}")
    other.call(f"ip link set {_port(number)} up")
    machine.call("ip link set lo up")
    machine.call("ip link set line up")
    machine.call(f"ip address add {machine.address}/24 dev line")


def _bridge(switch: Machine, ports: int) -> None:
    """Let the kernel forward packets between the ports at once."""
    switch.call("ip link add bridge type bridge")
    switch.call("ip link set bridge up")
    for number in range(ports):
        switch.call(f"ip link set {_port(number)} master bridge")


def _shape(machine: Machine, device: str, rate: float, counts_headers: bool) -> None:
    uncounted = "" if counts_headers else f"stab overhead -{HEADERS} "
    bucket = f"tbf rate {round(rate)}bit burst {BURST} latency {QUEUE}"
    machine.call(f"tc qdisc add dev {device} {uncounted}root {bucket}")
