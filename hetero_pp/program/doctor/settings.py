"""Check of the argument: a YAML is valid, a ticket admits to an open slot, or a run's settings can be read."""

from __future__ import annotations

from hetero_pp.core.units import format_names
from hetero_pp.program.doctor.finding import Finding, NotChecked, fail, ok
from hetero_pp.program.doctor.subject import Subject

_SHOWN = 4


def check_settings(subject: Subject) -> Finding:
    """Check the settings as `check` and `launch` do. Raises their errors."""
    if subject.problem:
        return fail(subject.problem)
    if subject.part_ is None:
        raise NotChecked("no YAML, ticket or run was given")
    if subject.kind == "ticket" and subject.answer.reply.refusal:
        return fail(subject.answer.reply.refusal)
    part = subject.part_.result()
    if subject.kind == "ticket":
        return ok(f"{subject.told}: open now: {format_names([slot for (slot,) in part.choices], _SHOWN)}")
    return ok(f"{subject.told}, starts {format_names(part.names, _SHOWN)} here")
