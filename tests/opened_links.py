"""One stage link to the downstream neighbour, for tests that open no later one."""

from __future__ import annotations

from hetero_pp.config.lines import LinkSpec
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide
from hetero_pp.rpc.stage_link import StageLink


def open_stage_link(
    address: str,
    spec: LinkSpec,
    credentials: Credentials,
    member: str,
    seed: int,
    timeout: float,
    generation: int = 0,
) -> GrpcLinkEnd:
    return StageLink(LinkSide(spec, credentials, member, seed)).dial(address, generation, timeout)
