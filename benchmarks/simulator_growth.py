"""Measure how CPU seconds and memory of a prediction grow with participants, stages and micro-batches.

    python benchmarks/simulator_growth.py [--json FILE] [--participants N ...]

Each size is predicted in a process of its own, on one core. The prediction is that of a round of 50 inner steps, of
three kinds of home machines with jitter (configs/simulate/ten_thousand.yaml). CPU seconds are
those after start-up (imports and reading the YAML). Memory is the peak of the process, start-up included.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from command_line import origin, parse, parser_of, save

from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.simulator.prediction import predict

YAML = Path(__file__).parents[1] / "configs" / "simulate" / "ten_thousand.yaml"
STAGES = 4
"""Stages of a group in that YAML."""
PARTICIPANTS = (1_000, 10_000, 100_000, 1_000_000)
STAGES_OF_A_GROUP = (2, 4, 8, 16, 32)
MICRO_BATCHES = (4, 16, 64, 256)
SMOKE = {"participants": [100], "stages": [2], "micro_batches": [4]}
GROUPS = 256
"""Number of groups where stages or micro-batches grow.

Their machines have enough memory, and their model enough layers.
"""


def changes_for(of: str, size: int) -> list[str]:
    """Return the changes of the YAML for a size of what grows."""
    if of == "participants":
        return [f"simulate.fleets.cable.count={size // STAGES}"]
    keys = {"stages": ["stages"], "micro-batches": ["batch_size", "micro_batches"]}[of]
    replicas = [f"replicas.{name}.{key}={size}" for name in ("fibre", "cable", "old") for key in keys]
    return [*replicas, *(f"replicas.{name}.hardware=h200" for name in ("fibre", "cable", "old")), "model.layers=32"]


def measure(overrides: list[str]) -> dict[str, float]:
    """Predict in this process, and return the cost."""
    spec = spec_of(ConfigFile(YAML, overrides))
    started = time.process_time()
    prediction = predict(spec)
    return {
        "cpu_seconds": time.process_time() - started,
        "startup_cpu_seconds": started,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "members": prediction.members,
        "round_seconds": prediction.round_seconds,
    }


def measured_alone(overrides: list[str]) -> dict[str, float]:
    """Return the cost of a prediction in a process of its own."""
    command = [sys.executable, __file__, "--one", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(overrides)}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--participants", type=int, nargs="+", default=PARTICIPANTS)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES_OF_A_GROUP)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES)
    parser.add_argument("--one", nargs="*", metavar="KEY=VALUE", help="predict once in this process, and print JSON")
    arguments = parse(parser, SMOKE)
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one)))
        return
    sizes = {"stages": arguments.stages, "micro-batches": arguments.micro_batches}
    results: dict[str, list[dict[str, Any]]] = {}
    for of, own in {"participants": arguments.participants, **sizes}.items():
        print(f"{of:>14} {'CPU seconds':>12} {'peak memory':>12}")
        for size in own:
            found = measured_alone(changes_for(of, size))
            results.setdefault(of, []).append({"size": size} | found)
            memory = f"{found['peak_memory_bytes'] / 1e9:.2f} GB"
            print(f"{size:>14,} {found['cpu_seconds']:>12.2f} {memory:>12}", flush=True)
    save(origin() | {"growth": results}, arguments.json)


if __name__ == "__main__":
    main()
