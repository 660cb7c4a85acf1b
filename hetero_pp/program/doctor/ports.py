"""Check of the ports at which the YAML lets members of this host listen."""

from __future__ import annotations

from hetero_pp.core.errors import ConfigError
from hetero_pp.program.doctor.finding import Finding, fail, ok
from hetero_pp.program.doctor.subject import Subject
from hetero_pp.program.launch.addresses import fixed_addresses
from hetero_pp.program.launch.claim import held_parts


def check_ports(subject: Subject) -> Finding:
    """Try to listen at each fixed address, as `check` and `launch` do."""
    part = subject.part
    running = held_parts(subject.runs.absolute(), subject.name) if subject.kind == "run" else []
    own = [one for one in fixed_addresses(part.spec.config) if one.member in part.names and one.is_of_this_host]
    for one in own:
        if one.member in running:
            continue
        try:
            one.try_to_listen()
        except ConfigError as error:
            return fail(str(part.located(error)))
    if not own:
        return ok("no fixed port on this host; free ones are chosen")
    shown = [f"{one.address} ({'used by this run' if one.member in running else 'free'})" for one in own]
    return ok(", ".join(shown))
