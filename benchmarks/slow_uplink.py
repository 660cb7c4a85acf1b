"""Measure whether heartbeats are late while contributions fill a home's uplink of 1 Mbit/s for a minute.

    sudo python benchmarks/slow_uplink.py [--parts beats run] [--json FILE]

The kernel shapes the uplink. All traffic to the exchange's port passes one token bucket. As in a home's router, packets
for one second may wait for it, and further packets are dropped.

- `heartbeats`: measure how long each heartbeat takes while its member uploads a contribution of 5 MB.
- `run`: launch a run whose members send 10 MB per round over this one uplink, and count members that are taken for
  dead.

Needs root, `ip` and `tc`. With --smoke, the measurement is skipped where these are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from chaos_run import YAML, ChaosRun
from command_line import origin, parse, parser_of, save
from google.protobuf.message import Message

from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import HeteroPPError, Refused
from hetero_pp.messages.messages_pb2 import BlobHeader, HeartbeatReply, JoinReply, JoinRequest
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Secret
from hetero_pp.rpc.limits import RequestBounds
from replica_groups.exchange.runner import AuditHook
from replica_groups.exchange.server import serve_exchange

NAMESPACE = f"hetero-pp-uplink-{os.getpid()}"
PORT = 47700
BITS_A_SECOND = 1_000_000
QUEUE_BYTES = BITS_A_SECOND // 8
"""Bytes that may wait for the uplink: one second of its rate."""
MTU, BURST = 1500, 3000
CONTRIBUTION = 5_000_000
SECRET, RUN = Secret("of this benchmark only"), "slow"
SLOW = YAML.replace("width: 64", "width: 192").replace("outer: {rounds: 100000}", "outer: {rounds: 2, method: diloco}")
MOST_SECONDS = 900.0
DEATHS = ("silent", "incarnation_over", "suspended", "restarted")
SMOKE = {"parts": ["heartbeats"], "bytes": 200_000}


@contextmanager
def slow_uplink() -> Iterator[list[str]]:
    """Shape the uplink on the loopback of a network namespace. Packets to other ports are not limited.

    Yields the prefix of commands that run in the namespace. Raises OSError with the system's message.
    """
    inside = ["ip", "netns", "exec", NAMESPACE]
    _call(["ip", "netns", "add", NAMESPACE])
    try:
        for command in (
            f"ip link set lo up mtu {MTU}",
            "tc qdisc add dev lo root handle 1: htb default 999",
            "tc class add dev lo parent 1: classid 1:999 htb rate 10gbit burst 1m",
            "tc class add dev lo parent 1: classid 1:10 htb rate 10gbit burst 1m",
            f"tc qdisc add dev lo parent 1:10 tbf rate {BITS_A_SECOND}bit burst {BURST} limit {QUEUE_BYTES}",
            f"tc filter add dev lo parent 1: protocol ip prio 1 u32 match ip dport {PORT} 0xffff flowid 1:10",
        ):
            _call([*inside, *command.split()])
        yield inside
    finally:
        _call(["ip", "netns", "delete", NAMESPACE])


def _call(command: Sequence[str]) -> None:
    """Run a command. Raises OSError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class FarEnd:
    """Exchange that accepts everything at once. It has the methods that a contribution and heartbeats need."""

    run, roster = RUN, Roster({"home": "home"}, {"home": frozenset()})

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.audits = AuditHook(lambda sender, reason: Refused(f"{sender}: {reason}"))
        self.requests = RequestBounds(self.roster, [], 0)
        self.inbox = self.runner = self.notifier = self.refusals = self

    def call(self, request: Message, _: object) -> Message:
        return JoinReply(incarnation=1) if isinstance(request, JoinRequest) else HeartbeatReply()

    def upload_url(self, *_: object) -> None:
        return None

    def expect(self, *_: object) -> None: ...

    def take(self, *_: object) -> None: ...

    def heard(self, *_: object) -> None: ...

    def held_by(self, *_: object) -> None: ...

    def wake(self, *_: object) -> None: ...

    def add(self, *_: object) -> None: ...

    def left(self, *_: object) -> None: ...

    def stay(self, _: str) -> None:
        self.is_over.wait()


def heartbeats(size: int) -> dict[str, Any]:
    """Send heartbeats during a contribution.

    Return the seconds of each, and the number that were not answered in time.
    """
    far = FarEnd()
    server, _ = serve_exchange(far, SECRET, f"127.0.0.1:{PORT}")  # type: ignore[arg-type]
    client, took, lost = ExchangeClient(f"127.0.0.1:{PORT}", SECRET.credentials("home"), RUN), list[float](), 0
    client.join("home", "")
    begin = time.monotonic()
    header = BlobHeader(round=1, replica="home", block="norm", size=size)
    sends = threading.Thread(target=client.deposit_blob, args=(header, bytes(size), Caller("home")))
    sends.start()
    while sends.is_alive():
        asked = time.monotonic()
        try:
            client.heartbeat("home", 1, 1, 1)
            took.append(time.monotonic() - asked)
        except HeteroPPError:
            lost += 1
        sends.join(max(0.0, asked + 1.0 - time.monotonic()))
    seconds = time.monotonic() - begin
    far.is_over.set()
    client.close()
    server.stop(None).wait()
    return {
        "contribution_bytes": size,
        "contribution_seconds": seconds,
        "share_of_the_line": size * 8 / BITS_A_SECOND / seconds,
        "heartbeats": len(took),
        "lost": lost,
        "heartbeat_seconds": {"median": median(took), "worst": max(took)} if took else None,
    }


def heartbeats_inside(arguments: argparse.Namespace) -> dict[str, Any]:
    with slow_uplink() as inside:
        command = [*inside, sys.executable, __file__, "--inside", "--bytes", str(arguments.bytes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def launched(_: argparse.Namespace) -> dict[str, Any]:
    """Launch a run with contributions that fill the uplink for minutes. Return the exchange's report on its members."""
    text = SLOW.replace("exchange:\n", f"exchange:\n  listen: 127.0.0.1:{PORT}\n")
    with tempfile.TemporaryDirectory(prefix="hetero-pp-slow-") as folder, slow_uplink() as inside:
        run = ChaosRun(Path(folder) / "slow", ["exchange.quorum=1", "exchange.limit=1h"], text, inside)
        begin = time.monotonic()
        run.start()
        is_over = not run.wait(MOST_SECONDS)
        run.stop()
        return _told(run) | {"to_its_end": is_over, "seconds": time.monotonic() - begin, "last_words": run.said()}


def _told(run: ChaosRun) -> dict[str, Any]:
    happened = [one for one in run.events() if one["event"] == "membership_event"]
    outer = [one["outer_seconds"] for one in run.events() if one["event"] == "member_round"]
    closed = [one for one in run.events() if one["event"] == "round_closed"]
    contributed = [blob["size"] for one in closed for sent in one.get("contributions", ()) for blob in sent["blobs"]]
    return {
        "taken_for_dead": sum(one["what"] in DEATHS for one in happened),
        "what_happened": [f"{one['what']} {one.get('slot')}: {one.get('cause')}" for one in happened],
        "rounds": len(run.records()),
        "contribution_bytes": contributed,
        "longest_outer_round": max(outer, default=None),
    }


PARTS = {"heartbeats": heartbeats_inside, "run": launched}


def why_not() -> str | None:
    """Return why the kernel cannot shape links here; None if it can."""
    try:
        with slow_uplink():
            return None
    except OSError as error:
        return str(error)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--bytes", type=int, default=CONTRIBUTION, help="size of the contribution that is sent beside heartbeats"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parse(parser, SMOKE)
    if arguments.inside:
        print(json.dumps(heartbeats(arguments.bytes)))
        return
    lacks = why_not()
    if lacks is not None and not arguments.smoke:
        raise SystemExit(f"benchmarks/slow_uplink.py needs root, `ip` and `tc`: {lacks}")
    if lacks is not None:
        print(f"not shaped by the kernel, which needs root, `ip` and `tc`: {lacks}")
        return
    found = origin() | {"bits_a_second": BITS_A_SECOND}
    for name in arguments.parts:
        found = found | {name: PARTS[name](arguments)}
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        save(found, arguments.json)


if __name__ == "__main__":
    main()
