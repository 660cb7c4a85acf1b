"""One stage link to the downstream neighbour, for tests that open no later one, and access lines."""

from __future__ import annotations

from hetero_pp.config.lines import Line, LinkSpec
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide
from hetero_pp.rpc.stage_link import StageLink


def open_stage_link(
    address: str, spec: LinkSpec, credentials: Credentials, member: str, seed: int, timeout: float, generation: int = 0
) -> GrpcLinkEnd:
    return StageLink(LinkSide(spec, credentials, member, seed)).dial(address, generation, timeout)


def line(name: str, members: tuple[str, ...], up: float | None, down: float | None, latency: float = 0.0) -> Line:
    """Return an access line with these bits per second."""
    return Line.model_construct(name=name, kind="dsl", members=members, up=up, down=down, latency=latency)
