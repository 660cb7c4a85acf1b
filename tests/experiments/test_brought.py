"""`reproduce` with the user's corpora and tokenizers: what is trained, how it is named, and what is refused."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.sources import StreamedCorpus
from hetero_pp.research.experiments.command import Request, short_name
from hetero_pp.research.experiments.corpus import prepare_corpus
from hetero_pp.research.experiments.definition import Catalog
from hetero_pp.research.experiments.training import make_job
from hetero_pp.research.trainer.train import train_fast

Reproduce = Callable[..., tuple[int, str, str]]
"""The type of the fixture of conftest.py."""

WORDS = ["replica", "stage", "link", "round", "the", "of", "and", "trains", "sends", "waits"]
SHARDS = 3
WIDTH, FEED_FORWARD, LAYERS = 16, 16, 2
"""Shape of the model of conftest.py."""


def _text(number: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=60))


def _write_shards(folder: Path, documents: int = 40) -> Path:
    """Return a folder in a dataset's layout. Its folder `as-parquet` has the same text as parquet."""
    for kind in ("web", "as-parquet"):
        (folder / kind).mkdir(parents=True)
    for shard in range(SHARDS):
        records = [{"text": _text(documents * shard + i), "url": "nowhere"} for i in range(documents)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "web" / f"{shard}.jsonl").write_text(lines)
        pq.write_table(pa.Table.from_pylist(records), folder / "as-parquet" / f"{shard}.parquet")
    return folder


def _write_tokenizer(folder: Path, size: int, *more: str) -> Path:
    """Write a byte-pair encoding of `size` tokens, and more tokens that no text has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_text(i) for i in range(20)], trainer)
    tokenizer.add_tokens(list(more))
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _write_words(folder: Path, count: int) -> Path:
    """Write a tokenizer of `count` words. Only its size is used."""
    from tokenizers import Tokenizer, models

    ids = {"</s>": 0} | {f"w{number}": number for number in range(1, count)}
    folder.mkdir()
    Tokenizer(models.WordLevel(ids, unk_token="</s>")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def brought(tmp_path: Path, toys: Path) -> Path:
    """Set the toy's scale to hold out and shuffle as few documents as the shards have. Return the shards' folder."""
    scale = toys / "scales" / "tiny.yaml"
    stream = "stream: {validation_documents: 5, shuffle_buffer: 8}"
    scale.write_text(scale.read_text().replace("sequence_length: 16,", f"sequence_length: 16, {stream},"))
    _write_tokenizer(tmp_path / "bpe", 290)
    return _write_shards(tmp_path / "brought")


def _table(tmp_path: Path, name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((tmp_path / "results" / "tiny" / "toy" / f"{name}.json").read_text())
    return table


def _rows(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "results" / "tiny" / "rows.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _parameters(vocabulary: int) -> int:
    """Return the number of parameters of the model.

    It has two tables and a last norm. Each layer has four matrices of attention, three of the feed-forward part, and
    two norms.
    """
    layer = 4 * WIDTH**2 + 3 * WIDTH * FEED_FORWARD + 2 * WIDTH
    return 2 * vocabulary * WIDTH + LAYERS * layer + WIDTH


# ---- what is trained ----


@pytest.mark.starts_processes
def test_a_streamed_corpus_and_a_tokenizer_make_a_table(
    tmp_path: Path, toys: Path, brought: Path, reproduce: Reproduce
) -> None:
    """Its losses are those of a run on the same stream, with the tokenizer's vocabulary.

    A scale that names the folder of the same stream, and the tokenizer's file, has the same rows.
    """
    options = ["--corpus", f"hf:{brought / 'web' / '*.jsonl'}", "--tokenizer", str(tmp_path / "bpe")]
    code, out, errors = reproduce("toy/one", "--seeds", "1", *options)
    assert code == 0, errors
    table, kept = _table(tmp_path, "one-web-bpe"), _rows(tmp_path)
    assert table["corpus"]["name"] == options[1]
    assert table["corpus"]["tokens"] is None
    assert table["command"].endswith(shlex.join([*options, "--seeds", "1"]))
    [setting], _ = _request(tmp_path, options[1], options[3]).settings()
    row = setting.experiment.rows[1]
    data = setting.config(row).data
    torch.set_num_threads(1)
    result = train_fast(RunSpec(setting.config(row, 1), 290), StreamedCorpus(data))
    assert {one["name"]: one["ours"] for one in table["rows"]}["all"]["mean"] == result.validation_loss[-1]
    assert f"{_parameters(290) / 1e6:.2g} M parameters" in " ".join(out.split())

    scale = toys / "scales" / "tiny.yaml"
    before, _, after = scale.read_text().replace("300", "290").partition("corpus: ")
    named = f"corpus: hf:{brought / 'web'}, tokenizer: {tmp_path / 'bpe' / 'tokenizer.json'}"
    scale.write_text(f"{before}{named}, {after.partition(', ')[2]}")
    code, _, errors = reproduce("toy/one", "--seeds", "1")
    assert code == 0, errors
    assert _rows(tmp_path) == kept
    assert _table(tmp_path, "one")["rows"] == table["rows"]


def _request(tmp_path: Path, corpus: str, tokenizer: str) -> Request:
    return Request(Catalog(tmp_path / "experiments"), ["toy/one"], "tiny", corpus=corpus, tokenizer=tokenizer)


# ---- the identity of a row ----


def _key(tmp_path: Path, corpus: str, tokenizer: Path, row: int = 1) -> str:
    [setting], _ = _request(tmp_path, corpus, str(tokenizer)).settings()
    one = setting.experiment.rows[row]
    encoded = prepare_corpus(setting.config(one).data, setting.scale.vocabulary, tmp_path / "runs" / ".tokens")
    return make_job(setting, one, 1, encoded, tmp_path).key


def test_rows_of_different_text_are_never_mixed_up(tmp_path: Path, brought: Path) -> None:
    """A word in the middle of a file, another tokenizer, or tokens that no text has make another row."""
    web, bpe = brought / "web", tmp_path / "bpe"
    keys = [_key(tmp_path, f"hf:{web}", bpe), _key(tmp_path, f"hf:{web}", _write_tokenizer(tmp_path / "other", 280))]
    keys.append(_key(tmp_path, f"hf:{web}", _write_tokenizer(tmp_path / "more", 290, "<never>")))
    keys.append(_key(tmp_path, f"hf:{brought / 'as-parquet'}", bpe))
    keys += [_key(tmp_path, str(web), tokenizer) for tokenizer in (bpe, tmp_path / "more")]  # not streamed
    text = (web / "1.jsonl").read_text()
    (web / "1.jsonl").write_text(text[:5000] + text[5000:].replace("stage", "other", 1))
    keys += [_key(tmp_path, f"hf:{web}", bpe), _key(tmp_path, str(web), bpe)]
    assert len(set(keys)) == len(keys)
    moved, elsewhere = web.rename(tmp_path / "moved"), bpe.rename(tmp_path / "bpe-moved")
    assert _key(tmp_path, f"hf:{moved}", elsewhere) == keys[-2], "where text and tokenizer lie does not matter"


NAMES = {
    "mine.txt": "mine",
    "/data/web.jsonl.zst": "web",
    "hf:mlfoundations/dclm-baseline-1.0": "dclm-baseline-1.0",
    "hf:/data/c4/**/*.json.gz": "c4",
    "data/llama-2/tokenizer.json": "llama-2",
    "data/llama-2": "llama-2",
    "tokenizer.json": "tokenizer",
    "hf:*.jsonl": "corpus",
    "my text": "my_text",
}


@pytest.mark.parametrize(("brought", "name"), NAMES.items(), ids=list(NAMES))
def test_tables_are_called_after_what_was_brought(brought: str, name: str) -> None:
    assert short_name(brought) == name


# ---- whether the text is long enough ----


@pytest.mark.starts_processes
def test_a_stream_that_ends_leaves_what_repeating_it_goes_on_from(
    tmp_path: Path, toys: Path, brought: Path, reproduce: Reproduce
) -> None:
    scale, table = toys / "scales" / "tiny.yaml", toys / "toy" / "one.yaml"
    longer = scale.read_text().replace("sequence_length: 16", "sequence_length: 64")
    scale.write_text(longer.replace("rounds: 2", "rounds: 8").replace("batch_size: 2", "batch_size: 6"))
    table.write_text(table.read_text().partition("  - {name: the same")[0])
    options = ["--seeds", "1", "--corpus", f"hf:{brought / 'web'}", "--tokenizer", str(tmp_path / "bpe")]
    code, out, _ = reproduce("toy/one", *options)
    assert code == 1
    told = " ".join(out.split())
    assert "if the stream ends before, rows stop with a checkpoint, and --repeat continues from it" in told
    assert "has ended, expected true (--repeat), more text, or fewer steps; the state after round " in told
    assert _rows(tmp_path) == []
    checkpoints = sorted((tmp_path / "runs" / ".rows").iterdir())
    assert len(checkpoints) == 2
    assert all(len(torch.load(path, weights_only=True)["losses"]) > 2 for path in checkpoints)
    assert reproduce("toy/one", *options, "--repeat")[0] == 0
    losses = {one["row"].partition(": ")[2]: one["validation_loss"] for one in _rows(tmp_path)}
    for path in checkpoints:
        assert not path.exists()
    assert {name: len(found) for name, found in losses.items()} == {"none": 8, "all": 8}


# ---- the paper's scale ----


def test_the_papers_scale_says_what_to_bring(tmp_path: Path, brought: Path, reproduce: Reproduce) -> None:
    """Only a tokenizer with the size of LLaMA-2's is accepted."""
    text = str(next((brought / "web").iterdir()))
    code, out, _ = reproduce("toy/one", "--scale", "paper", "--dry-run", "--corpus", text)
    assert code == 0
    told = (
        "Supply the data of Het-PP (section 3, Table 9): --corpus hf:mlfoundations/dclm-baseline-1.0, --tokenizer PATH"
    )
    assert f"{told} of LLaMA-2's tokenizer.json of 32,000 tokens." in " ".join(out.split())
    tokenizer = str(tmp_path / "bpe")
    code, _, errors = reproduce("toy/one", "--scale", "paper", "--dry-run", "--corpus", text, "--tokenizer", tokenizer)
    assert code == 2
    found = f"found 290 tokens in `{tokenizer}`, expected 32,000"
    why = "LLaMA-2's tokenizer.json of 32,000 tokens (Het-PP (section 3, Table 9))"
    assert errors == f"hetero-pp: --tokenizer {tokenizer}: {found}: {why}\n"
    tokenizer = str(_write_words(tmp_path / "llama-2", 32000))
    code, out, errors = reproduce(
        "toy/one", "--scale", "paper", "--dry-run", "--corpus", f"hf:{brought / 'web'}", "--tokenizer", tokenizer
    )
    assert code == 0, errors
    assert "toy/one-web-llama-2 at scale paper" in out
    assert "512,398,848" in out
    assert "Supply the data of" not in out


# ---- bad input ----


def test_what_is_not_there_is_told(brought: Path, reproduce: Reproduce) -> None:
    for options, words in (
        (["--corpus", f"hf:{brought / 'web'}"], "data.tokenizer: found none; use --tokenizer PATH of a tokenizer.json"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: found `nowhere`, expected `bytes` or a path to"),
        (["--corpus", "hf:nowhere/*.jsonl", "--tokenizer", "bytes"], "found `hf:nowhere/*.jsonl`, expected `hf:owner"),
    ):
        for more in ([], ["--dry-run"]):
            code, _, errors = reproduce("toy/one", *options, *more)
            assert code == 2
            assert words in errors
            assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [("BPE", "found 290 tokens in `BPE`, expected 300: its `vocabulary`"), ("nowhere", "found `nowhere`, expected")],
)
def test_a_scale_that_contradicts_its_tokenizer_is_told_with_its_line(
    name: str, words: str, tmp_path: Path, toys: Path, brought: Path, reproduce: Reproduce
) -> None:
    scale, bpe = toys / "scales" / "tiny.yaml", str(tmp_path / "bpe")
    scale.write_text(scale.read_text().replace("data: {", f"data: {{tokenizer: {name.replace('BPE', bpe)}, "))
    line = next(number for number, text in enumerate(scale.read_text().splitlines(), 1) if "data: " in text)
    code, _, errors = reproduce("toy/one", "--dry-run")
    assert code == 2
    assert errors.startswith(f"hetero-pp: {scale}:{line}: base.data.tokenizer: {words.replace('BPE', bpe)}")
