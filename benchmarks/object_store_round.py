"""Measure an outer round through an object store, and one through the exchange.

    python benchmarks/object_store_round.py [--json FILE] [--replicas 2 4 8]

SparseLoCo (appendix C) exchanges contributions through an object store: each replica uploads its own and downloads
those of all others. Here the store is SeaweedFS and the exchange a process beside it, both on this machine, and the
members are threads of a third. URLs, records and checks are those of a run. Compression, the outer step and TLS are
not timed.

- upload: from the beginning until a replica's last blob is accepted; through a store, until it is read and checked
- record: from there until the replica has the round's record
- download: from there until it has the contributions of all others

Before the first round each replica reads the first run checkpoint, and ten joiners read it in the end. The line of the
exchange carries `start, MB` for the replicas, `round, MB` for a round, and `joiners` for the ten. A forwarder before it
counts these bytes.

Seconds are the median over rounds of the slowest replica's, on loopback without a limit. `lines` is what the bytes take
at the paper's 110 Mbit/s up and 500 Mbit/s down, by division; add it for links of that rate.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import origin, parse, parser_of, save
from object_service import KEY, SECRET, object_service
from processes import serving

from hetero_pp.config.checkpoint import initial_checkpoint
from hetero_pp.config.spec import Roster
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.model.transformer import ModelShape, shapes_by_block
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection, select
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Secret
from hetero_pp.store.opening import open_store
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.server import serve_exchange
from replica_groups.rounds.rules import Rules, Window

RUN = "round"
RUN_SECRET = Secret("of this benchmark")
ROUNDS = 4
"""Rounds of a measurement. The first is left out, as connections open in it."""
UP, DOWN = 110e6, 500e6
"""Bits per second: the most that SparseLoCo's appendix C saw of its test node with a 70B model."""
PUBLISHED = [
    {"what": "8B, 20 replicas: communication of a round", "seconds": 12.0},
    {"what": "70B, 20 replicas: communication of a round", "seconds": 70.0},
]
"""SparseLoCo, appendix C."""
METHODS: dict[str, dict[str, Any]] = {
    "SparseLoCo, 1/128, 2 bits": {"method": "sparseloco"},
    "DiLoCo, dense, 8 bits": {"method": "diloco", "compression": {"value_bits": 8}},
}
MODELS = {
    "small": ModelShape(width=256, layers=8, heads=4, feed_forward=704, vocabulary=4096),
    "smoke": ModelShape(width=16, layers=1, heads=2, feed_forward=24, vocabulary=40),
}
PHASES = ("upload", "record", "download")
JOINERS = 10
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

Sent = Mapping[str, Sequence[tuple[str, tuple[int, ...], Selection]]]
"""Name, shape and selected values of a replica's parameters, by block."""


@dataclass(frozen=True)
class Setup:
    """One measurement; `store` is the URL of the run log, a folder or a bucket."""

    model: str
    method: str
    replicas: int
    store: str

    @property
    def settings(self) -> OuterSettings:
        return OuterSettings.model_validate({"rounds": ROUNDS + 1, **METHODS[self.method]})

    @property
    def names(self) -> list[str]:
        return [f"r{number}" for number in range(self.replicas)]


def contributions(setup: Setup) -> Sent:
    """Return one replica's selected values, by block, of normally distributed differences."""
    generator, settings = torch.Generator().manual_seed(1), setup.settings.compression
    shapes = {
        name: tuple(one.shape) for name, one in initial_checkpoint(MODELS[setup.model], None, 1).parameters.items()
    }
    return {
        block: [
            (name, shape, select(torch.zeros(shape), 0.01 * torch.randn(shape, generator=generator), settings))
            for name, shape in parts.items()
        ]
        for block, parts in shapes_by_block(shapes).items()
    }


def serve(told: Connection, setup: Setup) -> None:
    """Serve an exchange that waits for all, in this process, until the parent is done."""
    torch.set_num_threads(1)
    os.environ |= CREDENTIALS  # a fork server that ran before has no environment of this process
    checkpoint = initial_checkpoint(MODELS[setup.model], None, 1)
    blocks = shapes_by_block({name: tuple(one.shape) for name, one in checkpoint.parameters.items()})
    roster = Roster({name: name for name in setup.names}, dict.fromkeys(setup.names, frozenset(blocks)))
    waits = Window(1.0, math.inf, math.inf)
    rules = Rules(roster.members, roster.blocks, grace=waits, limit=math.inf, lease=waits, hang=waits)
    log = ContributionLog(open_store(setup.store))
    log.write_checkpoint(checkpoint)  # as a run does before it begins
    exchange = Exchange(RUN, roster, checkpoint, setup.settings, log, rules=rules)
    server, port = serve_exchange(exchange, RUN_SECRET, "127.0.0.1:0")
    told.send(port)
    with suppress(EOFError):
        told.recv()
    server.stop(None).wait()


@contextmanager
def forwarding(port: int) -> Iterator[tuple[int, Callable[[], int]]]:
    """Forward connections to a port of this machine. Yield a port, and a function that returns the bytes so far."""
    carried = [0]

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                carried[0] += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with suppress(OSError):  # it is closed at the end
            while True:
                ends = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                for both in (ends, ends[::-1]):
                    threading.Thread(target=copy, args=both, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], lambda: carried[0]


def measure(setup: Setup, allowed: Sequence[str]) -> dict[str, Any]:
    """Run the rounds; return seconds and bytes. `allowed`: stores that signed URLs may lead to; none: no URLs."""
    sent = contributions(setup)
    names = list(initial_checkpoint(MODELS[setup.model], None, 1).tensors())
    with (
        serving(serve, setup) as port,
        forwarding(port) as (front, carried),
        ThreadPoolExecutor(setup.replicas) as pool,
    ):
        address = f"127.0.0.1:{front}"
        clients = {
            name: ExchangeClient(address, RUN_SECRET.credentials(name), RUN, stores=allowed) for name in setup.names
        }
        for name, client in clients.items():
            client.join(name, "")
        begun = carried()
        for client in clients.values():
            client.checkpoint(names, 0)
        of_start, begun = carried() - begun, carried()
        took = [
            list(pool.map(lambda name, of=round_: _round(clients[name], name, of, setup, sent), setup.names))
            for round_ in range(1, ROUNDS + 1)
        ]
        of_rounds, begun = carried() - begun, carried()
        for number in range(JOINERS):
            tensors = clients[setup.names[number % setup.replicas]].checkpoint(names, 0)
        of_joiners = carried() - begun
        for client in clients.values():
            client.close()
    size = sum(len(_blob(setup, "r0", 1, block, sent)) for block in sent)
    seconds = {
        phase: median(max(one[place] for one in round_) for round_ in took[1:]) for place, phase in enumerate(PHASES)
    }
    others = setup.replicas - 1
    return {
        "replicas": setup.replicas,
        "method": setup.method,
        "by": "store" if allowed else "exchange",
        "contribution_bytes": size,
        "checkpoint_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "exchange_bytes": {"start": of_start, "round": of_rounds / ROUNDS, "joiners": of_joiners},
        "seconds": seconds | {"round": median(max(sum(one) for one in round_) for round_ in took[1:])},
        "line_seconds": 8 * size * (1 / UP + others / DOWN),
    }


def _round(client: ExchangeClient, name: str, round_: int, setup: Setup, sent: Sent) -> tuple[float, float, float]:
    """Take part in one round; return the seconds of its phases."""
    generation = client.assign(name, round_ - 1).generation
    blobs = {block: _blob(setup, name, round_, block, sent) for block in sent}
    begin = time.monotonic()
    for block, blob in blobs.items():
        header = pb.BlobHeader(round=round_, replica=name, block=block, size=len(blob), generation=generation, steps=1)
        client.deposit_blob(header, blob, Caller(name))
    uploaded = time.monotonic()
    counted = client.record(round_, name).contributions
    recorded = time.monotonic()
    assert len(counted) == setup.replicas
    for block in sent:  # in the order of `apply_round`, for which replies have the blobs that follow
        for other in (one.replica for one in counted if one.replica != name):
            client.fetch(name, round_, other, block)
    return uploaded - begin, recorded - uploaded, time.monotonic() - recorded


def _blob(setup: Setup, name: str, round_: int, block: str, sent: Sent) -> bytes:
    return encode_blob(BlobAddress(RUN, round_, name, block), sent[block], setup.settings.compression)


def line_of(found: Mapping[str, Any]) -> str:
    seconds = found["seconds"]
    cells = [found["contribution_bytes"] / 1e6, *(seconds[phase] for phase in (*PHASES, "round"))]
    carried = [one / 1e6 for one in found["exchange_bytes"].values()]
    numbers = "".join(f"{cell:>10.3f}" for cell in [*cells, found["line_seconds"], *carried])
    return f"{found['method']:<27}{found['replicas']:>4}  {found['by']:<9}{numbers}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--model", choices=MODELS, default="small")
    arguments = parse(parser, {"replicas": [2], "model": "smoke"})
    if sys.platform != "linux":
        raise SystemExit("benchmarks/object_store_round.py needs SeaweedFS, which has a package for Linux only")
    os.environ |= CREDENTIALS
    results = []
    columns = ("MB", *PHASES, "round, s", "lines, s", "start, MB", "round, MB", "joiners")
    print(f"{'method':<27}{'R':>4}  {'by':<9}" + "".join(f"{name:>10}" for name in columns))
    with tempfile.TemporaryDirectory() as folder, object_service(Path(folder)) as endpoint:
        for number, (method, replicas) in enumerate(product(METHODS, arguments.replicas)):
            bucket = f"s3://round-{number}/run?endpoint={endpoint}"
            open_store(bucket).put("first", b"")  # the service makes a bucket with its first object
            for store, allowed in ((bucket, [endpoint]), (str(Path(folder) / f"log-{number}"), [])):
                results.append(measure(Setup(arguments.model, method, replicas, store), allowed))
                print(line_of(results[-1]), flush=True)
    for one in PUBLISHED:
        print(f"SparseLoCo, appendix C: {one['what']} {one['seconds']:.0f} s")
    content = {"model": arguments.model, "published": PUBLISHED, "up_bits": UP, "down_bits": DOWN}
    save(origin() | content | {"measured": results}, arguments.json)


if __name__ == "__main__":
    main()
