"""A member with a ticket that sends its neighbour malformed messages, over gRPC and TLS: consequences for both."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from members import TIMEOUT
from small_run import Run

from hetero_pp.core.errors import Refused
from hetero_pp.messages.messages_pb2 import EXCLUDED, AssignReply, EnrolReply
from hetero_pp.rpc.admission_client import enrol
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import (
    Credentials,
    Identity,
    Secret,
    Ticket,
    as_text,
    make_ticket,
    new_key,
    signing_request,
)
from hetero_pp.simulator.planner.grouping import group_spares
from replica_groups.exchange.admission import RunForGuests
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.memberships import MOST_BLAMED, STRANGERS, Memberships
from replica_groups.exchange.server import OpenHouse, serve_exchange
from replica_groups.exchange.waiting_room import WaitingRoom
from replica_groups.rounds import coordinator
from replica_groups.rounds.coordinator import MOST_MALFORMED

SECRET = Secret("the run's secret")
HOUR = 3600.0


class Group:
    """The exchange of small_run over gRPC, with groups of two and three stages and slots for ticket holders."""

    def __init__(self, folder: Path, stack: ExitStack, groups: Mapping[str, int]) -> None:
        self.run, self._stack = Run(folder / "log", {"dc": 1, **groups}, quorum=1 / 3), stack
        self.memberships = Memberships(folder / "members.sqlite")
        stack.callback(self.memberships.close)
        house = OpenHouse(self.memberships, RunForGuests('{"name": "run"}', {}), WaitingRoom({}, group_spares))
        server, port = serve_exchange(self.run.exchange, SECRET, "127.0.0.1:0", encrypted=True, open_house=house)
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))
        self.address = f"127.0.0.1:{port}"
        for group, stages in groups.items():
            for stage in range(stages):
                self.run.exchange.died(f"{group}.{stage}", "its host is not needed", None)
        self.clients: dict[str, ExchangeClient] = {}
        """By slot, the client of its present holder."""

    def trusted(self, name: str) -> None:
        """Let a host with the run's secret take a slot."""
        self._joins(SECRET.credentials(name, encrypted=True))

    def _joins(self, credentials: Credentials) -> None:
        client = ExchangeClient(self.address, credentials, "run", timeout=TIMEOUT)
        self._stack.callback(client.close)
        client._incarnation = client.join(credentials.name, "")
        self.clients[credentials.name] = client

    def host(self, slot: str | None = None) -> Host:
        issued = self.memberships.invite(slot, HOUR)
        return Host(self, make_ticket("run", self.address, SECRET.authority, issued, time.time() + HOUR))

    def forms(self, group: str = "home") -> AssignReply:
        """Let all members of a group ask for work; return the assignment of its first one."""
        members = [name for name in self.clients if name.startswith(f"{group}.")]
        for name in members:
            if not self.run.exchange.coordinator.slots[name].held:
                self.clients[name]._incarnation = self.clients[name].join(name, "")
        with ThreadPoolExecutor() as threads:
            return next(iter(threads.map(lambda name: self.clients[name].assign(name, 0), members)))

    def accuses(self, slot: str, other: str, times: int = MOST_BLAMED) -> None:
        """Let the holder of a slot say that its neighbour sent malformed messages, each time the group has formed."""
        for _ in range(times):
            work = self.forms(slot.partition(".")[0])
            self.clients[slot].broken(slot, work.generation, "a cause", other)


class Host:
    """A home with a ticket."""

    def __init__(self, group: Group, ticket: Ticket) -> None:
        self._group, self._ticket, self._key = group, ticket, new_key()

    def enrols(self) -> EnrolReply:
        return enrol(self._group.address, self._ticket.identity, signing_request(self._key))

    def joins(self, slot: str) -> None:
        """Take a slot by the ticket and join. It has to be the one that is expected."""
        reply = self.enrols()
        assert reply.slot == slot
        identity = Identity(reply.certificate, as_text(self._key), SECRET.authority.certificate)
        self._group._joins(Credentials(slot, identity=identity))

    def may_return(self) -> bool:
        """Return whether its ticket is valid still."""
        return not self._group.memberships._ticket(self._ticket.id)[3]


@pytest.fixture
def group(tmp_path: Path, stack: ExitStack) -> Group:
    """A group whose first stage has the run's secret. A ticket holder has the second one."""
    group = Group(tmp_path, stack, {"home": 2})
    group.trusted("home.0")
    return group


def test_members_are_told_the_holders_beside_them(group: Group) -> None:
    group.host("home.1").joins("home.1")
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda one: one[1].assign(one[0], 0), group.clients.items())
    assert (first.HasField("upstream_holder"), first.downstream_holder) == (False, 1)
    assert (second.upstream_holder, second.HasField("downstream_holder")) == (0, False)
    assert second.HasField("upstream_holder")


def test_a_revoked_slot_is_vacant_at_the_next_heartbeat_of_its_neighbour(group: Group) -> None:
    """The heartbeat's answer says that the neighbour's links are over, so it drops them at once."""
    group.host("home.1").joins("home.1")
    work = group.forms()
    group.memberships.revoke("home.1")
    assert group.clients["home.0"].heartbeat("home.0", work.round, work.generation).suspended == work.generation
    assert not group.run.exchange.coordinator.slots["home.1"].held


def test_a_member_is_blamed_once_a_generation_and_by_its_neighbours_alone(group: Group) -> None:
    group.host("home.1").joins("home.1")
    work = group.forms()
    with pytest.raises(Refused, match="blames dc, which is not a neighbouring stage"):
        group.clients["home.1"].broken("home.1", work.generation, "a cause", "dc")
    for _ in range(MOST_BLAMED + 1):
        group.clients["home.1"].broken("home.1", work.generation, "a cause", "home.0")
    assert group.memberships.held_by("home.1") is not None


@pytest.mark.parametrize("accuser", ["home.0", "home.1"])
def test_a_ticket_loses_its_slot_beside_the_operator_and_no_more_whoever_accuses(group: Group, accuser: str) -> None:
    """The operator's member keeps its slot. The next ticket takes that of the parted one, which waits."""
    parted, other = group.host("home.1"), group.host("home.1")
    parted.joins("home.1")
    group.accuses(accuser, "home.0" if accuser == "home.1" else "home.1")
    coordinator = group.run.exchange.coordinator
    assert [coordinator.slots[name].held for name in ("home.0", "home.1")] == [accuser == "home.1", False]
    assert group.run.exchange.runner.failure is None
    with pytest.raises(Refused, match=f"home.1: was parted from its neighbour home.0 after {MOST_BLAMED} malformed"):
        group.clients["home.1"].join("home.1", "")
    waits = parted.enrols()
    assert (
        waits.in_waiting_room.why
        == "waiting for a slot that is not beside a host with which it exchanged malformed messages"
    )
    other.joins("home.1")
    assert group.forms().round == 1
    assert parted.may_return()


def test_the_next_ticket_takes_a_slot_before_the_exchange_has_heard_that_its_holder_is_parted(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memberships end an admission first. The newcomer is no second process of the slot."""
    parted, other = group.host("home.1"), group.host("home.1")
    parted.joins("home.1")
    end = Exchange.end_incarnation
    with monkeypatch.context() as patched:
        patched.setattr(Exchange, "end_incarnation", lambda *arguments: None)
        group.accuses("home.0", "home.1")
        assert group.run.exchange.coordinator.slots["home.1"].held
        patched.setattr(Exchange, "end_incarnation", end)
        other.joins("home.1")
    assert group.forms().round == 1


def test_a_liar_with_two_tickets_costs_an_honest_home_its_slot_and_not_its_ticket(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Whatever the liar says, and whether it sends malformed messages itself: nobody can know which end lies.

    The honest home is placed away from both tickets of the liar, and trains there.
    """
    group = Group(tmp_path, stack, {"home": 2, "more": 3})
    first, second, honest = group.host(), group.host(), group.host()
    first.joins("home.0")
    honest.joins("home.1")
    group.accuses("home.0", "home.1")
    del group.clients["home.0"], group.clients["home.1"]
    second.joins("home.0")  # before the honest home is back, which finds another liar beside its slot
    honest.joins("home.1")
    group.accuses("home.1", "home.0")  # now the honest home finds that the liar's messages are malformed
    del group.clients["home.0"], group.clients["home.1"]
    first.joins("home.0")
    honest.joins("more.0")  # home.1 is beside the first ticket
    second.joins("home.1")
    assert [one.may_return() for one in (first, second, honest)] == [True] * 3
    group.host().joins("more.1")
    group.host().joins("more.2")
    assert group.forms("more").round == 1


def test_a_ticket_that_strangers_were_parted_from_is_revoked(tmp_path: Path, stack: ExitStack) -> None:
    """Two of them may be one liar. None of them loses its own ticket."""
    group = Group(tmp_path, stack, {"home": 2, "more": 2, "most": 2, "last": 2})
    liar, slot_transitions = group.host(), ("home.0", "more.0", "most.0")
    hosts = [group.host(slot) for slot in slot_transitions]
    for host, slot in zip(hosts, slot_transitions, strict=True):
        assert liar.may_return()
        host.joins(slot)
        liar.joins(beside := slot.replace("0", "1"))
        group.accuses(slot, beside)
        del group.clients[slot], group.clients[beside]
        host.joins(slot)
    assert not liar.may_return()
    with pytest.raises(Refused, match="the ticket was revoked"):
        liar.enrols()
    assert all(host.may_return() for host in hosts)
    assert [one.ended for one in group.memberships.holders() if one.slot == "most.1"] == [
        f"{STRANGERS} neighbours with different tickets had malformed messages on their links to it"
    ]


@pytest.mark.parametrize("quorum", [1.0, 0.5])
def test_malformed_messages_end_a_run_if_a_quorum_needs_their_replica_and_else_bar_that(
    quorum: float, tmp_path: Path
) -> None:
    """Training has most likely diverged and would diverge again, and no other cause is known."""
    run = Run(tmp_path, {"dc": 1, "home": 2}, quorum)
    for number in range(MOST_MALFORMED):
        assert run.exchange.runner.failure is None
        if number:
            run.exchange.join("home.0", "")
        with ThreadPoolExecutor() as threads:
            work, _ = threads.map(lambda name: run.exchange.assign(name, 0), ("home.0", "home.1"))
        run.exchange.broken("home.0", work.generation, "a coefficient is not finite", "home.1")
    found = "round 1: home.0 and home.1 exchanged 3 malformed messages (a coefficient is not finite)"
    if quorum == 1.0:
        assert run.exchange.runner.failure == (
            f"{found}; without home, 1 of 2 needed replicas are left: check whether training diverged, and the memory "
            "of both machines"
        )
        return
    last = coordinator.BARRED_ROUNDS + 1
    assert run.exchange.runner.failure is None
    [told] = [one for one in run.told() if one.what == EXCLUDED]
    assert (told.replica, told.slot, told.round) == ("home", "home.1", 1)
    assert told.cause == f"{found}: home takes part in no round before {last}, unless a quorum needs it"
    run.deposit(1, "dc")
    assert run.counted(1).keys() == {"dc"}
