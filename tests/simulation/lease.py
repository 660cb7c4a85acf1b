"""Two hosts that may coordinate one run: a lease in the store changes hands, as in hetero_pp.store.lease.

9. One coordinator decides: only the holder of the newest lease writes records and claims slots.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.violation import Violation

if TYPE_CHECKING:
    from simulation.host import Host
    from simulation.world import World

TAKEOVER_SECONDS = 10.0
HEARTBEAT_SECONDS = TAKEOVER_SECONDS / 3
LOOK_SECONDS = TAKEOVER_SECONDS / 10
HELD_SHARE = 0.95
"""Share of the time for which a holder uses the store after a heartbeat. Clocks have different rates."""


class Leases:
    """The lease of a run, its holders, and the standby. There is always another host that waits to take over."""

    def __init__(self, world: World) -> None:
        self._world, self._dice = world, Random(f"{world.seed}: which host serves")
        self._number, self._heartbeat, self._acts = 1, 0, 1
        """Newest lease, its heartbeats, and the newest lease whose holder has begun."""
        self._numbers: dict[Host, int] = {}
        self._held_until: dict[Host, float] = {}
        self._rate = self._dice.uniform(0.999, 1.001)
        self._seen, self._seen_at = -1, 0.0
        world.timeline.after(LOOK_SECONDS, self._look)

    def began(self, host: Host) -> None:
        """Give the newest lease to a coordinator that begins."""
        self._acts, self._seen = self._number, -1
        self._numbers[host], self._held_until[host] = self._number, host.now + HELD_SHARE * TAKEOVER_SECONDS
        self._beat(host)

    def holds(self, host: Host) -> bool:
        """Return whether a coordinator may use the store, by its own clock."""
        return host.now < self._held_until[host]

    def wrote(self, host: Host) -> None:
        """Check a write of a coordinator."""
        if self._numbers[host] != self._acts:
            raise Violation(9, f"coordinator {host.number} writes, and another one has taken over from it")

    @property
    def _is_down(self) -> bool:
        return self._world.timeline.now < self._world.store.down_until

    def _beat(self, host: Host) -> None:
        """Begin a heartbeat, which arrives in the store later, and is answered after that."""
        if host.dead:
            return
        if host.is_away:
            self._world.timeline.after(host.frozen_until - self._world.timeline.now + 1e-3, self._beat, host)
            return
        self._world.timeline.after(HEARTBEAT_SECONDS, self._beat, host)
        self._world.timeline.after(self._dice.uniform(0.01, 0.3), self._arrive, host, host.now)

    def _arrive(self, host: Host, begun: float) -> None:
        if host.dead or self._is_down:
            return
        if self._numbers[host] == self._number:
            self._heartbeat += 1
        self._world.timeline.after(self._dice.uniform(0.01, 0.3), self._answer, host, begun, self._number)

    def _answer(self, host: Host, begun: float, newest: int) -> None:
        """Hold the lease for longer, or end the coordinator of a host that is a standby now."""
        if host.dead:
            return
        if host.is_away:
            self._world.timeline.after(
                host.frozen_until - self._world.timeline.now + 1e-3, self._answer, host, begun, newest
            )
        elif newest == self._numbers[host]:
            self._held_until[host] = max(self._held_until[host], begun + HELD_SHARE * TAKEOVER_SECONDS)
        else:
            self._world.tell(f"finds that another one has taken over: coordinator {host.number}")
            self._world.kill_host(host)

    def _look(self) -> None:
        """Let the standby read the newest heartbeat. It takes over if that has not changed for long."""
        world, now = self._world, self._rate * self._world.timeline.now
        if not self._is_down:
            if self._heartbeat != self._seen:
                self._seen, self._seen_at = self._heartbeat, now
            elif now - self._seen_at >= TAKEOVER_SECONDS:
                world.timeline.after(self._dice.uniform(0.01, 0.3), self._take_over, self._seen)
                return
        world.timeline.after(LOOK_SECONDS, self._look)

    def _take_over(self, seen: int) -> None:
        """Create the next lease. If a heartbeat arrived since the last look, let its time pass first."""
        if self._is_down:
            self._world.timeline.after(LOOK_SECONDS, self._look)
            return
        is_late = self._heartbeat != seen
        self._number, self._heartbeat = self._number + 1, 0
        self._world.timeline.after(TAKEOVER_SECONDS / self._rate if is_late else 0.0, self._serve)

    def _serve(self) -> None:
        world = self._world
        world.start_host(goes_on=bool(world.members))
        for member in world.members:
            member.later(self._dice.uniform(0.1, 15.0), member.wander)
        world.disturb(60.0)
        world.timeline.after(LOOK_SECONDS, self._look)
