"""A member with a ticket that sends its neighbour malformed messages, over gRPC and TLS: consequences for both."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from members import TIMEOUT
from small_run import GRACE, Run

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.shared import told_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError, Refused
from hetero_pp.link.protocol import Message
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import EXCLUDED, GRADIENT, AssignReply, BlobHeader, EnrolReply
from hetero_pp.messages.refusals import Kind
from hetero_pp.program.join.membership import take_slot
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.rpc.admission_client import enrol
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
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
from hetero_pp.rpc.link_end import GrpcLinkEnd
from hetero_pp.simulator.planner.grouping import group_spares
from replica_groups.exchange.admission import RunForGuests
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.host import begin_run, make_exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.memberships import MOST_BLAMED, STRANGERS, Memberships
from replica_groups.exchange.server import OpenHouse, serve_exchange
from replica_groups.exchange.waiting_room import WaitingRoom
from replica_groups.member.take_part import take_part
from replica_groups.rounds import coordinator
from replica_groups.rounds.coordinator import MOST_MALFORMED

ROUNDS = 3
SECRET = Secret("the run's secret")
HOUR = 3600.0
DEPOSIT = ExchangeClient.deposit_blob


def _spec(corpus: Path, quorum: float, *more: str) -> RunSpec:
    """Return a run of the datacenter replicas `dc` and `more`, and of the group `home`."""
    config: dict[str, Any] = {
        "name": "homes",
        "model": {"preset": "micro", "width": 16, "heads": 2, "feed_forward": 24, "layers": 2},
        "data": {"corpus": str(corpus), "sequence_length": 16, "validation_sequences": 4},
        "inner": {"steps": 2, "warmup_steps": 2, "learning_rate": 0.01},
        "checkpoints": {"every": 1},
        "outer": {"rounds": ROUNDS, "compression": {"density": "1/8"}},
        # A replica that takes part is awaited, on a busy machine too.
        "exchange": {"listen": "127.0.0.1:0", "quorum": quorum, "grace": {"least": "60 s"}},
        "replicas": [
            *({"name": name, "kind": "datacenter", "batch_size": 4} for name in ("dc", *more)),
            {"name": "home", "kind": "participants", "stages": 2, "batch_size": 4, "micro_batches": 2},
        ],
    }
    return RunSpec(RunConfig.model_validate(config), 256)


class Hosts:
    """An exchange that admits tickets, and its members.

    Each member is a thread that uses gRPC to the exchange and to neighbours.
    """

    def __init__(self, folder: Path, spec: RunSpec, stack: ExitStack) -> None:
        self.spec, self.runs = spec, folder
        self.folder = RunFolder(folder / "homes")
        self.exchange = make_exchange(spec, self.folder)
        self.memberships = Memberships(folder / "members.sqlite")
        stack.callback(self.memberships.close)
        house = OpenHouse(self.memberships, RunForGuests(*told_of(spec.config)), WaitingRoom({}, group_spares))
        server, port = serve_exchange(self.exchange, SECRET, "127.0.0.1:0", encrypted=True, open_house=house)
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))
        self.address = f"127.0.0.1:{port}"
        self.failed: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        self._tickets = [self.memberships.invite("home.1", HOUR) for _ in range(2)]
        threading.Thread(target=begin_run, args=(self.exchange, spec, self.folder, None), daemon=True).start()

    def starts(self, host: str, credentials: Credentials) -> None:
        """Start a member on a host.

        Successive hosts of a member share one folder, which keeps the optimizer's moments.
        """

        def run() -> None:
            torch.set_num_threads(1)
            member, own = self.spec.members[credentials.name], RunFolder(self.runs / credentials.name)
            connections = NetworkConnections(self.spec, member, self.address, credentials, Lines(own.lines))
            try:
                with connections:
                    take_part(self.spec, member, connections, own)
            except HeteroPPError as error:
                self.failed[host] = str(error)

        thread = threading.Thread(target=run, name=host, daemon=True)
        thread.start()
        self._threads.append(thread)

    def trusted(self, name: str) -> None:
        self.starts(name, SECRET.credentials(name, encrypted=True))

    def guest(self, host: str) -> None:
        """Let a host take home.1 by the next ticket for it."""
        issued = self._tickets.pop(0)
        ticket = make_ticket("homes", self.address, SECRET.authority, issued, time.time() + HOUR)
        self.starts(host, take_slot(ticket, self.runs / host).credentials)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        over = threading.Event()
        for _ in range(int(4 * TIMEOUT / 0.05)):
            if is_so():
                return
            assert self.exchange.runner.failure is None
            over.wait(0.05)
        raise AssertionError("it did not come to that")

    def ends(self, *failed: str) -> None:
        """Wait until every round is decided and all members have ended. No other host than `failed` has failed."""
        self.wait_until(lambda: self.exchange.coordinator.is_through or self.failed.keys() > {*failed})
        assert self.failed.keys() == {*failed}, self.failed
        for thread in self._threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        self.exchange.end_watching()


def _counted(log: ContributionLog) -> list[dict[str, bytes]]:
    """Return the digest of every included blob, by round."""
    return [
        {
            f"{one.replica} {blob.block}": blob.sha256
            for one in log.read_record(round_).contributions
            for blob in one.blobs
        }
        for round_ in range(1, ROUNDS + 1)
    ]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Liar:
    """Makes the gradients that home.1 sends in one round infinite or NaN, while `is_lying`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, round_: int) -> None:
        self.lies, self.is_lying = 0, True
        send = GrpcLinkEnd.send

        def lie(end: GrpcLinkEnd, message: Message) -> None:
            header = message.header
            if self.is_lying and header.purpose == GRADIENT and header.round == round_:
                self.lies += 1
                message = Message(header, tuple(torch.full_like(one, math.nan) for one in message.tensors))
            send(end, message)

        monkeypatch.setattr(GrpcLinkEnd, "send", lie)


def test_the_sender_of_malformed_messages_is_parted_and_the_run_comes_to_its_bits(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """The group forms again with the next host. The result has the bits of a run without an attack."""
    spec = _spec(corpus, quorum=1.0)
    hosts, liar = Hosts(tmp_path, spec, stack), Liar(monkeypatch, round_=2)
    for name in ("dc", "home.0"):
        hosts.trusted(name)
    hosts.guest("liar")
    hosts.wait_until(lambda: "liar" in hosts.failed)
    assert f"was parted from its neighbour home.0 after {MOST_BLAMED} malformed messages" in hosts.failed["liar"]
    assert hosts.exchange.coordinator.last_round == 1
    liar.is_lying = False
    hosts.guest("honest")
    hosts.ends("liar")
    told = [report for report in hosts.exchange.watch() if report.HasField("refusal")]
    refused = [(one.member, one.refusal.sender) for one in told if one.refusal.kind == Kind.MALFORMED]
    assert refused == [("home.0", "home.1")] * MOST_BLAMED
    others = RunFolder(tmp_path / "in process")
    run_in_process(spec, others, lambda report: None)
    assert _counted(hosts.exchange.log) == _counted(make_exchange(spec, others).log)


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
    died = Exchange.died
    with monkeypatch.context() as patched:
        patched.setattr(Exchange, "died", lambda *arguments: None)
        group.accuses("home.0", "home.1")
        assert group.run.exchange.coordinator.slots["home.1"].held
        patched.setattr(Exchange, "died", died)
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


def test_a_group_that_breaks_again_and_again_is_not_waited_for(group: Group) -> None:
    group.host("home.1").joins("home.1")
    for _ in range(4):
        work = group.forms()
        group.clients["home.0"].broken("home.0", work.generation, "nothing came from home.1")
    group.run.deposit(1, "dc")
    group.run.passes(GRACE.most + 1)
    assert group.run.counted(1).keys() == {"dc"}


def _without_home_in_round_2(
    corpus: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> list[dict[str, bytes]]:
    """Return the included blobs of a run in which `home` is honest, and barred from one round."""
    hosts = Hosts(folder, _spec(corpus, 0.5, "other"), stack)
    coordinator = hosts.exchange.coordinator
    monkeypatch.setattr(coordinator, "_is_barred", lambda replica, round_: (replica, round_) == ("home", 2))
    _other_waits_for_home(monkeypatch, hosts, lambda: True)
    for name in hosts.spec.members:
        hosts.trusted(name)
    hosts.ends()
    return _counted(hosts.exchange.log)


def _other_waits_for_home(monkeypatch: pytest.MonkeyPatch, hosts: Hosts, is_barred: Callable[[], bool]) -> None:
    """Let `other` contribute to round 2 once `home` is barred, and to round 3 once `home` trains it.

    Otherwise a round may close without the group.
    """
    home = hosts.exchange.coordinator.replicas["home"]

    def waits(client: ExchangeClient, header: BlobHeader, data: bytes, caller: Caller) -> None:
        if (header.replica, header.round) == ("other", 2):
            hosts.wait_until(is_barred)
        if (header.replica, header.round) == ("other", 3):
            hosts.wait_until(lambda: home.round == 3 or hosts.exchange.coordinator.last_round == 3)
        DEPOSIT(client, header, data, caller)

    monkeypatch.setattr(ExchangeClient, "deposit_blob", waits)


def test_a_trusted_group_whose_link_carries_malformed_messages_is_barred_and_the_run_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stack: ExitStack
) -> None:
    """The group takes part again afterwards. All bits are those of a run without the group in that round."""
    monkeypatch.setattr(coordinator, "BARRED_ROUNDS", 1)
    expected = _without_home_in_round_2(corpus, tmp_path / "expected", monkeypatch, stack)
    hosts, liar = Hosts(tmp_path / "lied to", _spec(corpus, 0.5, "other"), stack), Liar(monkeypatch, round_=2)
    home = hosts.exchange.coordinator.replicas["home"]
    _other_waits_for_home(monkeypatch, hosts, lambda: home.barred_until == 3)
    for name in hosts.spec.members:
        hosts.trusted(name)
    hosts.ends()
    assert liar.lies >= MOST_MALFORMED
    found = _counted(hosts.exchange.log)
    assert [sorted(one) for one in found] == [sorted(one) for one in expected]
    assert found == expected
    told = [one.membership_event for one in hosts.exchange.watch() if one.membership_event.what == EXCLUDED]
    assert [(one.replica, one.slot, one.round) for one in told] == [("home", "home.1", 2)]
    cause = "round 2: home.0 and home.1 exchanged 3 malformed messages (malformed data from home.1: "
    assert told[0].cause.startswith(cause)
    assert told[0].cause.endswith("): home takes part in no round before 3, unless a quorum needs it")


def test_a_run_ends_by_malformed_messages_only_if_a_quorum_needs_their_replica(tmp_path: Path) -> None:
    """Training has most likely diverged and would diverge again, and no other cause is known."""
    run = Run(tmp_path, {"dc": 1, "home": 2}, quorum=1.0)
    for number in range(MOST_MALFORMED):
        assert run.exchange.runner.failure is None
        if number:
            run.exchange.join("home.0", "")
        with ThreadPoolExecutor() as threads:
            work, _ = threads.map(lambda name: run.exchange.assign(name, 0), ("home.0", "home.1"))
        run.exchange.broken("home.0", work.generation, "a coefficient is not finite", "home.1")
    assert run.exchange.runner.failure == (
        "round 1: home.0 and home.1 exchanged 3 malformed messages (a coefficient is not finite); without home, 1 of 2 "
        "needed replicas are left: check whether training diverged, and the memory of both machines"
    )
