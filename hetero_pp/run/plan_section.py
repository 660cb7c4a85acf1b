"""The `plan` section: participants without a group, and constraints on groups. Training does not read it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from pydantic import Field

from hetero_pp.config.lines import LineSettings, check_kind
from hetero_pp.config.links import LinkSettings
from hetero_pp.config.settings import Ratio, Settings
from hetero_pp.core.errors import ConfigError


class LooseParticipant(Settings):
    """Machine that is to become a stage of a group."""

    name: str = Field(description="unique; letters, digits, `-` and `_`")
    site: str | None = Field(None, description="name of the site; `pairs` may refer to it")
    hardware: str | None = Field(None, description="hardware, from the catalog or from `simulate.hardware`")
    uplink: str | None = Field(None, description="kind of link to the exchange, from `links`")
    line: str | None = Field(
        None, description="kind of access line of the machine, from `lines`; machines at one site share it"
    )


class PairSettings(LinkSettings):
    """Link between two participants, or between all of one site and all of another (or of the same)."""

    between: tuple[str, str] = Field(description="participants or sites; `forward` is from the first to the second")


class PlanSettings(Settings):
    """Input of `hetero-pp plan` beyond the replicas in the YAML."""

    participants: list[LooseParticipant] = Field([], description="machines to group")
    pairs: list[PairSettings] = Field(
        [], description="links between participants; the entry that names the most participants applies"
    )
    default: LinkSettings | None = Field(
        None, description="link between all other pairs; by default, through the uplinks or access lines of both"
    )
    stages: int = Field(4, ge=1, description="participants per group")
    batch_size: int = Field(8, ge=1, description="sequences per inner step of a group")
    balance: Ratio = Field(
        0.9, gt=0, le=1, description="share of the best speed that must remain when better links are preferred"
    )
    few_bits: bool = Field(True, description="allow boundaries with 4 bits per number; otherwise only the papers' bf16")
    timed_rounds: bool = Field(
        False, description="plan rounds of a given time (`inner.seconds`) if replicas would wait for a slower one"
    )
    smallest_micro_batch: int = Field(1, ge=1, description="sequences per micro-batch, for groups and planned replicas")


def check_participants(
    plan: PlanSettings, kinds: Collection[str], lines: Mapping[str, LineSettings], layers: int
) -> None:
    """Raise ConfigError for names, links and numbers that cannot be grouped."""
    here = ("plan", "participants")
    sites = {one.site for one in plan.participants}
    seen: set[str] = set()
    for index, one in enumerate(plan.participants):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", one.name):
            raise ConfigError((*here, index, "name"), f"found `{one.name}`, expected letters, digits, `-` and `_`")
        if one.name in seen or one.name in sites:
            raise ConfigError((*here, index, "name"), f"found `{one.name}` twice, expected unique names")
        seen.add(one.name)
        check_kind(one.uplink, kinds, (*here, index, "uplink"), "links")
        check_kind(one.line, lines, (*here, index, "line"))
        first = next(other for other in plan.participants if other.name == one.name or other.site == one.site)
        if one.site is not None and one.line != first.line:
            raise ConfigError(
                (*here, index, "line"),
                f"found `{one.line}`, expected `{first.line}`, as {first.name} has at {one.site}: a site has one line",
            )
    for index, pair in enumerate(plan.pairs):
        for end in pair.between:
            if end not in seen | sites:
                raise ConfigError(
                    ("plan", "pairs", index, "between"), f"found `{end}`, expected a participant's name or a site"
                )
    if plan.participants and not plan.stages <= min(layers, len(seen)):
        raise ConfigError(
            ("plan", "stages"),
            f"found {plan.stages}, expected at most the {layers} layers of the model and the {len(seen)} participants",
        )
