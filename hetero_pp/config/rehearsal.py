"""Marks a run as a rehearsal, which `hetero-pp rehearse` sets and no YAML may set."""

from __future__ import annotations

from pydantic import Field

from hetero_pp.config.settings import Settings


class Rehearsal(Settings):
    """A run with real links, messages and rounds, and with timed waits in place of compute.

    `outer.rounds` and `inner.steps` of its configuration are those that are rehearsed. This section holds those of the
    run that it stands for. Costs of compute and hardware are those of the section `simulate`.
    """

    rounds: int = Field(ge=1, description="outer rounds of the run that is rehearsed")
    steps: int | None = Field(ge=1, description="inner steps a round of that run; null with `inner.seconds`")
