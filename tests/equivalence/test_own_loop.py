"""SparseLoCo in a loop of one's own, in two processes over gloo, and a run of this package have the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from started import run_on_ranks
from torch import nn

from hetero_pp import SparseLoCo
from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.launch.in_process import run_in_process

EXAMPLE = Path(__file__).parents[2] / "docs" / "own_loop.py"
ROUNDS, H = 3, 2

LOOP = f"""
import os, sys
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
from hetero_pp import SparseLoCo
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.model.transformer import Transformer, initialise

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
config = RunConfig.model_validate_json((folder / "config.json").read_text())
store = prepare_tokens(config.data, folder)
batches = StoreBatches(store=store, sequence_length=32, seed=5, replica=rank, replicas=2, batch_size=4)

def build():
    model = Transformer(RunSpec(config, 256).shape)
    named = dict(sorted(model.named_parameters()))
    groups = [
        {{"params": [p for p in named.values() if p.ndim > 1], "weight_decay": 0.1}},
        {{"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0}},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    return model, named, adamw

model, named, adamw = build()
initialise(model, 5 + rank)  # the first rank's parameters are those of all
outer = SparseLoCo(model, adamw, sync_every={H}, settings=config.outer)
for step in range({ROUNDS * H}):
    if step == 3:  # resumed from saved states, in the middle of a round
        saved = model.state_dict(), adamw.state_dict(), outer.state_dict()
        torch.save(saved, folder / f"state-{{rank}}.pt")
        model, named, adamw = build()
        outer = SparseLoCo(model, adamw, sync_every={H}, settings=config.outer)
        states = torch.load(folder / f"state-{{rank}}.pt", weights_only=True)
        for one, state in zip((model, adamw, outer), states, strict=True):
            one.load_state_dict(state)
    tokens = batches.train(step)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)
    for group in adamw.param_groups:
        group["lr"] = config.inner.rates({ROUNDS * H}).at(step)
    adamw.step()
    adamw.zero_grad()
    outer.step()
torch.save({{name: one.detach() for name, one in named.items()}}, folder / f"parameters-{{rank}}.pt")
dist.destroy_process_group()
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    "outer",
    [
        {"compression": {"density": 1 / 32, "quantiser": "levels"}},
        {"compression": {"density": 1 / 32}},
        {"method": "diloco"},
    ],
    ids=["levels", "signs", "diloco"],
)
def test_two_processes_have_the_bits_of_a_run(outer: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {
            "name": "own-loop",
            "seed": 5,
            "model": {"width": 64, "heads": 2, "feed_forward": 96, "layers": 2},
            "data": {"corpus": str(corpus), "sequence_length": 32, "validation_share": 0.1, "validation_sequences": 4},
            "inner": {"steps": H, "learning_rate": 0.01, "warmup_steps": 3},
            "outer": {"rounds": ROUNDS, **outer},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": 4} for name in ("a", "b")],
        }
    )
    run_in_process(RunSpec(config, 256), RunFolder(tmp_path / "run"), lambda _: None)
    saved = open_checkpoint(tmp_path / "run" / "log" / f"checkpoint-{ROUNDS:06d}.safetensors").checkpoint()
    prepare_tokens(config.data, tmp_path)  # once, for both processes
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "loop.py").write_text(LOOP)
    run_on_ranks(2, tmp_path / "loop.py", str(tmp_path))
    for rank in range(2):
        for name, parameter in torch.load(tmp_path / f"parameters-{rank}.pt", weights_only=True).items():
            assert parameter.equal(saved.parameters[name]), f"{name} of rank {rank}"


@pytest.mark.starts_processes
def test_the_example_of_the_documents_trains() -> None:
    printed = run_on_ranks(2, EXAMPLE)
    losses = [float(line.split()[-1]) for line in "".join(printed).splitlines()]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2


def test_settings_that_need_a_run_are_refused() -> None:
    model = nn.Linear(4, 4)
    sgd = torch.optim.SGD(model.parameters())
    for settings, expected in (
        (OuterSettings(rounds=1, overlap=1), "settings.overlap: got 1, expected 0"),
        (OuterSettings(rounds=1, method="adamw_ddp"), "settings.source: got 'gradient', expected 'difference'"),
        (OuterSettings(rounds=1, weights="tokens"), "settings.weights: got 'tokens', expected 'equal'"),
    ):
        with pytest.raises(ValueError, match=expected):
            SparseLoCo(model, sgd, settings=settings)
    with pytest.raises(ValueError, match="sync_every: got 0, expected at least 1"):
        SparseLoCo(model, sgd, sync_every=0)
    with pytest.raises(ValueError, match="inner_optimizer: got 3 parameters, 2 of them the model's"):
        SparseLoCo(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))]))
    other = nn.Linear(2, 2)
    state = SparseLoCo(other, torch.optim.SGD(other.parameters())).state_dict()
    with pytest.raises(ValueError, match="got the state of other parameters"):
        SparseLoCo(model, sgd).load_state_dict(state)


def test_a_replica_by_itself_sends_to_itself_and_a_diverged_one_says_so() -> None:
    model = nn.Linear(64, 64, bias=False)
    start, sgd = model.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=0.1)
    outer = SparseLoCo(model, sgd, sync_every=1, density=1.0, bits=32)
    with torch.no_grad():
        model.weight.add_(1.0)
    assert outer.step()
    assert model.weight.allclose(start + 1.0)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="weight is not finite after round 2"):
        outer.step()
