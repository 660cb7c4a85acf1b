"""The corpus of an experiment: encoded by the tokenizer that was named, or by one trained on it; or streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_pp.data.corpora import documents, fingerprint, sample
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.sources import Source, StreamedCorpus, open_source
from hetero_pp.data.tokenizers import Tokenizer, load_tokenizer
from hetero_pp.errors import ConfigError
from hetero_pp.files import whole
from hetero_pp.progress import OnProgress, untold

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoding

SAMPLED = 2 << 20
"""Bytes of a corpus, of which its number of tokens is estimated: of Python's standard library within 10 %."""


@dataclass(frozen=True)
class Corpus:
    """A corpus that is ready. `data` names its tokenizer, so any process can open it again."""

    data: DataSettings
    source: Source
    cache: Path
    """The folder of encoded corpora."""
    tokenizer: Tokenizer | None = None
    """That the user named; None for one that was trained on the corpus."""

    @property
    def digest(self) -> str:
        """Names its tokens; of a streamed one its files, and how they are read."""
        return self.source.fingerprint if isinstance(self.source, StreamedCorpus) else self.source.digest


def prepare_corpus(data: DataSettings, vocabulary: int, cache: Path, on_progress: OnProgress = untold) -> Corpus:
    """Encode the corpus, or find it in `cache`; open it if it is streamed.

    The tokenizer is the one that `data` names; where it names none, one of `vocabulary` tokens that is trained on the
    corpus. Raises ConfigError if a streamed corpus has none, or too little to validate on.
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
        how = "--tokenizer PATH of a tokenizer.json, or `data.tokenizer` in the scale"
        why = "is streamed, and never read as a whole to train one on"
        raise ConfigError(("data", "tokenizer"), f"found none, expected {how}: {data.corpus} {why}")


def estimate_tokens(data: DataSettings, vocabulary: int) -> int:
    """About how many tokens a corpus has that is not streamed, from a sample of it: no more is read."""
    texts, share = sample(data, SAMPLED)
    some = [text[:SAMPLED] for text in texts]
    if data.names_tokenizer:
        count = sum(map(len, load_tokenizer(data).encode_batch(some)))
    else:
        count = sum(map(len, _trained(some, vocabulary).encode_batch(some)))
    scale = sum(map(len, texts)) / max(1, sum(map(len, some)))
    return round((count * scale + len(texts)) / share)


def _prepare_tokenizer(data: DataSettings, vocabulary: int, cache: Path, on_progress: OnProgress) -> Path:
    """A byte-pair encoding of the corpus with this many tokens, trained once and kept in `cache`."""
    name = hashlib.sha256(f"{fingerprint(data)}/{vocabulary}".encode()).hexdigest()[:24]
    path = cache / f"bpe-{vocabulary}-{name}.json"
    if not path.exists():
        texts = documents(data, partial(on_progress, "reading the corpus for its tokenizer"))
        tokenizer = _trained(texts, vocabulary)
        with whole(path) as part:
            tokenizer.save(str(part))
    return path


def _trained(texts: Iterable[str], vocabulary: int) -> Encoding:
    """A byte-pair encoding of these texts."""
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
