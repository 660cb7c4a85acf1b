"""The fast in-process engine beside a plain PyTorch loop over one uncompressed model, on the same tokens.

    python benchmarks/in_process.py [--rounds N] [--json FILE]

Both run in this process on one thread, in turns, and are timed in CPU seconds, so that neighbours on the machine
matter little. The engine's share includes its outer rounds; the plain loop has none. Memory: tensors that the engine
holds between steps, against M x (weights + two moments + error feedback) + theta.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.model import Transformer, initialise, next_token_loss
from hetero_pp.program.config import RunConfig, RunPlan
from hetero_pp.program.experiments.report import commit, machine
from hetero_pp.program.fast import Group

H = 10
REPLICAS = 4


def plan_of(compressed: int) -> RunPlan:
    """The micro setting with so many of the four replicas compressed at k/d = 1/8 (bytes instead of a BPE)."""
    home = {"kind": "participants", "stages": 4, "boundary": {"rank": "1/8"}}
    replicas = [
        {"name": f"r{index}", "batch_size": 4} | (home if index < compressed else {"kind": "datacenter"})
        for index in range(REPLICAS)
    ]
    config = RunConfig.model_validate(
        {
            "name": "benchmark",
            "model": {"preset": "micro", "vocabulary": 1024},
            "data": {"sequence_length": 128},
            "inner": {"steps": H, "warmup_steps": 10},
            "outer": {"rounds": 1000, "compression": {"density": 1 / 32, "value_bits": 32}},
            "replicas": replicas,
        }
    )
    return RunPlan(config, 256)


class PlainLoop:
    """What anybody would write: one model, AdamW, clipping."""

    def __init__(self, plan: RunPlan, group: Group) -> None:
        self.model = Transformer(plan.shape)
        initialise(self.model, 0)
        self.adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-2, betas=(0.9, 0.95), fused=True)
        self.batches = group.batches

    def round(self, round_: int) -> None:
        """As many tokens as a round of the engine."""
        for step in range((round_ - 1) * H, round_ * H):
            for batches in self.batches:
                tokens = batches.train(step)
                next_token_loss(self.model(tokens[:, :-1]), tokens[:, 1:]).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.adamw.step()
                self.adamw.zero_grad()


def compare(compressed: int, rounds: int, store: TokenStore) -> dict[str, Any]:
    """CPU seconds a round of both, in turns; the medians and their ratio."""
    plan = plan_of(compressed)
    before = _held()
    group = Group(plan, store)
    group.round(1)
    held = _held() - before
    plain = PlainLoop(plan, group)
    plain.round(1)
    seconds: dict[str, list[float]] = {"engine": [], "plain": []}
    for round_ in range(2, rounds + 2):
        for name, runner in (("engine", group), ("plain", plain)):
            started = time.process_time()
            runner.round(round_)
            seconds[name].append(time.process_time() - started)
    tokens = group.tokens_per_round
    weights = sum(tensor.numel() for tensor in group.theta.values()) * 4
    return {
        "compressed_replicas": compressed,
        "tokens_per_cpu_second": {name: tokens / median(values) for name, values in seconds.items()},
        "engine_over_plain": median(seconds["plain"]) / median(seconds["engine"]),
        "held_bytes": held,
        "expected_bytes": weights * (4 * REPLICAS + 1),
        "held_over_expected": held / (weights * (4 * REPLICAS + 1)),
    }


def _held() -> int:
    """Bytes of all live tensors' storages, each counted once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def main() -> None:
    """Run and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    store = prepare_tokens(plan_of(0).config.data, Path("runs/.tokens"))
    results = [compare(compressed, arguments.rounds, store) for compressed in (0, 2, 4)]
    print(f"{'compressed':>10} {'engine tok/s':>14} {'plain tok/s':>14} {'ratio':>7} {'held / expected':>16}")
    for result in results:
        speeds = result["tokens_per_cpu_second"]
        print(
            f"{result['compressed_replicas']:>7} of {REPLICAS} {speeds['engine']:>13,.0f} {speeds['plain']:>14,.0f} "
            f"{result['engine_over_plain']:>7.3f} {result['held_over_expected']:>16.3f}"
        )
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "commit": commit(), "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
