"""Check of the limit of open files, against the processes that start here."""

from __future__ import annotations

from hetero_pp.core.units import format_count
from hetero_pp.program.doctor.finding import Finding, ok
from hetero_pp.program.doctor.subject import Subject
from hetero_pp.program.launch.open_files import require_open_files


def check_open_files(subject: Subject) -> Finding:
    """Check that the launcher may open enough files. Raises ConfigError as `launch` does."""
    processes = 1 if subject.part_ is None else len(subject.part.names)
    require_open_files(processes)
    return ok(f"enough for {format_count(processes, 'process', 'processes')}")
