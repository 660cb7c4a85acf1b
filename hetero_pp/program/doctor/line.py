"""Check of the line's speed to and from the exchange, against the topology's line and the bytes of a step."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_pp.config.lines import WAYS, Way, stage_link_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import Refused
from hetero_pp.core.units import format_bytes, format_seconds
from hetero_pp.program.doctor.finding import Finding, NotChecked, ok, warn
from hetero_pp.program.doctor.subject import Subject
from hetero_pp.program.launch.this_machine import LONG_STEP
from hetero_pp.program.rehearse.own_line import shown_rates, too_slow
from hetero_pp.rpc.admission_client import Rate, measure
from hetero_pp.simulator.traffic import stage_link_loads


def check_line(subject: Subject) -> Finding:
    """Measure this host's line to the exchange for a second or two, with 4 MiB in each direction at most."""
    if subject.peer is None:
        raise NotChecked("needs a ticket, or a run whose exchange answers")
    if subject.peer.is_here:
        raise NotChecked("the exchange is on this host")
    part, _ = subject.part, subject.answer
    try:
        up, down = measure(subject.peer.address, subject.peer.identity)
    except Refused as error:  # such as one measurement too many: the line may be as it should be
        return warn(f"not measured: {error}")
    return line_verdict(part.spec, part.names[0], {"up": up, "down": down})


def line_verdict(spec: RunSpec, member: str, measured: Mapping[Way, Rate]) -> Finding:
    """Return the finding for the measured rates of a member's line."""
    shown = shown_rates(measured)
    if slow := too_slow(spec, member, measured):
        mend = "stop other traffic, use a cable, or tell the operator of the run the measured rates"
        return warn(f"{shown}; the run's YAML expects {slow} of {member}: {mend}")
    loads = step_bytes(spec, member)
    if not any(loads.values()):
        return ok(shown)
    seconds = max(8 * loads[way] / max(measured[way].bits_per_second, 1.0) for way in WAYS)
    step = ", ".join(f"{format_bytes(loads[way])} {way}" for way in WAYS)
    told = f"{shown}; a step of {member} needs {step}, at least {format_seconds(seconds)} at this rate"
    if seconds > LONG_STEP:
        return warn(f"{told}: ask for a run with a smaller boundary, or use a faster line")
    return ok(told)


def step_bytes(spec: RunSpec, member: str) -> dict[Way, int]:
    """Return the bytes that a member sends to and receives from neighbouring stages in an inner step."""
    own, found = spec.members[member], dict.fromkeys(WAYS, 0)
    if own.stage is None or not isinstance(own.replica, ParticipantsReplica):
        return found
    loads = stage_link_loads(spec, own.replica)
    for hop in (own.stage.index - 1, own.stage.index):
        link = spec.links.get(stage_link_name(own.replica.name, hop))
        if link is not None:
            is_source = link.source == member
            found["up"] += loads["forward" if is_source else "backward"].step
            found["down"] += loads["backward" if is_source else "forward"].step
    return found
