"""Corpus of an experiment: encoded with the named tokenizer or with one trained on it, or streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import whole
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.data.corpora import documents, fingerprint, sample
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.sources import Source, StreamedCorpus, open_source
from hetero_pp.data.tokenizers import Tokenizer, load_tokenizer
from hetero_pp.research.experiments.definition import Scale

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoding

SAMPLED = 2 << 20
"""Bytes of the sample from which a corpus's tokens are estimated: within 10 % for Python's standard library."""


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. `data` names its tokenizer, so any process can open it again."""

    data: DataSettings
    source: Source
    cache: Path
    """Folder of encoded corpora."""
    tokenizer: Tokenizer | None = None
    """Tokenizer that the user named; None if it was trained on the corpus."""

    @property
    def digest(self) -> str:
        """Identifier of the corpus's tokens; for a streamed corpus, of its files and of how they are read."""
        return self.source.fingerprint if isinstance(self.source, StreamedCorpus) else self.source.digest


def prepare_corpus(data: DataSettings, vocabulary: int, cache: Path, on_progress: OnProgress = untold) -> Corpus:
    """Encode the corpus, or find it in `cache`; open it if it is streamed.

    Uses the tokenizer that `data` names. Otherwise trains one with `vocabulary` tokens on the corpus. Raises
    ConfigError if a streamed corpus has no named tokenizer, or too little validation data.
    """
    require_tokenizer(data)
    tokenizer = load_tokenizer(data) if data.names_tokenizer else None
    if tokenizer is None:
        trained = _prepare_tokenizer(data, vocabulary, cache, on_progress)
        data = data.model_copy(update={"tokenizer": str(trained)})
    source = open_source(data, cache, on_progress)
    if isinstance(source, StreamedCorpus):
        source.validation(batch_size=1)
    return Corpus(data, source, cache, tokenizer)


def require_tokenizer(data: DataSettings) -> None:
    """Raise ConfigError if the corpus is streamed and no tokenizer is named."""
    if data.streamed is not None and not data.names_tokenizer:
        how = "use --tokenizer PATH of a tokenizer.json, or set `data.tokenizer` in the scale"
        why = "is streamed, so no tokenizer can be trained on it"
        raise ConfigError(("data", "tokenizer"), f"found none; {how}: {data.corpus} {why}")


def estimate_tokens(data: DataSettings, vocabulary: int) -> int:
    """Estimate the number of tokens of a corpus that is not streamed; reads a sample only."""
    texts, share = sample(data, SAMPLED)
    some = [text[:SAMPLED] for text in texts]
    if data.names_tokenizer:
        count = sum(map(len, load_tokenizer(data).encode_batch(some)))
    else:
        count = sum(map(len, _trained(some, vocabulary).encode_batch(some)))
    scale = sum(map(len, texts)) / max(1, sum(map(len, some)))
    return round((count * scale + len(texts)) / share)


def _prepare_tokenizer(data: DataSettings, vocabulary: int, cache: Path, on_progress: OnProgress) -> Path:
    """Return the path of a byte-pair encoding with `vocabulary` tokens, trained once and kept in `cache`."""
    name = hashlib.sha256(f"{fingerprint(data)}/{vocabulary}".encode()).hexdigest()[:24]
    path = cache / f"bpe-{vocabulary}-{name}.json"
    if not path.exists():
        texts = documents(data, partial(on_progress, "reading the corpus to train its tokenizer"))
        tokenizer = _trained(texts, vocabulary)
        with whole(path) as part:
            tokenizer.save(str(part))
    return path


def _trained(texts: Iterable[str], vocabulary: int) -> Encoding:
    """Train a byte-pair encoding on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_tokenizer(scale: Scale, path: str | None) -> Scale:
    """Return the scale with the tokenizer at `path`, or else the one in its `data.tokenizer`.

    Returns the scale itself if neither is set. Raises ConfigError if the tokenizer cannot be read. Raises it, too, if
    the vocabulary differs from the scale's, for a scale of a paper or a tokenizer named in the scale's file.
    """
    data: dict[str, Any] = scale.base.get("data") or {}
    named = path or data.get("tokenizer")
    if not isinstance(named, str):
        return scale
    try:
        vocabulary = load_tokenizer(DataSettings.model_validate({"tokenizer": named})).vocabulary
    except ConfigError as error:
        raise _complaint(scale, path, error.message) from None
    if vocabulary != scale.vocabulary and (path is None or scale.bring is not None):
        whose = "its `vocabulary`" if scale.bring is None else f"{scale.bring.tokenizer} ({scale.bring.paper})"
        raise _complaint(
            scale, path, f"found {vocabulary:,} tokens in `{named}`, expected {scale.vocabulary:,}: {whose}"
        )
    base = {**scale.base, "data": {**data, "tokenizer": named}}
    return scale.model_copy(update={"base": base, "vocabulary": vocabulary})


def _complaint(scale: Scale, path: str | None, message: str) -> ConfigError:
    """Return an error that names the option, or the line of the scale's file, that named the tokenizer."""
    if path is not None:
        return ConfigError((), f"--tokenizer {path}: {message}")
    return scale.located(ConfigError(("base", "data", "tokenizer"), message))
