"""Corpus of a table: encoded with the named tokenizer or one trained on it, or streamed; and whether it is enough."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_pp.config.run_config import RunConfig
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import whole
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.core.units import format_number
from hetero_pp.data.corpora import documents, fingerprint, list_corpus
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.sources import Source, StreamedCorpus, open_source
from hetero_pp.data.tokenizers import Tokenizer, load_tokenizer
from hetero_pp.data.tokens import TokenStore
from hetero_pp.research.experiments.definition import Scale
from hetero_pp.research.experiments.rows import EQUAL_STEPS, Setting
from hetero_pp.research.trainer.participation import sequences_in

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Encoding

MORE = "supply more text: --corpus PATH, or --corpus hf:NAME with --tokenizer PATH to stream it"


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. `data` names its tokenizer, so any process can open it again."""

    data: DataSettings
    source: Source
    cache: Path  # folder of encoded corpora
    tokenizer: Tokenizer | None = None  # tokenizer that the user named; None if it was trained on the corpus

    @property
    def digest(self) -> str:
        """Identifier of the corpus's tokens; for a streamed corpus, of its files and of how they are read."""
        return self.source.fingerprint if isinstance(self.source, StreamedCorpus) else self.source.digest


def prepare_corpus(data: DataSettings, vocabulary: int, cache: Path, on_progress: OnProgress = untold) -> Corpus:
    """Encode the corpus, or find it in `cache`; open it if it is streamed.

    Uses the tokenizer that `data` names. Otherwise trains one with `vocabulary` tokens on the corpus. Raises
    ConfigError if a streamed corpus has no named tokenizer, or too little validation data.
    """
    _require_tokenizer(data)
    tokenizer = load_tokenizer(data) if data.names_tokenizer else None
    if tokenizer is None:  # trained once, and kept in the cache
        name = hashlib.sha256(f"{fingerprint(data)}/{vocabulary}".encode()).hexdigest()[:24]
        path = cache / f"bpe-{vocabulary}-{name}.json"
        if not path.exists():
            texts = documents(data, partial(on_progress, "reading the corpus to train its tokenizer"))
            trained = _trained(texts, vocabulary)
            with whole(path) as part:
                trained.save(str(part))
        data = data.model_copy(update={"tokenizer": str(path)})
    source = open_source(data, cache, on_progress)
    if isinstance(source, StreamedCorpus):
        source.validation(batch_size=1)
    return Corpus(data, source, cache, tokenizer)


def _require_tokenizer(data: DataSettings) -> None:
    if data.streamed is not None and not data.names_tokenizer:
        how = "use --tokenizer PATH of a tokenizer.json, or set `data.tokenizer` in the scale"
        why = "is streamed, so no tokenizer can be trained on it"
        raise ConfigError(("data", "tokenizer"), f"found none; {how}: {data.corpus} {why}")


def _trained(texts: Iterable[str], vocabulary: int) -> Encoding:
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

    Returns the scale itself if neither is set. Raises ConfigError, with the option or the line of the scale's file, if
    the tokenizer cannot be read. Raises it, too, if the vocabulary differs from the scale's, for a scale of a paper or
    a tokenizer named in the scale's file.
    """
    data: dict[str, Any] = scale.base.get("data") or {}
    named = path or data.get("tokenizer")
    if not isinstance(named, str):
        return scale

    def wrong(message: str) -> ConfigError:
        if path is not None:
            return ConfigError((), f"--tokenizer {path}: {message}")
        return scale.located(ConfigError(("base", "data", "tokenizer"), message))

    try:
        vocabulary = load_tokenizer(DataSettings.model_validate({"tokenizer": named})).vocabulary
    except ConfigError as error:
        raise wrong(error.message) from None
    if vocabulary != scale.vocabulary and (path is None or scale.bring is not None):
        whose = "its `vocabulary`" if scale.bring is None else f"{scale.bring.tokenizer} ({scale.bring.paper})"
        raise wrong(f"found {vocabulary:,} tokens in `{named}`, expected {scale.vocabulary:,}: {whose}")
    base = {**scale.base, "data": {**data, "tokenizer": named}}
    return scale.model_copy(update={"base": base, "vocabulary": vocabulary})


def tokens_read(config: RunConfig) -> int:
    """Return the number of tokens that a run reads, including the last token of each row of a batch."""
    steps = config.inner.require_steps(EQUAL_STEPS)
    return steps * (config.data.sequence_length + 1) * sequences_in(config, config.rounds)


class Supply:
    """Tokens that the rows of a table need, and those that its corpus has."""

    def __init__(self, setting: Setting, source: Source | None = None) -> None:
        """`source` is the prepared corpus; without it, only what rows need is known."""
        self.setting, self._source = setting, source
        self._configs = [setting.config(row) for row in setting.representable()]
        self.training = len(source.train) if isinstance(source, TokenStore) else None
        """Tokens for training; None if they are not counted: the corpus is streamed, or not read yet."""
        self.needed = max(map(tokens_read, self._configs))  # tokens needed by the row that trains on the most

    @property
    def epochs(self) -> float | None:
        """Number of times that the corpus is read; None if unknown."""
        return None if self.training is None else self.needed / max(1, self.training)

    def require_enough(self) -> None:
        """Raise ConfigError with what is lacking and what to bring, unless every row can be trained."""
        lacking, name = None, self._configs[0].data.corpus
        if isinstance(self._source, StreamedCorpus):
            # Of a stream, text that no replica trains on can be missing, for measuring the bias: reaching it would
            # require reading everything before it.
            counts = [sum(one.kind == "participants" for one in config.replicas) for config in self._configs]
            if self.setting.experiment.bias_every is not None and 1 in counts:
                why = "measuring the bias of one compressed replica needs text that no replica trains on"
                lacking = f"found the streamed corpus {name}, expected --corpus PATH: {why}"
        elif self._source is not None:
            once = max((tokens_read(config) for config in self._configs if not config.data.repeat), default=0)
            to_validate = max(one.data.validation_sequences * (one.data.sequence_length + 1) for one in self._configs)
            for to_do, found, needed, mend in (
                ("", len(self._source.train), once, f"{MORE}; --repeat reads this corpus {self._times} times"),
                (
                    " to validate on",
                    len(self._source.validation),
                    to_validate,
                    f"{MORE}; or increase `data.validation_share`, or reduce `data.validation_sequences`",
                ),
            ):
                if lacking is None and found < needed:
                    tokens = f"found {found:,} tokens{to_do} in {name}, expected {needed:,}"
                    lacking = f"{tokens}: {needed - found:,} are missing ({mend})"
        if lacking is not None:
            of = f"{self.setting.experiment.name} at scale {self.setting.scale.name}"
            raise ConfigError(("data", "corpus"), f"{of}: {lacking}")

    def describe(self) -> Iterator[str]:
        """Yield sentences: how many tokens there are, how many are needed, and what to bring."""
        data = self._configs[0].data
        told = f"{self.needed:,} tokens are needed of {data.corpus}"
        if self.training is not None:
            there = f"{self.training:,} tokens to train on in {data.corpus}, {self.needed:,} are needed"
            told = f"{there}: " + ("enough" if self.needed <= self.training else f"they are read {self._times} times")
        elif data.streamed is not None:
            unknown = f"{data.corpus} is streamed, so its number of tokens is unknown until it has been read"
            stops = "rows stop with a checkpoint, and --repeat continues from it"
            ends = "it is read again from the start" if data.repeat else stops
            told = f"{unknown}. {self.needed:,} are needed; if the stream ends before, {ends}"
        yield f"Corpus of {self.setting.experiment.name}: {told}"
        bring, setting = self.setting.scale.bring, self.setting
        if bring is not None and not (setting.corpus and data.names_tokenizer):
            corpus = setting.experiment.bring or bring.corpus
            yield f"Supply the data of {bring.paper}: --corpus {corpus}, --tokenizer PATH of {bring.tokenizer}"

    @property
    def _times(self) -> str:
        """Number of times that the corpus is read, with at least two digits."""
        epochs = self.epochs or 0.0
        return format_number(epochs, 2) if epochs < 10 else f"{epochs:,.0f}"


def require_text(data: DataSettings) -> None:
    """Raise ConfigError if the corpus, or a tokenizer that it needs, is missing; reads no text."""
    _require_tokenizer(data)
    if data.streamed is not None:
        StreamedCorpus(data)
    else:
        list_corpus(data)
        load_tokenizer(data)


def rounded(tokens: int) -> str:
    """Return a number of tokens with three digits, such as `819 k`."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= factor:
            return f"{tokens / factor:.3g} {unit}"
    return str(tokens)
