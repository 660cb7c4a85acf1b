"""Machine of a member in a prediction: the hardware that the YAML names, or the assumed one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.units import format_bytes, format_names
from hetero_pp.run.hardware import ASSUMED, Hardware, hardware_named
from hetero_pp.run.simulate_section import SimulateSettings
from hetero_pp.run.spec import MemberSpec, RunSpec

SHOWN = 5
"""Largest number of names in a message."""

HOW_TO_NAME = "set `hardware: h100` of the replica, or of all members with `--set simulate.machine=h100`"


def hardware_of(spec: RunSpec, member: MemberSpec) -> Hardware:
    """Return the machine of a member. Raises ConfigError for unknown hardware."""
    name, key = _named(member)
    if name is None:
        name, key = spec.config.simulate.machine, ("simulate", "machine")
    return hardware_named(name, spec.config.simulate.hardware, key)


def unnamed(members: Iterable[MemberSpec]) -> list[str]:
    """Return the names of members whose hardware the YAML does not name."""
    return [member.name for member in members if _named(member)[0] is None]


def assumption(settings: SimulateSettings, unnamed: Sequence[str]) -> str:
    """Return a sentence on the assumed hardware and how to name it; empty if `simulate.machine` names another."""
    if not unnamed or settings.machine != ASSUMED:
        return ""
    core = hardware_named(ASSUMED, settings.hardware, ("simulate", "machine"))
    speed = f"{core.achieved_flops / 1e9:.3g} GFLOP/s in training, {format_bytes(core.memory)}"
    names = format_names(unnamed, SHOWN)
    return f"no hardware is set for {names}, so one CPU core each is assumed ({speed}): {HOW_TO_NAME}"


def assumed_in(spec: RunSpec) -> str:
    """Return this sentence for all members without measured costs."""
    measured = spec.config.simulate.measured
    return assumption(spec.config.simulate, unnamed(one for one in spec.members.values() if one.name not in measured))


def _named(member: MemberSpec) -> tuple[str | None, tuple[str | int, ...]]:
    """Return the hardware that the YAML names for a member, and its key."""
    replica, here = member.replica, ("replicas", member.replica_index)
    if member.stage is not None and isinstance(replica, ParticipantsReplica):
        own = replica.stage_settings(member.stage.index)
        if own is not None and own.hardware is not None:
            return own.hardware, (*here, "stages", member.stage.index, "hardware")
    return replica.hardware, (*here, "hardware")
