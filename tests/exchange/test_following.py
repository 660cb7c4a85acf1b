"""Many members: a fetch brings the small blobs that follow, and an event wakes only the calls that it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from members import TIMEOUT, in_thread
from small_run import Run

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Secret
from replica_groups.exchange import decided
from replica_groups.exchange.server import serve_exchange

SECRET = Secret("a secret")
NAMES = ("a", "b", "c", "d")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose round 1 includes four replicas."""
    run = Run(tmp_path, dict.fromkeys(NAMES, 1))
    run.assign(0)
    run.deposit(1, *NAMES)
    return run


@pytest.fixture
def served(run: Run) -> Iterator[ExchangeClient]:
    """A client of member b."""
    server, port = serve_exchange(run.exchange, SECRET, "127.0.0.1:0")
    client = ExchangeClient(f"127.0.0.1:{port}", SECRET.credentials("b"), "run")
    yield client
    client.close()
    server.stop(None).wait()


def _replies(run: Run) -> list[tuple[str, list[str]]]:
    """Note the first replica of each fetch from now on, and those that followed."""
    found, fetch_many = list[tuple[str, list[str]]](), run.exchange.decided.fetch_many

    def noted(request: pb.FetchRequest, caller: Caller) -> tuple[pb.BlobHeader, list[memoryview]]:
        header, parts = fetch_many(request, caller)
        found.append((request.replica, [one.replica for one in header.following]))
        return header, parts

    run.exchange.decided.fetch_many = noted  # type: ignore[method-assign]
    return found


def test_a_fetch_brings_the_blobs_of_the_other_replicas_that_follow(run: Run, served: ExchangeClient) -> None:
    replies = _replies(run)
    for name in ("a", "c", "d", "c", "b"):
        assert served.fetch("b", 1, name, "norm") == run.blob(BlobAddress("run", 1, name, "norm"))
    assert replies == [("a", ["c", "d"]), ("c", ["d"]), ("b", [])]


def test_nothing_follows_a_large_blob_which_is_not_kept(
    run: Run, served: ExchangeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are read by several threads at once, and would fill the memory."""
    monkeypatch.setattr(decided, "FOLLOWING_BYTES_MAX", len(run.blob(BlobAddress("run", 1, "a", "norm"))) - 1)
    replies = _replies(run)
    assert served.fetch("b", 1, "a", "norm") == run.blob(BlobAddress("run", 1, "a", "norm"))
    assert replies == [("a", [])]
    assert not run.exchange.decided._replies


def test_a_slow_store_ends_a_reply(run: Run, served: ExchangeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decided, "SECONDS_TO_READ", 0.0)
    replies = _replies(run)
    for name in ("a", "c"):
        assert served.fetch("b", 1, name, "norm") == run.blob(BlobAddress("run", 1, name, "norm"))
    assert replies == [("a", []), ("c", [])]


def test_a_round_that_all_fetch_is_read_once_while_others_catch_up(run: Run) -> None:
    newest = decided._KEPT_ROUNDS + 2
    for number in range(2, newest + 1):
        run.assign(number - 1)
        run.deposit(number, *NAMES)
    with mock.patch.object(run.exchange.decided, "record", wraps=run.exchange.decided.record) as record:
        for number in range(1, newest):
            run.exchange.fetch("b", number, "a", "norm")
            run.exchange.fetch("c", newest, "a", "norm")
    assert [one.args[0].round for one in record.call_args_list].count(newest) == 1


def test_a_heartbeat_wakes_no_other_members_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, looks = Run(tmp_path, dict.fromkeys(NAMES, 1)), dict[str, int]()
    waits = run.exchange.runner.notifier
    pause = waits.pause

    def counted(subject: str, seconds: float) -> None:
        """Wait, and count how often each member was waited for."""
        if subject in NAMES:
            looks[subject] = looks.get(subject, 0) + 1
            waits.changed.notify_all()
        pause(subject, seconds)

    monkeypatch.setattr(waits, "pause", counted)
    run.assign(0)
    waiting = in_thread(lambda: run.exchange.record(1, Caller("a", 1)))
    with waits.changed:
        assert waits.changed.wait_for(lambda: looks == {"a": 1}, TIMEOUT)
    for _ in range(3):
        run.exchange.heartbeat("b")
    run.deposit(1, "b", "c", "d")
    assert looks == {"a": 1}
    run.deposit(1, "a")
    assert waiting.result(TIMEOUT).round == 1


def test_a_sign_of_life_does_not_wait_for_the_state_of_the_run(run: Run) -> None:
    """Each frame is one, and with a thousand members the lock of the state would be asked for by all at once."""
    with run.exchange.runner.changed:
        in_thread(lambda: run.exchange.runner.heard("a", 1)).result(TIMEOUT)
        assert "a" in in_thread(lambda: run.exchange.runner.last_heard).result(TIMEOUT)
