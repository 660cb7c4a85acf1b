"""Serve a run's exchange as `hetero-pp serve` does, and end this host in a phase of a round.

    python benchmarks/serve_and_die.py PHASE ROUND SIGNAL serve CONFIG [OPTIONS]

PHASE is one of fault_injection.dying_host.PHASES, SIGNAL is KILL or STOP.
"""

from __future__ import annotations

import os
import signal
import sys

from fault_injection.dying_host import DyingSupervisor

from hetero_pp.program.cli import app
from hetero_pp.program.launch import command

if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as hetero_pp.__main__
    phase, round_, by = sys.argv[1:4]
    DyingSupervisor.phase, DyingSupervisor.round = phase, int(round_)
    DyingSupervisor.by = signal.Signals[f"SIG{by}"]
    command.Supervisor = DyingSupervisor  # type: ignore[misc]
    sys.argv[1:4] = []
    app()
