"""The waiting room: how long hosts wait for a group to form, for which group and together with which other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from small_run import Clock

from hetero_pp.core.errors import AskAgain, Forbidden
from hetero_pp.messages.messages_pb2 import InWaitingRoom
from hetero_pp.simulator.planner.grouping import group_spares
from replica_groups.exchange import waiting_room as waiting_room_module
from replica_groups.exchange.waiting_room import HostLine, WaitingRoom

GROUPS = {"home-1": ["home-1.0", "home-1.1"], "home-2": ["home-2.0", "home-2.1"], "spot": ["spot"]}
SIZES = {"large": ["large.0", "large.1", "large.2"], "small": ["small.0", "small.1"]}
MEGABIT = 1e6
KEPT = "every free slot is kept for another host that waits"


class Waiting:
    """The waiting room of a run, and the free slots."""

    def __init__(self, groups: Mapping[str, Sequence[str]] = GROUPS) -> None:
        self.clock = Clock()
        self.waiting_room = WaitingRoom(groups, group_spares, self.clock)
        self.free = [slot for slots in groups.values() for slot in slots if slot != "spot"]

    def come(self, ticket: str, up: float = 100.0, down: float = 100.0) -> str | InWaitingRoom:
        """Arrive with a line of these Mbit/s up and down, and ask for a slot."""
        self.waiting_room.probed(ticket, up * MEGABIT, down * MEGABIT)
        return self.ask(ticket)

    def ask(self, ticket: str) -> str | InWaitingRoom:
        """Ask for a slot, and take it if one is offered."""
        found = self.waiting_room.slot_for(ticket, self.free)
        if isinstance(found, str):
            self.free.remove(found)
            self.waiting_room.has_slot(ticket)
        return found

    def settle(self, *tickets: str) -> dict[str, str | InWaitingRoom]:
        """Let the settling time pass, then let each host ask twice: the first to ask does not know the others yet."""
        self.clock.time += waiting_room_module.SETTLE_SECONDS
        first = {ticket: self.ask(ticket) for ticket in tickets}
        return {
            ticket: self.ask(ticket) if isinstance(found, InWaitingRoom) else found for ticket, found in first.items()
        }


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_a_group_forms_as_soon_as_enough_wait(waiting: Waiting) -> None:
    assert waiting.come("anna") == InWaitingRoom(here=1, needed=2, probed=True)
    assert waiting.settle("anna") == {"anna": InWaitingRoom(here=1, needed=2, probed=True)}
    assert waiting.come("ben") == InWaitingRoom(here=2, needed=2, probed=True)  # others may arrive together with ben
    assert set(waiting.settle("anna", "ben").values()) == {"home-1.0", "home-1.1"}
    assert waiting.waiting_room.here == 0


def test_who_comes_together_is_grouped_by_lines(waiting: Waiting) -> None:
    """Two slow and two fast lines make one slow and one fast group. The fast group comes first."""
    lines = {"slow": (10, 50), "fast": (900, 900), "slower": (5, 900), "faster": (1000, 1000)}
    for ticket, line in lines.items():
        waiting.come(ticket, *line)
    found = waiting.settle(*lines)
    assert {found["fast"], found["faster"]} == {"home-1.0", "home-1.1"}
    assert {found["slow"], found["slower"]} == {"home-2.0", "home-2.1"}


def test_a_slot_that_somebody_has_left_is_taken_at_once(waiting: Waiting) -> None:
    waiting.free.remove("home-1.0")
    assert waiting.ask("anna") == "home-1.1"
    assert isinstance(waiting.ask("ben"), InWaitingRoom)


def test_who_has_waited_longest_gets_a_freed_slot_unless_it_asks_no_more(waiting: Waiting) -> None:
    waiting.free.clear()
    for ticket in ("anna", "ben"):
        assert isinstance(waiting.come(ticket), InWaitingRoom)
        waiting.clock.time += 1
    waiting.free.append("home-1.0")
    for ticket in ("clara", "ben"):
        assert waiting.ask(ticket) == InWaitingRoom(here=2, needed=2, probed=ticket == "ben", why=KEPT)
    assert waiting.ask("anna") == "home-1.0"
    assert waiting.come("anna") == InWaitingRoom(here=2, needed=2, probed=True)  # it lost that slot, and is last now
    waiting.clock.time += waiting_room_module.AWAKE_SECONDS + 1
    waiting.free.append("home-1.0")
    assert waiting.ask("anna") == "home-1.0"  # ben asks no more


def test_who_does_not_ask_any_more_is_forgotten(waiting: Waiting) -> None:
    waiting.come("anna")
    waiting.clock.time += waiting_room_module.FORGET_SECONDS + 0.1
    assert waiting.come("ben") == InWaitingRoom(here=1, needed=2, probed=True)
    assert waiting.ask("anna") == InWaitingRoom(here=1, needed=2, probed=False)


def test_a_slot_is_kept_for_who_was_chosen_and_for_so_long(waiting: Waiting) -> None:
    waiting.come("anna")
    waiting.come("ben")
    waiting.clock.time += waiting_room_module.SETTLE_SECONDS
    assert waiting.ask("anna") in ("home-1.0", "home-1.1")
    assert waiting.ask("clara") == InWaitingRoom(here=0, needed=2, probed=False)  # it waits for the second group
    (left,) = set(GROUPS["home-1"]) & set(waiting.free)
    waiting.clock.time += waiting_room_module.PROMISE_SECONDS + 0.1
    assert waiting.ask("dora") == left


def test_who_was_not_chosen_waits_for_those_who_were(waiting: Waiting) -> None:
    """A chosen host may not come back."""
    waiting.free = GROUPS["home-1"].copy()
    for ticket, up in {"slow": 1.0, "gone": 50.0, "fast": 80.0}.items():
        waiting.come(ticket, up)
    waiting.clock.time += waiting_room_module.SETTLE_SECONDS
    assert waiting.ask("slow") == InWaitingRoom(here=1, needed=2, probed=True)
    assert waiting.ask("slow") == InWaitingRoom(here=1, needed=2, probed=True, why=KEPT)
    (left,) = set(GROUPS["home-1"]) - {waiting.ask("fast")}
    until = waiting.clock.time + waiting_room_module.PROMISE_SECONDS - 2.0
    while waiting.clock.time < until:
        waiting.clock.time += 2.0
        assert waiting.ask("slow") == InWaitingRoom(here=1, needed=2, probed=True, why=KEPT)
    waiting.clock.time += 2.1
    assert waiting.ask("slow") == left


def test_who_has_not_asked_for_a_while_is_not_chosen(waiting: Waiting) -> None:
    waiting.come("gone")
    waiting.clock.time += waiting_room_module.AWAKE_SECONDS - 1.0
    waiting.come("anna")
    assert waiting.settle("anna")["anna"] == InWaitingRoom(here=2, needed=2, probed=True)
    waiting.come("ben")
    assert set(waiting.settle("anna", "ben").values()) == {"home-1.0", "home-1.1"}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_groups_of_other_sizes_form_by_how_many_wait(count: int) -> None:
    waiting, tickets = Waiting(SIZES), [f"{number}" for number in range(count)]
    for ticket in tickets:
        waiting.come(ticket)
    found = waiting.settle(*tickets)
    assert set(found.values()) == {
        slot for name, slots in SIZES.items() for slot in slots if count in (5, 3 if name == "large" else 2)
    }


def _probe(waiting: Waiting, ticket: str) -> bool:
    """Measure the line of a ticket's holder. Return whether it was its turn."""
    try:
        waiting.waiting_room.begin_probe(ticket)
    except AskAgain:
        return False
    waiting.waiting_room.end_probe(ticket)
    return True


def test_a_line_is_measured_once_in_a_while(waiting: Waiting) -> None:
    assert _probe(waiting, "anna") and _probe(waiting, "ben")
    with pytest.raises(Forbidden, match="once in 120 seconds"):
        _probe(waiting, "anna")
    waiting.clock.time += waiting_room_module.PROBE_AGAIN_SECONDS + 0.1
    assert _probe(waiting, "anna")


def test_tickets_that_are_measured_again_and_again_keep_nobody_else_waiting(waiting: Waiting) -> None:
    """The attackers always ask first, and their time between two measurements is over."""
    attackers = [f"attacker {number}" for number in range(10)]
    assert all(_probe(waiting, ticket) for ticket in attackers)
    waiting.clock.time += waiting_room_module.PROBE_AGAIN_SECONDS + 0.1
    waiting.waiting_room.begin_probe(attackers[0])
    for ticket in (*attackers[1:], "anna"):
        assert not _probe(waiting, ticket)
    waiting.waiting_room.end_probe(attackers[0])
    assert not any(_probe(waiting, ticket) for ticket in attackers[1:])
    assert _probe(waiting, "anna")
    assert [_probe(waiting, ticket) for ticket in attackers[1:3]] == [True, True]


def test_where_nothing_is_free_a_host_waits_for_the_next_slot(waiting: Waiting) -> None:
    waiting.free = []
    assert waiting.come("anna") == InWaitingRoom(here=1, needed=2, probed=True)
    waiting.free = ["home-1.1"]
    assert waiting.ask("anna") == "home-1.1"


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_worst_link_of_groups_is_the_best_that_any_choice_has(stages: int) -> None:
    """A link over home lines is as fast as the slowest of its four directions.

    Sorting therefore groups similar lines.
    """
    random = np.random.default_rng(stages)
    lines = [HostLine(*pair) for pair in random.uniform(1e6, 1e9, (2 * stages, 2))]
    found = group_spares(lines, stages)
    slowest = [min(min(lines[one].up, lines[one].down) for one in group) for group in found]
    ranked = sorted(min(line.up, line.down) for line in lines)
    assert sorted(one for group in found for one in group) == list(range(2 * stages))
    assert slowest == [ranked[stages], ranked[0]]
