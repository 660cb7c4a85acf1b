"""An engine that fails: one message has the replica, the rank and the cause, and nothing is left behind."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import pytest
from asking import sets
from started import run_program
from typer.testing import CliRunner

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.cli import app
from hetero_pp.program.launch.command import ReachedExchange, begin_folder, run_members
from hetero_pp.program.launch.inputs import Prepared, require_same_ranks
from hetero_pp.program.operate.operations import Operations
from replica_groups.engines.build import require_engine
from replica_groups.member.saved_states import SavedStates

CONFIG = Path(__file__).parents[2] / "configs" / "mixed_engines.yaml"
SMALL = [
    "outer.rounds=1",
    "inner.steps=1",
    "data.validation_sequences=8",
    "data.validation_share=0.2",
    "data.repeat=true",
]


def _command(corpus: Path, runs: Path, *settings: str) -> list[str]:
    given = sets(*SMALL, f"data.corpus={corpus}", *settings)
    return ["launch", str(CONFIG), "--runs", str(runs), *given]


@pytest.mark.starts_processes
def test_an_engines_own_error_is_told(corpus: Path, tmp_path: Path) -> None:
    nonsense = 'replicas.1.deepspeed={"optimizer": {"type": "Nonsense", "params": {}}}'
    done = run_program(*_command(corpus, tmp_path, nonsense, "replicas.0.engine=torch", "replicas.0.ranks=1"))
    assert done.returncode == 1
    told = r"zero: rank [01] of zero: AssertionError: Nonsense is not a supported DeepSpeed Optimizer"
    assert re.search(told, done.stderr)
    assert len(done.stderr.splitlines()) == 1
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert not left


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("replicas.0.ranks=3", "replicas[0].batch_size: found micro-batches of 8 sequences, expected a multiple of 3"),
        ("replicas.0.torchtitan.tensor_parallel=4", "replicas[0].torchtitan: found tensor_parallel 4"),
        ("replicas.0.engine=torch", "--set replicas.0.engine=torch: found `torch` with 2 ranks"),
        (
            'replicas.1.deepspeed={"train_batch_size": 4}',
            "replicas[1].deepspeed.train_batch_size: found a key that hetero-pp sets",
        ),
        ('replicas.1.deepspeed={"bf16": {"enabled": true}}', "replicas[1].deepspeed.zero_optimization: found stage 0"),
        ('outer={"rounds": 1, "method": "adamw_ddp"}', "replicas[0].engine: found `torchtitan`, expected `torch`"),
        ("replicas.0.nodes=2", "replicas[0].rendezvous: found nothing, expected HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    setting: str, complaint: str, corpus: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(app, _command(corpus, tmp_path, setting))
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert "mixed_engines.yaml:" in done.stderr or f"--set {setting}: " in done.stderr
    assert not (tmp_path / "mixed-engines").exists()


@pytest.mark.parametrize(("stage", "is_refused"), [(0, False), (1, True), (3, True)])
def test_another_number_of_ranks_is_refused_where_deepspeed_cannot_read_its_checkpoint(
    stage: int, is_refused: bool, tmp_path: Path
) -> None:
    """It split the optimizer over the ranks that wrote it."""
    zero = '{"zero_optimization": {"stage": STAGE}}'.replace("STAGE", str(stage))
    file = ConfigFile(CONFIG, [f"replicas.1.deepspeed={zero}", "replicas.1.ranks=1"])
    spec = RunSpec(file.config, 256)
    folder = begin_folder(spec, tmp_path)
    for run, wrote in ((spec.run, 2), ("another run", 4)):
        names = [f"outer-{rank}-of-{wrote}.safetensors" for rank in range(wrote)]
        SavedStates(folder.state("zero"), run, 1).save(wrote, partial(_touch, names))
    if not is_refused:
        require_same_ranks(spec, spec.config, ["zero"], folder)
        return
    prepared, exchange = Prepared(spec, ["zero"], None, located=file.located), cast(ReachedExchange, None)
    told = "--set replicas.1.ranks=1: found 1, expected 2: 2 ranks wrote its checkpoints of ZeRO "
    with pytest.raises(ConfigError, match=re.escape(told)):
        run_members(prepared, tmp_path, "zero", exchange, Operations())
    (wrong,) = folder.state("zero").glob("round-000002")
    shutil.rmtree(wrong)
    require_same_ranks(spec, spec.config, ["zero"], folder)


def _touch(names: Sequence[str], folder: Path) -> None:
    for name in names:
        (folder / name).touch()


@pytest.mark.parametrize("heads", [(3, 3), (4, 1)], ids=str)
def test_tensor_parallelism_splits_no_head(heads: tuple[int, int]) -> None:
    titan = {"kind": "datacenter", "name": "dc", "engine": "torchtitan", "torchtitan": {"tensor_parallel": 2}}
    model = {"width": 48, "heads": heads[0], "kv_heads": heads[1]}
    values = {"name": "t", "model": model, "outer": {"rounds": 1}, "replicas": [{**titan, "ranks": 2}]}
    with pytest.raises(ConfigError) as caught:
        RunConfig.model_validate(values).check()
    assert caught.value.key == ("replicas", 0, "torchtitan", "tensor_parallel")
    assert caught.value.message == f"found 2, expected a divisor of the model's {heads[1]} heads of keys and values"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = r"found `deepspeed`, which is not installed; install it with: pip install .*\[deepspeed\]"
    with pytest.raises(ConfigError, match=told):
        require_engine("deepspeed")
    require_engine("torch")
