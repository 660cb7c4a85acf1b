"""Compare the engines of a datacenter replica with a plain PyTorch loop over the same model, and measure outer rounds.

    python benchmarks/engines.py --preset 178m [--engines torch,torchtitan,deepspeed] [--ranks 1] [--device cuda]

torchrun starts each engine in processes of its own, eager and (on a GPU, or with --modes) compiled. Every process also
has a plain loop, which trains this rank's share of the batch with torch's own modules and autocast. Both take
steps in turns. The results are tokens per second, their ratio, the peak memory of a rank, and MFU if the catalog knows
the device. Then the replica runs outer rounds without others. Their cost is reported in seconds, as a share of 50 inner
steps, and as the memory of a rank beyond training. A GPU trains in bf16, a CPU in fp32 with one thread per rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import origin, parse, parser_of, save
from processes import reset_peak, serving, status_bytes, when_idle
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.predictions import hardware_of
from hetero_pp.config.spec import Roster
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.device import name_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.arithmetic import Linear, RMSNorm, next_token_loss
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import (
    ModelSettings,
    ModelShape,
    Transformer,
    shapes_by_block,
)
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Secret
from hetero_pp.simulator.costs import StagePart, forward_flops
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.build import build_engine, require_engine
from replica_groups.engines.engine import Engine
from replica_groups.engines.ranks import Ranks, init_ranks
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.server import serve_exchange
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import Heartbeat, MemberSession

SECRET = Secret("of this benchmark only")
OUTER = OuterSettings.model_validate({"rounds": 2, "compression": {"density": 1 / 128}})
INNER_STEPS = 50
PARAMETERS = "parameters.safetensors"
WARM_UP = 3
"""Steps before the measured ones."""
TOTAL = 1000
SMOKE = {"preset": "micro", "device": "cpu", "batch_size": 2, "length": 32, "steps": 1}


@dataclass(frozen=True)
class Case:
    """One engine, and its number of ranks."""

    engine: str
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
    """Plain training loop on one device: torch's own modules, autocast, clipping, fused AdamW."""

    def __init__(self, case: Case, parameters: dict[str, torch.Tensor], device: torch.device) -> None:
        model = Transformer(case.shape)
        model.load_state_dict(parameters)
        plain: dict[type, Any] = {Linear: nn.Linear, RMSNorm: nn.RMSNorm}
        for part in model.modules():
            part.__class__ = plain.get(type(part), type(part))  # without the project's casts
        self.module, self.device = model.to(device), device
        if case.compile:
            for block in self.module.layers.values():
                block.compile()
        self.of_logits = torch.compile(next_token_loss) if case.compile else next_token_loss
        self.adamw = torch.optim.AdamW(self.module.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)

    def inner_step(self, tokens: torch.Tensor, step: int) -> tuple[float, float, float]:
        """Take one step. The interface is that of the engines."""
        tokens = tokens.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.of_logits(self.module(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        return loss.item(), norm.item(), 1e-3


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Measure one engine on this rank beside the plain loop, and return the result."""
    ranks = init_ranks(torch.device(case.device))
    if ranks.device.type == "cpu":
        torch.set_num_threads(1)
    parameters = _parameters(case)
    engine = _engine(case, parameters, InnerSettings(learning_rate=1e-3), ranks)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(case.shape.vocabulary, (case.batch_size, case.length + 1), generator=generator)
    for step in range(WARM_UP):
        engine.inner_step(tokens, step)
    peak = _peak(ranks.device)
    plain, own = PlainLoop(case, parameters, ranks.device), tokens.chunk(ranks.world)[ranks.rank]
    for step in range(WARM_UP):
        plain.inner_step(own, step)
    seconds: list[tuple[float, float]] = []
    for step in range(WARM_UP, WARM_UP + case.steps):
        ours = _timed(partial(engine.inner_step, tokens, step), ranks.device)
        seconds.append((ours, _timed(partial(plain.inner_step, own, step), ranks.device)))
    step_seconds, plain_seconds = (median(column) for column in zip(*seconds, strict=True))
    del plain
    found = asdict(case) | {
        "step_seconds": step_seconds,
        "tokens_per_second": case.batch_size * case.length / step_seconds,
        "over_plain": max(ranks.gather(plain_seconds)) / step_seconds,
        "peak_bytes": peak,
        "mfu": _mfu(case, step_seconds, ranks.device),
        "plain_mfu": _mfu(case, plain_seconds, ranks.device),
    }
    found |= _outer_round(case, engine, parameters, step_seconds, folder, ranks)
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
            "engine": case.engine,
            "batch_size": case.batch_size,
            "compile": case.compile and case.engine == "torch",
            "torchtitan": {"compile": case.compile and case.engine == "torchtitan"},
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
    with ExitStack() as stack:
        client = None
        if ranks.is_first:
            save_file(parameters, folder / PARAMETERS)
            client = ExchangeClient(stack.enter_context(serving(_serve, case, folder)), SECRET.credentials("r"))
            stack.callback(client.close)
        shared = MemberSession(client, "r", "r", "run", ranks=ranks)
        shared.join("r", "")
        outer = OuterRound(shared, engine, parameters, OUTER, keeps_undo=False)
        stack.enter_context(Heartbeat(shared, "r", lambda before, cause: None).sending())
        outer.synchronise(1, shared.assign("r", 0).generation)
        generation, before = shared.assign("r", 1).generation, _reset_peak(ranks.device)
        seconds = _timed(lambda: outer.synchronise(2, generation), ranks.device)
    extra = max(ranks.gather(_peak(ranks.device) - before))
    kept = sum(tensor.numel() * 4 for tensor in (*outer.error.values(), *outer.theta.values()))
    return {
        "outer_seconds": seconds,
        "outer_share": seconds / (INNER_STEPS * step_seconds + seconds),
        "outer_kept_bytes": kept,
        "outer_extra_bytes": extra,
        "largest_parameter_bytes": max(tensor.numel() * 4 for tensor in parameters.values()),
    }


def _serve(told: Connection, case: Case, folder: Path) -> None:
    """Serve the exchange in a process of its own, as in a run, until the parent is done."""
    if case.device == "cpu":
        torch.set_num_threads(1)
    parameters = load_file(folder / PARAMETERS)
    roster = Roster({"r": "r"}, {"r": frozenset(shapes_by_block({n: tuple(t.shape) for n, t in parameters.items()}))})
    log = ContributionLog(FolderStore(folder / "log"))
    exchange = Exchange("run", roster, RunCheckpoint(0, parameters, None), OUTER, log)
    server, port = serve_exchange(exchange, SECRET, "127.0.0.1:0")
    told.send(f"127.0.0.1:{port}")
    with suppress(EOFError):
        told.recv()
    server.stop(None)


def _parameters(case: Case) -> dict[str, torch.Tensor]:
    """Draw the parameters, on the device because that is faster; return them in host memory."""
    generator = torch.Generator(case.device).manual_seed(0)
    with torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in Transformer(case.shape).named_parameters()}
    return {
        name: torch.empty(shape, device=case.device).normal_(1.0 * (len(shape) == 1), 0.02, generator=generator).cpu()
        for name, shape in sorted(shapes.items())
    }


def _timed(work: Callable[[], object], device: torch.device) -> float:
    """Return wall-clock seconds until the work is done and the device is idle."""
    started = when_idle(device)
    work()
    return when_idle(device) - started


def _peak(device: torch.device) -> int:
    """Return the peak bytes: those of tensors on a GPU, those of the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status_bytes("VmHWM")


def _reset_peak(device: torch.device) -> int:
    """Reset the peak, and return the bytes that are held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return reset_peak()


def _mfu(case: Case, step_seconds: float, device: torch.device) -> float | None:
    known, shape = hardware_of(name_of(device)), case.shape
    part = StagePart(shape.layers, True, 0)
    flops = 3 * forward_flops(shape, part, case.batch_size, case.length)
    return None if known is None else flops / step_seconds / known.flops / case.ranks


def _measure(case: Case) -> dict[str, Any]:
    """Run a case with torchrun, and return what its first rank wrote."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"HETERO_PP_CASE": json.dumps(asdict(case)), "HETERO_PP_FOLDER": folder}
        command = ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}", __file__]
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            return asdict(case) | {"failed": f"exit code {done.returncode}", "log": done.stderr[-4000:]}
        return json.loads((Path(folder) / "found.json").read_text())


def _show(results: list[dict[str, Any]]) -> None:
    print(f"{results[0]['preset']} on {results[0]['device']}, {results[0]['ranks']} rank(s)")
    speeds = ["tokens/s", "over plain", "MFU", "MFU of plain", "peak GB"]
    table = PlainTable(["engine"], [*speeds, "outer round s", "share of 50 steps"], ["extra"])
    for one in results:
        name = one["engine"] + (", compiled" if one["compile"] else "")
        if "failed" in one:
            table.add_row(name, "failed", one["failed"])
            continue
        cells = [name, f"{one['tokens_per_second']:,.0f}", f"{one['over_plain']:.3f}"]
        cells += [f"{one[key]:.3f}" if one[key] else "" for key in ("mfu", "plain_mfu")]
        extra = one["outer_extra_bytes"] / one["largest_parameter_bytes"]
        cells += [f"{one['peak_bytes'] / 1e9:.2f}", f"{one['outer_seconds']:.2f}", f"{one['outer_share']:.2%}"]
        table.add_row(*cells, f"{extra:.1f} parameters")
    Console(width=140).print(table)


def main() -> None:
    if "HETERO_PP_CASE" in os.environ:
        folder = Path(os.environ["HETERO_PP_FOLDER"])
        found = run_case(Case(**json.loads(os.environ["HETERO_PP_CASE"])), folder)
        if os.environ["RANK"] == "0":
            (folder / "found.json").write_text(json.dumps(found))
        return
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=("micro", "178m", "512m", "1b"), default="178m")
    parser.add_argument("--engines", default="torch,torchtitan,deepspeed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--modes", help="`eager`, `compiled` or `eager,compiled` (default: both on a GPU, else eager)")
    arguments = parse(parser, SMOKE)
    engines = arguments.engines.split(",")
    try:
        for engine in engines:
            require_engine(engine)
    except ConfigError as error:
        raise SystemExit(f"benchmarks/engines.py: {error}") from None
    results = []
    modes = arguments.modes or ("eager,compiled" if arguments.device == "cuda" else "eager")
    for compiled in [mode == "compiled" for mode in modes.split(",")]:
        for engine in engines:
            if engine == "deepspeed" and compiled:
                continue  # the DeepSpeed engine does not compile
            sizes = (arguments.ranks, arguments.batch_size, arguments.length, arguments.steps)
            results.append(_measure(Case(engine, arguments.preset, arguments.device, *sizes, compiled)))
    _show(results)
    save(origin() | {"results": results}, arguments.json)
    if logs := [one["log"] for one in results if "failed" in one]:
        raise SystemExit("\n".join(logs))


if __name__ == "__main__":
    main()
