"""A member that is asked to stop ends after the last closed round, wherever it is when the request arrives."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from small_run import Run

import replica_groups.member.stopping
from hetero_pp.core.errors import Stopped
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.exchange_service import ExchangeService
from replica_groups.engines.ranks import ALONE
from replica_groups.member import session
from replica_groups.member.session import MemberSession
from replica_groups.member.stopping import Stopping


@pytest.fixture
def stopping() -> Iterator[Stopping]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGALRM)}
    one = Stopping(signal.SIGUSR2)
    one.listen()
    yield one
    for number, handler in kept.items():
        signal.signal(number, handler)


def _is_ended(stopping: Stopping, closed: int | None, round_: int | None, seconds: float) -> bool:
    """Return whether a request to stop ends a waiting block within so many seconds."""
    try:
        with stopping.allowed(round_):
            stopping.ask(closed)
            threading.Event().wait(seconds)
    except Stopped:
        return True
    return False


@pytest.mark.parametrize(("closed", "round_"), [(4, 5), (4, None), (None, None)])
def test_a_block_is_ended_at_once_unless_its_round_may_be_closed(
    closed: int | None, round_: int | None, stopping: Stopping
) -> None:
    assert _is_ended(stopping, closed, round_, seconds=60)
    with pytest.raises(Stopped):
        stopping.check(ALONE, round_)


def test_the_record_of_a_closed_round_is_waited_for(stopping: Stopping, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds on slow machines too: other members have the record, and save their states after that round."""
    monkeypatch.setattr(replica_groups.member.stopping, "SECONDS_TO_AGREE", 0.01)
    assert not _is_ended(stopping, 5, 5, seconds=0.2)
    stopping.check(ALONE, 5)  # it trains ahead of that round
    with pytest.raises(Stopped):
        stopping.check(ALONE)


def test_the_record_of_a_round_is_not_waited_for_long_if_nobody_knows_whether_it_is_closed(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_groups.member.stopping, "SECONDS_TO_AGREE", 0.01)
    assert _is_ended(stopping, None, 5, seconds=60)


def test_an_exchange_that_is_halted_tells_the_last_closed_round_and_closes_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    for name in ("a", "b"):
        run.assign(0, name)
        run.deposit(1, name)
    assert run.exchange.runner.halt() == 1
    for name in ("a", "b"):
        run.assign(1, name)
        run.deposit(2, name)
    assert run.exchange.last_round() == run.log.last_record() == run.exchange.runner.halt() == 1


def test_a_halted_exchange_waits_for_the_members_that_have_not_applied_the_last_round(tmp_path: Path) -> None:
    """Members on other hosts fetch and confirm the round from it. A member that has left is not waited for."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    for name in ("a", "b"):
        run.assign(0, name)
        threading.Thread(target=run.exchange.stay, args=[name], daemon=True).start()
        run.deposit(1, name)
    run.exchange.runner.wait_until(lambda: run.exchange.here == {"a", "b"})
    closed = run.exchange.runner.halt()
    waiting = threading.Thread(target=run.exchange.wait_until_applied, args=[closed, 600], daemon=True)
    waiting.start()
    hashes = {name: bytes(32) for name in run.checkpoint.parameters}
    run.exchange.confirm("a", closed, hashes)
    assert waiting.is_alive()
    run.exchange.left("b")
    waiting.join(60)
    assert not waiting.is_alive()
    run.exchange.wait_until_applied(0, 600)  # this exchange has closed no round
    run.exchange.left("a")


def test_a_member_that_is_stopped_does_not_wait_for_the_answer_to_its_confirmation(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has applied the round, and saves its state although the exchange is gone."""
    monkeypatch.setattr(replica_groups.member.stopping, "SECONDS_TO_AGREE", 0.01)
    is_over = threading.Event()

    class Gone:
        def call(self, *_: object) -> None:
            stopping.ask(None)
            is_over.wait(60)
            is_over.set()

    MemberSession(cast(Any, Gone()), "a", "a", stopping=stopping).confirm("a", 1, {})
    assert not is_over.is_set()


@pytest.mark.parametrize(
    "ask",
    [
        lambda exchange: exchange.assign("a", 1),
        lambda exchange: exchange.broken("a", 1, "its neighbour is gone"),
        lambda exchange: exchange.changes(),
        lambda exchange: exchange.join("a", ""),
        lambda exchange: exchange.newest_checkpoint(),
        lambda exchange: exchange.checkpoint(["weight"], 1),
        lambda exchange: exchange.fetch("a", 1, "b", "layer"),
    ],
)
def test_a_member_that_is_stopped_waits_for_no_reply_of_an_exchange_that_is_gone(
    ask: Callable[[ExchangeService], object], stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((session, "SECONDS_TO_FETCH"), (replica_groups.member.stopping, "SECONDS_TO_AGREE")):
        monkeypatch.setattr(module, name, 0.01)

    class Gone:
        def call(self, *_: object) -> None:
            stopping.ask(None)
            threading.Event().wait(60)

        read_checkpoint = fetch_blob = call

    with pytest.raises(Stopped):
        ask(MemberSession(cast(Any, Gone()), "a", "a", stopping=stopping))


def test_a_recovering_member_that_is_stopped_waits_for_an_exchange_that_is_there(stopping: Stopping) -> None:
    """Once it has recovered it can save its state. The exchange is there if it has told its last closed round."""

    class Slow:
        def call(self, *_: object) -> Any:
            stopping.ask(3)
            return pb.NewestCheckpointReply(round=3)

    assert MemberSession(cast(Any, Slow()), "a", "a", stopping=stopping).newest_checkpoint() == (3, [])


class _Left(Exception):
    """Is raised where a process would end."""


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_a_member_with_nothing_left_to_save_ends_wherever_it_waits(
    is_asked_before: bool, stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for an exchange that is gone, to tell it that the member failed, or to deliver its last reports."""
    monkeypatch.setattr(replica_groups.member.stopping, "SECONDS_TO_LEAVE", 0.01)

    def leave() -> None:
        raise _Left

    stopping.leave = leave
    if is_asked_before:
        stopping.ask(None)
    with pytest.raises(_Left):
        stopping.end()
        if not is_asked_before:
            stopping.ask(None)
        with stopping.allowed():
            threading.Event().wait(60)


class _Asks:
    """Asks a member to stop in its destructor, where Python drops exceptions."""

    def __init__(self, stopping: Stopping) -> None:
        self._stopping = stopping

    def __del__(self) -> None:
        self._stopping.ask(None)


@pytest.mark.parametrize("round_", [None, 5])
def test_a_block_is_ended_although_python_drops_the_first_exception(
    round_: int | None, stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 5: the alarm comes while a destructor runs."""
    dropped: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: dropped.append(one.exc_type))
    monkeypatch.setattr(replica_groups.member.stopping, "SECONDS_TO_AGREE", 0.01)
    monkeypatch.setattr(replica_groups.member.stopping, "_SECONDS_UNTIL_AGAIN", 0.01)

    class Waits(_Asks):
        def __del__(self) -> None:
            super().__del__()
            threading.Event().wait(60)

    with pytest.raises(Stopped), stopping.allowed(round_):
        one = (_Asks if round_ is None else Waits)(stopping)
        del one
        threading.Event().wait(60)
    assert dropped == [Stopped]


def test_a_member_is_asked_again_if_its_main_thread_has_slept_through_the_signal(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that arrives as an unlimited wait begins does not end the wait."""
    monkeypatch.setattr(replica_groups.member.stopping, "_SECONDS_UNTIL_AGAIN", 0.01)
    kill, sent = os.kill, list[int]()

    def lose_first(process: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            kill(process, number)

    monkeypatch.setattr(os, "kill", lose_first)
    with pytest.raises(Stopped), stopping.allowed():
        stopping.ask(None)
        threading.Event().wait(60)


@contextmanager
def _frame_of_with() -> Iterator[FrameType]:
    """Yield the frame of the standard library that enters this block."""
    yield sys._getframe(1)


@pytest.mark.parametrize("of_library", [True, False])
def test_a_signal_that_arrives_as_a_block_begins_or_ends_leaves_no_block_open(
    of_library: bool, stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped would leave the block allowed, and be raised again while the state is saved."""
    monkeypatch.setattr(replica_groups.member.stopping, "_SECONDS_UNTIL_AGAIN", 0.01)
    waits, block = False, stopping.allowed()
    with pytest.raises(Stopped), block:
        with _frame_of_with() as frame:
            stopping._hear(signal.SIGUSR2, frame if of_library else block.gen.gi_frame)  # type: ignore[attr-defined]
        waits = True
        threading.Event().wait(60)
    assert waits
    signal.raise_signal(signal.SIGALRM)  # the block is over
