"""Checks before the start whether this machine can run the members that would start on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.member_inputs import devices_of, stage_devices
from hetero_pp.config.predictions import ASSUMED, CATALOG
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.device import accelerators
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes, format_count, format_duration, format_names, format_seconds
from hetero_pp.program.launch.host_memory import host_memory
from hetero_pp.simulator.costs import part_of, step_flops
from hetero_pp.simulator.exchange_load import exchange_load
from hetero_pp.simulator.memory import LAUNCHER_BYTES, listed_by_kind, memory_of_member, remedy

LONG_STEP, LONG_RUN = 60.0, 2 * 86400.0  # seconds of a step, and of the run, beyond which the user is warned
_SHOWN = 4  # largest number of members that a message names


@dataclass(frozen=True)
class Limit:
    """Something that this machine cannot do, or would take unreasonably long for."""

    key: tuple[str | int, ...]
    message: str
    is_final: bool  # whether it cannot work at all


def limits_of(spec: RunSpec, names: Sequence[str]) -> list[Limit]:
    """Return the limits that starting these members on this machine would exceed."""
    members = [spec.members[name] for name in names if name in spec.members]
    of_memory, of_time = _of_memory(spec, members, EXCHANGE in names), _of_time(spec, members)
    try:
        devices = devices_of(spec, [member.name for member in members])
    except ConfigError as error:
        return [Limit(error.key, error.message, is_final=True), *of_memory, *of_time]
    of_ranks, count = list[Limit](), len(accelerators())
    for member in members:
        if devices[member.name].type != "cpu" and (ranks := _processes(member)) > count:
            there = format_count(count, "GPU")
            expected = f"found {ranks}, expected at most the {there} of this machine: each rank uses one"
            of_ranks.append(Limit(("replicas", member.replica_index, "ranks"), expected, is_final=True))
    return [*of_ranks, *of_memory, *_of_device_memory(spec, members, devices), *of_time]


def _of_memory(spec: RunSpec, members: Sequence[MemberSpec], has_exchange: bool) -> Iterator[Limit]:
    if not members:
        return
    memories = [(member, memory_of_member(spec, member, not _computes_here(member))) for member in members]
    machine = host_memory()
    total, free = machine.total, machine.available
    held: list[Mapping[str, float]] = [
        {name: _on_this_node(member, size) for name, size in memory.held().items()} for member, memory in memories
    ]
    parameters = sum(_on_this_node(member, part_of(spec, member).parameters) for member in members)
    who = format_count(len(members), "member")
    if has_exchange:
        held, who = [*held, exchange_load(spec).memory_bytes], f"{who} and the exchange"
    who, why = f"{who} with {parameters:,.0f} parameters", f"({listed_by_kind(held)})"
    needed = LAUNCHER_BYTES + sum(sum(one.values()) for one in held)
    if needed > total:
        helps = remedy(spec, memories, needed, total, "host")
        found = f"found {who} to start on this machine, which need {format_bytes(needed)} {why}"
        expected = f"expected at most its {machine}"
        helps = f"{helps}; or start fewer members here, with `launch --only`"
        yield Limit(("replicas",), f"{found}, {expected}: {helps}", is_final=True)
    elif needed > free:
        helps = remedy(spec, memories, needed, free, "host")
        told = f"{who} need {format_bytes(needed)} {why}; {format_bytes(free)} of its {machine} are free: {helps}"
        yield Limit(("replicas",), told, is_final=False)


def _of_device_memory(
    spec: RunSpec, members: Sequence[MemberSpec], devices: Mapping[str, torch.device]
) -> Iterator[Limit]:
    """Compare what members hold on accelerators, which several may share, with the free memory of these."""
    shared: dict[torch.device, list[MemberSpec]] = {}
    for member in members:
        for device in stage_devices(member, devices[member.name]) or [devices[member.name]]:
            shared.setdefault(device, []).append(member)
    for device, same in shared.items():
        free = None if device.type == "cpu" else free_bytes(device)
        memories = [(member, memory_of_member(spec, member, accelerated=True)) for member in same]
        ranks = max(_processes(member) for member in same)  # each has a device of its own
        shares = [memory.n_bytes("device") / (len(stage_devices(member, device)) or 1) for member, memory in memories]
        needed = sum(shares) / ranks
        if free is not None and needed > free:
            why = listed_by_kind([memory.held("device") for _, memory in memories])
            helps = remedy(spec, memories, ranks * needed, ranks * free, "device")
            who = format_names([member.name for member in same], _SHOWN)
            found = f"found {who} on {device} with {format_bytes(needed)} ({why})"
            expected = f"expected at most the {format_bytes(free)} that are free there"
            yield Limit(("replicas", same[0].replica_index), f"{found}, {expected}: {helps}", is_final=True)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of an accelerator; None if torch does not know it."""
    try:
        free: int = torch.get_device_module(device).mem_get_info(device)[0]
    except (AttributeError, AssertionError, RuntimeError):
        return None
    return free


def _of_time(spec: RunSpec, members: Sequence[MemberSpec]) -> Iterator[Limit]:
    computing = [member for member in members if _computes_here(member)]
    if not computing:
        return
    cores = min(usable_cores(), spec.config.threads * sum(_processes(member) for member in computing))
    speed = CATALOG[ASSUMED].achieved_flops
    step = sum(_on_this_node(member, step_flops(spec, member)) for member in computing) / (speed * cores)
    inner, rounds = spec.config.inner, spec.latest.rounds
    whole = rounds * (step * inner.steps if inner.steps is not None else max(step, inner.seconds or 0.0))
    if step > LONG_STEP or whole > LONG_RUN:
        long = f"a step would take about {format_seconds(step)} on {format_count(cores, 'CPU core')}"
        rate = f"{speed / 1e9:g} GFLOP/s per core (`hetero-pp calibrate` measures it)"
        yield Limit(("replicas",), f"{long}, and the run {format_duration(whole)}, at {rate}", is_final=False)


def _computes_here(member: MemberSpec) -> bool:
    """Return whether a member trains on the CPU."""
    device, _ = member.setting("device")
    return device in ("cpu", ["cpu"] * len(device)) or (device == "auto" and not accelerators())


def _on_this_node(member: MemberSpec, amount: float) -> float:
    return amount / member.replica.nodes if isinstance(member.replica, DatacenterReplica) else amount


def _processes(member: MemberSpec) -> int:
    return member.replica.ranks if isinstance(member.replica, DatacenterReplica) else 1


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
