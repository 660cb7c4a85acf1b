"""Error for a group that cannot hold the model: the layers that fit each stage, and the key that would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bytes, format_count, format_names
from hetero_pp.planner.split import Load, Sizes, part_of_stage, stage_bytes
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.machines import SHOWN, assumption, hardware_of, unnamed


@dataclass(frozen=True)
class _Room:
    """Number of layers that fit the memory of a stage's machine."""

    member: str
    capacity: float
    """Memory of the machine, in bytes."""
    layers: int
    next_bytes: float
    """Bytes that one more layer would need."""


def no_split(spec: RunSpec, index: int, loads: Sequence[Load]) -> ConfigError:
    """Return the error for a group whose machines have too little memory for every split, with each of `loads`.

    It describes the load with which the stages hold the most layers.
    """
    replica = spec.config.replicas[index]
    assert isinstance(replica, ParticipantsReplica)
    rooms = [_rooms(spec, replica, load) for load in loads]
    best = max(range(len(loads)), key=lambda one: sum(room.layers for room in rooms[one]))
    load, found = loads[best], rooms[best]
    machines = format_names([_described(room) for room in found], SHOWN, "; ")
    members = [one for one in spec.members.values() if one.replica is replica]
    told = (
        f"found {format_count(len(found), 'stage')} of {replica.name} with memory for "
        f"{sum(room.layers for room in found)} layers, expected {spec.shape.layers} with at least 1 "
        f"each: {machines} (with {format_count(load.sequences, 'sequence')} per micro-batch)"
    )
    sentences = [told, _remedy(spec, replica, load), assumption(spec.config.simulate, unnamed(members))]
    return ConfigError(("replicas", index, "stages"), "; ".join(filter(None, sentences)))


def _rooms(spec: RunSpec, replica: ParticipantsReplica, load: Load) -> list[_Room]:
    """Return the room of every stage. Stages beyond those of the group are assumed to have its last machine."""
    shape, sizes, found = spec.shape, Sizes.of(spec.parameter_shapes), list[_Room]()
    for stage in range(load.stages):
        member = spec.members[replica.members[min(stage, replica.stage_count - 1)]]
        hardware = hardware_of(spec, member)
        capacity = hardware.memory * replica.accelerators_of_member
        needed = [
            stage_bytes(shape, part_of_stage(shape, sizes, stage, load, layers), load, stage, hardware)
            for layers in range(1, shape.layers + 1)
        ]
        layers = sum(size <= capacity for size in needed)
        found.append(_Room(member.name, capacity, layers, needed[min(layers, shape.layers - 1)]))
    return found


def _described(room: _Room) -> str:
    number = "no layer" if room.layers == 0 else format_count(room.layers, "layer")
    more = f"needs {format_bytes(room.next_bytes)} for {room.layers + 1}"
    return f"{room.member} has {format_bytes(room.capacity)} for {number} and {more}"


def _remedy(spec: RunSpec, replica: ParticipantsReplica, load: Load) -> str:
    """Return the smallest number of stages that would hold the model on such machines, or what else would help."""
    larger = f"use machines with more memory (`hardware` of {replica.name})"
    if isinstance(replica.stages, list):
        return f"add entries under `stages`, or {larger}"
    for count in range(replica.stage_count + 1, spec.shape.layers + 1):
        rooms = _rooms(spec, replica, replace(load, stages=count))
        if all(room.layers for room in rooms) and sum(room.layers for room in rooms) >= spec.shape.layers:
            return f"use --set replicas.{replica.name}.stages={count}, or {larger}"
    return f"no number of stages on these machines is sufficient: {larger}"
