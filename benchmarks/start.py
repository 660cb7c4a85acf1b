"""Measure how long `hetero-pp launch` takes until a member has taken its first inner step, and what the time goes to.

    python benchmarks/start.py [--program .venv/bin/hetero-pp --program OTHER/.venv/bin/hetero-pp] [--json FILE]

Programs are started in turns, each with a run of its own that is ended after the first step. Times are wall-clock
seconds since the start. Imports take CPU seconds, so both are shown: of all processes of the run, up to the first step.
On a machine with other load, compare the CPU seconds, and the ratio of programs in one run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from command_line import origin, parse, parser_of, save
from launched import events_of
from processes import cpu_seconds

from hetero_pp.config.folder import RunFolder

EVENTS = ("joined", "begun", "inner_step")
"""Events whose first occurrence is timed, in their order."""
SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_FOR_A_START = 120.0
CONFIG = Path(__file__).parents[1] / "configs/quickstart.yaml"
OWN = str(Path(sys.executable).parent / "hetero-pp")


def start(program: str, runs: Path) -> dict[str, float]:
    """Return seconds from the program's start to each event, and the CPU seconds until the last."""
    shutil.rmtree(runs / "quickstart", ignore_errors=True)  # the encoded corpus stays
    command, since = [program, "launch", str(CONFIG), "--runs", str(runs)], time.time()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found: dict[str, float] = {}
        while EVENTS[-1] not in found:
            if process.poll() is not None or time.time() - since > SECONDS_FOR_A_START:
                raise SystemExit(f"benchmarks/start.py: {program} took no step")
            time.sleep(SECONDS_BETWEEN_LOOKS)
            found = _events(RunFolder(runs / "quickstart"), since)
        return found | {"cpu": cpu_seconds(process.pid)}
    finally:
        process.kill()  # the members end with it
        process.wait()


def _events(run: RunFolder, since: float) -> dict[str, float]:
    """Return seconds from `since` to the first of each kind of event."""
    found: dict[str, float] = {}
    for event in events_of(run):
        if event["event"] in EVENTS:
            found.setdefault(event["event"], event["time"] - since)
    return found


def measure(programs: list[str], repeats: int) -> dict[str, Any]:
    """Return all starts of each program, and their medians."""
    starts: dict[str, list[dict[str, float]]] = {program: [] for program in programs}
    with tempfile.TemporaryDirectory(prefix="hetero-pp-start-") as folder:
        for _ in range(repeats + 1):  # the first start of each reads files from the disk, and encodes the corpus
            for number, program in enumerate(programs):
                starts[program].append(start(program, Path(folder) / str(number)))
    kept = {program: found[1:] or found for program, found in starts.items()}
    medians = {name: {key: median(one[key] for one in found) for key in found[0]} for name, found in kept.items()}
    return {"load": os.getloadavg()[0], "medians": medians, "starts": starts}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--program", action="append", help="program to start (default: the one beside this Python)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parse(parser, {"repeats": 0})
    found = measure(arguments.program or [OWN], arguments.repeats)
    for program, seconds in found["medians"].items():
        print(f"{program}: " + ", ".join(f"{key} {value:.2f} s" for key, value in seconds.items()))
    save(origin() | found, arguments.json)


if __name__ == "__main__":
    main()
