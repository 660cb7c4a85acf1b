"""Serve a run's exchange as `hetero-pp serve` does, and end this host in a phase of a round.

    python benchmarks/serve_and_die.py PHASE ROUND SIGNAL serve CONFIG [OPTIONS]

PHASE is one of fault_injection.dying_host.PHASES, SIGNAL is KILL or STOP.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from fault_injection.dying_host import DyingSupervisor

from hetero_pp.program.cli import app
from hetero_pp.program.launch import command

if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as hetero_pp.__main__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase")
    parser.add_argument("round", type=int)
    parser.add_argument("signal", type=lambda name: signal.Signals[f"SIG{name}"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    dies = parser.parse_args()
    DyingSupervisor.phase, DyingSupervisor.round, DyingSupervisor.by = dies.phase, dies.round, dies.signal
    command.Supervisor = DyingSupervisor  # type: ignore[misc]
    sys.argv[1:] = dies.arguments
    app()
