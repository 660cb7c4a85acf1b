"""Every field of every message on a stage link is set to invalid values, in a live run.

No value may change the result, stall the run or fail it, nor make the honest stage at the other end fail.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from lying_run import LyingRun, Replacer, lying_spec
from members import TIMEOUT

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from lies import Call, fields_of, link_lies, lying, raw_lies

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc import connections, stage_link
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.relay import KEY_BYTES
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import calls_of
from hetero_pp.rpc.stage_link import StageLink

GROUP = {"kind": "participants", "stages": 2, "boundary": {"rank": "1/4"}}


def misuses_relay(run: LyingRun, call: Call) -> None:
    """Ask the relay for the member's own link and for others, and send its port what no honest stage sends."""
    with closing(make_channel(run.address, run.credentials["c.0"].identity, EXCHANGE)) as channel:
        carry = calls_of(RELAY, channel)["Carry"]
        for link in ("c.0-1", "d.0-1", "a-exchange", "", "x" * 100_000):
            carry(pb.RelayedLink(link=link), metadata=call.metadata).cancel()
            for _, frames in raw_lies([b"x" * KEY_BYTES]):
                # A connection is closed as soon as its key is known to be wrong.
                dialled = socket.create_connection(("127.0.0.1", run.meeting_point.port), TIMEOUT)
                with dialled as connection, suppress(OSError):
                    connection.sendall(b"".join(frames))


def test_no_lie_on_a_stage_link_bends_stalls_or_ends_a_run(corpus: Path, tmp_path: Path) -> None:
    """The first stage of `c` and the last stage of `d` lie. No round closes without both groups."""
    exchange = {"quorum": 1.0, "lease": {"least": "60 s", "most": "60 s"}}
    with LyingRun(lying_spec(corpus, 3, {"c": GROUP, "d": GROUP}, layers=2, exchange=exchange), tmp_path) as run:
        liars = {name: Replacer(run, {"LinkHello": False, "LinkHeader": False}) for name in ("c.0", "d.1")}
        opened, carried, refused = StageLink.open, list[Call](), list[str]()

        def dialled(frames: Iterator[bytes]) -> Iterator[bytes]:
            return link_lies(frames, liars["c.0"].change_message)

        def answered(server: StageLink, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            is_liar = server.side.member == "d.1"
            if is_liar and not refused:
                refused.append(context.peer())
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "found an honest stage, expected none")
            frames = opened(server, requests, context)
            return link_lies(frames, liars["d.1"].change_message) if is_liar else frames

        def change(call: Call) -> Call:
            if call.name == "Assign" and not carried:
                carried.append(call)
                misuses_relay(run, call)
            return call

        with ExitStack() as stack:
            for module, what in (
                (stage_link, "CONNECT_TIMEOUT"),
                (stage_link, "DIRECT_SECONDS"),
                (connections, "CONNECT_TIMEOUT"),
                (connections, "CUT_OFF_SECONDS"),
            ):
                stack.enter_context(mock.patch.object(module, what, 1.0))
            stack.enter_context(mock.patch.object(StageLink, "open", answered))
            stack.enter_context(lying("c.0", change, dialled))
            run.until_over()
        harm, failed = run.harm(), [repr(error) for name in ("c.1", "d.0") for error in run.errors[name]]
    assert harm == []
    assert failed == []
    assert carried
    assert refused
    sent = {("LinkHello", path) for path in fields_of(pb.LinkHello.DESCRIPTOR)}
    sent |= {("LinkHeader", path) for path in fields_of(pb.LinkHeader.DESCRIPTOR)}
    for name, liar in liars.items():
        assert (name, sent - liar.said) == (name, set())
