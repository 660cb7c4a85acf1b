"""Compare the trainer of tables with a plain PyTorch loop over one uncompressed model, on the same tokens.

    python benchmarks/in_process.py [--scale micro|small] [--device cpu|cuda] [--rounds N] [--json FILE]

The trainer runs eager and compiled, in this process and in turns with the loop. On a CPU they have one thread and are
timed in CPU seconds, so that other load on the machine matters little. On a GPU they are timed by the wall clock, until
the device is idle. The trainer's time includes its outer rounds; the plain loop has none. Memory is that of live
tensors of the eager trainer between rounds. It is compared with M x (weights + two moments + error feedback) + theta.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import origin, parse, parser_of, save
from processes import when_idle

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.model.arithmetic import next_token_loss
from hetero_pp.model.transformer import Transformer, initialise
from hetero_pp.research.trainer.train import AllReplicas


@dataclass(frozen=True)
class Scale:
    """Setting of the experiments, with byte tokens instead of a BPE."""

    model: dict[str, Any]
    length: int
    replicas: int
    batch_size: int
    steps: int


SCALES = {
    "least": Scale({"width": 32, "layers": 4, "heads": 2, "feed_forward": 64, "vocabulary": 256}, 32, 2, 2, 2),
    "micro": Scale({"preset": "micro", "vocabulary": 1024}, 128, 4, 4, 10),
    "small": Scale({"width": 256, "layers": 8, "heads": 4, "feed_forward": 704, "vocabulary": 4096}, 512, 8, 8, 25),
}


WAYS = ("eager", "compiled")
SMOKE = {"scale": "least", "rounds": 1, "ways": ["eager"]}


def trainer(way: str, spec: RunSpec, store: TokenStore, device: torch.device) -> AllReplicas:
    """Return the trainer of tables with the options that the way names."""
    return AllReplicas(spec, store, compiles=way == "compiled", device=device)


def spec_of(scale: Scale, compressed: int) -> RunSpec:
    """Return the setting with `compressed` of its replicas compressed at k/d = 1/8."""
    home = {"kind": "participants", "stages": 4, "boundary": {"rank": "1/8"}}
    replicas = [
        {"name": f"r{index}", "batch_size": scale.batch_size} | (home if index < compressed else {"kind": "datacenter"})
        for index in range(scale.replicas)
    ]
    config = RunConfig.model_validate(
        {
            "name": "benchmark",
            "model": scale.model,
            "data": {"sequence_length": scale.length},
            "inner": {"steps": scale.steps, "warmup_steps": 10},
            "outer": {"rounds": 1000, "compression": {"density": 1 / 32, "value_bits": 32}},
            "replicas": replicas,
        }
    )
    return RunSpec(config, 256)


class PlainLoop:
    """Plain training loop: one model, AdamW, clipping."""

    def __init__(self, spec: RunSpec, group: AllReplicas, device: torch.device) -> None:
        model = Transformer(spec.shape)
        initialise(model, 0)
        self.model = model.to(device)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)
        self.batches = group.batches
        self.steps = spec.inner_steps
        self.device = device

    def round(self, round_: int) -> None:
        """Train on as many tokens as a round of the trainer of tables."""
        for step in range((round_ - 1) * self.steps, round_ * self.steps):
            for batches in self.batches:
                tokens = batches.train(step).to(self.device)
                next_token_loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.adamw.step()
                self.adamw.zero_grad()


def compare(
    spec: RunSpec, compressed: int, ways: Sequence[str], rounds: int, store: TokenStore, device: torch.device
) -> dict[str, Any]:
    """Time rounds of every way and of the plain loop in turns.

    Return their median speeds, the ratios, and the memory.
    """
    before = _held(device)
    eager = trainer("eager", spec, store, device)
    eager.round(1)
    held = _held(device) - before
    runners: dict[str, PlainLoop | AllReplicas] = {"plain": PlainLoop(spec, eager, device), "eager": eager}
    runners |= {name: trainer(name, spec, store, device) for name in ways if name != "eager"}
    for name, runner in runners.items():
        if name != "eager":
            runner.round(1)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for round_ in range(2, rounds + 2):
        for name, runner in runners.items():
            started = _now(device)
            runner.round(round_)
            seconds[name].append(_now(device) - started)
    sequences = sum(replica.batch_size for replica in spec.config.replicas)
    tokens = sequences * spec.config.data.sequence_length * spec.inner_steps
    speeds = {name: tokens / median(values) for name, values in seconds.items()}
    weights = sum(tensor.numel() for tensor in eager.theta.values()) * 4
    expected = weights * (4 * len(eager.replicas) + 1)
    return {
        "compressed_replicas": compressed,
        "tokens_per_second": speeds,
        "over_plain": {name: speed / speeds["plain"] for name, speed in speeds.items() if name != "plain"},
        "held_bytes": held,
        "expected_bytes": expected,
        "held_over_expected": held / expected,
    }


def _now(device: torch.device) -> float:
    """Return CPU seconds of this process. On a GPU, return the wall clock once all work is done."""
    return time.process_time() if device.type == "cpu" else when_idle(device)


def _held(device: torch.device) -> int:
    """Return the bytes of all live tensors' storages, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == device.type:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scale", choices=SCALES, default="micro")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compressed", type=int, help="compressed replicas (default: none, half and all, in turns)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="ways to measure (default: all)")
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    scale, device = SCALES[arguments.scale], torch.device(arguments.device)
    ways = arguments.ways or WAYS
    store = prepare_tokens(spec_of(scale, 0).config.data, Path("runs/.tokens"))
    results = []
    all_counts = (0, scale.replicas // 2, scale.replicas)
    for compressed in all_counts if arguments.compressed is None else (arguments.compressed,):
        results.append(compare(spec_of(scale, compressed), compressed, ways, arguments.rounds, store, device))
    unit = "CPU second" if device.type == "cpu" else "second"
    print(f"{arguments.scale}, {arguments.device}: tokens per {unit}, and their ratio to the plain loop's")
    print("compressed" + "".join(f"{name:>26}" for name in ("plain", *ways)) + f"{'held / expected':>18}")
    for result in results:
        speeds, ratios = result["tokens_per_second"], {"plain": 1.0} | result["over_plain"]
        cells = "".join(f"{speeds[name]:>17,.0f} ({ratios[name]:.3f})" for name in ("plain", *ways))
        print(f"{result['compressed_replicas']:>5} of {scale.replicas}{cells}{result['held_over_expected']:>18.3f}")
    measured = {"scale": arguments.scale, "device": arguments.device, "results": results}
    save(origin() | measured, arguments.json)


if __name__ == "__main__":
    main()
