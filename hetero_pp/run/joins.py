"""Links between the members of a run, and the lines that they pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetero_pp.config.lines import LineSpec
from hetero_pp.config.links import (
    DIRECTIONS,
    EXCHANGE,
    LinkSettings,
    LinkShape,
    LinkSpec,
    exchange_link_name,
    stage_link_name,
)
from hetero_pp.config.topology import ExchangeSettings, ParticipantsReplica, ReplicaSettings


def link_specs(
    replicas: Sequence[ReplicaSettings], kinds: Mapping[str, LinkSettings], lines: Mapping[str, LineSpec]
) -> Iterator[LinkSpec]:
    """Yield every link of the run, with stage links first in each replica. `lines` maps members to their lines."""

    def spec(name: str, source: str, target: str, kind: str | None) -> LinkSpec:
        settings = LinkSettings() if kind is None else kinds[kind]
        both = lines.get(source), lines.get(target)
        passed = [None, None] if both[0] == both[1] else both
        forward, backward = (_with_lines(settings.shape(way), passed) for way in DIRECTIONS)
        return LinkSpec(name, source, target, forward, backward, *passed)

    for replica in replicas:
        if isinstance(replica, ParticipantsReplica):
            for hop in range(replica.stage_count - 1):
                kind = replica.link[hop] if isinstance(replica.link, list) else replica.link
                yield spec(stage_link_name(replica.name, hop), replica.members[hop], replica.members[hop + 1], kind)
        for stage, member in enumerate(replica.members):
            kind = replica.uplink
            if isinstance(replica, ParticipantsReplica):
                own = replica.stage_settings(stage)
                kind = own.uplink if own is not None and own.uplink is not None else kind
            yield spec(exchange_link_name(member), member, EXCHANGE, kind)


def _with_lines(shape: LinkShape, lines: Sequence[LineSpec | None]) -> LinkShape:
    """Add the latency and jitter of the lines that the link passes."""
    passed = [line for line in lines if line is not None]
    latency, jitter = sum(line.latency for line in passed), sum(line.jitter for line in passed)
    return LinkShape(shape.bandwidth, shape.latency + latency, shape.jitter + jitter)


def lines_of_members(replicas: Sequence[ReplicaSettings], exchange: ExchangeSettings) -> dict[str, str | None]:
    """Return the kind of line that each member has, in the order of the run, the exchange last."""
    found = {
        member: replica.line_of(stage) if isinstance(replica, ParticipantsReplica) else replica.line
        for replica in replicas
        for stage, member in enumerate(replica.members)
    }
    return found | {EXCHANGE: exchange.line}
