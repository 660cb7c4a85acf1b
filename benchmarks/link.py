"""Measure a stage link on loopback: how well it keeps to its shape, and how fast it is without one.

    python benchmarks/link.py --json benchmarks/results/link_<cpu>_<date>.json

The two ends are separate processes. The unshaped link runs without TLS, with TLS, and through the relay of an exchange
(a third process). It is compared with a raw TCP socket, and with a bare gRPC stream of full frames that nobody makes or
reads. All take turns in every round, so that a busy machine slows all of them.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import grpc
import torch
from command_line import origin, parse, parser_of, save
from processes import cpu_seconds, serving

from hetero_pp.config.lines import EXCHANGE, LinkShape, LinkSpec
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import LinkClosed
from hetero_pp.link.protocol import FRAME_BYTES, LinkEnd, Message
from hetero_pp.messages.messages_pb2 import FLUSH, LinkHeader
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import Callers
from hetero_pp.rpc.channels import make_server
from hetero_pp.rpc.identities import Secret
from hetero_pp.rpc.link_end import LinkSide
from hetero_pp.rpc.memory import keep_freed_memory
from hetero_pp.rpc.relay import (
    MOST_CARRIED,
    LinkLimit,
    LocalAddress,
    MeetingPoint,
    Relay,
    RelayedDialler,
    RelayedListener,
    TrainedRound,
)
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import service_handler
from hetero_pp.rpc.stage_link import StageLink

HOST = "127.0.0.1"
SECRET = Secret("of this benchmark only")
SECONDS = 60.0
SIZES = [64, 512, 4 << 10, 32 << 10]
RATES = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9}
SMOKE = {"rates": ["1 Gbit/s"], "seconds": 0.1, "repeats": 3, "rounds": 1, "sizes": [64, 4 << 10], "megabytes": 1}
STREAM_METHOD = "/hetero_pp.Benchmark/Stream"
LAST = b"the last frame"
UNLIMITED = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
]

COMPARED = ("link", "tls", "relayed", "stream")
Transfer = Callable[[int, int], float]
"""Takes (message bytes, messages). Returns the seconds until the other end has received all messages."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES), help="rates of shaped transfers")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a shaped transfer")
    parser.add_argument("--repeats", type=int, default=50, help="messages whose latency is measured")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the unshaped comparison")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="sizes of unshaped messages, in KiB")
    parser.add_argument("--megabytes", type=int, default=128, help="size of an unshaped measurement, in MiB")
    arguments = parse(parser, SMOKE)
    keep_freed_memory()  # as every member of a run does
    sizes, total = [kib << 10 for kib in arguments.sizes], arguments.megabytes << 20
    result = origin() | {
        "grpc": grpc.__version__,
        "shaped": [measure_rate(name, RATES[name], arguments.seconds) for name in arguments.rates],
        "latency": measure_latency(0.020, arguments.repeats),
        "unshaped": measure_unshaped(sizes, arguments.rounds, total),
    }
    print_tables(result)
    save(result, arguments.json)


# ---- the shape ----------------------------------------------------------------------------------------------


def measure_rate(name: str, rate: float, seconds: float) -> dict[str, Any]:
    """Return the bits on the wire per second of one long transfer, divided by the configured rate."""
    size = min(4 << 20, int(rate * seconds / 8 / 10))
    count = round(rate * seconds / 8 / size)
    with serving(serve_link, shape := LinkShape(bandwidth=rate)) as port, open_link(port, shape) as end:
        taken = send_all(end, size, count)
        wire = end.ledger.of_round(0).wire_bytes
    return {
        "rate": name,
        "seconds": taken,
        "wire_bytes": wire,
        "measured_over_configured": wire * 8 / taken / rate,
    }


def measure_latency(latency: float, repeats: int) -> dict[str, float]:
    """Return the median seconds from sending a small message to its answer, over an unlimited way back."""
    result = {"configured": latency}
    for name, shape in {"with": LinkShape(latency=latency), "without": LinkShape()}.items():
        with serving(serve_link, shape) as port, open_link(port, shape) as end:
            result[name] = statistics.median(send_all(end, 64, 1) for _ in range(repeats))
    return result


# ---- the speed ----------------------------------------------------------------------------------------------


def measure_unshaped(sizes: Sequence[int], rounds: int, total: int) -> list[dict[str, Any]]:
    """Return the median GB/s of each way at each size, and its ratio to the TCP socket."""
    with all_ways() as ways:
        seen: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in sizes}
        spent: dict[tuple[str, int], list[float]] = {key: [] for key in seen}
        for round_ in range(rounds + 1):
            for size in sizes:
                count = max(2, total // size)
                for way, transfer in ways.items():
                    before = cpu_seconds()  # of all ways, but only the ends of this one use CPU
                    gigabytes = size * count / 1e9
                    rate = gigabytes / transfer(size, count)
                    if round_ > 0:  # the first round is a warm-up
                        seen[way, size].append(rate)
                        spent[way, size].append((cpu_seconds() - before) / gigabytes)
    rows = []
    for size in sizes:
        medians = {way: statistics.median(seen[way, size]) for way in ways}
        ratios = {f"{way}_over_tcp": medians[way] / medians["tcp"] for way in COMPARED}
        ratios["link_over_stream"] = medians["link"] / medians["stream"]
        ratios["tls_over_link"] = medians["tls"] / medians["link"]
        ratios["relayed_over_tls"] = medians["relayed"] / medians["tls"]
        cpu = {way: statistics.median(spent[way, size]) for way in ways}
        found = {way: seen[way, size] for way in ways}
        rows.append({"message_bytes": size, **medians, **ratios, "cpu_seconds_a_gigabyte": cpu, "all": found})
    return rows


@contextmanager
def all_ways() -> Iterator[dict[str, Transfer]]:
    """Yield transfers of each way."""
    with ExitStack() as stack:
        yield {
            "tcp": stack.enter_context(tcp_transfer()),
            "link": stack.enter_context(link_transfer()),
            "tls": stack.enter_context(link_transfer(encrypted=True)),
            "relayed": stack.enter_context(relayed_transfer()),
            "stream": stack.enter_context(stream_transfer()),
        }


@contextmanager
def tcp_transfer() -> Iterator[Transfer]:
    """Yield a transfer by sendall and recv_into, with one byte back at the end."""
    with serving(serve_tcp) as port, socket.create_connection((HOST, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def transfer(size: int, count: int) -> float:
            data = memoryview(bytearray(size))
            connection.sendall(size.to_bytes(8, "little") + count.to_bytes(8, "little"))
            start = time.perf_counter()
            for _ in range(count):
                connection.sendall(data)
            connection.recv(1)
            return time.perf_counter() - start

        yield transfer


@contextmanager
def link_transfer(encrypted: bool = False) -> Iterator[Transfer]:
    """Yield a transfer over a stage link, from tensors to tensors."""
    shape = LinkShape()
    with serving(serve_link, shape, encrypted) as port, open_link(port, shape, encrypted) as end:
        yield lambda size, count: send_all(end, size, count)


@contextmanager
def relayed_transfer() -> Iterator[Transfer]:
    """Yield a transfer over a stage link with TLS. Its ends dial a relay, and not each other."""
    shape = LinkShape()
    with serving(serve_relay) as relay, serving(serve_link, shape, True, relay):
        own = SECRET.credentials("home.0", encrypted=True)
        dialler = RelayedDialler(f"{HOST}:{relay}", own, spec_of(shape).name)
        with closing(dialler), open_link(dialler.address, shape, encrypted=True) as end:
            yield lambda size, count: send_all(end, size, count)


@contextmanager
def stream_transfer() -> Iterator[Transfer]:
    """Yield a transfer over a bare gRPC stream, of the frames that a link would send: full ones, if messages fit."""
    frames: SimpleQueue[bytes | None] = SimpleQueue()
    with serving(serve_stream) as port, grpc.insecure_channel(f"{HOST}:{port}", options=UNLIMITED) as channel:
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STREAM_METHOD)
        answers = call(iter(frames.get, None))

        full = bytes(FRAME_BYTES)

        def transfer(size: int, count: int) -> float:
            number, rest = divmod(size * count, FRAME_BYTES)
            start = time.perf_counter()
            for _ in range(number):
                frames.put(full)
            frames.put(full[:rest] + LAST)
            next(answers)
            return time.perf_counter() - start

        yield transfer
        frames.put(None)


def send_all(end: LinkEnd, size: int, count: int) -> float:
    """Send messages of one tensor, wait for the answer to the last one, and return the seconds."""
    message = Message(LinkHeader(), (torch.zeros(size, dtype=torch.uint8),))
    last = Message(LinkHeader(purpose=FLUSH), message.tensors)
    start = time.perf_counter()
    for _ in range(count - 1):
        end.send(message)
    end.send(last)
    end.receive(SECONDS)
    return time.perf_counter() - start


# ---- the other process --------------------------------------------------------------------------------------


def spec_of(shape: LinkShape) -> LinkSpec:
    return LinkSpec("home.0-1", "home.0", "home.1", shape, LinkShape())


@contextmanager
def open_link(at: int | str, shape: LinkShape, encrypted: bool = False) -> Iterator[LinkEnd]:
    """Open a link to a port or to an address."""
    spec = spec_of(shape)
    own = SECRET.credentials("home.0", [spec], encrypted).of_link(spec.name)
    address = f"{HOST}:{at}" if isinstance(at, int) else at
    end = StageLink(LinkSide(spec, own, "home.0", seed=0)).dial(address, 0, SECONDS)
    yield end
    end.close()


def serve_link(control: Connection, shape: LinkShape, encrypted: bool = False, relay: int | None = None) -> None:
    """Receive and recycle messages, and answer the last one.

    With a relay's port, the relay is the only way to the link.
    """
    keep_freed_memory()
    spec = spec_of(shape)
    own = SECRET.credentials("home.1", [spec], encrypted).of_link(spec.name)
    links = StageLink(LinkSide(spec, own, "home.1", seed=0), expected=None)
    if relay is None:
        control.send(links.listen(f"{HOST}:0"))
    else:
        local = str(LocalAddress())
        control.send(links.listen(local))
        RelayedListener(f"{HOST}:{relay}", SECRET.credentials("home.1", encrypted=True), spec.name, local)
    end = links.accept(SECONDS)
    try:
        while True:
            message = end.receive(SECONDS)
            if message.header.purpose == FLUSH:
                end.send(Message(LinkHeader()))
            end.recycle(message)
    except LinkClosed:
        end.close()
    links.close(grace=0)


class OpenAuthenticator:
    """Admits callers with a certificate of the run to the relay."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def admit(self, call: str, context: grpc.ServicerContext) -> str:
        """Return the caller's name."""
        return self._callers.let_in(context).name

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """Ignore the refusal."""

    def request_bytes_max(self, call: str) -> int:
        return FRAME_BYTES

    def blame(self, context: grpc.ServicerContext, reason: str) -> None:
        """Ignore the request."""


def serve_relay(control: Connection) -> None:
    """Carry the link, as the process of an exchange does, until the parent is done."""
    keep_freed_memory()
    ends = {("home.0-1", "forward"): "home.0", ("home.0-1", "backward"): "home.1"}
    roster = Roster({"home.0": "home", "home.1": "home"}, {}, counts=ends)
    callers = Callers(SECRET, roster, encrypted=True)
    authenticator = OpenAuthenticator(callers)
    meeting_point = MeetingPoint(f"{HOST}:0")
    limits = {key: LinkLimit(step_bytes=1.0, bits_a_second=1e12) for key in ends}
    relay = Relay(callers, ends, authenticator, meeting_point, limits, lambda link: TrainedRound(1, 1, steps=1e15))
    handler = service_handler(RELAY, relay, authenticator, MOST_CARRIED)
    server, port = make_server(f"{HOST}:0", [handler], 2 * MOST_CARRIED, SECRET.authority.identity(EXCHANGE))
    control.send(port)
    with suppress(EOFError):
        control.recv()
    server.stop(grace=0).wait()
    meeting_point.close()


def serve_tcp(control: Connection) -> None:
    """Receive messages into one buffer, and answer the last one."""
    keep_freed_memory()
    with socket.create_server((HOST, 0)) as listener:
        control.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while header := connection.recv(16, socket.MSG_WAITALL):
            size, count = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
            buffer = memoryview(bytearray(size))
            for _ in range(count):
                rest = buffer
                while len(rest):
                    rest = rest[connection.recv_into(rest) :]
            connection.sendall(b"!")


def serve_stream(control: Connection) -> None:
    """Receive messages and drop them, until the parent is done."""
    keep_freed_memory()

    def answer(frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        return (b"!" for frame in frames if frame.endswith(LAST))

    service, name = STREAM_METHOD.strip("/").split("/")
    handler = grpc.method_handlers_generic_handler(service, {name: grpc.stream_stream_rpc_method_handler(answer)})
    server = grpc.server(ThreadPoolExecutor(2), [handler], options=UNLIMITED)
    control.send(server.add_insecure_port(f"{HOST}:0"))
    server.start()
    with suppress(EOFError):
        control.recv()
    server.stop(grace=0).wait()


def print_tables(result: dict[str, Any]) -> None:
    print("shaped                    seconds   measured / configured")
    for row in result["shaped"]:
        print(f"{row['rate']:<24} {row['seconds']:8.2f} {row['measured_over_configured']:14.4f}")
    latency = {name: f"{1e3 * value:.2f} ms" for name, value in result["latency"].items()}
    print(f"\nthere and back at latency {latency['configured']}: {latency['with']}, without: {latency['without']}")
    ratios = "".join(f" {name:>9} (ratio)" for name in COMPARED)
    print(f"\nmessage        TCP GB/s{ratios}   CPU s a GB: link    TLS relayed")
    for row in result["unshaped"]:
        ways = "".join(f" {row[way]:9.2f} ({row[f'{way}_over_tcp']:.2f})" for way in COMPARED)
        cpu = "".join(f" {row['cpu_seconds_a_gigabyte'][way]:7.2f}" for way in ("link", "tls", "relayed"))
        print(f"{row['message_bytes'] >> 10:>6} KiB {row['tcp']:12.2f}{ways} {cpu:>35}")


if __name__ == "__main__":
    main()
