"""Streamed corpora in the schemas of allenai/c4 and DCLM: what is read, what is held out, and errors."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from hetero_pp.core.errors import ConfigError
from hetero_pp.data import sources
from hetero_pp.data.corpora import Rows, documents
from hetero_pp.data.settings import DataSettings, is_on_the_hub
from hetero_pp.data.sources import StreamedCorpus, open_splits

SHARDS, DOCUMENTS = 3, 40


def text_of(shard: int | str, document: int) -> str:
    words = random.Random(f"{shard}/{document}").choices(["replica", "stage", "link"], k=12)
    return f"<{shard}/{document}> " + " ".join(words)


def records(shard: int | str, count: int = DOCUMENTS) -> list[dict[str, Any]]:
    url = f"https://example.org/{shard}"
    return [{"text": text_of(shard, i), "timestamp": "2019-04-25T12:57:54Z", "url": url} for i in range(count)]


def lines(shard: int | str, count: int = DOCUMENTS, **more: Any) -> bytes:
    return "".join(json.dumps(record | more) + "\n" for record in records(shard, count)).encode()


@pytest.fixture(scope="module")
def c4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like the Hub's allenai/c4, with two subsets and two splits."""
    folder = tmp_path_factory.mktemp("c4")
    names = {f"en/c4-train.{i:05d}-of-{SHARDS:05d}.json.gz": lines(i) for i in range(SHARDS)}
    names["en/c4-validation.00000-of-00001.json.gz"] = lines("v")
    names["de/c4-train.00000-of-00001.json.gz"] = lines("de")
    for name, content in names.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(gzip.compress(content))
    splits = {"train": "en/c4-train.*.json.gz", "validation": "en/c4-validation.*.json.gz"}
    files = "".join(f"\n  - split: {split}\n    path: {path}" for split, path in splits.items())
    german = "- config_name: de\n  data_files:\n  - split: train\n    path: de/*.json.gz"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: en\n  data_files:{files}\n{german}\n---\n")
    return folder


@pytest.fixture(scope="module")
def dclm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return nested folders like the Hub's mlfoundations/dclm-baseline-1.0, without a validation split."""
    folder = tmp_path_factory.mktemp("dclm")
    for i in range(SHARDS):
        below = folder / f"global-shard_0{i + 1}_of_10" / "local-shard_0_of_10"
        below.mkdir(parents=True)
        more: dict[str, Any] = {"metadata": {"Content-Length": "12"}, "language_id_whole_page_fasttext": {"en": 0.9}}
        (below / f"shard_{i:08d}_processed.jsonl.zst").write_bytes(zstandard.compress(lines(i, **more)))
    return folder


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parquet")
    for i in range(SHARDS):
        table = pa.Table.from_pylist([record | {"size": 1} for record in records(i)])
        pq.write_table(table, folder / f"train-{i:05d}-of-{SHARDS:05d}.parquet", row_group_size=16)
    return folder


def settings_of(target: object, **values: Any) -> DataSettings:
    stream = {"validation_documents": 10, "shuffle_buffer": 16} | values.pop("stream", {})
    defaults = {"sequence_length": 64, "validation_sequences": 8}
    return DataSettings.model_validate({"corpus": f"hf:{target}", "stream": stream, **defaults, **values})


def epoch(settings: DataSettings, replicas: int = 2) -> list[str]:
    """Return the documents that all replicas together read in an epoch."""
    source = StreamedCorpus(settings.model_copy(update={"repeat": False}))
    text = ""
    for replica in range(replicas):
        stream = source.batches(settings.sequence_length, 1, replica, replicas, 4).stream
        ids = list(all_of(stream))
        text += "".join("\n" if index == source.tokenizer.separator else chr(index) for index in ids)
    return text.splitlines()


def all_of(stream: Any) -> Iterator[int]:
    try:
        while True:
            yield int(stream.take(1)[0])
    except ConfigError as error:
        assert "has ended" in str(error)


TRAINING = [text_of(shard, i) for shard in range(SHARDS) for i in range(DOCUMENTS)]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_folder_like_c4(c4: Path, replicas: int) -> None:
    settings = settings_of(c4, stream={"subset": "en", "validation_split": "validation"})
    assert sorted(epoch(settings, replicas)) == sorted(TRAINING)
    german = settings_of(c4, stream={"subset": "de", "validation_documents": 1})
    assert sorted(epoch(german, replicas)) == sorted(text_of("de", i) for i in range(1, DOCUMENTS))


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl.zst", "parquet", "parquet/*.parquet"])
def test_held_out_documents_are_never_trained_on(dclm: Path, parquet: Path, pattern: str) -> None:
    folder = parquet if pattern.startswith("parquet") else dclm
    target = folder / pattern.removeprefix("parquet").lstrip("/")
    assert sorted(epoch(settings_of(target))) == sorted(TRAINING[10:])


@pytest.mark.parametrize("rows", [256, 7])
def test_reading_from_the_middle_of_a_shard(
    c4: Path, dclm: Path, parquet: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is read in tables of `rows` rows. Reading may start at any row of a table."""
    monkeypatch.setattr(sources, "_ROWS", rows)
    for folder, subset in ((c4, "en"), (dclm, None), (parquet, None)):
        shards = open_splits(settings_of(folder, stream={"subset": subset}))["train"]
        assert shards.count == SHARDS
        for start in (0, 1, 16, 39, 40, 99):
            assert list(shards.documents(1, start)) == [text_of(1, i) for i in range(start, DOCUMENTS)]


def test_nulls_and_blanks_are_no_documents(tmp_path: Path) -> None:
    texts = ["a", None, " ", "b", "", "c"]
    pq.write_table(pa.table({"content": texts}), tmp_path / "x.parquet", row_group_size=2)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"content": text or ""}) + "\n\n" for text in texts))
    for name in ("x.parquet", "x.jsonl"):
        settings = settings_of(tmp_path / name, text_field="content", stream={"validation_documents": 1})
        assert sorted(epoch(settings, 1)) == ["b", "c"]


def test_the_same_text_is_read_as_from_files_that_are_not_streamed(tmp_path: Path) -> None:
    """This includes nulls, byte order marks, and every layout of text in parquet."""
    texts = ["a", None, "é"]
    (tmp_path / "x.jsonl").write_bytes("\n".join(f"\ufeff{json.dumps({'text': text})}\r" for text in texts).encode())
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]
    columns = [pa.array(texts).cast(kind) for kind in kinds]
    columns += [pa.array(texts).cast(kind).dictionary_encode() for kind in (pa.string(), pa.binary())]
    for number, column in enumerate(columns):
        pq.write_table(pa.table({"text": column}), tmp_path / f"{number}.parquet")
    for path in tmp_path.iterdir():
        [shards] = open_splits(settings_of(path)).values()
        rows = Rows()
        assert list(shards.documents(0, 0)) == ["a", "", "é"], path
        assert list(documents(DataSettings(corpus=str(path)), rows=rows)) == ["a", "é"], path
        assert rows == Rows(read=3, null=1), path


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl", ".hidden*/*.jsonl"])
def test_each_real_file_is_streamed_once_and_no_hidden_one(tmp_path: Path, pattern: str) -> None:
    """The files come from a folder that `datasets` lists or from a pattern. A pattern may ask for hidden files."""
    (tmp_path / "a.jsonl").write_bytes(lines(0))
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    (tmp_path / "c.jsonl").hardlink_to(tmp_path / "a.jsonl")
    for name in ("._a.jsonl", ".hidden/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines("hidden"))
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "broken.jsonl").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")
    source = StreamedCorpus(settings_of(tmp_path / pattern, stream={"validation_documents": 1}))
    asked = "hidden" if "hidden" in pattern else 0
    assert sorted(epoch(source.settings)) == sorted(text_of(asked, i) for i in range(1, DOCUMENTS))
    if not asked:
        [note] = source.notes
        assert note.startswith(f"data.corpus: {source.settings.corpus}: read 1 file; skipped ")
        assert note.endswith("2 repeated links" if not pattern else "2 repeated links and 1 special file")
        assert ("hidden" in note) == bool(pattern)


def test_a_pattern_of_nothing_that_can_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=r"found no usable file at `hf:.*` \(skipped 1 special file\), expected one"):
        StreamedCorpus(settings_of(tmp_path / "*.jsonl"))


def test_validation_is_the_same_for_everyone(c4: Path, dclm: Path) -> None:
    split = {"subset": "en", "validation_split": "validation"}
    for settings, shard in ((settings_of(dclm), 0), (settings_of(c4, stream=split), "v")):
        rows = torch.cat(StreamedCorpus(settings).validation(3))
        assert [len(part) for part in StreamedCorpus(settings).validation(3)] == [3, 3, 2]
        expected = "\0".join(text_of(shard, i) for i in range(DOCUMENTS)).encode()[: 8 * 65]
        assert bytes(rows.flatten().tolist()) == expected


def test_the_digest_tells_corpora_apart(c4: Path, dclm: Path, parquet: Path, tmp_path: Path) -> None:
    """Equal text has an equal digest in any format and folder."""
    digests = [StreamedCorpus(settings_of(folder)).digest for folder in (dclm, parquet)]
    split = {"subset": "en", "validation_split": "validation"}
    digests.append(StreamedCorpus(settings_of(c4, stream=split)).digest)
    digests.append(StreamedCorpus(settings_of(dclm, sequence_length=32)).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_fingerprint_tells_files_apart_and_not_where_they_lie(tmp_path: Path) -> None:
    """The fingerprint covers sizes, times and the settings of the stream, but not the text."""
    folder = tmp_path / "here"
    folder.mkdir()
    for i in range(SHARDS):
        (folder / f"{i}.jsonl").write_bytes(lines(i))
    before = StreamedCorpus(settings_of(folder)).fingerprint
    moved = folder.rename(tmp_path / "there")
    assert StreamedCorpus(settings_of(moved)).fingerprint == before
    assert StreamedCorpus(settings_of(moved, stream={"shuffle_buffer": 17})).fingerprint != before
    changed, text = moved / "1.jsonl", lines(1)
    place = text.index(b"stage", len(text) // 2)
    changed.write_bytes(text[:place] + b"other" + text[place + 5 :])
    assert len(changed.read_bytes()) == len(text)
    assert StreamedCorpus(settings_of(moved)).fingerprint != before


def test_paths_are_made_absolute_and_names_of_the_hub_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for name in ("allenai/c4", "mlfoundations/dclm-baseline-1.0", "wikitext"):
        assert is_on_the_hub(name)
        assert settings_of(name).with_absolute_paths().corpus == f"hf:{name}"
    for path in ("here", "./there/x", "a/b/*.parquet", "x*.jsonl"):
        assert not is_on_the_hub(path)
        assert settings_of(path).with_absolute_paths().corpus == f"hf:{(tmp_path / path).absolute()}"
    assert settings_of("~/x/y").with_absolute_paths().corpus == f"hf:{Path('~/x/y').expanduser()}"


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no folder": ("MISSING/x", {}, "expected `hf:owner/name`, or a folder, a file or a pattern that exists"),
    "no file": ("MISSING/*.jsonl", {}, "expected `hf:owner/name`, or a folder, a file or a pattern that exists"),
    "no format": ("C4/README.md", {}, r"README.md`, expected .jsonl, .json, .parquet, or those compressed"),
    "no subset": ("C4", {"stream": {"subset": "fr"}}, "BuilderConfig 'fr' not found"),
    "subset of files": (
        "DCLM/*/*/*.zst",
        {"stream": {"subset": "en"}},
        "data.stream.subset: found `en`, expected none",
    ),
    "no split": ("DCLM", {"stream": {"split": "test"}}, "data.stream.split: found `test`, expected one of train"),
    "no validation split": (
        "DCLM",
        {"stream": {"validation_split": "test"}},
        "data.stream.validation_split: found `test`, expected one of train",
    ),
    "no field": (
        "DCLM",
        {"text_field": "content"},
        r"found `content`, expected a field of .*jsonl.zst:1: text, timestamp, url, metadata, language",
    ),
    "no column": (
        "PARQUET",
        {"text_field": "content"},
        r"data.text_field: found `content`, expected a column of .*parquet: text, timestamp, url, size",
    ),
    "no text": ("DCLM", {"text_field": "metadata"}, r"found `metadata` of type dict in .*jsonl.zst:1, expected text"),
    "a column of no text": ("PARQUET", {"text_field": "size"}, "data.text_field: found `size` of type int64 in"),
    "too little": (
        "DCLM",
        {"validation_sequences": 100},
        r"data.stream.validation_documents: found \d+ tokens to validate on \(10\), expected at least 6500: 100 ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, c4: Path, dclm: Path, parquet: Path, tmp_path: Path) -> None:
    target, values, expected = BAD[case]
    for name, path in {"MISSING": tmp_path / "missing", "C4": c4, "DCLM": dclm, "PARQUET": parquet}.items():
        target = target.replace(name, str(path))
    with pytest.raises(ConfigError, match=expected) as caught:
        StreamedCorpus(settings_of(target, **values)).validation(4)
    assert caught.value.key[0] == "data"
    assert len(str(caught.value).splitlines()) == 1


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    broken = {
        "a.jsonl.zst": (b"no zstd", "a.jsonl.zst: cannot be read"),
        "a.json.gz": (gzip.compress(lines(0))[:-60], "a.json.gz: cannot be read"),
        "b.jsonl": (lines(0) + b"{", "b.jsonl:41: found no valid JSON"),
        "c.jsonl": (lines(0) + b"\xff\n", "c.jsonl:41: found the byte 0xff, which is not UTF-8, expected UTF-8 text"),
        "c.jsonl.gz": (gzip.compress(lines(0) + b"\xff\n"), "c.jsonl.gz:41: found the byte 0xff, which is not UTF-8"),
        "c.jsonl.zst": (zstandard.compress(b"{}\n\xff"), "c.jsonl.zst:2: found the byte 0xff, which is not UTF-8"),
        "e.jsonl": (b'{"text": null}\n' * 20, r"e.jsonl: found only null in `text` \(20 rows\), expected text"),
        "d.parquet": (b"PAR1 not", "d.parquet"),
    }
    for name, (content, expected) in broken.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=expected) as caught:
            stream = {"validation_documents": 50}
            StreamedCorpus(settings_of(tmp_path / name, validation_sequences=200, stream=stream)).validation(4)
        assert len(str(caught.value).splitlines()) == 1


def test_a_hub_that_does_not_answer_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        for number in range(1, 6):
            logging.getLogger("huggingface_hub.utils._http").warning("no answer")
            logging.getLogger("huggingface_hub.utils._http").warning(f"Retrying in 1s [Retry {number}/5].")
        raise ConnectionError("not reached")

    monkeypatch.setattr("datasets.load_dataset_builder", fail)
    with pytest.raises(ConfigError, match=r"found `hf:a/b`, expected a dataset that can be opened \(ConnectionError"):
        open_splits(settings_of("a/b"))
    assert capsys.readouterr().err == "data.corpus: hf:a/b: no answer; trying again for half a minute\n"


def test_without_the_extra(dclm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"which needs an optional package: pip install 'hetero-pp\[datasets\]'"):
        StreamedCorpus(settings_of(dclm))


def test_what_reads_a_whole_corpus_takes_no_stream(dclm: Path) -> None:
    with pytest.raises(ConfigError, match="expected a corpus that is not streamed"):
        next(documents(settings_of(dclm)))
