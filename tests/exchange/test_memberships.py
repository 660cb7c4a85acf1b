"""Tickets and the slots held by them: each is used once, by one key, until it is revoked, whichever process asks."""

from __future__ import annotations

import re
import sqlite3
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from hetero_pp.core.errors import Refused, StoreError, TooMuch
from replica_groups.exchange.memberships import (
    ADMISSIONS_A_MINUTE,
    ADMISSIONS_AT_ONCE,
    LEFT,
    MOST_BLAMED,
    PARTED_SECONDS,
    RESERVED_SECONDS,
    Memberships,
)

DAY, HOUR = 86400.0, 3600.0
SLOTS = ["dc", "home.0", "home.1"]
ANNA, BEN = b"anna's key", b"ben's key"


class Clock:
    """A clock in seconds that advances when a test sets it."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def memberships(tmp_path: Path, clock: Clock) -> Iterator[Memberships]:
    with closing(Memberships(tmp_path / "authority" / "members.sqlite", clock)) as found:
        yield found


def test_a_ticket_lets_one_key_in(memberships: Memberships) -> None:
    ticket = memberships.invite("home.1", DAY)
    found = memberships.enrol(ticket, ANNA, SLOTS, HOUR)
    assert (found.slot, found.number, found.until, found.ended) == ("home.1", 1, 1000.0 + HOUR, None)
    assert memberships.enrol(ticket, ANNA, [], HOUR) == found  # the first answer may have been lost
    with pytest.raises(Refused, match="used already"):
        memberships.enrol(ticket, BEN, SLOTS, HOUR)
    memberships.require_in("home.1", 1)
    assert memberships.held_by("home.1") == found


def test_a_ticket_without_a_slot_takes_the_first_that_is_free(memberships: Memberships) -> None:
    first, second, third = (memberships.invite(None, DAY) for _ in range(3))
    assert memberships.enrol(first, ANNA, ["home.0", "home.1"], HOUR).slot == "home.0"
    assert memberships.enrol(second, BEN, ["home.0", "home.1"], HOUR).slot == "home.1"  # home.0 has not joined yet
    with pytest.raises(Refused, match="no slot of the run is free"):
        memberships.enrol(third, b"another", ["home.0", "home.1"], HOUR)
    assert memberships.enrol(third, b"another", SLOTS, HOUR).slot == "dc"  # the refused attempt used nothing up


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda found, ticket, clock: setattr(clock, "time", 1000.0 + DAY + 1), "the ticket has expired"),
        (lambda found, ticket, clock: found.revoke(ticket), "the ticket was revoked"),
        (lambda found, ticket, clock: found.revoke("home.1"), "the ticket was revoked"),
        (lambda found, ticket, clock: found.enrol(found.invite(None, DAY), BEN, ["home.1"], HOUR), "home.1 is taken"),
    ],
)
def test_tickets_that_let_nobody_in(
    memberships: Memberships, clock: Clock, spoil: Callable[[Memberships, str, Clock], None], told: str
) -> None:
    ticket = memberships.invite("home.1", DAY)
    spoil(memberships, ticket, clock)
    with pytest.raises(Refused, match=told):
        memberships.enrol(ticket, ANNA, SLOTS, HOUR)
    with pytest.raises(Refused, match=r"does not belong to this run"):
        memberships.enrol("made up", ANNA, SLOTS, HOUR)
    with pytest.raises(Refused, match=r"does not belong to this run"):
        memberships.require_open("made up")


def test_a_slot_that_is_held_is_promised_to_nobody_else(memberships: Memberships, clock: Clock) -> None:
    memberships.enrol(memberships.invite("home.1", DAY), ANNA, SLOTS, HOUR)
    with pytest.raises(Refused, match=re.escape("home.1 is taken: `hetero-pp revoke` frees it")):
        memberships.invite("home.1", DAY)
    clock.time += HOUR + 1
    memberships.invite("home.1", DAY)


def test_who_renews_stays(memberships: Memberships, clock: Clock) -> None:
    memberships.enrol(memberships.invite("home.1", DAY), ANNA, SLOTS, HOUR)
    memberships.joined("home.1", 1)
    clock.time += HOUR / 2
    with pytest.raises(Refused, match="for its original key"):
        memberships.renew("home.1", 1, BEN, HOUR)
    assert memberships.renew("home.1", 1, ANNA, HOUR).until == clock.time + HOUR
    clock.time += HOUR - 1
    memberships.require_in("home.1", 1)
    clock.time += 2
    with pytest.raises(Refused, match="was not renewed in time"):
        memberships.require_in("home.1", 1)
    with pytest.raises(Refused, match="was not renewed in time"):
        memberships.renew("home.1", 1, ANNA, HOUR)


def test_who_is_followed_by_another_holder_is_out(memberships: Memberships) -> None:
    memberships.enrol(memberships.invite("home.1", DAY), ANNA, SLOTS, HOUR)
    assert memberships.revoke("home.1") == ["home.1 (holder number 1)"]
    with pytest.raises(Refused, match=r"home\.1: it was taken back"):
        memberships.require_in("home.1", 1)
    assert memberships.enrol(memberships.invite("home.1", DAY), BEN, SLOTS, HOUR).number == 2
    memberships.require_in("home.1", 2)
    with pytest.raises(Refused, match="given to another holder since"):
        memberships.require_in("home.1", 1)
    with pytest.raises(Refused, match="has had no holder of this number"):
        memberships.require_in("home.1", 3)
    memberships.end("home.1", 1, "of no effect")
    memberships.require_in("home.1", 2)


def test_who_has_left_may_come_back_by_its_ticket_and_who_was_taken_back_may_not(memberships: Memberships) -> None:
    ticket = memberships.invite(None, DAY)
    assert memberships.enrol(ticket, ANNA, SLOTS, HOUR).slot == "dc"
    memberships.end("dc", 1, "its slot was returned")
    assert memberships.held_by("dc") is None
    assert memberships.enrol(memberships.invite(None, DAY), BEN, SLOTS, HOUR).slot == "dc"
    again = memberships.enrol(ticket, ANNA, ["home.0"], HOUR)
    assert (again.slot, again.number) == ("home.0", 1)
    assert memberships.revoke("home.0") == ["home.0 (holder number 1)"]
    with pytest.raises(Refused, match="the ticket was revoked"):
        memberships.enrol(ticket, ANNA, SLOTS, HOUR)
    with pytest.raises(Refused, match="the ticket was revoked"):
        memberships.require_open(ticket)


def test_what_was_answered_is_known_to_every_process(tmp_path: Path) -> None:
    path = tmp_path / "authority" / "members.sqlite"
    with closing(Memberships(path)) as one, closing(Memberships(path)) as other:
        ticket = one.invite("home.1", DAY)
        other.enrol(ticket, ANNA, SLOTS, HOUR)
        one.require_in("home.1", 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_of_many_at_once_one_takes_a_ticket_and_none_a_slot_twice(tmp_path: Path) -> None:
    """Each thread has its own connection, as separate processes have."""
    path = tmp_path / "members.sqlite"
    with closing(Memberships(path)) as first:
        shared, own = first.invite(None, DAY), [first.invite(None, DAY) for _ in range(8)]
    slots = [f"home.{number}" for number in range(20)]

    def enrol(number: int) -> tuple[str | None, str]:
        with closing(Memberships(path)) as one:
            try:
                found = one.enrol(shared, f"key {number}".encode(), slots, HOUR).slot
            except Refused:
                found = None
            return found, one.enrol(own[number], f"key {number}".encode(), slots, HOUR).slot

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(enrol, range(8)))
    assert sum(slot is not None for slot, _ in found) == 1
    taken = [slot for pair in found for slot in pair if slot is not None]
    assert len(set(taken)) == len(taken) == 9


def test_malformed_messages_are_counted_by_both_tickets_whatever_numbers_they_have(
    memberships: Memberships, clock: Clock
) -> None:
    """Members that leave and return keep their count. For an hour, neither is placed beside the other one."""
    tickets = [memberships.invite(slot, DAY) for slot in ("home.0", "home.1")]
    for number in range(1, MOST_BLAMED + 1):
        for ticket, key in zip(tickets, (ANNA, BEN), strict=True):
            assert memberships.enrol(ticket, key, SLOTS, HOUR).number == number
        parted = memberships.part({"home.0": number, "home.1": number})
        if number < MOST_BLAMED:
            assert parted == {}
            for slot in ("home.0", "home.1"):
                memberships.end(slot, number, LEFT)
    with pytest.raises(Refused, match=f"home.1: was parted from its neighbour home.0 after {MOST_BLAMED} malf"):
        memberships.require_in("home.1", MOST_BLAMED)
    assert parted.keys() == {"home.0", "home.1"}
    assert memberships.enrol(tickets[0], ANNA, ["home.0"], HOUR).slot == "home.0"
    assert not memberships.may_be_neighbour(tickets[1], {"home.0": False})
    assert memberships.may_be_neighbour(tickets[1], {"home.2": True})  # its holder has the run's secret
    assert memberships.enrol(tickets[1], BEN, ["home.2"], HOUR).slot == "home.2"
    clock.time += PARTED_SECONDS
    assert memberships.may_be_neighbour(tickets[1], {"home.0": False})


def test_a_slot_is_kept_for_minutes_until_its_holder_joins(memberships: Memberships, clock: Clock) -> None:
    """A host that prepares itself renews them. Afterwards the slot is kept for as long as the certificate is valid."""
    silent, slow, next_one = (memberships.invite("home.0", 3 * DAY) for _ in range(3))
    memberships.enrol(silent, ANNA, SLOTS, DAY)
    clock.time += RESERVED_SECONDS + 1
    with pytest.raises(Refused, match="its holder did not join in time"):
        memberships.require_in("home.0", 1)
    memberships.enrol(slow, BEN, SLOTS, DAY)
    for _ in range(3):
        clock.time += RESERVED_SECONDS - 1
        memberships.renew("home.0", 2, BEN, DAY)
    memberships.joined("home.0", 2)
    clock.time += DAY - 1
    with pytest.raises(Refused, match="is taken"):
        memberships.enrol(next_one, ANNA, SLOTS, DAY)


def _take_and_give(memberships: Memberships, ticket: str, key: bytes) -> None:
    found = memberships.enrol(ticket, key, SLOTS, HOUR)
    memberships.end(found.slot, found.number, "it was given back")


def test_a_ticket_that_takes_and_gives_its_slot_in_a_loop_has_to_wait(memberships: Memberships, clock: Clock) -> None:
    ticket = memberships.invite("home.0", DAY)
    for _ in range(ADMISSIONS_AT_ONCE):
        _take_and_give(memberships, ticket, ANNA)
    with pytest.raises(TooMuch, match="this ticket takes a slot too often; it may again in 6 s"):
        _take_and_give(memberships, ticket, ANNA)
    _take_and_give(memberships, memberships.invite("home.0", DAY), BEN)  # no other ticket is pending
    clock.time += 60 / ADMISSIONS_A_MINUTE
    _take_and_give(memberships, ticket, ANNA)


def test_renewals_in_a_loop_write_nothing(memberships: Memberships, clock: Clock, tmp_path: Path) -> None:
    ticket = memberships.invite("home.0", DAY)
    number = memberships.enrol(ticket, ANNA, SLOTS, HOUR).number
    memberships.joined("home.0", number)
    changes = memberships._writer.total_changes
    for _ in range(100):
        clock.time += 0.01
        assert memberships.renew("home.0", number, ANNA, HOUR).until == 1000.0 + HOUR
    assert memberships._writer.total_changes == changes
    clock.time += HOUR / 2
    assert memberships.renew("home.0", number, ANNA, HOUR).until == pytest.approx(1001.0 + 1.5 * HOUR)
    with pytest.raises(Refused, match="for its original key"):
        memberships.renew("home.0", number, BEN, HOUR)


def test_a_database_that_cannot_be_opened_or_read_is_one_line_that_names_it(
    memberships: Memberships, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exchange retries after such an error instead of failing."""
    (tmp_path / "members.sqlite").mkdir()
    with pytest.raises(StoreError, match=r"members\.sqlite: cannot be opened \("):
        Memberships(tmp_path / "members.sqlite")

    class Failing:
        in_transaction = False

        def execute(self, *_: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    calls: list[Callable[[], object]] = [
        lambda: memberships.require_in("home.0", 1),
        lambda: memberships.require_open("ticket"),
        lambda: memberships.held_by("home.0"),
        lambda: memberships.wants("ticket", ANNA, ()),
        memberships.holders,
        memberships.tickets,
        memberships.valid_tickets,
        lambda: memberships.end("home.0", 1, "it was given back"),
    ]
    with monkeypatch.context() as patch:
        for connection in ("_reader", "_writer"):
            patch.setattr(memberships, connection, Failing())
        for call in calls:
            with pytest.raises(StoreError, match=r"members\.sqlite: cannot be (read|written) \(disk I/O error\)$"):
                call()
