"""Replicas with different shards, weighted by the amount of text: vectorized trainer, in process and over gRPC."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from started import run_program

from hetero_pp.core.errors import ConfigError, Refused
from hetero_pp.data.clusters import find_clusters
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.research.vectorized.all_replicas import AllReplicas
from hetero_pp.research.vectorized.train import train_fast
from hetero_pp.run.batches import examples_in, text_digest
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec
from replica_groups.exchange.host import make_exchange
from replica_groups.exchange.text import Text

NAMES = ["a", "b", "c"]
STEPS, ROUNDS = 2, 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of two kinds. One kind has twice as many."""
    folder, order = tmp_path_factory.mktemp("kinds"), random.Random(1)
    for number in range(60):
        letters = "abcdefgh" if number % 3 else "stuvwxyz"
        (folder / f"{number}.txt").write_text("".join(order.choices(letters + " .", k=400)))
    return folder


def _config(text: Path, **outer: Any) -> RunConfig:
    data = {"corpus": str(text), "sequence_length": 15, "validation_share": 0.2, "validation_sequences": 4}
    return RunConfig.model_validate(
        {
            "name": "t",
            "seed": 3,
            "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 1},
            "data": data | {"clusters": 3},
            "inner": {"steps": STEPS, "warmup_steps": 0, "learning_rate": 0.01},
            "outer": {"rounds": ROUNDS, "method": "diloco", "weights": "examples", **outer},
            "exchange": {"quorum": 1.0},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": 2} for name in NAMES],
        }
    )


def _store(config: RunConfig, folder: Path) -> TokenStore:
    return prepare_tokens(config.data, folder)


def test_a_mean_weighs_by_examples(text: Path, tmp_path: Path) -> None:
    """If everything is sent without momentum, theta is the replicas' mean, weighted by the sizes of their shards."""
    torch.set_num_threads(1)
    config = _config(text, learning_rate=1.0, momentum=0.0, nesterov=False)
    spec = RunSpec(config, 256)
    store = _store(config, tmp_path)
    examples = examples_in(spec, store, 1)
    assert len(set(examples.values())) > 1
    group = AllReplicas(spec, store)
    assert group.weights == examples
    before = {name: tensor.clone() for name, tensor in group.theta.items()}
    ends: list[dict[str, torch.Tensor]] = []
    synchronise = group._synchronise

    def remembering(round_: int) -> None:
        ends.extend({name: own.detach().clone() for name, own in one.parameters.items()} for one in group.replicas)
        synchronise(round_)

    group._synchronise = remembering  # type: ignore[method-assign]
    assert group.round(1)
    for name, found in group.theta.items():
        own = [examples[replica] * (end[name] - before[name]) for replica, end in zip(NAMES, ends, strict=True)]
        torch.testing.assert_close(found, before[name] + sum(own) / sum(examples.values()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pretraining", [0, 2])
def test_it_has_the_bits_of_the_run_in_process(pretraining: int, text: Path, tmp_path: Path) -> None:
    config = _config(text, pretraining=pretraining)
    spec, store = RunSpec(config, 256), _store(config, tmp_path)
    fast = train_fast(spec, store)
    reports: list[Report] = []
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    closed = [one.round_closed for one in reports if one.HasField("round_closed")]
    early, late = (examples_in(spec, store, round_) for round_ in (1, ROUNDS))
    assert (early["a"] == sum(late.values())) == (pretraining > 0)
    assert [{one.replica: one.weight for one in record.contributions} for record in closed] == [
        {"a": early["a"]} if round_ <= pretraining else late for round_ in range(1, ROUNDS + 1)
    ]
    told = [one.evaluation for one in reports if one.HasField("evaluation") and one.evaluation.round == ROUNDS]
    assert [one.loss for one in told] == 3 * [fast.validation_loss[-1]]


@pytest.mark.starts_processes
def test_it_has_the_same_bits_over_the_network(text: Path, tmp_path: Path) -> None:
    config = _config(text)
    fast = train_fast(RunSpec(config, 256), _store(config, tmp_path))
    (tmp_path / "run.yaml").write_text(config.model_dump_json())
    done = run_program("launch", str(tmp_path / "run.yaml"), "--runs", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All replicas hold the same weights" in done.stdout
    told = map(json.loads, (tmp_path / "t" / "metrics.jsonl").read_text().splitlines())
    losses = {one["loss"] for one in told if one["event"] == "evaluation" and one["round"] == ROUNDS}
    assert losses == {fast.validation_loss[-1]}


def test_it_goes_on_from_a_checkpoint_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    """The first replica reads all of the text in the first half, and its own shard in the second."""
    config = _config(text, pretraining=2)
    spec, store = RunSpec(config, 256), _store(config, tmp_path)
    whole = train_fast(spec, store)

    def stop(round_: int, loss: float) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fast(spec, store, stop, checkpoint=tmp_path / "kept", checkpoint_seconds=0.0)
    assert train_fast(spec, store, checkpoint=tmp_path / "kept").validation_loss == whole.validation_loss


def test_an_exchange_that_counts_examples_lets_no_other_text_in(text: Path, tmp_path: Path) -> None:
    config = _config(text)
    spec, folder = RunSpec(config, 256), RunFolder(tmp_path / "run")
    exchange = make_exchange(spec, folder)
    store = _store(config, folder.cache)
    with pytest.raises(Refused, match=r"reads another text than the run: .*, as exchange reads"):
        exchange.agree("a", spec.agreed, store.digest)
    assert exchange.agree("a", spec.agreed, text_digest(spec, store)) == spec.run
    Text(folder.text, lambda _: True, lambda: False).note("a", store.digest)
    with pytest.raises(ConfigError, match=r"the exchange reads another text than the run: .*, as a reads") as error:
        make_exchange(spec, folder)
    assert error.value.key == ("data", "corpus")


def _weights(runs: Path) -> list[dict[str, float]]:
    """Return the weights of each round, from its record."""
    records = sorted((runs / "t" / "log").glob("round-*/record.json"))
    told = [json.loads(path.read_text())["contributions"] for path in records]
    return [{one["replica"]: one["weight"] for one in contributions} for contributions in told]


@pytest.mark.starts_processes
def test_who_comes_or_goes_changes_the_weights_from_that_round_on(text: Path, tmp_path: Path) -> None:
    """The clusters are distributed again from then on."""
    config = _config(text)
    clusters = find_clusters(_store(config, tmp_path), 15, 3, config.seed)

    def launch(names: list[str], rounds: int, *arguments: str) -> None:
        raw = config.model_dump(mode="json")
        raw["snapshots"]["every"] = 1
        raw["replicas"] = [one for one in raw["replicas"] if one["name"] in names]
        (path := tmp_path / f"{rounds}.yaml").write_text(json.dumps(raw))
        changed = ("--set", f"outer.rounds={rounds}", *arguments)
        done = run_program("launch", str(path), "--runs", str(tmp_path), *changed)
        assert done.returncode == 0, done.stdout + done.stderr

    launch(["a", "b"], 2)
    launch(["a", "b", "c"], 4, "--resume")
    launch(["a", "c"], 6, "--resume")
    launch(["a", "c"], 7, "--resume")
    two, three = ([len(clusters.windows(share, shares)) for share in range(shares)] for shares in (2, 3))
    of_three = dict(zip("abc", three, strict=True))
    first, last = dict(zip("ab", two, strict=True)), dict(zip("ac", two, strict=True))
    assert len({*two, *three}) > 3
    assert _weights(tmp_path) == [first, first, of_three, of_three, last, last, last]


@pytest.mark.starts_processes
def test_text_that_was_changed_meanwhile_is_told_in_a_line(text: Path, tmp_path: Path) -> None:
    shutil.copytree(text, tmp_path / "text")
    (tmp_path / "run.yaml").write_text(_config(tmp_path / "text", rounds=2).model_dump_json())
    assert run_program("launch", str(tmp_path / "run.yaml"), "--runs", str(tmp_path)).returncode == 0
    (tmp_path / "text" / "0.txt").write_text("abcdefgh " * 50)
    more = ("--resume", "--set", "outer.rounds=3")
    done = run_program("launch", str(tmp_path / "run.yaml"), "--runs", str(tmp_path), *more)
    assert done.returncode == 1
    assert "data.corpus: the exchange reads another text than the run: found tokens" in done.stdout + done.stderr
    assert "Error" not in done.stdout + done.stderr


def test_averaged_gradients_weigh_the_same() -> None:
    with pytest.raises(ValueError, match="found weights `examples` with averaged gradients, expected `equal`"):
        OuterSettings(rounds=1, method="adamw_ddp", weights="examples")
