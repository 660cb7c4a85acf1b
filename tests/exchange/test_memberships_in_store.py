"""Memberships whose changes are in a store: every host that serves the run has them, whatever its own disk has."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from hetero_pp.core.errors import ConfigError, Refused, StoreError
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange import memberships as module
from replica_groups.exchange.memberships import LEFT, MOST_BLAMED, Memberships, mark_of, require_token

DAY, HOUR, TOKEN, TIMEOUT = 86400.0, 3600.0, "a token of this test", 60.0
SLOTS = ["dc", "home.0", "home.1"]
ANNA, BEN = b"anna's key", b"ben's key"

Host = Callable[[str], Memberships]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture
def host(tmp_path: Path, store: FolderStore) -> Iterator[Host]:
    """Return a function that opens the memberships on a host of this name."""
    with ExitStack() as opened:
        yield lambda name: opened.enter_context(
            closing(Memberships(tmp_path / name / "members.sqlite", lambda: 1000.0, store, TOKEN))
        )


def _rows(memberships: Memberships) -> list[Any]:
    tables = ("tickets", "holders", "malformed", "blamed")
    return [memberships._reader.execute(f"SELECT * FROM {one}").fetchall() for one in tables]


def _change_everything(first: Memberships) -> None:
    """Make a change of every kind."""
    tickets = [first.invite(None, DAY) for _ in range(4)]
    own = [first.enrol(one, key, SLOTS, HOUR) for one, key in zip(tickets, (ANNA, BEN, b"third"), strict=False)]
    first.joined(own[0].slot, own[0].number)
    first.renew(own[0].slot, own[0].number, ANNA, 2 * HOUR)
    for _ in range(3):
        first.part({own[1].slot: own[1].number, own[2].slot: own[2].number})
    for _ in range(MOST_BLAMED):
        first.blame(tickets[1])
    first.end(own[0].slot, own[0].number, LEFT)
    first.condemn(own[2].slot, own[2].number, "its work was wrong")
    first.revoke(tickets[3])


def test_another_host_has_every_change(host: Host) -> None:
    first = host("first")
    _change_everything(first)
    assert _rows(host("second")) == _rows(first)
    assert all(_rows(first))


def test_a_host_that_returns_reads_what_changed_since(host: Host) -> None:
    first = host("first")
    ticket = first.invite("home.0", DAY)
    second = host("second")
    assert second.enrol(ticket, ANNA, SLOTS, HOUR).slot == "home.0"
    with pytest.raises(Refused, match="home\\.0 is taken"):
        first.invite("home.0", DAY) if first.held_by("home.0") else host("first").invite("home.0", DAY)


def test_of_two_hosts_that_change_at_once_the_second_sees_the_change_of_the_first(host: Host) -> None:
    first, second = host("first"), host("second")
    ticket = first.invite("home.0", DAY)
    other = second.invite("home.0", DAY)  # has the number of the first one's change
    assert first.enrol(ticket, ANNA, SLOTS, HOUR).slot == "home.0"
    with pytest.raises(Refused, match="home\\.0 is taken by another host"):
        second.enrol(other, BEN, SLOTS, HOUR)
    assert second.held_by("home.0") == first.held_by("home.0")


def test_older_changes_go_once_two_later_ones_have_all_rows(
    host: Host, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WITH_ALL_ROWS", 4)
    first, stale = host("first"), host("stale")
    _change_everything(first)
    kept = sorted(int(name) for name in store.names(f"memberships/{mark_of(TOKEN)}"))
    assert len(kept) <= 2 * 4 + 1
    assert _rows(host("new")) == _rows(first)
    stale.invite("dc", DAY)
    assert len(_rows(stale)[0]) == len(_rows(first)[0]) + 1


def test_a_change_is_acknowledged_only_if_the_store_has_it(
    host: Host, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host("first")
    real = store.create

    def create_and_lose_the_answer(key: str, data: bytes) -> bool:
        real(key, data)
        raise StoreError("no answer")

    monkeypatch.setattr(store, "create", create_and_lose_the_answer)
    with pytest.raises(StoreError, match="no answer"):
        first.invite("dc", DAY)
    assert first.tickets() == []
    monkeypatch.setattr(store, "create", real)
    ticket = first.invite("dc", DAY)
    assert ticket in [one.id for one in first.tickets()]
    assert _rows(host("second")) == _rows(first)  # the change without an answer was made, too


def test_a_store_that_does_not_answer_keeps_no_member_out(
    host: Host, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host("first")
    number = first.enrol(first.invite("dc", DAY), ANNA, SLOTS, HOUR).number
    is_asked, answers, real = threading.Event(), threading.Event(), store.create

    def create(key: str, data: bytes) -> bool:
        is_asked.set()
        assert answers.wait(TIMEOUT)
        return real(key, data)

    monkeypatch.setattr(store, "create", create)
    change = threading.Thread(target=first.joined, args=("dc", number))
    change.start()
    assert is_asked.wait(TIMEOUT)
    first.require_in("dc", number)
    answers.set()
    change.join(TIMEOUT)
    found = first.held_by("dc")
    assert found is not None
    assert found.joins_by is None


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"writes": [["drop", 1]]}', b'{"writes": [["use"]]}'])
def test_a_change_that_cannot_be_read_is_one_line(host: Host, store: FolderStore, content: bytes) -> None:
    host("first")
    store.put(f"memberships/{mark_of(TOKEN)}/000001", content)
    with pytest.raises(StoreError, match=rf"store/memberships/{mark_of(TOKEN)}: cannot be read \("):
        host("second")


def test_another_runs_token_is_refused(host: Host, store: FolderStore) -> None:
    require_token(store, "any token, before the run has begun")
    host("first")
    require_token(store, TOKEN)
    told = f"{store.url()}: found another token, expected that of the run"
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}"):
        require_token(store, "another run's token")
