"""All checks of `doctor`, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from hetero_pp.program.doctor.devices import check_gpu, check_memory
from hetero_pp.program.doctor.disk import check_disk, check_temporary
from hetero_pp.program.doctor.exchange import (
    check_certificate,
    check_clock,
    check_exchange,
    check_neighbours,
    check_proxy,
    check_relay,
)
from hetero_pp.program.doctor.finding import Finding
from hetero_pp.program.doctor.line import check_line
from hetero_pp.program.doctor.packages import check_output
from hetero_pp.program.doctor.start import check_leftovers, check_open_files, check_ports, check_settings
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
    "relay": check_relay,
    "line": check_line,
    "certificate": check_certificate,
}
OF_THE_MACHINE: Mapping[str, Callable[[], Finding]] = {
    "gpu": check_gpu,
    "temporary": check_temporary,
    "output": check_output,
}


def checks_of(subject: Subject) -> dict[str, Callable[[], Finding]]:
    return {**OF_THE_MACHINE, **{name: partial(check, subject) for name, check in OF_A_SUBJECT.items()}}
