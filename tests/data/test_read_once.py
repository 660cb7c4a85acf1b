"""A resumed run on a streamed corpus does not read again what it has read, because that may have changed since.

If the run did not load its position, it would only lose time as long as the corpus stays the same. Here, the corpus
changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from typer.testing import CliRunner

from hetero_pp.data.batches import Share, SharedBatches
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.sources import StreamedCorpus
from hetero_pp.data.stream import StreamBatches
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import ModelSettings, Transformer, initialise
from hetero_pp.pipeline.coefficients import Floats
from hetero_pp.program.cli import app
from replica_groups.engines.plain import PlainEngine, WholeReplica
from replica_groups.member.trainers import DatacenterMember, StageMember, TrainingMember
from stages.boundary import Boundary
from stages.stage import Stage
from stages.worker import StageWorker, WorkerSettings

WIDTH, ROWS, LENGTH, STEPS, ROUNDS = 16, 2, 16, 3, 4
HELD_OUT, BUFFER, REPLICAS = 4, 3, 2
INNER = InnerSettings(steps=STEPS, learning_rate=0.02, warmup_steps=0)
YAML = f"""
name: stream
model: {{width: {WIDTH}, heads: 2, feed_forward: 24, layers: 2}}
data:
  corpus: "hf:SHARDS"
  stream: {{validation_documents: {HELD_OUT}, shuffle_buffer: {BUFFER}}}
  sequence_length: {LENGTH}
  validation_sequences: 4
inner: {{steps: {STEPS}, learning_rate: 2e-2, warmup_steps: 0}}
outer: {{rounds: {ROUNDS}, compression: {{density: 1/4}}}}
checkpoints: {{every: 1}}
replicas:
  - {{name: dc, kind: datacenter, batch_size: {ROWS}, device: cpu}}
  - {{name: home, kind: participants, stages: 2, batch_size: {ROWS}}}
"""


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return shards of documents with random letters. A run here reads less than an epoch of them."""
    random, folder = Random(0), tmp_path / "shards"
    folder.mkdir()
    for shard in range(4):
        _write(folder, shard, ["".join(random.choices("abcdefgh", k=random.randint(20, 50))) for _ in range(12)])
    return folder


def _write(folder: Path, shard: int, texts: list[str]) -> None:
    lines = (json.dumps({"text": text}) + "\n" for text in texts)
    (folder / f"{shard}.jsonl").write_text("".join(lines))


def _batches(shards: Path, replica: int) -> StreamBatches:
    stream = {"validation_documents": HELD_OUT, "shuffle_buffer": BUFFER}
    data = DataSettings.model_validate({"corpus": f"hf:{shards}", "stream": stream, "validation_sequences": 4})
    return StreamedCorpus(data).batches(LENGTH, 0, replica, REPLICAS, ROWS)


def test_a_stream_is_shared_out_anew(shards: Path) -> None:
    """From a later step on, three replicas read what two have read before.

    Each reads other documents, in the same batches.
    """
    data = DataSettings.model_validate(
        {"corpus": f"hf:{shards}", "stream": {"validation_documents": HELD_OUT, "shuffle_buffer": BUFFER}}
    )

    def batches_of(share: Share) -> StreamBatches:
        corpus = StreamedCorpus(data)
        return corpus.batches(LENGTH, share.seed(0), share.replica, share.replicas, ROWS)

    everyone = [SharedBatches(Share(min(replica, 1), 2), batches_of) for replica in range(3)]
    for batches in everyone:
        batches.train(STEPS - 1)
    shares = [Share(replica, 3, (), 2, STEPS) for replica in range(3)]
    for batches, share in zip(everyone, shares, strict=True):
        batches.take(share, STEPS)
    read = [[batches.train(step) for step in range(STEPS, 2 * STEPS)] for batches in everyone]
    rows = [tuple(row.tolist()) for steps in read for batch in steps for row in batch]
    assert len(rows) == len(set(rows)) == 3 * STEPS * ROWS
    again = SharedBatches(Share(0, 2), batches_of)
    again.load(json.loads(json.dumps(everyone[0].state())))
    again.take(shares[0], 2 * STEPS)
    assert again.train(2 * STEPS).equal(everyone[0].train(2 * STEPS))


def _change_what_was_read(shards: Path, steps: int) -> None:
    """Replace all documents before the replicas' current blocks by longer ones, after so many steps.

    Validation documents and the first document of each shard, which identifies a corpus, stay as they are.
    """
    everyone = [_batches(shards, replica) for replica in range(REPLICAS)]
    expected = [batches.train(steps) for batches in everyone]
    for batches in everyone:
        batches.train(steps - 1)
    left = [part for batches in everyone for part in batches.stream.position.parts]
    assert all(part.epoch == 0 for part in left)
    for shard, path in enumerate(sorted(shards.glob("*.jsonl"))):
        texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
        for number in range(HELD_OUT if shard == 0 else 1, len(texts)):
            if not any(part.holds(0, shard, number) for part in left):
                texts[number] = "z" * 61
        _write(shards, shard, texts)
    found = [_batches(shards, replica).train(steps) for replica in range(REPLICAS)]
    assert not any(ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True))


def _model() -> Transformer:
    model = Transformer(ModelSettings(width=WIDTH, heads=2, feed_forward=24, layers=2).resolve(257))
    initialise(model, 1)
    return model


def _shared(shards: Path, replica: int) -> SharedBatches:
    return SharedBatches(Share(replica, REPLICAS), lambda share: _batches(shards, share.replica))


def _datacenter(shards: Path, model: Transformer) -> TrainingMember:
    return DatacenterMember("dc", PlainEngine(WholeReplica("dc", model, INNER, 100)), _shared(shards, 0), [])


def _stage(shards: Path, model: Transformer) -> TrainingMember:
    """Return a group's first stage, which is also its last."""
    stage = Stage(StageSpec(0, 1, range(2)), model, Boundary(WIDTH, Floats(torch.float32)), INNER, 100)
    worker = StageWorker(stage, WorkerSettings(1, ROWS, LENGTH, 0, None, "home", 0), None, None)
    return StageMember("home", worker, _shared(shards, 1), [], 0)


@pytest.mark.parametrize("build", [_datacenter, _stage], ids=["datacenter", "stage"])
def test_a_member_goes_on_to_the_same_batches(
    build: Callable[[Path, Transformer], TrainingMember], shards: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model, steps = _model(), 8
    member = build(shards, model)
    for step in range(steps):
        member.inner_step(1, step, step)
    saved = tmp_path / "state"
    saved.mkdir()
    member.save(saved)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = [member.inner_step(2, step, steps + step) for step in range(3)]
    _change_what_was_read(shards, steps)
    again = _model()
    resumed = build(shards, again)
    again.load_state_dict(weights)
    resumed.load(saved)
    assert [resumed.inner_step(2, step, steps + step) for step in range(3)] == expected


def _launch(config: Path, runs: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["launch", str(config), "--in-process", "--runs", str(runs), *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_launched_run_goes_on_to_the_same_bits(shards: Path, tmp_path: Path) -> None:
    """The run loses its last round, and the documents that it read before have changed."""
    config, runs = tmp_path / "stream.yaml", tmp_path / "runs"
    config.write_text(YAML.replace("SHARDS", str(shards)))
    _launch(config, runs)
    unbroken = json.loads((runs / "stream" / "summary.json").read_text())
    states = list((runs / "stream" / "state").glob(f"*/round-{ROUNDS:06d}"))
    assert len(states) == 3
    for state in states:
        shutil.rmtree(state)
    (runs / "stream" / "log" / f"checkpoint-{ROUNDS:06d}.safetensors").unlink()
    _change_what_was_read(shards, (ROUNDS - 1) * STEPS)
    assert f"resuming after round {ROUNDS - 1}" in _launch(config, runs, "--resume")
    resumed = json.loads((runs / "stream" / "summary.json").read_text())
    assert resumed["validation_loss"] == unbroken["validation_loss"]
    assert resumed["parameters_sha256"] == unbroken["parameters_sha256"]
    assert len(set(resumed["parameters_sha256"].values())) == 1
