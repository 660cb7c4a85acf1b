"""Compare the engines of a datacenter replica with a plain PyTorch loop over the same model, and measure outer rounds.

    python benchmarks/engines.py --preset 178m [--engines torchtitan,deepspeed] [--ranks 1] [--device cuda]

torchrun starts each way in processes of its own, eager and (on a GPU, or with --compile) compiled. The results are
tokens per second, the peak memory of a rank, and MFU if the catalog knows the device. Then the replica runs outer
rounds without others. Their cost is reported in seconds, as a share of 50 inner steps, and as the memory of a rank
beyond training. A GPU trains in bf16. A CPU trains in fp32, with one thread per rank.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import parse, save
from rich.console import Console
from rich.table import Table

from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.loss import next_token_loss
from hetero_pp.model.transformer import (
    ModelSettings,
    ModelShape,
    Transformer,
    initialise,
    shapes_by_block,
)
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.research.experiments.provenance import commit, machine
from hetero_pp.rpc.credentials import Secret
from hetero_pp.rpc.exchange import serve_exchange
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.run.hardware import CATALOG
from hetero_pp.run.snapshot import Snapshot
from hetero_pp.run.spec import Roster
from hetero_pp.simulator.costs import Part, forward_flops
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.build import build_engine, require_engine
from replica_groups.engines.engine import Engine
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.loop.collective import CollectiveExchange
from replica_groups.loop.pulse import Pulse
from replica_groups.outer.outer_round import OuterRound
from replica_groups.outer.ranks import Ranks, init_ranks

SECRET = Secret("of this benchmark only")
INNER_STEPS = 50
TOTAL = 1000
SMOKE = {"preset": "micro", "device": "cpu", "batch_size": 2, "length": 32, "steps": 1}


@dataclass(frozen=True)
class Case:
    """One way to train, and its number of ranks."""

    way: str
    preset: str
    device: str
    ranks: int
    batch_size: int
    length: int
    steps: int
    compile: bool

    @property
    def shape(self) -> ModelShape:
        vocabulary = 32000 if self.preset != "micro" else 1024
        return ModelSettings.model_validate({"preset": self.preset, "vocabulary": vocabulary}).resolve(None)


class PlainLoop:
    """Plain training loop for one device: autocast, AdamW, clipping."""

    def __init__(self, case: Case, parameters: dict[str, torch.Tensor], inner: InnerSettings, ranks: Ranks) -> None:
        model = Transformer(case.shape)
        model.load_state_dict(parameters)
        self.module = model.to(ranks.device)
        if case.compile:
            for block in self.module.layers.values():
                block.compile()
        self.adamw = torch.optim.AdamW(self.module.parameters(), lr=1e-3, betas=inner.betas, fused=True)
        self.ranks = ranks

    def inner_step(self, tokens: torch.Tensor, step: int) -> tuple[float, float, float]:
        """Take one step. The interface is that of the engines."""
        tokens = tokens.to(self.ranks.device)
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.ranks.device.type == "cuda"):
            loss = next_token_loss(self.module(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        return loss.item(), norm.item(), 1e-3


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Measure one way on this rank, and return the result."""
    torch.set_num_threads(1)
    ranks = init_ranks(torch.device(case.device))
    parameters = _parameters(case)
    inner = InnerSettings(learning_rate=1e-3)
    trainer = (
        PlainLoop(case, parameters, inner, ranks) if case.way == "plain" else _engine(case, parameters, inner, ranks)
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(case.shape.vocabulary, (case.batch_size, case.length + 1), generator=generator)
    seconds = []
    for step in range(case.steps + 3):
        seconds.append(_timed(partial(trainer.inner_step, tokens, step), ranks.device))
    step_seconds = median(seconds[3:])
    found = asdict(case) | {
        "step_seconds": step_seconds,
        "tokens_per_second": case.batch_size * case.length / step_seconds,
        "peak_bytes": _peak(ranks.device),
        "mfu": _mfu(case, step_seconds, ranks.device),
    }
    if not isinstance(trainer, PlainLoop):
        found |= _outer_round(case, trainer, parameters, step_seconds, folder, ranks)
    ranks.close()
    return found


def _engine(case: Case, parameters: dict[str, torch.Tensor], inner: InnerSettings, ranks: Ranks) -> Engine:
    settings: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    if ranks.device.type == "cuda":
        settings["bf16"] = {"enabled": True}
    replica = DatacenterReplica.model_validate(
        {
            "kind": "datacenter",
            "name": "dc",
            "engine": case.way,
            "batch_size": case.batch_size,
            "torchtitan": {"compile": case.compile},
            "deepspeed": settings,
        }
    )
    return build_engine(replica, case.shape, parameters, inner, TOTAL, ranks)


def _outer_round(
    case: Case, engine: Engine, parameters: dict[str, torch.Tensor], step_seconds: float, folder: Path, ranks: Ranks
) -> dict[str, Any]:
    """Run two outer rounds of a single replica, and measure the second.

    Extra memory is that beyond training, on any rank.
    """
    settings = _outer_settings()
    client, stop = None, None
    if ranks.is_first:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(case, folder, theirs), daemon=True)
        process.start()
        client, stop = ExchangeClient(ours.recv(), SECRET.credentials("r")), ours
    shared = CollectiveExchange(client, ranks)
    shared.join("r", "")
    outer = OuterRound("run", "r", "r", engine, parameters, shared, settings, ranks=ranks, keeps_undo=False)
    pulse = Pulse(shared, "r", lambda before, cause: None)
    with pulse.beating():
        outer.synchronise(1, shared.assign("r", 0).epoch)
        epoch, before = shared.assign("r", 1).epoch, _reset_peak(ranks.device)
        seconds = _timed(lambda: outer.synchronise(2, epoch), ranks.device)
    extra = max(ranks.gather(_peak(ranks.device) - before))
    if client is not None and stop is not None:
        client.close()
        stop.send("stop")
    kept = sum(tensor.numel() * 4 for tensor in (*outer.error.values(), *outer.theta.values()))
    return {
        "outer_seconds": seconds,
        "outer_share": seconds / (INNER_STEPS * step_seconds + seconds),
        "outer_kept_bytes": kept,
        "outer_extra_bytes": extra,
        "largest_parameter_bytes": max(tensor.numel() * 4 for tensor in parameters.values()),
    }


def _outer_settings() -> OuterSettings:
    return OuterSettings.model_validate({"rounds": 2, "compression": {"density": 1 / 128}})


def _serve(case: Case, folder: Path, told: Connection) -> None:
    """Serve the exchange in a process of its own, as in a run, until told to stop."""
    torch.set_num_threads(1)
    parameters = _parameters(case)
    roster = Roster({"r": "r"}, {"r": frozenset(shapes_by_block({n: tuple(t.shape) for n, t in parameters.items()}))})
    log = ContributionLog(FolderStore(folder / "log"))
    exchange = Exchange("run", roster, Snapshot(0, parameters, None), _outer_settings(), log)
    server, port = serve_exchange(exchange, SECRET, "127.0.0.1:0")
    told.send(f"127.0.0.1:{port}")
    told.recv()
    server.stop(None)


def _parameters(case: Case) -> dict[str, torch.Tensor]:
    model = Transformer(case.shape)
    initialise(model, 0)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Return wall-clock seconds until the work is done and the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _peak(device: torch.device) -> int:
    """Return the peak bytes: those of tensors on a GPU, those of the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _of_status("VmHWM")


def _reset_peak(device: torch.device) -> int:
    """Reset the peak, and return the bytes that are held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")
    return _of_status("VmRSS")


def _of_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _mfu(case: Case, step_seconds: float, device: torch.device) -> float | None:
    if device.type == "cpu":
        return None
    name = torch.cuda.get_device_name(device).lower()
    known = next((entry for key, entry in CATALOG.items() if key in name.replace(" ", "-")), None)
    shape = case.shape
    part = Part(shape.layers, True, True, 0)
    flops = 3 * forward_flops(shape, part, case.batch_size, case.length)
    return None if known is None else flops / step_seconds / known.flops / case.ranks


def _measure(case: Case) -> dict[str, Any]:
    """Run a case with torchrun, and return what its first rank wrote."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HETERO_PP_CASE": json.dumps(asdict(case)), "HETERO_PP_FOLDER": folder}
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", __file__]
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            return asdict(case) | {"failed": f"exit code {done.returncode}", "log": done.stderr[-4000:]}
        return json.loads((Path(folder) / "found.json").read_text())


def _show(results: list[dict[str, Any]]) -> None:
    table = Table(title=f"{results[0]['preset']} on {results[0]['device']}, {results[-1]['ranks']} rank(s)")
    for column in ("way", "tokens/s", "over plain", "MFU", "peak GB", "outer round s", "share of 50 steps", "extra"):
        table.add_column(column, justify="right")
    plain = {
        one["compile"]: one["tokens_per_second"] for one in results if one["way"] == "plain" and "failed" not in one
    }
    for one in results:
        name = one["way"] + (", compiled" if one["compile"] else "")
        if "failed" in one:
            table.add_row(name, "failed", one["failed"])
            continue
        ratio = one["tokens_per_second"] / one["ranks"] / plain[one["compile"]] if one["compile"] in plain else None
        cells = [name, f"{one['tokens_per_second']:,.0f}", f"{ratio:.3f}" if ratio else "", f"{one['mfu'] or 0:.3f}"]
        cells.append(f"{one['peak_bytes'] / 1e9:.2f}")
        if "outer_seconds" in one:
            extra = one["outer_extra_bytes"] / one["largest_parameter_bytes"]
            cells += [f"{one['outer_seconds']:.2f}", f"{one['outer_share']:.2%}", f"{extra:.1f} parameters"]
        table.add_row(*cells)
    Console(width=120).print(table)


def main() -> None:
    """Run every way, print, and write JSON if asked."""
    if "HETERO_PP_CASE" in os.environ:
        folder = Path(os.environ["HETERO_PP_FOLDER"])
        found = run_case(Case(**json.loads(os.environ["HETERO_PP_CASE"])), folder)
        if os.environ["RANK"] == "0":
            (folder / "found.json").write_text(json.dumps(found))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=("micro", "178m", "512m", "1b"), default="178m")
    parser.add_argument("--engines", default="torchtitan,deepspeed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="also run compiled, even on a CPU")
    arguments = parse(parser, SMOKE)
    engines = arguments.engines.split(",")
    try:
        for engine in engines:
            require_engine(engine)
    except ConfigError as error:
        raise SystemExit(f"benchmarks/engines.py: {error}") from None
    results = []
    for compiled in (False, True) if arguments.compile or arguments.device == "cuda" else (False,):
        for way in ("plain", *engines):
            ranks = 1 if way == "plain" else arguments.ranks
            share = arguments.batch_size // arguments.ranks if way == "plain" else arguments.batch_size
            if way == "deepspeed" and compiled:
                continue  # the DeepSpeed engine does not compile
            length, steps, preset = arguments.length, arguments.steps, arguments.preset
            results.append(_measure(Case(way, preset, arguments.device, ranks, share, length, steps, compiled)))
    _show(results)
    save({"machine": machine(), "commit": commit(), "results": results}, arguments.json)
    if logs := [one["log"] for one in results if "failed" in one]:
        raise SystemExit("\n".join(logs))


if __name__ == "__main__":
    main()
