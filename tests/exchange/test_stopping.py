"""A member that is asked to stop ends after the last closed round, wherever it is when the request arrives."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from small_run import Run

import replica_groups.loop.stopping
from hetero_pp.config.links import EXCHANGE, LinkShape, LinkSpec
from hetero_pp.core.errors import Stopped
from hetero_pp.link.shared_lines import Lines
from replica_groups.loop import exchanges
from replica_groups.loop.exchanges import ShapedExchange
from replica_groups.loop.stopping import Stopping
from replica_groups.outer.ranks import ALONE


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
    monkeypatch.setattr(replica_groups.loop.stopping, "SECONDS_TO_AGREE", 0.01)
    assert not _is_ended(stopping, 5, 5, seconds=0.2)
    stopping.check(ALONE, 5)  # it trains ahead of that round
    with pytest.raises(Stopped):
        stopping.check(ALONE)


def test_the_record_of_a_round_is_not_waited_for_long_if_nobody_knows_whether_it_is_closed(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_groups.loop.stopping, "SECONDS_TO_AGREE", 0.01)
    assert _is_ended(stopping, None, 5, seconds=60)


def test_an_exchange_that_is_halted_tells_the_last_closed_round_and_closes_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    for name in ("a", "b"):
        run.assign(0, name)
        run.deposit(1, name)
    assert run.exchange.halt() == 1
    for name in ("a", "b"):
        run.assign(1, name)
        run.deposit(2, name)
    assert run.exchange.last_round() == run.log.last_record() == run.exchange.halt() == 1


def test_a_halted_exchange_waits_for_the_members_that_have_not_applied_the_last_round(tmp_path: Path) -> None:
    """Members on other hosts fetch and confirm the round from it. A member that has left is not waited for."""
    run = Run(tmp_path, {"a": 1, "b": 1}, quorum=1.0)
    for name in ("a", "b"):
        run.assign(0, name)
        threading.Thread(target=run.exchange.presence.stay, args=[name], daemon=True).start()
        run.deposit(1, name)
    run.exchange.decisions.wait_until(lambda: run.exchange.presence.here == {"a", "b"})
    closed = run.exchange.halt()
    waiting = threading.Thread(target=run.exchange.wait_until_applied, args=[closed, 600], daemon=True)
    waiting.start()
    hashes = {name: bytes(32) for name in run.snapshot.parameters}
    run.exchange.confirm("a", closed, hashes)
    assert waiting.is_alive()
    run.exchange.presence.left("b")
    waiting.join(60)
    assert not waiting.is_alive()
    run.exchange.wait_until_applied(0, 600)  # this exchange has closed no round
    run.exchange.presence.left("a")


def test_a_member_that_is_stopped_does_not_wait_for_the_answer_to_its_confirmation(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has applied the round, and saves its state although the exchange is gone."""
    monkeypatch.setattr(replica_groups.loop.stopping, "SECONDS_TO_AGREE", 0.01)
    is_over = threading.Event()

    class Gone:
        def call(self, *_: object) -> None:
            stopping.ask(None)
            is_over.wait(60)
            is_over.set()

    link = LinkSpec("a-exchange", "a", EXCHANGE, LinkShape(), LinkShape())
    ShapedExchange(cast(Any, Gone()), link, 1, Lines(), stopping).confirm("a", 1, {})
    assert not is_over.is_set()


def test_a_member_that_is_stopped_does_not_wait_for_a_contribution_from_an_exchange_that_is_gone(
    stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanges, "SECONDS_TO_FETCH", 0.01)
    is_over = threading.Event()

    class Gone:
        def fetch_blob(self, *_: object) -> bytes:
            stopping.ask(None)
            is_over.wait(60)
            is_over.set()
            return b""

    link = LinkSpec("a-exchange", "a", EXCHANGE, LinkShape(), LinkShape())
    with pytest.raises(Stopped):
        ShapedExchange(cast(Any, Gone()), link, 1, Lines(), stopping).fetch("a", 1, "b", "layer")
    assert not is_over.is_set()
