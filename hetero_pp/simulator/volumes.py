"""Bytes that every member sends and receives in an outer round, by the way of exchange, with the codec's real sizes.

With R replicas and a contribution of m bytes (N bytes if it is dense), each replica

    gather              sends m, receives (R - 1) m       through the exchange, or an object store
    parameter_server    sends m, receives one aggregate
    ring_all_gather     sends and receives (R - 1) m      own and others' are passed on
    ring_all_reduce     sends and receives 2 (R - 1) N / R
    sparse_ring         sends and receives (s_1 + ... + s_R-1 + (R - 1) s_R) / R, where h contributions sum to s_h

`launch` uses `gather`. With an object store as the exchange it is the deployment of SparseLoCo's Appendix C. The others
are the topologies of SparseLoCo's Figure 2, and one that sums sparse contributions along the ring. The bytes that
replicas really sent are measured by `hetero_pp/outer/volume.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

import numpy as np

from hetero_pp.config.lines import LineSpec, check_kind
from hetero_pp.config.links import EXCHANGE, Direction, LinkShape, exchange_link_name
from hetero_pp.core.errors import ConfigError
from hetero_pp.link.ledger import raw_frames, wire_bytes
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.outer.volume import Volume
from hetero_pp.pseudo_gradient.contribution import BlobAddress, blob_bytes
from hetero_pp.run.simulate_section import SimulateSettings
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.simulator.loads import Messages, blob_sizes, exchange_messages, wanted_blocks
from hetero_pp.simulator.pipeline import Array


@dataclass(frozen=True)
class Crossing:
    """One direction of the links from a replica's members to the exchange, in a round."""

    n_bytes: Array
    """Bytes on the wire, [S]."""
    seconds: Array
    """Seconds that they occupy a link, [S, G]; a site's shared link, as if no other member used it."""
    delay: Array
    """Seconds of latencies and mean jitter, [S, 1]."""

    @property
    def alone(self) -> Array:
        """Seconds from begin to end if the link is not shared, [S, G]."""
        return self.seconds + self.delay


RINGS = ("ring_all_gather", "ring_all_reduce", "sparse_ring")
"""Values of `simulate.exchange` with which replicas pass contributions on to each other, without an exchange."""


def is_ring(simulate: SimulateSettings) -> bool:
    """Return whether contributions go round a ring of replicas."""
    return simulate.exchange in RINGS


def wire_bytes_of(messages: Iterable[tuple[int, int]]) -> float:
    """Return the bytes on the wire of messages given as (payload bytes, number of such messages)."""
    return float(sum(times * wire_bytes(raw_frames(size)) for size, times in messages))


def check_exchange(spec: RunSpec) -> None:
    """Raise ConfigError for impossible sites, shared lines or rings."""
    simulate = spec.config.simulate
    seen: set[str] = set()
    for name, site in simulate.sites.items():
        key = ("simulate", "sites", name)
        check_kind(site.uplink, spec.config.links, (*key, "uplink"), "links")
        for one in site.members:
            found = {member.name for member in spec.members.values() if one in (member.name, member.replica.name)}
            if not found:
                raise ConfigError((*key, "members"), f"found `{one}`, expected members or replicas of this file")
            if seen & found:
                raise ConfigError((*key, "members"), f"found {min(seen & found)} at two sites, expected it at one")
            seen |= found
    for line in spec.lines.values():
        if both := seen & set(line.members):
            raise ConfigError(
                ("simulate", "sites"), f"found {min(both)}, which has a line, expected it under the top-level `sites`"
            )
        _check_shared(spec, line)
    if line_of_exchange(spec) is not None and simulate.exchange_bandwidth is not None:
        raise ConfigError(
            ("simulate", "exchange_bandwidth"), "found this key and `exchange.line`, expected only one of them"
        )
    if is_ring(simulate):
        _check_ring(spec)


def _check_shared(spec: RunSpec, line: LineSpec) -> None:
    """Raise ConfigError if a member of a shared line stands for several replicas."""
    for member in (spec.members[name] for name in line.members if name in spec.members):
        fleet = spec.config.simulate.fleets.get(member.replica.name)
        if len(line.members) > 1 and fleet is not None and fleet.count > 1:
            raise ConfigError(
                ("sites", line.name, "members"),
                f"found {member.name}, one of {fleet.count} replicas in simulate.fleets, expected a single replica",
            )


def _check_ring(spec: RunSpec) -> None:
    simulate, key = spec.config.simulate, ("simulate", "exchange")
    if any(len(replica.members) > 1 for replica in spec.config.replicas):
        raise ConfigError(
            key, f"found `{simulate.exchange}` with participant groups, expected datacenter replicas only"
        )
    if simulate.exchange == "ring_all_reduce" and spec.config.outer.compression.density < 1:
        raise ConfigError(
            key,
            f"found `ring_all_reduce` at density {spec.config.outer.compression.density:.3g}, expected 1: sums of "
            "sparse contributions grow on their way, as in `sparse_ring`; `ring_all_gather` forwards them unchanged",
        )
    shared = [line for line in spec.lines.values() if len(line.members) > 1 or EXCHANGE in line.members]
    if simulate.sites or shared or simulate.exchange_bandwidth is not None:
        raise ConfigError(
            key, f"found `{simulate.exchange}`, expected no sites, no exchange.line and no exchange_bandwidth beside it"
        )


def crossing(
    spec: RunSpec, members: Sequence[MemberSpec], direction: Direction, bandwidth: Array | None, count: int
) -> Crossing:
    """Return what the members of each of `count` equal replicas send (`forward`) or receive.

    `bandwidth` [S, G] replaces the bandwidth of their links. Every message follows the one before, and waits for the
    latency.
    """
    sizes, seconds, delays = [], [], []
    for row, member in enumerate(members):
        shape = link_of(spec, member, direction)
        messages = outer_messages(spec, member)[direction]
        wire = wire_bytes_of(messages)
        drawn = bandwidth is not None and site_of(spec, member) is None
        rate = bandwidth[row] if bandwidth is not None and drawn else (shape.bandwidth or np.inf)
        sizes.append(wire)
        seconds.append(np.broadcast_to(wire * 8 / rate, (count,)))
        delays.append([sum(times for _, times in messages) * (shape.latency + shape.jitter / 2)])
    return Crossing(np.array(sizes), np.stack(seconds), np.array(delays))


def site_of(spec: RunSpec, member: MemberSpec) -> str | None:
    """Return the name of the site whose uplink, or line, the member shares."""
    for name, site in spec.config.simulate.sites.items():
        if member.name in site.members or member.replica.name in site.members:
            return name
    passed = spec.links[exchange_link_name(member.name)].source_line
    return passed.name if passed in _shared_lines(spec) else None


def link_of(spec: RunSpec, member: MemberSpec, direction: Direction) -> LinkShape:
    """Return the shape of the path to the exchange: the member's own link and line, or those of its site."""
    site = site_of(spec, member)
    if site in spec.config.simulate.sites:
        return spec.config.links[spec.config.simulate.sites[site].uplink].shape(direction)
    link = spec.links[exchange_link_name(member.name)]
    return replace(link.shape(direction), bandwidth=link.bottleneck(direction))


def site_bandwidths(spec: RunSpec, direction: Direction) -> Iterator[tuple[str, float]]:
    """Return the names and bandwidths of sites whose uplink or line is limited in this direction, seen from members."""
    found = {
        name: spec.config.links[site.uplink].shape(direction).bandwidth
        for name, site in spec.config.simulate.sites.items()
    }
    found |= {line.name: line.bandwidth("up" if direction == "forward" else "down") for line in _shared_lines(spec)}
    return ((name, bandwidth) for name, bandwidth in found.items() if bandwidth is not None)


def exchange_bandwidth(spec: RunSpec, direction: Direction) -> float | None:
    """Return the bits per second of all members together to the exchange (`forward`) or from it; None is unlimited."""
    line = line_of_exchange(spec)
    if line is None:
        return spec.config.simulate.exchange_bandwidth
    return line.bandwidth("down" if direction == "forward" else "up")


def is_beside_exchange(spec: RunSpec, member: MemberSpec) -> bool:
    """Return whether a member is at the exchange's own site, so that it needs no line to reach the exchange."""
    line = line_of_exchange(spec)
    return line is not None and member.name in line.members


def line_of_exchange(spec: RunSpec) -> LineSpec | None:
    """Return the line that the YAML gives the exchange."""
    return next((line for line in spec.lines.values() if EXCHANGE in line.members), None)


def _shared_lines(spec: RunSpec) -> list[LineSpec]:
    """Return lines that several members share, at sites other than the exchange's."""
    return [line for line in spec.lines.values() if len(line.members) > 1 and EXCHANGE not in line.members]


def outer_messages(spec: RunSpec, member: MemberSpec) -> Messages:
    """Return the messages that a member sends and receives, as (bytes, number of them)."""
    simulate = spec.config.simulate
    counts = {name: fleet.count for name, fleet in simulate.fleets.items()}
    gathered = exchange_messages(spec, member, counts)
    replicas = replica_count(spec)
    own = sum(size for size, _ in gathered["forward"])
    match simulate.exchange:
        case "gather":
            return gathered
        case "parameter_server":
            sizes = aggregate_bytes(spec)
            return {
                "forward": gathered["forward"],
                "backward": [(sizes[block], 1) for block in sorted(wanted_blocks(spec, member))],
            }
        case "ring_all_gather":
            passed_on = [(own, replicas - 1)]
        case "ring_all_reduce":
            passed_on = [(-(-own // replicas), 2 * (replicas - 1))]
        case "sparse_ring":
            parts = [-(-sum(sum_bytes(spec, count).values()) // replicas) for count in range(1, replicas + 1)]
            passed_on = [*((part, 1) for part in parts[:-1]), (parts[-1], replicas - 1)]
    passed_on = [message for message in passed_on if message[1]]
    return {"forward": passed_on, "backward": passed_on}


def replica_count(spec: RunSpec) -> int:
    """Return R: all replicas, including those that a fleet's name stands for."""
    fleets = spec.config.simulate.fleets
    return sum(fleets[one.name].count if one.name in fleets else 1 for one in spec.config.replicas)


def aggregate_bytes(spec: RunSpec) -> dict[str, int]:
    """Return the bytes by block of the mean of all contributions, in fp32, as the codec would write them.

    `union` is the largest possible size: no two replicas kept the same position.
    """
    return sum_bytes(spec, replica_count(spec), is_dense=spec.config.simulate.aggregate == "dense")


@lru_cache(maxsize=64)  # every member asks for it, in both directions
def sum_bytes(spec: RunSpec, count: int, is_dense: bool = False) -> dict[str, int]:
    """Return the bytes by block of a sum of `count` contributions, in fp32, as the codec would write it.

    This is the largest possible size: no two replicas kept the same position.
    """
    compression = spec.config.outer.compression
    density = 1.0 if is_dense else min(1.0, count * compression.density)
    written = compression.model_copy(update={"density": density, "value_bits": 32, "quantiser": "levels"})
    blocks = shapes_by_block(spec.parameter_shapes)
    return {
        block: blob_bytes(BlobAddress(spec.run, 1, EXCHANGE, block), shapes, written)
        for block, shapes in blocks.items()
    }


def expected_volume(spec: RunSpec, replicas: int) -> Volume:
    """Return the bytes on the wire of contributions of that number of replicas, by the formulas above."""
    mean = fmean(sum(blobs.values()) for blobs in blob_sizes(spec).values())
    sums = [sum(sum_bytes(spec, count).values()) for count in range(1, replicas + 1)]
    is_dense = spec.config.outer.compression.density == 1
    return Volume(
        gather=mean,
        ring_all_gather=(replicas - 1) * mean,
        ring_all_reduce=2 * (replicas - 1) * mean / replicas if is_dense else None,
        sparse_ring=(sum(sums[:-1]) + (replicas - 1) * sums[-1]) / replicas,
    )
