"""A network of machines inside this one: a namespace each, one line each to a switch, shaped by the kernel.

Every machine has one interface, and so all that it sends passes one token bucket of `tc` (tbf) of its own, and all that
it receives another one at the switch. Where lines have a latency, benchmarks/slow_switch.py is that switch. Needs
Linux with `ip`, `tc`, `unshare` and `nsenter`, and either root or user namespaces. A namespace lives as long as the
process that holds it, and that one as long as its standard input is open: nothing is left behind, however this program
ends.
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
HEADERS = 14 + 20 + 32
"""Bytes of a packet that TCP's data are not: Ethernet, which `tc` counts, IPv4, TCP with its timestamps."""
BURST = 10_000
"""Bytes that a bucket lets through at once after a pause, which a line would not: more than the kernel needs to keep
the rate, and a few percent of a message."""
QUEUE = "200ms"
"""How long a packet may wait for its bucket, as in a home's router; then it is dropped, and TCP slows down."""
HOLDER = ["sh", "-c", "echo ready; exec cat"]
CONGESTION_CONTROL = "reno"
"""BBR sends below the rate of a bucket while it looks for it."""


@dataclass(frozen=True)
class Line:
    """What joins a machine to the others: bit/s, and seconds that a packet takes longer either way."""

    up: float
    down: float
    latency: float = 0.0


@dataclass(frozen=True)
class Counted:
    """What the kernel has counted on a machine's line since it was made, headers included."""

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
        """What to put before a command that is to run there."""
        return ["nsenter", f"--target={self.holder}", "--user", "--net", "--preserve-credentials"]

    def call(self, command: str) -> None:
        """Run a command there. Raises OSError with what it said if it fails."""
        done = subprocess.run([*self.inside, *command.split()], capture_output=True, text=True)
        if done.returncode != 0:
            raise OSError(f"{command}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Network:
    """Machines by name, and the switch between them."""

    machines: Mapping[str, Machine]
    switch: Machine

    def counted(self) -> dict[str, Counted]:
        """By machine, as the switch's ports see it: behind the bucket of what goes up, and that of what comes down."""
        lines = Path(f"/proc/{self.switch.holder}/net/dev").read_text().splitlines()
        ports = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines[2:])}
        return {
            name: Counted(*(int(ports[_port(number)][column]) for column in (0, 1, 8, 9)))
            for number, name in enumerate(self.machines)
        }


@contextmanager
def network(lines: Mapping[str, Line | None], counts_headers: bool) -> Iterator[Network]:
    """A machine for every name, with its line; None is as fast as the kernel.

    A rate is one of packets, as a provider's is, with `counts_headers`; else of the bytes that TCP carries in them, and
    acknowledgements pass for nothing. Raises OSError, with what the system says, where such a network cannot be had.
    """
    with ExitStack() as stack:
        switch = Machine("", stack.enter_context(_running(["unshare", "--user", "--map-root-user", "--net", *HOLDER])))
        machines: dict[str, Machine] = {}
        for number, (name, line) in enumerate(lines.items()):
            holder = stack.enter_context(_running([*switch.inside, "unshare", "--net", *HOLDER]))
            machines[name] = Machine(f"10.47.0.{number + 1}", holder)
            _join(machines[name], switch, number)
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
    """A machine, and others by name that each have a cable to it and to nothing else: behind routers, as homes are.

    None of them reaches another one. Each dials the machine in the middle at its `gateway`. Raises OSError, with what
    the system says, where such a network cannot be had.
    """
    with ExitStack() as stack:
        middle = Machine("", stack.enter_context(_running(["unshare", "--user", "--map-root-user", "--net", *HOLDER])))
        middle.call("ip link set lo up")
        middle.call("sysctl -qw net.ipv4.ip_forward=0")
        homes: dict[str, Machine] = {}
        for number, name in enumerate(names):
            holder = stack.enter_context(_running([*middle.inside, "unshare", "--net", *HOLDER]))
            homes[name] = home = Machine(f"10.48.{number}.2", holder)
            middle.call(f"ip link add {_port(number)} type veth peer name line netns {holder}")
            middle.call(f"ip address add {gateway(home)}/24 dev {_port(number)}")
            middle.call(f"ip link set {_port(number)} up")
            home.call("ip link set lo up")
            home.call(f"ip address add {home.address}/24 dev line")
            home.call("ip link set line up")
        yield middle, homes


def gateway(home: Machine) -> str:
    """The address of the machine in the middle, for one that is apart."""
    return home.address.removesuffix("2") + "1"


def _port(number: int) -> str:
    return f"port{number}"


@contextmanager
def _running(command: Sequence[str]) -> Iterator[int]:
    """A process that says a line when it is ready, and ends when its standard input does: its number."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise OSError(process.stderr.read().strip())
        yield process.pid


def _join(machine: Machine, switch: Machine, number: int) -> None:
    """A cable between a machine and a port of the switch. Packets cross one by one, as they would on a wire."""
    wire, port = f"mtu {MTU} gso_max_segs 1", _port(number)
    peer = f"line address {mac(number)} {wire} netns {machine.holder}"
    switch.call(f"ip link add {port} {wire} type veth peer name {peer}")
    switch.call(f"ip link set {port} up")
    machine.call("ip link set lo up")
    machine.call("ip link set line up")
    machine.call(f"ip address add {machine.address}/24 dev line")
    machine.call(f"sysctl -qw net.ipv4.tcp_congestion_control={CONGESTION_CONTROL}")


def _bridge(switch: Machine, ports: int) -> None:
    """Let the kernel give packets on between the ports, at once."""
    switch.call("ip link add bridge type bridge")
    switch.call("ip link set bridge up")
    for number in range(ports):
        switch.call(f"ip link set {_port(number)} master bridge")


def _shape(machine: Machine, device: str, rate: float, counts_headers: bool) -> None:
    uncounted = "" if counts_headers else f"stab overhead -{HEADERS} "
    bucket = f"tbf rate {round(rate)}bit burst {BURST} latency {QUEUE}"
    machine.call(f"tc qdisc add dev {device} {uncounted}root {bucket}")
