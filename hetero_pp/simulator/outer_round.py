"""Time of an outer round (contribute, exchange, apply) on the clocks of all members.

A member's own links transfer one message after the other. Lines that several members share (of a site, or of the
exchange) are never idle while a member could use them. So the round closes exactly when the last byte has arrived
(`all_sent`). Latency is the exception: it adds the longest one of those that share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np

from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.fleets import Fleet
from hetero_pp.simulator.pipeline import Array, GroupClock
from hetero_pp.simulator.volumes import exchange_bandwidth, is_ring, site_bandwidths

Fleets = Sequence[tuple[Fleet, GroupClock]]


def run_outer_round(spec: RunSpec, fleets: Fleets, communicates: bool) -> float:
    """Advance every member to the end of the outer round; return when it closed and the next one opened.

    The round waits only for members that stay.
    """
    for fleet, clock in fleets:
        _until(clock, "contribute", clock.free + fleet.contribute)
    closed = _carry(spec, fleets, communicates)
    for fleet, clock in fleets:
        _until(clock, "apply", clock.free + fleet.apply)
    return closed


def run_overlapped_round(spec: RunSpec, fleets: Fleets, communicates: bool, train: Callable[[], None]) -> None:
    """Advance members through an outer round while they train the next one, by `train`.

    Both uses have the full bandwidth of every line, so a round may be shorter than its lines need for all bytes.
    """
    for fleet, clock in fleets:
        _until(clock, "contribute", clock.free + fleet.contribute)
    carried = [(fleet, _beside(clock)) for fleet, clock in fleets]
    _carry(spec, carried, communicates)
    train()
    for (fleet, clock), (_, line) in zip(fleets, carried, strict=True):
        _until(clock, "wait", np.maximum(clock.free, line.free))
        _until(clock, "apply", clock.free + fleet.apply)


def _beside(clock: GroupClock) -> GroupClock:
    """Return a copy of a clock that starts at the same time; its spans have tracks of their own in a timeline."""
    other, on_span = copy.copy(clock), clock.on_span
    other.free = clock.free.copy()
    if on_span is not None:
        other.on_span = lambda track, *rest: on_span(f"{track} exchange", *rest)
    return other


def _carry(spec: RunSpec, fleets: Fleets, communicates: bool) -> float:
    """Exchange all contributions until every member has them; return when the round closed."""
    is_gathered = communicates and not is_ring(spec.config.simulate)
    closed = _send(spec, fleets) if is_gathered else _last(fleets)
    for _, clock in fleets:
        clock.free[:] = closed
    if is_gathered:
        _receive(spec, fleets)
    elif communicates:
        _pass_around(fleets)
    return closed


def seconds_to_contribute(spec: RunSpec, fleet: Fleet, communicates: bool) -> Array:
    """Return the seconds [G] from the last step of each group's first stage until its contribution has arrived."""
    sends = communicates and not is_ring(spec.config.simulate)
    return fleet.contribute[0] + (fleet.up.alone[0] if sends else 0.0)


def _send(spec: RunSpec, fleets: Fleets) -> float:
    """Send contributions; return when the exchange has all of them."""
    ready = [clock.free.copy() for _, clock in fleets]
    for fleet, clock in fleets:
        _until(clock, "send contribution", clock.free + fleet.up.alone)
    for name, bandwidth in site_bandwidths(spec, "forward"):
        of = [fleet.at_site(name) for fleet, _ in fleets]
        starts, sizes = _flat(fleets, ready, of), _flat(fleets, [fleet.up.n_bytes for fleet, _ in fleets], of)
        delay = max(float(fleet.up.delay[at].max(initial=0)) for (fleet, _), at in zip(fleets, of, strict=True))
        end = all_sent(starts, sizes, bandwidth) + delay
        for (_, clock), at in zip(fleets, of, strict=True):
            clock.free[at] = np.maximum(clock.free[at], end)
    closed, shared = _last(fleets), exchange_bandwidth(spec, "forward")
    if shared is None:
        return closed
    elsewhere = [~fleet.beside_exchange for fleet, _ in fleets]
    sizes = _flat(fleets, [fleet.up.n_bytes for fleet, _ in fleets], elsewhere)
    delay = max(float(fleet.up.delay.max()) for fleet, _ in fleets)
    return max(closed, all_sent(_flat(fleets, ready, elsewhere), sizes, shared) + delay)


def _receive(spec: RunSpec, fleets: Fleets) -> None:
    """Receive contributions. All members begin together, because the round has just closed."""
    ends = [clock.free + fleet.down.alone for fleet, clock in fleets]
    for name, bandwidth in site_bandwidths(spec, "backward"):
        of = [fleet.at_site(name) for fleet, _ in fleets]
        sizes = _flat(fleets, [fleet.down.n_bytes for fleet, _ in fleets], of)
        counts = [int(at.sum()) * fleet.count for (fleet, _), at in zip(fleets, of, strict=True)]
        shares = iter(np.split(fair_ends(sizes, bandwidth), np.cumsum(counts)[:-1]))
        for (fleet, clock), at, end in zip(fleets, of, ends, strict=True):
            own = clock.free[at] + next(shares).reshape(int(at.sum()), fleet.count) + fleet.down.delay[at]
            end[at] = np.maximum(end[at], own)
    shared = exchange_bandwidth(spec, "backward")
    if shared is not None:
        total = sum(float(fleet.down.n_bytes[~fleet.beside_exchange].sum()) * fleet.count for fleet, _ in fleets)
        last = max(float(end.max()) for end in ends)
        delay = max(float(fleet.down.delay.max()) for fleet, _ in fleets)
        late = max(0.0, float(fleets[0][1].free.min()) + total * 8 / shared + delay - last)
        ends = [end + late for end in ends]
    for (_, clock), end in zip(fleets, ends, strict=True):
        _until(clock, "receive contributions", end)


def _pass_around(fleets: Fleets) -> None:
    """Pass contributions around a ring. All begin together, and every step takes as long as its slowest link."""
    slowest = max(float(np.maximum(fleet.up.seconds, fleet.down.seconds).max()) for fleet, _ in fleets)
    up = max(float(fleet.up.delay.max()) for fleet, _ in fleets)
    down = max(float(fleet.down.delay.max()) for fleet, _ in fleets)
    for _, clock in fleets:
        _until(clock, "pass contributions on", clock.free + slowest + up + down)


def _last(fleets: Fleets) -> float:
    """Return when the last member that stays is ready."""
    return max(float(np.where(fleet.stays, clock.free, 0.0).max()) for fleet, clock in fleets)


def _until(clock: GroupClock, what: str, ends: Array) -> None:
    """Keep every member busy until `ends`, [S, G]."""
    if clock.on_span is not None:
        for stage, starts in enumerate(clock.free):
            clock.on_span(f"stage {stage}", what, 0, starts.copy(), ends[stage])
    clock.free[:] = ends


def _flat(fleets: Fleets, values: Sequence[Array], of: Sequence[Array]) -> Array:
    """Return the values of the chosen members [S] of each fleet in one row.

    Values are [S, G], or [S] if equal for all.
    """
    rows = []
    for (fleet, _), own, at in zip(fleets, values, of, strict=True):
        whole = own if own.ndim == 2 else np.repeat(own[:, None], fleet.count, axis=1)
        rows.append(whole[at].ravel())
    return np.concatenate(rows)


def all_sent(starts: Array, n_bytes: Array, bandwidth: float) -> float:
    """Return the seconds when the last one is done, in whatever order they send.

    Args: starts [n]: when each begins to send; n_bytes [n]; bandwidth in bits per second.

    It is the largest of (start + all bytes that start then or later), as the link works without a pause from some start
    on.
    """
    order = np.argsort(-starts)
    return float((starts[order] + np.cumsum(n_bytes[order]) * 8 / bandwidth).max())


def fair_ends(n_bytes: Array, bandwidth: float) -> Array:
    """Return the seconds [n] until each has its bytes, if all begin together and share the link evenly.

    While the smallest is in transit, all get as much as it does: end_i = sum_j min(bytes_i, bytes_j) over the
    bandwidth.
    """
    order = np.argsort(n_bytes)
    ascending = n_bytes[order]
    later = np.arange(len(ascending) - 1, -1, -1)
    ends = np.empty(len(ascending))
    ends[order] = (np.cumsum(ascending) + later * ascending) * 8 / bandwidth
    return ends
