"""All checks of `doctor`, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from hetero_pp.program.doctor.certificate import check_certificate
from hetero_pp.program.doctor.devices import check_gpu, check_memory
from hetero_pp.program.doctor.disk import check_disk, check_temporary
from hetero_pp.program.doctor.exchange import check_clock, check_exchange, check_neighbours
from hetero_pp.program.doctor.finding import Finding
from hetero_pp.program.doctor.leftovers import check_leftovers
from hetero_pp.program.doctor.line import check_line
from hetero_pp.program.doctor.open_files import check_open_files
from hetero_pp.program.doctor.output import check_output
from hetero_pp.program.doctor.ports import check_ports
from hetero_pp.program.doctor.proxy import check_proxy
from hetero_pp.program.doctor.settings import check_settings
from hetero_pp.program.doctor.subject import Subject
from hetero_pp.program.doctor.text import check_text

OF_A_SUBJECT: Mapping[str, Callable[[Subject], Finding]] = {
    "settings": check_settings,
    "memory": check_memory,
    "disk": check_disk,
    "open files": check_open_files,
    "text": check_text,
    "ports": check_ports,
    "leftovers": check_leftovers,
    "proxy": check_proxy,
    "exchange": check_exchange,
    "clock": check_clock,
    "neighbours": check_neighbours,
    "line": check_line,
    "certificate": check_certificate,
}
OF_THE_MACHINE: Mapping[str, Callable[[], Finding]] = {
    "gpu": check_gpu,
    "temporary": check_temporary,
    "output": check_output,
}


def checks_of(subject: Subject) -> dict[str, Callable[[], Finding]]:
    """Return every check by its name."""
    return {**OF_THE_MACHINE, **{name: partial(check, subject) for name, check in OF_A_SUBJECT.items()}}
