"""The token store: the contents of its file, when it is made, and how many processes make it at once."""

from __future__ import annotations

import hashlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import ByteTokenizer
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.program.launch.fork_server import fork_server


class CountingTokenizer(ByteTokenizer):
    """A tokenizer of bytes that counts the documents it encodes."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        self.encoded += len(texts)
        return super().encode_batch(texts)


class WideTokenizer(ByteTokenizer):
    """A tokenizer of bytes whose ids need more than 16 bits."""

    vocabulary = 100_000
    identity = "wide"

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [ids.astype(np.uint32) + 70_000 for ids in super().encode_batch(texts)]


def write_texts(folder: Path, texts: list[str]) -> DataSettings:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return DataSettings(corpus=str(folder), validation_share=0.1)


def stream(store: TokenStore) -> np.ndarray:
    return np.concatenate([store.train, store.validation])


TEXTS = [f"document {number} " * (1 + number % 3) for number in range(30)]


def test_the_stream_is_every_document_and_its_separator(tmp_path: Path) -> None:
    store = prepare_tokens(write_texts(tmp_path / "corpus", TEXTS), tmp_path / "cache")
    ordered = sorted(TEXTS, key=lambda text: hashlib.sha256(text.encode()).digest())
    assert bytes(stream(store).astype(np.uint8)) == b"".join(text.encode() + b"\0" for text in ordered)
    assert stream(store).dtype == np.dtype("<u2")


def test_train_and_validation_are_disjoint_parts(tmp_path: Path) -> None:
    store = prepare_tokens(write_texts(tmp_path / "corpus", TEXTS), tmp_path / "cache")
    whole = np.load(store.path)
    assert len(store.validation) == round(len(whole) / 10)
    np.testing.assert_array_equal(stream(store), whole)


def test_names_of_files_do_not_matter(tmp_path: Path) -> None:
    here = prepare_tokens(write_texts(tmp_path / "here", TEXTS), tmp_path / "cache")
    there = prepare_tokens(write_texts(tmp_path / "there", TEXTS[::-1]), tmp_path / "cache")
    assert here.path != there.path
    assert here.digest == there.digest


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    settings = write_texts(tmp_path / "corpus", TEXTS)
    store = prepare_tokens(settings, tmp_path / "cache")
    assert store.digest == hashlib.sha256(store.path.read_bytes()).hexdigest()
    assert store.path.with_suffix(".sha256").read_text() == f"{store.digest}  {store.path.name}\n"
    store.path.with_suffix(".sha256").unlink()
    assert prepare_tokens(settings, tmp_path / "cache").digest == store.digest
    assert {path.suffix for path in store.path.parent.iterdir()} == {".npy", ".sha256"}


def test_a_second_call_encodes_nothing(tmp_path: Path) -> None:
    settings, tokenizer = write_texts(tmp_path / "corpus", TEXTS), CountingTokenizer()
    first = prepare_tokens(settings, tmp_path / "cache", tokenizer)
    assert tokenizer.encoded == len(TEXTS)
    again = prepare_tokens(settings, tmp_path / "cache", tokenizer)
    other_split = prepare_tokens(settings.model_copy(update={"validation_share": 0.5}), tmp_path / "cache", tokenizer)
    assert tokenizer.encoded == len(TEXTS)
    assert first.digest == again.digest == other_split.digest
    assert len(other_split.validation) > len(again.validation)


def test_a_changed_corpus_or_tokenizer_is_encoded_again(tmp_path: Path) -> None:
    settings, tokenizer = write_texts(tmp_path / "corpus", TEXTS), CountingTokenizer()
    before = prepare_tokens(settings, tmp_path / "cache", tokenizer)
    (tmp_path / "corpus" / "more.txt").write_text("more")
    after = prepare_tokens(settings, tmp_path / "cache", tokenizer)
    assert before.digest != after.digest
    assert tokenizer.encoded == 2 * len(TEXTS) + 1
    wide = prepare_tokens(settings, tmp_path / "cache", WideTokenizer())
    assert wide.train.dtype == np.dtype("<u4")
    np.testing.assert_array_equal(stream(wide), np.where(stream(after), stream(after) + np.uint32(70_000), 0))


def test_documents_are_encoded_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = write_texts(tmp_path / "corpus", TEXTS)
    whole = prepare_tokens(settings, tmp_path / "cache")
    monkeypatch.setattr("hetero_pp.data.tokens._BATCH_CHARACTERS", 50)
    assert prepare_tokens(settings, tmp_path / "other cache").digest == whole.digest


@pytest.mark.starts_processes
def test_processes_may_prepare_at_once(tmp_path: Path) -> None:
    settings = write_texts(tmp_path / "corpus", TEXTS * 20)
    with ProcessPoolExecutor(2, fork_server()) as pool:
        stores = [pool.submit(prepare_tokens, settings, tmp_path / "cache") for _ in range(4)]
        assert len({(store.result().path, store.result().digest) for store in stores}) == 1
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    settings = write_texts(tmp_path / "corpus", ["good"])
    (tmp_path / "corpus" / "1.jsonl").write_text("bad")
    with pytest.raises(ConfigError, match="no valid JSON"):
        prepare_tokens(settings, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_share_that_leaves_a_part_empty(tmp_path: Path) -> None:
    settings = write_texts(tmp_path / "corpus", ["tiny"])
    for share in (0.01, 0.99):
        with pytest.raises(
            ConfigError,
            match=(f"found {share}, expected at least one of the 5 tokens for training and one for validation"),
        ):
            prepare_tokens(settings.model_copy(update={"validation_share": share}), tmp_path / "cache")
