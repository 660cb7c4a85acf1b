"""Check of the ticket or the certificate that admits this host: when it expires."""

from __future__ import annotations

import time

from hetero_pp.core.units import format_duration
from hetero_pp.program.doctor.finding import Finding, NotChecked, fail, ok, warn
from hetero_pp.program.doctor.subject import Subject

SOON_SECONDS = 3600.0


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
