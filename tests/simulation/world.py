"""A simulated run: coordinators, members, a store and faults on a simulated clock. One seed gives one history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from simulation.dice import (
    Faults,
    draw_condemnations,
    draw_faults,
    draw_fragments,
    draw_idles,
    draw_optional,
    draw_resumes,
    draw_rules,
    draw_standby,
)
from simulation.faults import FaultInjector
from simulation.host import Host
from simulation.invariants import Invariants
from simulation.lease import Leases
from simulation.member import Member
from simulation.network import Network
from simulation.stores import Disks, Store
from simulation.timeline import Timeline
from simulation.training import Trainings
from simulation.violation import Violation

from hetero_pp.messages.messages_pb2 import RoundRecord
from replica_groups.rounds.coordinator import UNAWAITED_FACTOR

ROUND_SECONDS = 60.0
"""Seconds of faults per round. After that, the run is left without faults."""
STUCK_SECONDS = 300.0
"""Seconds beyond the limit of a round.

Without faults, a round must close within this time, and rounds must include every replica that is present.
"""
BY_HAND = 0.3
"""Share of ended coordinators that are restarted by hand instead of by their launcher."""
KEPT_BLOBS = 100
"""Rounds whose blobs are kept. No saved state is older."""

Tells = Callable[[str], object]


@dataclass(frozen=True)
class History:
    """The results of a seed."""

    seed: int
    rounds: int
    violation: str | None = None
    seconds: float = 0.0
    """Duration on the simulated clock."""
    events: int = 0
    counted: int = 0
    live: int = 0
    """Number of times that a replica was present during a whole round. `counted` is how often the round included it."""
    are_light: bool = False
    """Whether faults were rare."""


class World:
    """All processes of a simulated run, with the store, the network and the clock."""

    def __init__(self, seed: int, rounds: int, tells: Tells | None = None, faults: Faults | None = None) -> None:
        self.seed, self.rounds, self.tells = seed, rounds, tells
        self.dice = Random(seed)
        self.timeline = Timeline()
        self.rules = draw_optional(Random(f"{seed}: who comes and goes"), draw_rules(self.dice))
        self.rules = draw_resumes(Random(f"{seed}: who resumes"), self.rules)
        self.rules = draw_fragments(Random(f"{seed}: fragments"), self.rules)
        drawn = draw_idles(Random(f"{seed}: who idles"), draw_faults(self.dice))
        drawn = draw_condemnations(Random(f"{seed}: who is condemned"), drawn)
        drawn = draw_standby(Random(f"{seed}: whether a host waits"), drawn)
        self.faults = drawn if faults is None else faults
        self.states_every = self.dice.choice((1, 1, 2, 3))
        self.slots_of = {replica: self.rules.slots_of(replica) for replica in self.rules.replicas}
        self.invariants = Invariants(self)
        self.network = Network(self.timeline, self.dice, self.faults)
        self.store = Store(self.timeline, self.dice, self.faults.store_fails, self._decided)
        self.disks = Disks()
        self.trainings = Trainings(self)
        self.hosts: list[Host] = []
        self.members: list[Member] = []
        self.corrupt_again_at = 0.0
        self.corrupted: set[str] = set()
        """Slots of which a member once held wrong parameters."""
        self.condemned: set[str] = set()
        """Replicas that an audit once condemned."""
        self.barred_until: dict[str, int] = {}
        """First round that a replica may take part in again, by replica."""
        self._number = 0
        self._calm_since = dict.fromkeys(self.rules.replicas, 0.0)
        """Time at which the last disturbance of each replica ended, or will end."""
        self._counted_at = dict.fromkeys(self.rules.replicas, 0.0)
        self._stuck_at = 0.0
        self._decided_at = 0.0
        self._counted = self._live = 0
        self.leases = Leases(self) if self.faults.has_standby else None
        self.start_host(goes_on=False)
        for slot in self.rules.slots:
            seconds = self.dice.uniform(0.0, 5.0) if self.dice.random() < 0.9 else self.dice.uniform(0.0, 100.0)
            self.timeline.after(seconds, self.start, slot, True)
            self.disturb(seconds + 10.0, self.rules.slots[slot])
        self.injector = FaultInjector(self)

    # ---- a history ----

    def play(self) -> History:
        """Simulate all rounds, until every process has ended."""
        violation = None
        try:
            self._play()
        except Violation as found:
            violation = f"seed {self.seed}, round {self.store.last + 1}: {found}"
            self.tell(violation)
        done, now = self.store.last, self.timeline.now
        happened = self.timeline.happened
        return History(self.seed, done, violation, now, happened, self._counted, self._live, self.faults.are_light)

    def _play(self) -> None:
        self._stuck_at = self._patience
        calm_at = ROUND_SECONDS * self.rounds
        while not self._is_over and self.timeline.go_on():
            if self.timeline.now > self._stuck_at:
                self._look_whether_stuck()
            if not self.injector.is_over and (self.timeline.now > calm_at or self.store.last == self.rounds):
                self._calm_down()

    @property
    def _is_over(self) -> bool:
        if self.store.last < self.rounds or not all(member.stays for member in self.members):
            return False
        return all(host.coordinator.is_through for host in self.hosts)

    @property
    def _patience(self) -> float:
        return self.rules.limit + STUCK_SECONDS

    def _look_whether_stuck(self) -> None:
        there = [replica for replica in self.rules.replicas if self._is_well(replica)]
        among = self.rules.replicas if self.injector.is_over else there
        enough = sorted(self._calm_since[one] for one in among)[: self.rules.needed_of(among)]
        self._stuck_at = max(self._decided_at, *enough, 0.0) + self._patience
        if self.timeline.now <= self._stuck_at:
            return
        self._stuck_at = self.timeline.now + self._patience
        if self.store.last == self.rounds:
            left = [member.process for member in self.members]
            raise Violation(6, f"the run is over, and {left} do not end")
        if self.injector.is_over:
            raise Violation(6, f"nothing goes wrong any more, and the round does not close with {there}")
        if len(there) >= self.rules.needed_of(there) and self._are_hosts_well():
            raise Violation(6, f"{there} are there, and the round does not close")

    def _are_hosts_well(self) -> bool:
        if len(self.hosts) != 1 or (self.leases is not None and not self.leases.holds(self.hosts[0])):
            return False
        return not self.hosts[0].is_away and self.timeline.now >= self.store.down_until

    def _is_well(self, replica: str) -> bool:
        well = {member.slot for member in self.members if member.is_well}
        return all(slot in well for slot in self.slots_of[replica])

    def _calm_down(self) -> None:
        """End all faults and start every missing process. From now on the run has to reach its end."""
        self.tell("nothing goes wrong any more")
        self.injector.end()
        for host in self.hosts[1:]:
            self.kill_host(host)
        self.need_host()
        for slot in self.rules.slots:
            if not any(member.slot == slot for member in self.members):
                self.start(slot, True)
        self.disturb(200.0)

    # ---- events of the run ----

    def next_number(self) -> int:
        """Return a new number."""
        self._number += 1
        return self._number

    def tell(self, what: str) -> None:
        """Report a line of the history to its reader."""
        if self.tells is not None:
            self.tells(f"{self.timeline.now:10.2f}  {what}")

    def disturb(self, seconds: float, replica: str | None = None) -> None:
        """Allow a replica, or all of them, to make no progress for so many seconds."""
        until = self.timeline.now + seconds
        for name in self.rules.replicas if replica is None else [replica]:
            self._calm_since[name] = max(self._calm_since[name], until)

    def need_host(self) -> None:
        """Start a coordinator unless there is one. Try again if the store cannot be read."""
        if self.hosts or self.leases is not None:  # the standby begins by itself
            return
        if self.timeline.now < self.store.down_until:
            self.timeline.after(1.0, self.need_host)
        else:
            self.start_host(goes_on=bool(self.members), meets=self.dice.random() < BY_HAND)

    def start_host(self, goes_on: bool = True, meets: bool = False) -> Host:
        """Start a coordinator that resumes where the store says.

        If the run `goes_on`, members are presumed to be present. With `meets`, they are presumed so once the first of
        them appears.
        """
        host = Host(self, self.next_number(), goes_on, meets)
        self.hosts.append(host)
        if self.leases is not None:
            self.leases.began(host)
        self.tell(f"begins after round {self.store.last}: coordinator {host.number}")
        return host

    def kill_host(self, host: Host) -> None:
        """End a coordinator. This may happen at any instruction."""
        host.dead = True
        self.hosts.remove(host)
        self.invariants.ended(host)

    def start(self, slot: str, has_state: bool) -> None:
        """Start a process. With `has_state` it loads the state that an earlier process of the slot saved."""
        member = Member(self, slot, self.next_number(), has_state)
        self.members.append(member)
        self.tell(f"begins after round {member.holds}: {member.process}")

    def gone(self, member: Member) -> None:
        """End a process."""
        if not member.dead:
            member.die()
            self.members.remove(member)

    def end_hung(self, member: Member) -> None:
        """End a member that hangs, as its launcher does after its incarnation is over. Start another one."""
        member.hangs = False
        self.injector.kill(member)
        if self.injector.is_over and not any(one.slot == member.slot for one in self.members):
            self.start(member.slot, True)

    def _decided(self, record: RoundRecord) -> None:
        self.invariants.decided(record)
        now, before = self.timeline.now, self._decided_at
        self.tell(f"round {record.round} is decided: {', '.join(one.replica for one in record.contributions)}")
        for one in record.contributions:
            self._counted_at[one.replica] = now
        for replica in self.rules.replicas:
            self._take_stock(replica, before, record)
        self._decided_at = now
        if record.round % KEPT_BLOBS == 0:
            self.store.forget_blobs_before(record.round - KEPT_BLOBS)

    def _take_stock(self, replica: str, before: float, record: RoundRecord) -> None:
        """Require that rounds include a replica that is present, at least now and then."""
        if record.round < self.barred_until.get(replica, 0):
            self._calm_since[replica] = self.timeline.now
            return
        if self._calm_since[replica] > before or not self._is_well(replica):
            return
        self._live += 1
        self._counted += self._counted_at[replica] == self.timeline.now
        calm = max(self._counted_at[replica], self._calm_since[replica])
        patience = self._patience + UNAWAITED_FACTOR * self.rules.grace.most
        if self.timeline.now - calm > patience and before > calm:
            raise Violation(6, f"{replica} is there, and is not counted any more: round {record.round}")


def play(seed: int, rounds: int, tells: Tells | None = None, faults: Faults | None = None) -> History:
    """Return the history of a seed, which is always the same."""
    return World(seed, rounds, tells, faults).play()
