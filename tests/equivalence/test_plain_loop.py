"""One datacenter replica and a plain PyTorch loop have the same bits for H steps and through the outer round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelSettings, Transformer, initialise
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.pseudo_gradient.compression import CompressionSettings

H = 4
ROUNDS = 2
DENSITY = 1 / 32
PAPERS = CompressionSettings(density=DENSITY, quantiser="levels")


@pytest.fixture
def config(corpus: Path) -> RunConfig:
    return RunConfig(
        name="plain",
        seed=5,
        model=ModelSettings(width=64, heads=2, feed_forward=96, layers=2),
        data=DataSettings(corpus=str(corpus), sequence_length=32, validation_share=0.1, validation_sequences=4),
        inner=InnerSettings(steps=H, learning_rate=0.01, warmup_steps=3),
        outer=OuterSettings(rounds=ROUNDS, learning_rate=0.8, compression=PAPERS),
        replicas=[DatacenterReplica(name="dc", kind="datacenter", batch_size=4)],
        checkpoints={"every": 1},
    )


def _plain_steps(model: Transformer, adamw: torch.optim.AdamW, batches: StoreBatches, first: int) -> list[float]:
    losses = []
    for step in range(first, first + H):
        tokens = batches.train(step)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        by_name = [parameter for _, parameter in sorted(model.named_parameters())]  # in the norm's order
        torch.nn.utils.clip_grad_norm_(by_name, 1.0)
        for group in adamw.param_groups:
            group["lr"] = InnerSettings(learning_rate=0.01, warmup_steps=3).rates(H * ROUNDS).at(step)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    return losses


def _plain_round(start: torch.Tensor, local: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Apply SparseLoCo for one replica, chunk by chunk, with sorting and Python loops."""
    error.mul_(0.95).add_(start - local)
    matrix = error if error.ndim == 2 else error.view(1, -1)
    tile = (64, 64) if error.ndim == 2 else (1, error.numel())
    where = []
    for top in range(0, matrix.shape[0], tile[0]):
        for left in range(0, matrix.shape[1], tile[1]):
            chunk = matrix[top : top + tile[0], left : left + tile[1]]
            kept = max(1, int(DENSITY * chunk.numel() + 0.5))
            order = chunk.abs().flatten().sort(descending=True, stable=True).indices[:kept]
            where += [(top + int(i) // chunk.shape[1], left + int(i) % chunk.shape[1]) for i in order]
    rows, columns = torch.tensor(where).T
    values = matrix[rows, columns].double()
    centre = values.float().mean()
    deviation = (values.float() - centre).square().mean().sqrt()
    codes = ((values.float() - centre) / (6.0 * deviation / 4) + 2).round().clamp(0, 3)
    sent = torch.zeros(matrix.shape)
    for code in range(4):
        chosen = codes == code
        if chosen.any():
            sent[rows[chosen], columns[chosen]] = values[chosen].mean().float()
    matrix -= sent
    return start - 0.8 * sent.view(start.shape)


def test_sgd_within_and_without_is_sgd_of_the_large_batch(config: RunConfig, tmp_path: Path) -> None:
    """DiLoCo with H = 1 and two replicas equals torch.optim.SGD on both batches (in float64, up to rounding)."""
    torch.set_num_threads(1)
    plain = RunConfig.model_validate(
        config.model_dump()
        | {
            "inner": InnerSettings(
                steps=1, learning_rate=0.5, warmup_steps=3, optimizer="sgd", weight_decay=0.0, clip_norm=None
            ),
            "outer": OuterSettings(rounds=5, method="diloco", learning_rate=1.0, momentum=0.0, nesterov=False),
            "replicas": [DatacenterReplica(name=name, kind="datacenter", batch_size=4) for name in ("a", "b")],
            "exchange": {"magnitudes": {"scale": 1e9, "leave_out": 1e9}},  # single gradients vary more
        }
    )
    spec = RunSpec(plain, 256)
    run_in_process(spec, RunFolder(tmp_path / "run"), lambda _: None)
    store = prepare_tokens(config.data, tmp_path)
    batches = [
        StoreBatches(store=store, sequence_length=32, seed=5, replica=index, replicas=2, batch_size=4)
        for index in range(2)
    ]
    model = Transformer(spec.shape)
    initialise(model, 5)
    model.double()
    sgd = torch.optim.SGD(model.parameters())
    for step in range(5):
        tokens = torch.cat([one.train(step) for one in batches])
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        for group in sgd.param_groups:
            group["lr"] = plain.inner.rates(5).at(step)
        sgd.step()
        sgd.zero_grad()
    saved = open_checkpoint(tmp_path / "run" / "log" / "checkpoint-000005.safetensors").checkpoint().parameters
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[name].double(), parameter.detach(), atol=2e-6, rtol=1e-5)


def test_a_datacenter_replica_is_a_plain_loop(config: RunConfig, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reports: list[Report] = []
    spec = RunSpec(config, 256)
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    measured = [report.inner_step.loss for report in reports if report.HasField("inner_step")]

    store = prepare_tokens(config.data, tmp_path)
    batches = StoreBatches(store=store, sequence_length=32, seed=5, replica=0, replicas=1, batch_size=4)
    model = Transformer(spec.shape)
    initialise(model, 5)
    named = dict(sorted(model.named_parameters()))
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    errors = {name: torch.zeros_like(p) for name, p in named.items()}
    expected = []
    for round_ in range(ROUNDS):
        start = {name: p.detach().clone() for name, p in named.items()}
        expected += _plain_steps(model, adamw, batches, round_ * H)
        assert measured[: len(expected)] == expected  # the inner loop is equal to the bit
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(_plain_round(start[name], p.detach(), errors[name]))
        saved = open_checkpoint(tmp_path / "run" / "log" / f"checkpoint-{round_ + 1:06d}.safetensors").checkpoint()
        for name, p in named.items():
            assert saved.parameters[name].equal(p), f"{name} after round {round_ + 1}"
