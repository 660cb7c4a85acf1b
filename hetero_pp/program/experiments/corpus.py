"""The corpus of an experiment: a byte-pair encoding trained on it, its tokens, and whether they suffice."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_pp.data.corpora import documents, fingerprint
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.errors import ConfigError
from hetero_pp.files import whole
from hetero_pp.progress import OnProgress, untold
from hetero_pp.run.config import RunConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """An encoded corpus. `data` names its tokenizer, so any process can open it again."""

    data: DataSettings
    store: TokenStore

    def tokens_needed(self, config: RunConfig) -> int:
        """How many tokens a run reads."""
        steps = config.outer.rounds * config.inner.require_steps("rows are compared after as many steps")
        return steps * (config.data.sequence_length + 1) * sum(replica.batch_size for replica in config.replicas)

    def epochs(self, config: RunConfig) -> float:
        """How often a run reads the corpus."""
        return self.tokens_needed(config) / len(self.store.train)

    def require_enough(self, configs: Sequence[RunConfig]) -> None:
        """Raise ConfigError, saying how many tokens are lacking, if a run may not repeat the corpus but would, or if
        there are too few to validate on.
        """
        needed = max((self.tokens_needed(config) for config in configs if not config.data.repeat), default=0)
        if needed > len(self.store.train):
            raise self._lacking("", len(self.store.train), needed, "--repeat reads the corpus more than once")
        needed = max(config.data.validation_sequences * (config.data.sequence_length + 1) for config in configs)
        if needed > len(self.store.validation):
            mend = "a larger `data.validation_share`, or fewer `data.validation_sequences`"
            raise self._lacking(" to validate on", len(self.store.validation), needed, mend)

    def _lacking(self, what_for: str, known: int, needed: int, mend: str) -> ConfigError:
        found = f"found {known:,} tokens{what_for} in {self.data.corpus}, expected {needed:,}"
        return ConfigError(("data", "corpus"), f"{found}: {needed - known:,} are lacking ({mend})")


def prepare_corpus(data: DataSettings, vocabulary: int, cache: Path, on_progress: OnProgress = untold) -> Corpus:
    """Train the encoding and encode the corpus, or find both in `cache`."""
    tokenizer = _prepare_tokenizer(data, vocabulary, cache, on_progress)
    named = data.model_copy(update={"tokenizer": str(tokenizer)})
    return Corpus(named, prepare_tokens(named, cache, on_progress=on_progress))


def _prepare_tokenizer(data: DataSettings, vocabulary: int, cache: Path, on_progress: OnProgress) -> Path:
    """A byte-pair encoding of the corpus with this many tokens, trained once and kept in `cache`."""
    name = hashlib.sha256(f"{fingerprint(data)}/{vocabulary}".encode()).hexdigest()[:24]
    path = cache / f"bpe-{vocabulary}-{name}.json"
    if not path.exists():
        tokenizer = _trained_tokenizer(data, vocabulary, on_progress)
        with whole(path) as part:
            tokenizer.save(str(part))
    return path


def _trained_tokenizer(data: DataSettings, vocabulary: int, on_progress: OnProgress) -> Tokenizer:
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
    texts = documents(data, partial(on_progress, "reading the corpus for its tokenizer"))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
