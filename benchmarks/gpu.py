"""Measure on one GPU what the other benchmarks measure on CPUs.

    python benchmarks/gpu.py [--parts whole,stages,...] [--json FILE]

- whole: engines of a datacenter replica with the 512m model, beside a plain PyTorch loop (benchmarks/engines.py), and
  an outer round: selection and coding of a pseudo-gradient of 512M parameters;
- stages: a launched group of four stages of the 512m model, beside a launched replica that is not split. The stages are
  processes on this GPU that exchange messages over loopback gRPC. They train once more with NVIDIA's Multi-Process
  Service, which lets kernels of several processes run at the same time. `--micro-batches` and `--in-flight` take
  several settings at once;
- boundary: encoding, copying and decoding of one micro-batch's activations at one boundary of that model, beside
  copying them whole;
- compression: top-k, quantisation and error feedback, beside a copy of the same bytes (benchmarks/compressors.py);
- rows: rounds of the trainer of tables, compiled and not, beside a plain loop (benchmarks/in_process.py);
- mixed: a run with stages on the CPU and on the GPU, in which all replicas have to end with the same parameters.

With --smoke, everything runs on the CPU at its smallest size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import origin, parse, parser_of, save
from launched import events_of, letters, run_quietly, summary_of
from processes import when_idle
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.pipeline.coefficients import noise_key
from hetero_pp.pipeline.subspace import random_basis
from stages.boundary import Boundary, boundary_of
from stages.sender import copies_of

HERE = Path(__file__).parent
SMOKE = {"device": "cpu", "steps": 3, "micro_batches": [2]}
MPS = "nvidia-cuda-mps-control"
WARM_UP = 3
"""Steps of a launched run that are not measured, because they compile and allocate."""

BOUNDARY = ("encode", "gradient", "to host", "to device", "decode")

RUN = """\
name: {name}
seed: 1
model: {{{model}}}
data: {{corpus: {corpus}, sequence_length: {length}, validation_share: 0.1, validation_sequences: 4}}
inner: {{steps: {steps}, learning_rate: 3e-4, warmup_steps: 1}}
outer: {{rounds: {rounds}, compression: {{density: 1/32, value_bits: 2}}}}
replicas:
{replicas}
"""
BATCH = "batch_size: {batch}, micro_batches: {parts}, device: {device}"
WHOLE = "  - {{name: dc, kind: datacenter, compile: {compiles}, " + BATCH + "}}"
GROUP = (
    "  - {{name: home, kind: participants, stages: 4, compile: {compiles}, boundary: {{rank: 1/8, dtype: bf16}}, "
    + "extra_in_flight: {in_flight}, "
    + BATCH
    + "}}"
)
MIXED = """\
  - {{name: dc, kind: datacenter, batch_size: 4, device: {device}}}
  - name: home
    kind: participants
    batch_size: 4
    micro_batches: 2
    boundary: {{rank: 1/4, bits: 4}}
    stages: [{{layers: 1, device: {device}}}, {{layers: 2, device: cpu}}, {{layers: 1, device: {device}}}]
"""


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement, by default the smallest ones."""

    steps: int = WARM_UP + 1
    """Inner steps of a launched run."""
    model: str = "width: 32, layers: 4, heads: 2, feed_forward: 64, vocabulary: 300"
    width: int = 32
    vocabulary: int = 300
    length: int = 32
    batch: int = 8


LARGE: dict[str, Any] = {"model": "preset: 512m, vocabulary: 32000", "width": 1536, "vocabulary": 32000, "length": 1024}


def _script(name: str, arguments: Sequence[str], folder: Path, is_smoke: bool) -> Any:
    """Run another benchmark, and return what it wrote. It prints its own table."""
    path = folder / f"{name}.json"
    ends = ["--smoke"] if is_smoke else ["--json", str(path)]
    done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments, *ends], check=False)
    if done.returncode != 0:
        return {"failed": done.returncode}
    return {} if is_smoke else json.loads(path.read_text())


def whole(scale: Scale, asked: argparse.Namespace, folder: Path) -> Any:
    """Measure engines beside a plain loop. torchtitan is left out where torch is too old for it."""
    engines = ["torch"]
    try:
        import replica_groups.engines.titan  # noqa: F401

        engines.append("torchtitan")
    except ImportError as error:
        print(f"without torchtitan: {error}")
    more = [] if asked.smoke else ["--preset", "512m", "--batch-size", "8", "--modes", "compiled"]
    return _script("engines", ["--engines", ",".join(engines), *more], folder, asked.smoke)


def stages(scale: Scale, asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Launch a whole replica and groups of four stages, with equal work; return their tokens per second."""
    settings: dict[str, Any] = {"device": asked.device, "batch": scale.batch, "compiles": str(not asked.smoke).lower()}
    ways = ["staged", *(["staged-mps"] if asked.device != "cpu" and shutil.which(MPS) else [])]
    found: list[dict[str, Any]] = []
    for parts in asked.micro_batches:
        settings["parts"] = parts
        run = _launched(f"whole-{parts}", WHOLE.format(**settings), scale, 1, folder)
        found.append({"way": "whole", "micro_batches": parts, "tokens_per_second": _tokens_per_second(run)})
        print(f"{parts} micro-batches: whole {found[-1]['tokens_per_second']:>12,.0f} tokens/s", flush=True)
        whole = found[-1]["tokens_per_second"]
        for in_flight, way in product(asked.in_flight, ways):
            settings["in_flight"] = in_flight
            with _multi_process(folder) if way == "staged-mps" else nullcontext():
                run = _launched(f"{way}-{len(found)}", GROUP.format(**settings), scale, 1, folder)
            speed = _tokens_per_second(run)
            found.append({"way": way, "micro_batches": parts, "in_flight": in_flight, "tokens_per_second": speed})
            print(f"{way:<12}{speed:>12,.0f} tokens/s{speed / whole:>8.3f}  {in_flight} extra in flight", flush=True)
    return found


@contextmanager
def _multi_process(folder: Path) -> Iterator[None]:
    """Run NVIDIA's Multi-Process Service for processes that start in the block."""
    places = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    os.environ.update(places)
    if subprocess.run([MPS, "-d"], check=False).returncode != 0:
        print(f"{MPS} does not start; this run goes on without it", flush=True)
    try:
        yield
    finally:
        subprocess.run([MPS], input="quit\n", text=True, check=False)
        for name in places:
            del os.environ[name]


def _launched(name: str, replicas: str, scale: Scale, rounds: int, folder: Path) -> RunFolder:
    """Launch a run as a user would; return its folder. Prints the ends of its logs if it fails."""
    corpus, yaml, runs = folder / "corpus.txt", folder / f"{name}.yaml", folder / "runs"
    if not corpus.exists():
        corpus.write_text(letters(30 * scale.batch * scale.length))
    sizes = {"model": scale.model, "length": scale.length, "steps": scale.steps, "rounds": rounds}
    yaml.write_text(RUN.format(name=name, corpus=corpus, replicas=replicas, **sizes))
    try:
        return run_quietly(yaml, [], runs)
    except HeteroPPError:
        print(_logs(RunFolder(runs / name)))
        raise


def _logs(run: RunFolder) -> str:
    return "".join(f"{log.name}: {log.read_text()[-3000:]}" for log in sorted(run.path.glob("logs/*.log")))


def _tokens_per_second(run: RunFolder) -> float:
    """Return the speed of the steps after the first ones, from the median time between two steps."""
    steps = [one for one in events_of(run) if one["event"] == "inner_step" and one.get("tokens")][WARM_UP:]
    return steps[0]["tokens"] / median(after["time"] - before["time"] for before, after in pairwise(steps))


def boundary(scale: Scale, asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Time the parts of a boundary for one micro-batch, in microseconds, for the ways to write coefficients."""
    here, rows = torch.device(asked.device), 4
    generator = torch.Generator().manual_seed(1)
    x_BLD = torch.randn(rows, scale.length, scale.width, generator=generator).to(here, torch.bfloat16)
    embedding = torch.randn(scale.vocabulary, scale.width, generator=generator).to(here)
    tokens = torch.randint(scale.vocabulary, (rows, scale.length), generator=generator).to(here)
    basis = random_basis(scale.width, scale.width // 8, 1).to(here)
    ways: dict[str, dict[str, Any]] = {"whole, bf16": {"dtype": "bf16"}}
    ways["rank 1/8, bf16"] = {"rank": "1/8", "dtype": "bf16"}
    ways["rank 1/8, 4 bits"] = {"rank": "1/8", "bits": 4}
    found = []
    print(f"{'microseconds':<18}" + "".join(f"{part:>10}" for part in BOUNDARY) + f"{'bytes':>12}")
    for name, values in ways.items():
        settings = BoundarySettings.model_validate(values)
        one = boundary_of(settings, scale.width, None if settings.rank is None else basis)
        one.split(embedding)
        row = {"boundary": name, **_times(one, x_BLD, tokens, here)}
        cells = "".join(f"{row[part]:>10,.0f}" for part in BOUNDARY)
        print(f"{name:<18}{cells}{row['bytes']:>12,}", flush=True)
        found.append(row)
    return found


def _times(one: Boundary, x_BLD: Tensor, tokens: Tensor, device: torch.device) -> dict[str, Any]:
    copies, key, gradient_BLD = copies_of(device), noise_key(1, "home", 0, 0, 0).to(device), x_BLD.float()
    symbols = one.encode_activation(x_BLD)
    here = copies.to_host(symbols)()
    timed = partial(_microseconds, device)
    return {
        "encode": timed(lambda: one.encode_activation(x_BLD)),
        "gradient": timed(lambda: one.encode_gradient(gradient_BLD, key)),
        "to host": timed(lambda: copies.to_host(symbols)()),
        "to device": timed(lambda: copies.to_device(here)),
        "decode": timed(lambda: one.decode_activation(symbols, tokens)),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in one.format.to_wire(here)),
    }


def _microseconds(device: torch.device, work: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time of a call until the device is idle."""
    found = []
    for _ in range(repeats + WARM_UP):
        started = when_idle(device)
        work()
        found.append(when_idle(device) - started)
    return 1e6 * median(found[WARM_UP:])


def compression(scale: Scale, asked: argparse.Namespace, folder: Path) -> Any:
    return _script("compressors", ["--device", asked.device], folder, asked.smoke)


def rows(scale: Scale, asked: argparse.Namespace, folder: Path) -> Any:
    more = [] if asked.smoke else ["--scale", "micro", "--compressed", "2", "--rounds", "3"]
    return _script("in_process", ["--device", asked.device, *more], folder, asked.smoke)


def mixed(scale: Scale, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train a run with members on the CPU and on the GPU. Exits with an error if the replicas differ."""
    run = _launched("mixed", MIXED.format(device=asked.device), Scale(), 2, folder)
    summary = summary_of(run)
    hashes = set(summary["parameters_sha256"].values())
    print(f"mixed: {len(summary['parameters_sha256'])} replicas, {len(hashes)} hash; loss {summary['validation_loss']}")
    if len(summary["parameters_sha256"]) != 2 or len(hashes) != 1:
        raise SystemExit(f"expected two replicas with one hash, found {summary['parameters_sha256']}\n{_logs(run)}")
    return {"parameters_sha256": hashes.pop(), "validation_loss": summary["validation_loss"]}


PARTS = {part.__name__: part for part in (boundary, mixed, whole, stages, compression, rows)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda", help="device to measure")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure, separated by commas")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of a launched run")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step of `stages`")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16], help="of a step of `stages`")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1], help="`extra_in_flight` of the groups")
    arguments = parse(parser, SMOKE)
    if arguments.device != "cpu" and not torch.accelerator.is_available():
        raise SystemExit("benchmarks/gpu.py: found no GPU; --smoke runs everything on the CPU at its smallest size")
    found, scale = origin(), Scale(WARM_UP + arguments.steps)
    if not arguments.smoke:
        scale = replace(scale, batch=arguments.batch, **LARGE)
    with tempfile.TemporaryDirectory(prefix="hetero-pp-gpu-") as name:
        for part in arguments.parts.split(","):
            print(f"\n{part}", flush=True)
            started = time.monotonic()
            found[part] = PARTS[part](scale, arguments, Path(name))
            print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)
            save(found, arguments.json)


if __name__ == "__main__":
    main()
