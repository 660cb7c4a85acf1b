"""A member's client survives a restart of the exchange and tells the new one again what the first one knew."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest
from cutting_proxy import CuttingProxy
from deposits import deposit
from members import TIMEOUT, in_thread
from small_run import LEASE, Run
from test_uncounted import Member

from hetero_pp.config.audit import AuditSettings
from hetero_pp.core.errors import ExchangeLost, Refused
from hetero_pp.messages.messages_pb2 import (
    DESCRIPTOR,
    BlobHeader,
    Computes,
    RecordRequest,
    Report,
    RoundRecord,
    ShownFile,
)
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc import exchange_client
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Secret
from replica_groups.audit.judgements import Judgements
from replica_groups.audit.showing import Shows
from replica_groups.exchange.server import serve_exchange

SECRET = Secret("a secret")


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize("waits", [True, False])
def test_who_has_contributed_deposits_again_with_the_next_exchange(waits: bool, tmp_path: Path) -> None:
    """The first exchange ends while a member waits for the record, or just before, when no call is open.

    The contribution is included, although the first exchange has lost what it knew of it.
    """
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("a"), "run")
    run.exchange.died("a", "to be taken over the network")
    assert client.join("a", "") == 2
    a, b = Member(run, "a"), Member(run, "b")
    a.outer.session._exchange = client
    run.assign(0, "b")
    work = client.assign("a", 0)
    assert (work.round, work.generation) == (1, 2)
    a.train(1)
    first = run.exchange
    if waits:
        record = in_thread(lambda: a.outer.synchronise(1, work.generation, 7))
        first.runner.wait_until(lambda: first.coordinator.open is not None and "a" in first.coordinator.open.whole)
    else:
        own = a.outer.contribute(1, work.generation, 7)
    ended = server.stop(None)  # every call breaks at once
    first.runner.fail("it is gone")  # ends the first exchange's waiting threads; no member hears of this any more
    assert ended.wait(TIMEOUT)
    run.take_over()
    server, _ = serve_exchange(run.exchange, SECRET, f"127.0.0.1:{port}")
    assert not run.exchange.heartbeat("b", 1, 1).is_over
    if not waits:
        assert client.last_round() == 0  # it has reached the new exchange
        with pytest.raises(ExchangeLost, match="sending them again"):
            client.record(1, "a")
        for block, data in own.items():
            deposit(client, "a", BlobAddress(run.exchange.run, 1, "a", block), data, work.generation, 7)
        record = in_thread(lambda: client.record(1, "a"))
    b.outer.session._exchange = run.exchange
    b.train(1)
    b.outer.synchronise(1, 1, 7)
    assert record.result(TIMEOUT).round == 1
    assert run.counted(1) == {"a": 2, "b": 1}
    for name, tensor in b.holds().items():
        assert not waits or a.holds()[name].equal(tensor), name
    client.close()
    server.stop(None).wait()


def test_a_process_that_waits_for_its_slot_gets_it_from_the_next_exchange(tmp_path: Path) -> None:
    """The slot still has a silent holder. The process was started again, and its launcher would not start it twice."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0, lease=LEASE)
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    client, first = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("a"), "run", TIMEOUT), run.exchange
    run.passes(LEASE.least / 2, heard=("b",))
    joins = in_thread(lambda: client.join("a", ""))
    first.runner.wait_until(lambda: first.coordinator.slots["a"].applicant is not None)
    ended = server.stop(None)
    first.runner.fail("it is gone")
    assert ended.wait(TIMEOUT)
    run.take_over()
    server, _ = serve_exchange(run.exchange, SECRET, f"127.0.0.1:{port}")
    run.exchange.died("a", "its launcher says so")
    assert joins.result(TIMEOUT) == 2
    client.close()
    server.stop(None).wait()


def test_a_client_goes_to_the_host_that_serves_the_exchange_now(tmp_path: Path) -> None:
    """The second host begins to serve once the first one has ended, and the first one serves again later."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    ports = [free_port(), free_port()]
    server, _ = serve_exchange(run.exchange, SECRET, f"127.0.0.1:{ports[0]}")
    client = ExchangeClient(",".join(f"127.0.0.1:{one}" for one in ports), SECRET.credentials("a"), "run")
    run.exchange.died("a", "to be taken over the network")
    client.join("a", "")
    for port in (ports[1], ports[0]):
        first = run.exchange
        ended = server.stop(None)
        first.runner.fail("it is gone")
        assert ended.wait(TIMEOUT)
        asked = in_thread(client.last_round)  # no host answers yet
        run.take_over()
        server, _ = serve_exchange(run.exchange, SECRET, f"127.0.0.1:{port}")
        assert asked.result(TIMEOUT) == 0
        assert not client.heartbeat("a").is_over
    client.close()
    server.stop(None).wait()


def test_a_heartbeat_moves_a_client_from_a_frozen_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for its answer meanwhile, and is repeated at the other host."""
    monkeypatch.setattr(exchange_client, "HEARTBEAT_TIMEOUT", 1.0)
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    first, second = CuttingProxy(f"127.0.0.1:{port}"), f"127.0.0.1:{free_port()}"
    client = ExchangeClient(f"{first.address},{second}", SECRET.credentials("a"), "run")
    run.exchange.died("a", "to be taken over the network")
    client.join("a", "")
    assert not client.heartbeat("a").is_over
    first.freeze()
    asked = in_thread(client.last_round)
    run.exchange.runner.fail("it is frozen")
    run.take_over()
    other, _ = serve_exchange(run.exchange, SECRET, second)
    with pytest.raises(ExchangeLost):
        client.heartbeat("a")
    assert not client.heartbeat("a").is_over
    assert asked.result(TIMEOUT) == 0
    client.close()
    first.close()
    for one in (server, other):
        one.stop(None).wait()


def test_callers_that_are_gone_leave_no_thread_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an unstable line a member repeats its calls, and the server has a limited number of threads."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    run.assign(0, "a", "b")
    held = shown(SECRET.credentials("a"), "run", run.exchange.coordinator.slots["a"].incarnation)
    entered, left, call = Semaphore(0), Semaphore(0), run.exchange.decided.record

    def counted(request: RecordRequest, caller: Caller) -> RoundRecord:
        entered.release()
        try:
            return call(request, caller)
        finally:
            left.release()

    monkeypatch.setattr(run.exchange.decided, "record", counted)
    for _ in range(60):
        client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("a"), "run")
        waits = client._wires.calls["Record"].future(RecordRequest(round=1), metadata=held, wait_for_ready=True)
        assert entered.acquire(timeout=TIMEOUT)
        client.close()
        assert left.acquire(timeout=TIMEOUT)
        assert waits.done()
    client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("a"), "run")
    client.wait_until_ready(TIMEOUT)
    assert client.newest_checkpoint()[0] == 0
    client.close()
    server.stop(None).wait()


def _taken_over_after_a_round(tmp_path: Path) -> Run:
    """Return a run whose exchange has restarted after round 1, so that no record is in memory."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    run.assign(0)
    run.deposit(1, "a", "b")
    run.take_over()
    return run


@pytest.mark.parametrize("is_there", [True, False])
def test_a_record_that_cannot_be_read_is_not_asked_for_for_ever(tmp_path: Path, is_there: bool) -> None:
    """The exchange is not gone, so the caller is told which file is damaged or lost."""
    run, record = _taken_over_after_a_round(tmp_path), tmp_path / "round-000001" / "record.json"
    record.write_bytes(record.read_bytes()[:-20])
    if not is_there:
        record.unlink()
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("a"), "run")
    run.exchange.died("a", "to be taken over the network")
    client.join("a", "")
    try:
        for ask in (lambda: client.record(1, "a"), lambda: client.fetch("a", 1, "b", "norm")):
            with pytest.raises(Refused, match=r"no record of round 1: .*round-000001/record\.json"):
                in_thread(ask).result(TIMEOUT)
    finally:
        client.close()
        server.stop(None).wait()


def _header(run: Run, data: bytes = b"") -> BlobHeader:
    block = min(run.roster.blocks["a"])
    return BlobHeader(round=2, replica="a", block=block, size=len(data), generation=1, steps=7, sha256=bytes(32))


def _joins_again(run: Run) -> int:
    run.exchange.died("a", "it has a successor", 1)
    return run.exchange.join("a", "")


def _shows(run: Run, caller: Caller) -> Any:
    exchange = run.exchange
    parts = exchange.runner, exchange.reports, exchange.held_by
    shows = Shows(1.0, frozenset(), {"a": 10}, {})
    audits = Judgements(*parts, AuditSettings(), weighs=False, overlapping=lambda record: (), shows=shows)
    exchange.runner.audits = audits
    with pytest.raises(Refused, match="was not asked for it"):
        audits.expect_file(ShownFile(round=1, name="before.safetensors", size=1), caller)


CALLS: dict[str, Callable[[Run, Caller], Any]] = {
    "Agree": lambda run, a: run.exchange.agree(a, "{}"),
    "Join": lambda run, a: _joins_again(run),
    "LastRound": lambda run, a: run.exchange.last_round(),
    "Assign": lambda run, a: run.exchange.assign(a, 1),
    "Heartbeat": lambda run, a: run.exchange.heartbeat(a, 2, 1),
    "Broken": lambda run, a: run.exchange.broken(a, 1, "a cause"),
    "Died": lambda run, a: run.exchange.died("b", "a cause", 1),
    "NewestCheckpoint": lambda run, a: run.exchange.newest_checkpoint(),
    "RunCheckpoint": lambda run, a: run.exchange.checkpoint(["norm.weight"], 0),
    "Deposit": lambda run, a: run.deposit(2, "a", generation=1, incarnation=1),
    "UploadUrl": lambda run, a: run.exchange.inbox.upload_url(_header(run), a),
    "Uploaded": lambda run, a: run.exchange.inbox.uploaded(_header(run), a),
    "Record": lambda run, a: run.exchange.record(1, a),
    "Fetch": lambda run, a: run.exchange.fetch(a, 1, "b", min(run.roster.blocks["b"])),
    "Confirm": lambda run, a: run.exchange.confirm(a, 1, dict.fromkeys(run.checkpoint.parameters, bytes(32))),
    "Show": _shows,
    "Report": lambda run, a: run.exchange.report([Report(member="a", computes=Computes(device="cpu"))], a),
}


def test_every_call_of_a_member_is_tried() -> None:
    """Judge is a validator's. Stay and Watch only wait."""
    service = DESCRIPTOR.services_by_name["Exchange"]
    assert {*CALLS, "Judge", "Stay", "Watch"} == {one.name for one in service.methods}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_is_refused_while_the_next_exchange_reads_the_log(call: str, tmp_path: Path) -> None:
    """A member may make any call before this exchange has begun: it trains, or has just heard where the run begins."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    run.assign(0)
    run.deposit(1, "a", "b")
    run.assign(1)
    run.exchange = next_one = run._open(goes_on=True)
    waits, wait_until = Event(), next_one.runner.wait_until

    def waited(*arguments: Any, **options: Any) -> None:
        waits.set()
        wait_until(*arguments, **options)

    next_one.runner.wait_until = waited  # type: ignore[method-assign]
    answer = in_thread(lambda: CALLS[call](run, Caller("a", 1)))
    answer.add_done_callback(lambda _: waits.set())
    assert waits.wait(TIMEOUT)
    assert next_one.runner.refusals.counts.total() == 0, answer.exception(TIMEOUT)
    next_one.begin(run.checkpoint, last_round=1)
    refused = answer.exception(TIMEOUT)
    assert refused is None or (call == "Uploaded" and "was not uploaded" in str(refused)), refused
