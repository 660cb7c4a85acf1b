"""Faults that happen at random times until the history is to end without any."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.member import TRAINING

from replica_groups.rounds import events as e

if TYPE_CHECKING:
    from simulation.host import Host
    from simulation.member import Member
    from simulation.world import World

HOLDS_SECONDS = 40.0
"""Seconds for which a fault that ends by itself may still disturb other processes after its end."""


class FaultInjector:
    """Injects faults into members, coordinators and the store."""

    def __init__(self, world: World) -> None:
        self._world, self._faults = world, world.faults
        self.is_over = False
        faults = world.faults
        for mean, strike in (
            (faults.kills, self._kill),
            (faults.freezes, self._freeze),
            (faults.hangs, self._hang),
            (faults.cuts, self._cut),
            (faults.coordinator_kills, self._kill_coordinator),
            (faults.coordinator_freezes, self._freeze_coordinator),
            (faults.second_coordinators, self._start_second_coordinator),
            (faults.outages, self._fail_store),
            (faults.corruptions, self._corrupt),
            (faults.clock_jumps, self._jump),
            (faults.power_cuts, self._cut_power),
            (faults.idles, self._idle),
        ):
            if mean is not None:
                self._plan(mean, strike)

        self._judge = Random(f"{world.seed}: judgements")  # the other faults of a history are as without audits
        if faults.condemnations is not None:
            self._plan_judgement(faults.condemnations)

    def _plan_judgement(self, mean: float) -> None:
        self._world.timeline.after(self._judge.expovariate(1 / mean), self._condemn, mean)

    def _condemn(self, mean: float) -> None:
        """Have an audit bar a replica at a coordinator whose run has begun."""
        if self.is_over:
            return
        world, replica = self._world, self._judge.choice(self._world.rules.replicas)
        for host in [one for one in world.hosts if one.coordinator.rounds is not None and not one.is_away]:
            last, rounds = host.coordinator.last_round, self._judge.choice((1, 4, 16))
            world.condemned.add(replica)
            world.tell(f"condemned for {rounds} rounds: {replica}")
            host.receive(None, e.Condemned(replica, last, last + 1 + rounds, "an audit"))
        self._plan_judgement(mean)

    def _plan(self, mean: float, strike: object) -> None:
        self._world.timeline.after(self._world.dice.expovariate(1 / mean), self._strike, mean, strike)

    def _strike(self, mean: float, strike: object) -> None:
        if self.is_over:
            return
        assert callable(strike)
        strike()
        self._plan(mean, strike)

    def end(self) -> None:
        """End all faults and inject no more."""
        self.is_over = True
        world = self._world
        world.network.heal()
        for member in list(world.members):
            self._end_idle(member)
        world.store.fails, world.store.down_until = 0.0, 0.0

    # ---- members ----

    def _one(self) -> Member | None:
        there = self._world.members
        return self._world.dice.choice(there) if there else None

    def _kill(self) -> None:
        member = self._one()
        if member is not None:
            self._world.tell(f"killed: {member.process}")
            self.kill(member)

    def kill(self, member: Member) -> None:
        """End a process. Its launcher may report that, and may start another process."""
        world, dice = self._world, self._world.dice
        world.gone(member)
        host = member.host
        if host is not None and dice.random() < self._faults.says_died:
            incarnation = member.incarnation if member.incarnation and dice.random() < 0.5 else None
            world.timeline.after(0.05, host.receive, None, e.Died(member.slot, incarnation))
        elif host is not None and member.incarnation and dice.random() < 0.5:
            world.network.send(host.receive, None, e.Lost(member.slot, member.incarnation))
        if dice.random() < self._faults.comes_back:
            seconds = dice.choice((dice.uniform(0.5, 5.0), dice.uniform(5.0, 90.0)))
            world.timeline.after(seconds, self._come_back, member.slot)
            world.disturb(seconds + HOLDS_SECONDS, member.replica)
        else:
            world.disturb(HOLDS_SECONDS, member.replica)

    def _come_back(self, slot: str) -> None:
        if not any(member.slot == slot for member in self._world.members):
            self._world.start(slot, self._world.dice.random() >= self._faults.elsewhere)

    def _freeze(self) -> None:
        member = self._one()
        if member is None:
            return
        world, dice = self._world, self._world.dice
        seconds = dice.choice((dice.uniform(1.0, 10.0), dice.uniform(10.0, 200.0)))
        member.frozen_until = world.timeline.now + seconds
        world.tell(f"frozen for {seconds:.0f} s: {member.process}")
        world.disturb(seconds + HOLDS_SECONDS, member.replica)
        if seconds > 20.0 and dice.random() < 0.3:
            world.timeline.after(dice.uniform(5.0, seconds), world.start, member.slot, dice.random() < 0.7)

    def _hang(self) -> None:
        training = [one for one in self._world.members if one.phase == TRAINING]
        if training:
            member = self._world.dice.choice(training)
            member.hangs = True
            self._world.tell(f"hangs: {member.process}")
            self._world.disturb(self._world.rules.hang.most + HOLDS_SECONDS, member.replica)

    def _idle(self) -> None:
        """Let a member take every round, send heartbeats and contribute nothing for a while."""
        member = self._one()
        if member is None:
            return
        world = self._world
        seconds = world.dice.choice((world.dice.uniform(20.0, 100.0), world.dice.uniform(100.0, 600.0)))
        member.idles_until = world.timeline.now + seconds
        world.timeline.after(seconds, self._end_idle, member)
        world.tell(f"contributes nothing for {seconds:.0f} s: {member.process}")
        world.disturb(seconds + HOLDS_SECONDS, member.replica)

    def _end_idle(self, member: Member) -> None:
        """End the process of a member that contributes nothing."""
        if member.idles_until and not member.dead:
            member.idles_until = 0.0
            self._world.end_hung(member)

    def _cut(self) -> None:
        member = self._one()
        if member is None:
            return
        world, dice = self._world, self._world.dice
        seconds = dice.choice((dice.uniform(1.0, 10.0), dice.uniform(10.0, 100.0)))
        member.cut_until = world.timeline.now + seconds
        world.tell(f"cut off for {seconds:.0f} s: {member.process}")
        world.disturb(seconds + HOLDS_SECONDS, member.replica)
        if member.host is not None and member.incarnation and dice.random() < 0.5:
            world.network.send(member.host.receive, None, e.Lost(member.slot, member.incarnation))

    def _corrupt(self) -> None:
        """Give a member wrong parameters.

        Only one has them at a time: if all members did, replay would seem to be wrong.
        """
        member = self._one()
        world = self._world
        if member is None or any(one.is_corrupt for one in world.members):
            return
        if world.timeline.now < world.corrupt_again_at:
            return
        world.corrupt_again_at = world.timeline.now + 300.0
        world.corrupted.add(member.slot)
        member.theta, member.is_corrupt, member.wrong_rounds = world.dice.randbytes(8), True, 0
        world.tell(f"holds other bits: {member.process}")

    # ---- coordinators and the store ----

    def _host(self) -> Host | None:
        return self._world.dice.choice(self._world.hosts) if self._world.hosts else None

    def _kill_coordinator(self) -> None:
        host = self._host()
        if host is None:
            return
        world = self._world
        world.tell(f"killed: coordinator {host.number}")
        world.kill_host(host)
        if not world.hosts:
            seconds = world.dice.choice((world.dice.uniform(0.5, 5.0), world.dice.uniform(5.0, 60.0)))
            world.timeline.after(seconds, world.need_host)
            world.disturb(seconds + HOLDS_SECONDS)

    def _freeze_coordinator(self) -> None:
        host = self._host()
        if host is not None:
            seconds = self._world.dice.choice((self._world.dice.uniform(1.0, 10.0), self._world.dice.uniform(10, 120)))
            self._world.tell(f"frozen for {seconds:.0f} s: coordinator {host.number}")
            host.freeze(seconds)
            self._world.disturb(seconds + HOLDS_SECONDS)

    def _start_second_coordinator(self) -> None:
        """Start a second coordinator for a while. Some members connect to it."""
        world = self._world
        if len(world.hosts) != 1 or world.timeline.now < world.store.down_until or world.leases is not None:
            return
        world.start_host()
        seconds = world.dice.uniform(20.0, 150.0)
        for member in world.members:
            if world.dice.random() < 0.5:
                member.later(world.dice.uniform(0.1, seconds), member.wander)
        world.timeline.after(seconds, self._end_one_coordinator)
        world.disturb(seconds + HOLDS_SECONDS)

    def _end_one_coordinator(self) -> None:
        if len(self._world.hosts) > 1:
            self._world.kill_host(self._world.dice.choice(self._world.hosts))

    def _cut_power(self) -> None:
        """End every process at once, and resume the run later."""
        world, dice = self._world, self._world.dice
        world.tell("every process is killed")
        for host in list(world.hosts):
            world.kill_host(host)
        for member in list(world.members):
            world.gone(member)
        resumed = dice.uniform(1.0, 60.0)
        world.timeline.after(resumed, world.need_host)
        for slot in world.rules.slots:
            world.timeline.after(resumed + dice.uniform(0.0, 20.0), self._come_back, slot)
        world.disturb(resumed + 20.0 + HOLDS_SECONDS)

    def _fail_store(self) -> None:
        seconds = self._world.dice.uniform(1.0, 60.0)
        self._world.store.down_until = self._world.timeline.now + seconds
        self._world.tell(f"the store fails for {seconds:.0f} s")
        self._world.disturb(seconds + HOLDS_SECONDS)

    def _jump(self) -> None:
        host = self._host()
        if host is not None and not host.is_away:
            seconds = self._world.dice.choice(
                (self._world.dice.uniform(0.1, 3.0), self._world.dice.uniform(3.0, 500.0))
            )
            self._world.tell(f"clock of coordinator {host.number} jumps by {seconds:.1f} s")
            host.jump(seconds)
            self._world.disturb(HOLDS_SECONDS)
