"""Checks of the way to the exchange: proxies, answer, clock, neighbours, line, and what admits this host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from urllib.request import getproxies_environment

from hetero_pp.config.lines import WAYS, Way, stage_link_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import LinkTimeout, Refused
from hetero_pp.core.proxies import grpc_proxy, route_to
from hetero_pp.core.units import format_bytes, format_duration, format_names, format_seconds
from hetero_pp.program.check.findings import Finding, NotChecked, fail, in_background, ok, warn
from hetero_pp.program.check.subject import CheckedPart, Subject
from hetero_pp.program.join.membership import unanswered
from hetero_pp.program.join.runs_here import read_run_on_disk
from hetero_pp.program.launch.hosts import fixed_addresses, meeting_places
from hetero_pp.program.launch.this_machine import LONG_STEP
from hetero_pp.program.rehearse.command import shown_rates, too_slow
from hetero_pp.rpc.admission_client import Rate, measure
from hetero_pp.rpc.identities import CLOCKS_DIFFER
from hetero_pp.simulator.traffic import stage_link_loads

_PUBLIC = "192.0.2.1"  # a host outside of all private networks (RFC 5737); it is not dialled
CLOCK_WARNING_SECONDS = 60.0  # difference of clocks from which logs and expiry dates mislead

_SECONDS_TO_DIAL = 1.5
_NODES_OF = "the nodes of "
_MOST_DIALLED = 16  # Neighbours that are dialled, each in a thread. A group rarely has more stages.
_SHOWN = 4
SOON_SECONDS = 3600.0  # remaining validity of a ticket or certificate from which a host should hurry


def check_proxy(subject: Subject) -> Finding:
    """Say which proxy connections use. A proxy that does not work is a warning, because connections go without it."""
    if not getproxies_environment():
        return ok("the environment names no proxy")
    if subject.peer is None:
        proxy = grpc_proxy(_PUBLIC)
        return ok("no proxy for gRPC" if proxy is None else f"{proxy} outside of private networks")
    route = route_to(subject.peer.address)
    if route.proxy is not None:
        return ok(f"the exchange is reached through {route.proxy}")
    if route.note:
        return warn(f"the exchange is{route.note}: correct the variable, or name the exchange in no_proxy")
    return ok("the environment names a proxy, which is not used for the exchange")


def check_exchange(subject: Subject) -> Finding:
    """Check that the exchange answers and admits this host. Nothing changes there. Raises Refused with its reason."""
    if subject.peer is None or subject.answer_ is None:
        if subject.kind == "run" and (resume := read_run_on_disk(subject.folder).resume):
            return warn(f"the exchange of {subject.name} does not run now; resume it with: {resume}")
        raise NotChecked("needs a ticket, or a run whose exchange runs now")
    address = subject.peer.address
    try:
        subject.answer_.result()
    except LinkTimeout as error:
        here = f"{error}: see its log in {subject.folder.path}/logs"
        return fail(here if subject.peer.is_here else unanswered(error, subject.name))
    return ok(f"{address} answers and admits this host, with the same version of the protocol")


def check_clock(subject: Subject) -> Finding:
    """Compare this host's clock with that of the exchange, to within the seconds that the call took."""
    answer = subject.answer
    return clock_verdict(answer.ahead, answer.within)


def clock_verdict(ahead: float, within: float) -> Finding:
    """Return the finding for an exchange clock `ahead` seconds before this host's, give or take `within`."""
    apart = max(abs(ahead) - within, 0.0)
    if apart < CLOCK_WARNING_SECONDS:
        return ok(f"differs by less than {format_duration(max(apart, 1.0))} from the clock of the exchange")
    told = f"this host's clock is {format_duration(apart)} {'behind' if ahead > 0 else 'ahead of'} the exchange's"
    mend = "set it by network time (timedatectl set-ntp true)"
    if apart > CLOCKS_DIFFER:
        return fail(f"{told}, so certificates seem not valid yet or expired: {mend}")
    return warn(f"{told}: {mend}")


def check_neighbours(subject: Subject) -> Finding:
    """Dial the neighbouring stages that listen. Those that are not reached are reached through the exchange."""
    if subject.peer is not None:
        told = subject.answer.reply.neighbours  # of names that the run does not have, nothing is dialled
        found = {name: told[name] for name in subject.part.spec.members if name in told}
    else:
        part = subject.part
        found = {one.name: one.address for one in fixed_addresses(part.spec.config) if not one.is_of_this_host}
        places = [one for one in meeting_places(part.spec.config) if one.member in part.names]
        found |= {f"{_NODES_OF}{one.name}": one.address for one in places if not one.is_of_this_host}
        if not found:
            raise NotChecked("the YAML names no address on another host")
    if not found and not _starts_stage(subject.part):
        return ok("no stage starts here, so there are no neighbours")
    if not found:
        return ok("no neighbouring stage listens now; stages send to each other through the exchange")
    found = dict(islice(found.items(), _MOST_DIALLED))
    dialled = {name: in_background(partial(_answers, address)) for name, address in found.items()}
    silent = {name: found[name] for name, answers in dialled.items() if not answers.result()}
    if silent:
        shown = format_names([f"{name} at {address}" for name, address in silent.items()], _SHOWN)
        relays = any(not name.startswith(_NODES_OF) for name in silent)
        why = f"it is not started, or a firewall is between{'; the exchange relays instead' if relays else ''}"
        return warn(f"{shown} cannot be dialled: {why}")
    return ok(f"dialled {format_names(list(found), _SHOWN)}")


def check_relay(subject: Subject) -> Finding:
    """Dial the port of the relay. A stage needs it unless it reaches its neighbours directly."""
    if subject.peer is None:
        raise NotChecked("needs a ticket, or a run whose exchange runs now")
    port, part = subject.answer.reply.relay_port, subject.part
    if not port:
        raise NotChecked("the exchange has no relay")
    if not _starts_stage(part):
        raise NotChecked("no stage starts here")
    address = f"{subject.peer.address.rpartition(':')[0]}:{port}"
    if _answers(address):
        return ok(f"{address} answers")
    mend = f"on the exchange's host, open this port in the firewall and forward it as {port}"
    return fail(f"{address} does not answer, so stages that cannot dial each other have no link: {mend}")


def _starts_stage(part: CheckedPart) -> bool:
    members = part.spec.members
    return any(members[name].stage is not None for name in part.names if name in members)


def _answers(address: str) -> bool:
    try:
        with route_to(address).connect(address, _SECONDS_TO_DIAL):
            return True
    except (OSError, ValueError, OverflowError):  # it cannot be reached, or is no address
        return False


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


def check_certificate(subject: Subject) -> Finding:
    """Check that what admits this host is valid for a while. `join` renews a certificate while it runs."""
    if subject.until is None:
        raise NotChecked("this host holds no ticket or certificate of the run")
    what, until = subject.until
    left = until - time.time()
    if left <= 0:
        mend = "ask for another (or is the clock of this host wrong?)"
        return fail(f"{what} expired {format_duration(-left)} ago: {mend}")
    told = f"{what} is valid for {format_duration(left)}"
    return ok(told) if left > SOON_SECONDS else warn(f"{told}: start `join` before, or ask for another ticket")
