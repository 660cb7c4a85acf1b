"""Compare the predicted memory and CPU of the exchange's process with those of launched runs.

    python benchmarks/exchange_load.py [--json FILE] [--only NAME ...]

Each run is launched as a user launches it, with every member in a process of its own. Peak memory is the process's
largest resident set (VmHWM), less that of an idle Python that has imported torch and grpc. CPU seconds of a round are
the user and system time from the first audited round to the last, divided by the rounds between.
The factors of `hetero_pp/simulator/exchange_load.py` were chosen with all runs but those named `held-out`. Runs on one
machine have no TLS: CPU of transfers (benchmarks/link.py) is not measured here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from command_line import origin, parse, parser_of, save
from launched import start_program, words
from processes import status_bytes, writers_to

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.simulator.exchange_load import exchange_load

SECONDS_BETWEEN_LOOKS = 0.02
IDLE = "import torch, grpc, re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"

YAML = """\
name: {name}
seed: 1
model:
  {{preset: micro, width: {width}, layers: {layers}, heads: 4, feed_forward: {feed_forward}, vocabulary: {vocabulary}}}
data: {{corpus: {corpus}, tokenizer: bytes, sequence_length: 32, validation_share: 0.2, validation_sequences: 2}}
inner: {{steps: {steps}, learning_rate: 1e-3}}
outer: {{rounds: {rounds}, momentum: {momentum}, compression: {{density: {density}}}}}
checkpoints: {{every: {checkpoints}}}
replicas:
"""


@dataclass(frozen=True)
class Run:
    """A run of equal datacenter replicas, or of groups of four stages."""

    name: str
    width: int = 64
    layers: int = 4
    vocabulary: int = 256
    members: int = 2
    stages: int = 1
    density: float = 1 / 32
    momentum: float = 0.0
    checkpoints: int = 100
    steps: int = 2
    rounds: int = 6

    def yaml(self, corpus: Path) -> str:
        values = asdict(self) | {"feed_forward": 3 * self.width, "corpus": corpus}
        kind = "kind: datacenter" if self.stages == 1 else f"kind: participants, stages: {self.stages}"
        replicas = range(self.members // self.stages)
        return YAML.format(**values) + "".join(
            f"  - {{name: r{number}, {kind}, batch_size: 2}}\n" for number in replicas
        )


SMALLEST = Run("smallest", layers=1, steps=1, rounds=2)
MEDIUM = {"width": 384, "layers": 8, "vocabulary": 8192}
LARGE = {"width": 512, "layers": 12, "vocabulary": 32000}
RUNS = [
    Run("micro-2"),
    Run("micro-4", members=4),
    Run("micro-8", members=8),
    Run("micro-8-in-groups", members=8, stages=4),
    Run("micro-2-steps-50", steps=50),
    Run("medium-2", **MEDIUM),
    Run("medium-4", **MEDIUM, members=4),
    Run("medium-8", **MEDIUM, members=8),
    Run("medium-8-in-groups", **MEDIUM, members=8, stages=4),
    Run("medium-2-dense", **MEDIUM, density=1),
    Run("medium-4-dense", **MEDIUM, members=4, density=1),
    Run("medium-2-momentum", **MEDIUM, momentum=0.9),
    Run("medium-2-checkpoints", **MEDIUM, checkpoints=1),
    Run("large-2", **LARGE),
    Run("large-2-dense", **LARGE, density=1),
    Run("large-4", **LARGE, members=4),
    Run("large-2-momentum-checkpoints", **LARGE, momentum=0.9, checkpoints=1),
    Run("held-out-3", width=256, layers=6, vocabulary=16000, members=3, density=1 / 8, momentum=0.9, checkpoints=2),
    Run("held-out-8", width=448, layers=4, vocabulary=4096, members=8, stages=2, density=1 / 128),
]


@dataclass(frozen=True)
class Look:
    """The exchange's process at one moment."""

    audited: int
    """Rounds that the auditor has replayed."""
    peak_bytes: int
    cpu_seconds: float


def compare(run: Run, folder: Path) -> dict[str, Any]:
    """Launch a run, and return what was predicted of its exchange beside what was measured."""
    yaml = folder / f"{run.name}.yaml"
    (folder / "corpus.txt").write_text(words())
    yaml.write_text(run.yaml(folder / "corpus.txt"))
    load = exchange_load(spec_of(ConfigFile(yaml)))
    looks = list(launched(yaml, RunFolder(folder / "runs" / run.name)))
    first, last = next(look for look in looks if look.audited), looks[-1]
    last = next(look for look in looks if look.audited == last.audited)
    return {
        "run": run.name,
        "settings": asdict(run),
        "predicted": {"memory_bytes": dict(load.memory_bytes), "cpu_seconds": dict(load.cpu_seconds)},
        "measured": {
            "memory_bytes": looks[-1].peak_bytes,
            "cpu_seconds": (last.cpu_seconds - first.cpu_seconds) / max(1, last.audited - first.audited),
        },
    }


def launched(yaml: Path, folder: RunFolder) -> Iterator[Look]:
    """Launch a run, and yield samples of its exchange until the exchange ends."""
    output = yaml.parent / "output.txt"
    with start_program("launch", str(yaml), "--runs", str(folder.path.parent), "--new", to=output) as launcher:
        try:
            exchange = exchange_of(launcher, folder)
            while exchange is not None and (look := look_at(exchange, folder)) is not None:
                yield look
                time.sleep(SECONDS_BETWEEN_LOOKS)
            if launcher.wait(60):
                raise SystemExit(f"{yaml.stem}: {output.read_text()}")
        finally:
            launcher.terminate()


def exchange_of(launcher: subprocess.Popen[bytes], folder: RunFolder) -> psutil.Process | None:
    """Wait for the process that writes the exchange's output; None if the launcher ends before there is one."""
    while launcher.poll() is None:
        for pid, member in writers_to(folder.output(EXCHANGE).parent):
            if member == EXCHANGE:
                return psutil.Process(pid)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return None


def look_at(process: psutil.Process, folder: RunFolder) -> Look | None:
    """Read the process's figures; None if it has ended."""
    audited = len(list((folder.path / "log" / "audited").glob("round-*.json")))
    try:
        return Look(audited, status_bytes("VmHWM", process.pid), sum(process.cpu_times()[:2]))
    except (OSError, psutil.Error):
        return None


def idle_bytes() -> int:
    """Return the peak memory of a Python that has imported torch and grpc, and does nothing."""
    return 1024 * int(subprocess.run([sys.executable, "-P", "-c", IDLE], capture_output=True, check=True).stdout)


def line_of(found: Mapping[str, Any], idle: int) -> str:
    predicted, measured = found["predicted"], found["measured"]
    bytes_, seconds = (sum(predicted[name].values()) for name in ("memory_bytes", "cpu_seconds"))
    cells = [bytes_ / 1e6, (measured["memory_bytes"] - idle) / 1e6, seconds, measured["cpu_seconds"]]
    return f"{found['run']:<28}" + "{:>12.1f}{:>12.1f}{:>14.3f}{:>12.3f}".format(*cells)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[run.name for run in RUNS], metavar="NAME")
    arguments = parse(parser, {"only": [SMALLEST.name]})
    idle, results = idle_bytes(), []
    print(f"idle Python with torch and grpc: {idle / 1e6:.0f} MB, taken off the measured memory below")
    print(f"{'':<28}{'memory, MB':>24}{'CPU s a round':>26}")
    print(f"{'run':<28}{'predicted':>12}{'measured':>12}{'predicted':>14}{'measured':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for run in (run for run in [SMALLEST, *RUNS] if run.name in arguments.only):
            results.append(compare(run, Path(folder)))
            print(line_of(results[-1], idle), flush=True)
    save(origin() | {"idle_bytes": idle, "runs": results}, arguments.json)


if __name__ == "__main__":
    main()
