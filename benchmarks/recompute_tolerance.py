"""How far honest recomputations of a round are apart on other settings of a machine, and how far cheats are.

    python benchmarks/recompute_tolerance.py [--json results.json]        # half an hour on 1 core

Each number is the largest relative difference of a block, with which `audit.recompute.tolerance` is compared. Honest
rounds are trained again with other numbers of threads, other instruction sets of the products, compiled, and with
products of fewer bits. Last, many rounds of a tiny model are computed again from files with the same settings.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from command_line import origin, parse, parser_of, save
from torch import Tensor

from hetero_pp.config.checkpoint import first_checkpoint
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.sources import open_source
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.outer.apply_round import apply_round
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.pseudo_gradient.contribution import BlobAddress, entry_of
from replica_groups.audit.commitments import load_state, state_of
from replica_groups.audit.recompute import ReplicaHere, RoundStart, difference

REPLICA = "home"
SMOKE = {"steps": [2], "rounds": 2, "honest_rounds": 3, "width": 16, "values": ["fp32"], "environments": 1}
ENVIRONMENTS: Sequence[Mapping[str, str]] = (
    {"ATEN_CPU_CAPABILITY": "default"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
)
"""Instruction sets of torch's own kernels, and of the products of MKL and oneDNN."""

COMPRESSIONS: Mapping[str, Mapping[str, Any]] = {"signs": {}, "fp32": {"value_bits": 32}}
"""How kept values are sent: by default 1 bit with a magnitude of each chunk, or whole."""

Blobs = dict[str, bytes]
"""Contribution by block."""


@dataclass(frozen=True)
class Variant:
    """Settings with which a round is trained again."""

    threads: int = 1
    compiles: bool = False
    precision: str = "fp32"
    products: str = "highest"
    """Precision of fp32 products (`torch.set_float32_matmul_precision`). On a GPU `high` is TF32."""
    device: str = "cpu"

    def of(self, spec: RunSpec) -> RunSpec:
        """Return the same run with these settings; the run's name in blobs stays."""
        own = spec.config.replicas[0].model_copy(update={"compile": self.compiles, "precision": self.precision})
        changed = RunSpec(spec.config.model_copy(update={"threads": self.threads, "replicas": [own]}), 256)
        changed.__dict__["run"] = spec.run
        return changed


class Rounds:
    """Consecutive honest rounds of one replica. The files in a folder have what each of them starts from."""

    def __init__(self, width: int, steps: int, values: str, folder: Path) -> None:
        """`values`: how they are sent, a key of COMPRESSIONS."""
        self.steps, self.values, self.folder = steps, values, folder
        self.spec = _spec(width, steps, COMPRESSIONS[values], folder)
        self.source = open_source(self.spec.config.data, folder / "tokens")

    def go_on(self, rounds: int) -> list[Blobs]:
        """Train rounds from the beginning, and write what each starts from; return the contributions."""
        theta, outer, found = dict(first_checkpoint(self.spec).parameters), OuterOptimizer(self.spec.config.outer), []
        for number in range(1, rounds + 1):
            here = ReplicaHere(self.spec, REPLICA, RoundStart(number, theta, None, self._states(number)), self.source)
            safetensors.torch.save_file(theta, self.folder / f"theta-{number}")
            found.append(dict(here.train(self.steps)))
            member = here.members[REPLICA]
            assert member.batches is not None
            after = state_of(member, here.outers[REPLICA], member.batches.state(), None)
            after.save(self.folder / f"state-{number + 1}")
            blobs = [entry_of(block, sha256(data).digest(), len(data), []) for block, data in found[-1].items()]
            record = RoundRecord(
                round=number, contributions=[ContributionEntry(replica=REPLICA, weight=1, blobs=blobs)]
            )
            theta = {name: tensor.clone() for name, tensor in theta.items()}
            apply_round(theta, self.spec.run, record, lambda _, block: found[-1][block], outer)
        return found

    def start(self, number: int, theta_of: int | None = None) -> RoundStart:
        """Return what a round starts from, by default with its own theta."""
        theta = safetensors.torch.load_file(self.folder / f"theta-{theta_of or number}")
        return RoundStart(number, theta, None, self._states(number))

    def _states(self, number: int) -> dict[str, Any]:
        return {REPLICA: load_state(self.folder / f"state-{number}")} if number > 1 else {}

    def again(self, number: int, variant: Variant = Variant()) -> Blobs:
        spec = variant.of(self.spec)
        torch.set_num_threads(variant.threads)
        torch.set_float32_matmul_precision(variant.products)
        try:
            device = torch.device(variant.device)
            return dict(ReplicaHere(spec, REPLICA, self.start(number), self.source, device).train(self.steps))
        finally:
            torch.set_float32_matmul_precision("highest")
            torch.set_num_threads(1)

    def cheated(self, number: int, cheat: str) -> Blobs:
        """Train a round again, and cheat."""
        start = self.start(number, number - 1 if cheat == "stale theta" else None)
        here = ReplicaHere(self.spec, REPLICA, start, self.source)
        alter = CHEATS[cheat]
        if alter is not None:
            alter(self, here)
        return dict(here.train(self.steps - 1 if cheat == "one step skipped" else self.steps))

    def difference(self, number: int, told: Blobs, again: Blobs) -> float:
        """Return the largest relative difference of a block."""
        shapes, compression = shapes_by_block(self.spec.parameter_shapes), self.spec.config.outer.compression
        address = partial(BlobAddress, self.spec.run, number, REPLICA)
        return max(difference(address(one), shapes[one], compression, told[one], again[one]) for one in told)


def _spec(width: int, steps: int, compression: Mapping[str, Any], folder: Path) -> RunSpec:
    """Return a run of one replica, on text of this repository."""
    text = folder / "text.txt"
    if not text.exists():
        documents = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
        text.write_text("\n".join(one.read_text(encoding="utf-8") for one in documents), encoding="utf-8")
    config = {
        "name": "t",
        "seed": 1,
        "model": {"width": width, "heads": 2, "feed_forward": 3 * width, "layers": 2},
        "data": {"corpus": str(text), "sequence_length": 64, "validation_sequences": 1},
        "inner": {"steps": steps, "warmup_steps": 5, "learning_rate": 3e-3},
        "outer": {"rounds": 2000, "compression": dict(compression)},
        "audit": {"recompute": {}},
        "replicas": [{"name": REPLICA, "kind": "datacenter", "batch_size": 8}],
    }
    return RunSpec(RunConfig.model_validate(config), 256)


# ---- cheats ----


def _other_text(rounds: Rounds, here: ReplicaHere) -> None:
    own = here.members[REPLICA].batches
    assert own is not None
    inner, train = own._batches, own._batches.train
    object.__setattr__(inner, "train", lambda step: train(step + 7))


def _other_seed(rounds: Rounds, here: ReplicaHere) -> None:
    own = here.members[REPLICA].batches
    assert own is not None
    own._batches = replace(own._batches, seed=2)  # type: ignore[type-var]


def _slower(rounds: Rounds, here: ReplicaHere) -> None:
    rates = rounds.spec.rates_in(here.start.round, 0, None)
    here.members[REPLICA].follow(replace(rates, peak=0.9 * rates.peak))  # type: ignore[type-var,attr-defined]


def _altering(alter: Callable[[str, Tensor], Tensor]) -> Callable[[Rounds, ReplicaHere], None]:
    """Return a cheat that changes the pseudo-gradient of each parameter."""

    def change(rounds: Rounds, here: ReplicaHere) -> None:
        outer = here.outers[REPLICA]
        honest = outer._contributed
        outer._contributed = lambda round_, name: alter(name, honest(round_, name))  # type: ignore[method-assign]

    return change


def _noise(name: str, delta: Tensor) -> Tensor:
    random = torch.randn(delta.shape, generator=torch.Generator().manual_seed(len(name)))
    return delta + 0.01 * delta.norm() / random.norm() * random


CHEATS: Mapping[str, Callable[[Rounds, ReplicaHere], None] | None] = {
    "one step skipped": None,
    "other text": _other_text,
    "other seed": _other_seed,
    "learning rate x 0.9": _slower,
    "stale theta": None,
    "noise of 1 %": _altering(_noise),
    "sign flip of one layer": _altering(lambda name, delta: -delta if name.startswith("layers.1.") else delta),
}


# ---- distributions ----


def honest_variants(
    rounds: Rounds, numbers: range, environments: int, device: str | None
) -> Iterator[tuple[str, list[Blobs]]]:
    """Yield the contributions of honest rounds with each setting, by its name; `device`: also on an accelerator."""
    in_process = {
        "same settings": Variant(),
        "2 threads": Variant(threads=2),
        "4 threads": Variant(threads=4),
        "fp32 products: high": Variant(products="high"),
        "fp32 products: medium": Variant(products="medium"),
    }
    if device is not None:
        in_process[device] = Variant(device=device)
        in_process[f"{device}, fp32 products: high"] = Variant(device=device, products="high")
        in_process[f"{device}, compiled"] = Variant(device=device, compiles=True)
        in_process[f"{device}, bf16"] = Variant(device=device, precision="bf16")
    for name, variant in in_process.items():
        yield name, [rounds.again(number, variant) for number in numbers]
    for one in ENVIRONMENTS[:environments]:
        yield " ".join("=".join(pair) for pair in one.items()), _elsewhere(rounds, numbers, one, "plain")
    if environments > 1:
        yield "bf16", _elsewhere(rounds, numbers, {}, "bf16")
    if environments == len(ENVIRONMENTS):
        yield "compiled", _elsewhere(rounds, numbers, {}, "compiled")


def _elsewhere(rounds: Rounds, numbers: range, environment: Mapping[str, str], kind: str) -> list[Blobs]:
    """Train rounds again in another process."""
    sizes = {"width": rounds.spec.config.model.width, "steps": rounds.steps, "rounds": numbers.stop - 1}
    command = [sys.executable, __file__, "--worker", str(rounds.folder), kind, "--values", rounds.values]
    command += [f"--{name}={size}" for name, size in sizes.items()]
    subprocess.run(command, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}, check=True)
    found = []
    for number in numbers:
        paths = (rounds.folder / f"again-{number}").glob("*.blob")
        found.append({path.name.removesuffix(".blob"): path.read_bytes() for path in paths})
    return found


def work(folder: Path, kind: str, values: str, width: int, steps: int, last: int) -> None:
    """Train the rounds of a folder again, and write the contributions."""
    torch.set_num_threads(1)
    rounds = Rounds(width, steps, values, folder)
    variant = Variant(compiles=kind == "compiled", precision="bf16" if kind == "bf16" else "fp32")
    for number in range(2, last + 1):
        to = folder / f"again-{number}"
        to.mkdir(exist_ok=True)
        for block, data in rounds.again(number, variant).items():
            (to / f"{block}.blob").write_bytes(data)


def measured(
    width: int, steps: int, values: str, count: int, environments: int, device: str | None, folder: Path
) -> dict[str, Any]:
    """Return the differences of all settings and cheats over the rounds from the second on."""
    rounds, numbers = Rounds(width, steps, values, folder), range(2, count + 1)
    honest = rounds.go_on(count)

    def told(name: str, found: Sequence[Blobs], to: Sequence[Blobs] = honest[1:]) -> dict[str, float]:
        apart = [rounds.difference(*both) for both in zip(numbers, to, found, strict=True)]
        middle = statistics.median(apart)
        print(f"{values:5} H = {steps:2}  {name:30} min {min(apart):.1e}  mid {middle:.1e}  max {max(apart):.1e}")
        return {"median": middle, "largest": max(apart), "smallest": min(apart)}

    same = {name: told(name, found) for name, found in honest_variants(rounds, numbers, environments, device)}
    if device is not None:
        once, again = ([rounds.again(number, Variant(device=device)) for number in numbers] for _ in range(2))
        same[f"{device}, twice"] = told(f"{device}, twice", again, once)
    cheats = {name: told(name, [rounds.cheated(number, name) for number in numbers]) for name in CHEATS}
    return {"values": values, "steps": steps, "honest": same, "cheats": cheats}


def false_alarms(count: int, folder: Path) -> dict[str, Any]:
    """Compute honest rounds of a tiny model again from their files; count those with other bits."""
    rounds = Rounds(16, 2, "signs", folder)
    honest = rounds.go_on(count)
    apart = sum(rounds.again(number) != honest[number - 1] for number in range(1, count + 1))
    print(f"{count:,} honest rounds computed again: {apart} false alarms")
    return {"rounds": count, "alarms": apart}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=[5, 15, 30], help="inner steps of a round (H)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each H")
    parser.add_argument("--honest-rounds", type=int, default=1000, help="rounds of the tiny model")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument(
        "--values", choices=COMPRESSIONS, nargs="+", default=list(COMPRESSIONS), help="how values are sent"
    )
    parser.add_argument("--environments", type=int, default=len(ENVIRONMENTS), help="number of instruction sets")
    parser.add_argument("--device", help="also train rounds on this accelerator, such as cuda")
    parser.add_argument("--worker", nargs=2, metavar=("FOLDER", "KIND"), help=argparse.SUPPRESS)
    arguments = parse(parser, SMOKE)
    if arguments.worker is not None:
        folder, kind = arguments.worker
        work(Path(folder), kind, arguments.values[0], arguments.width, arguments.steps[0], arguments.rounds)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        alarms = false_alarms(arguments.honest_rounds, Path(folder))
    results, environments = [], arguments.environments
    for values in arguments.values:
        for steps in arguments.steps:
            with tempfile.TemporaryDirectory() as folder:
                sizes = (arguments.width, steps, values, arguments.rounds)
                results.append(measured(*sizes, environments, arguments.device, Path(folder)))
    save(origin() | {"results": results, "false_alarms": alarms}, arguments.json)


if __name__ == "__main__":
    main()
