"""Sites, replicas, members, links and lines of a run, as the page draws them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_pp.config.lines import WAYS, members_at
from hetero_pp.config.links import EXCHANGE, Direction, LinkSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.units import bytes_per_second
from hetero_pp.run.spec import MemberSpec, RunSpec

SIDES: Mapping[str, Direction] = {"there": "forward", "back": "backward"}
"""Direction of a link as the page names it -> as the run names it."""


def topology_of(spec: RunSpec) -> dict[str, Any]:
    """Return what does not change during a run. Rates are in bytes per second; None is unlimited."""
    names = list(spec.members)
    sites = {name: members_at(site, names) for name, site in spec.config.sites.items()}
    site_of = {member: name for name, members in sites.items() for member in members}
    return {
        "sites": [{"id": name, "label": name} for name in sites],
        "replicas": [_replica(replica, spec.shape.width) for replica in spec.replicas_ever],
        "members": [_member(member, site_of) for member in spec.members.values()],
        "links": [_link(link) for link in spec.links.values()],
        "lines": [
            {"id": line.name, "latency": line.latency, "members": list(line.members)}
            | {way: bytes_per_second(line.bandwidth(way)) for way in WAYS}
            for line in spec.lines.values()
        ],
    }


def _replica(replica: ReplicaSettings, width: int) -> dict[str, Any]:
    return {
        "id": replica.name,
        "kind": replica.kind,
        "optional": replica.optional,
        "members": list(replica.members),
        "boundary": _boundary(replica, width),
        "batch_size": replica.batch_size,
    }


def _boundary(replica: ReplicaSettings, width: int) -> str | None:
    """Return what crosses between the stages of a group, such as `8 of 64, 4 bits`; None if nothing does."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count < 2:
        return None
    own = replica.boundary
    kept = own.dimensions(width)
    coefficient = own.dtype if own.bits is None else f"{own.bits} bits"
    return f"{width if kept is None else kept} of {width}, {coefficient}"


def _member(member: MemberSpec, site_of: Mapping[str, str]) -> dict[str, Any]:
    replica, stage = member.replica, member.stage
    return {
        "id": member.name,
        "replica": replica.name,
        "stage": None if stage is None else stage.index,
        "layers": None if stage is None else _layers(stage.layers),
        "engine": replica.engine if isinstance(replica, DatacenterReplica) else "stages",
        "site": site_of.get(member.name),
    }


def _layers(layers: range) -> str:
    if len(layers) < 2:
        return f"layer {layers.start}" if layers else "no layer"
    return f"layers {layers.start}-{layers.stop - 1}"


def _link(link: LinkSpec) -> dict[str, Any]:
    return {
        "id": link.name,
        "source": link.source,
        "target": link.target,
        "kind": "exchange" if EXCHANGE in (link.source, link.target) else "stage",
        "bandwidth": {side: bytes_per_second(link.bottleneck(way)) for side, way in SIDES.items()},
        "latency": {side: link.shape(way).latency for side, way in SIDES.items()},
    }
