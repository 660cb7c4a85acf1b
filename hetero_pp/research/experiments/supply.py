"""Check, before training, that a table's corpus has enough tokens for its rows; says what to bring if not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_number
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.sources import StreamedCorpus
from hetero_pp.research.experiments.corpus import Corpus, estimate_tokens, require_tokenizer
from hetero_pp.research.experiments.facts import rounded
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.trainer.participation import sequences_in
from hetero_pp.run.config import RunConfig

MORE = "supply more text: --corpus PATH, or --corpus hf:NAME with --tokenizer PATH to stream it"
SURE = 1.25
"""Factor by which an estimate must differ from the needed tokens to decide whether they suffice."""


def tokens_read(config: RunConfig) -> int:
    """Return the number of tokens that a run reads, including the last token of each row of a batch."""
    steps = config.inner.require_steps("rows are compared after equal numbers of steps")
    return steps * (config.data.sequence_length + 1) * sequences_in(config, config.outer.rounds)


@dataclass(frozen=True)
class Supply:
    """Tokens that the rows of a table need, and those that the corpus has for training and validation."""

    setting: Setting
    training: int | None
    """Tokens for training; None if the corpus is streamed, as its size is then unknown."""
    validation: int | None
    is_counted: bool = True
    """Whether tokens were counted; False for an estimate."""

    @cached_property
    def _configs(self) -> list[RunConfig]:
        return [self.setting.config(row) for row in self.setting.representable()]

    @cached_property
    def needed(self) -> int:
        """Tokens needed by the row that trains on the most."""
        return max(map(tokens_read, self._configs))

    @cached_property
    def needed_once(self) -> int:
        """Tokens needed by the row that trains on the most without repeating the corpus; 0 if all rows repeat it."""
        return max((tokens_read(config) for config in self._configs if not config.data.repeat), default=0)

    @cached_property
    def needed_to_validate(self) -> int:
        """Tokens needed by the row that validates on the most."""
        return max(one.data.validation_sequences * (one.data.sequence_length + 1) for one in self._configs)

    @property
    def epochs(self) -> float | None:
        """Number of times that the corpus is read; None if unknown."""
        return None if self.training is None else self.needed / max(1, self.training)

    def require_enough(self) -> None:
        """Raise ConfigError with what is lacking and what to bring, unless every row can be trained."""
        if (lacking := self._lacking()) is not None:
            of = f"{self.setting.experiment.name} at scale {self.setting.scale.name}"
            raise ConfigError(("data", "corpus"), f"{of}: {lacking}")

    def describe(self) -> Iterator[str]:
        """Yield sentences: how many tokens there are, how many are needed, and what to bring."""
        yield f"Corpus of {self.setting.experiment.name}: {self._lacking() or self._enough()}"
        bring, setting = self.setting.scale.bring, self.setting
        if bring is not None and not (setting.corpus and self._configs[0].data.names_tokenizer):
            corpus = setting.experiment.bring or bring.corpus
            yield f"Supply the data of {bring.paper}: --corpus {corpus}, --tokenizer PATH of {bring.tokenizer}"

    def _lacking(self) -> str | None:
        if self.training is None or self.validation is None:
            return self._lacking_of_stream()
        if self.needed_once > self.training * self._tolerance:
            again = f"--repeat reads this corpus {self._times} times"
            return self._too_few(self.training, "", self.needed_once, f"{MORE}; {again}")
        if self.needed_to_validate > self.validation * self._tolerance:
            mend = f"{MORE}; or increase `data.validation_share`, or reduce `data.validation_sequences`"
            return self._too_few(self.validation, " to validate on", self.needed_to_validate, mend)
        return None

    def _lacking_of_stream(self) -> str | None:
        """Return what a streamed corpus lacks: text that no replica trains on, for measuring the bias.

        Reaching such text would require reading everything before it.
        """
        counts = [sum(one.kind == "participants" for one in config.replicas) for config in self._configs]
        if self.setting.experiment.bias_every is None or 1 not in counts:
            return None
        why = "measuring the bias of one compressed replica needs text that no replica trains on"
        return f"found the streamed corpus {self._name}, expected --corpus PATH: {why}"

    def _too_few(self, found: int, to_do: str, needed: int, mend: str) -> str:
        tokens = f"found {self._count(found)} tokens{to_do} in {self._name}, expected {needed:,}"
        return f"{tokens}: {self._count(needed - found)} are missing ({mend})"

    def _enough(self) -> str:
        if self.training is None:
            unknown = f"{self._name} is streamed, so its number of tokens is unknown until it has been read"
            stops = "rows stop with a checkpoint, and --repeat continues from it"
            ends = "it is read again from the start" if self._configs[0].data.repeat else stops
            return f"{unknown}. {self.needed:,} are needed; if the stream ends before, {ends}"
        there = f"{self._count(self.training)} tokens to train on in {self._name}, {self.needed:,} are needed"
        if self.needed_once * self._tolerance > self.training:
            return f"{there}: the tokens are counted before training starts"
        return f"{there}: " + ("enough" if self.needed <= self.training else f"they are read {self._times} times")

    @property
    def _tolerance(self) -> float:
        return 1.0 if self.is_counted else SURE

    @property
    def _name(self) -> str:
        return self._configs[0].data.corpus

    @property
    def _times(self) -> str:
        """Number of times that the corpus is read, with at least two digits."""
        epochs = self.epochs or 0.0
        return format_number(epochs, 2) if epochs < 10 else f"{epochs:,.0f}"

    def _count(self, tokens: int) -> str:
        return f"{tokens:,}" if self.is_counted else f"about {rounded(tokens)}"


def counted(setting: Setting, corpus: Corpus) -> Supply:
    """Return the supply of a prepared corpus."""
    if isinstance(corpus.source, StreamedCorpus):
        return Supply(setting, None, None)
    return Supply(setting, len(corpus.source.train), len(corpus.source.validation))


class Estimates:
    """Estimates for corpora that are not encoded yet.

    Each corpus is sampled once. A streamed corpus is only opened, which reads a list of its files.
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str, str], int | None] = {}

    def of(self, setting: Setting) -> Supply | None:
        """Return a table's needs and its corpus's estimated tokens; None if the scale can represent none of its rows.

        Raises ConfigError if the corpus, or a tokenizer that it needs, is missing.
        """
        rows = setting.representable()
        if not rows:
            return None
        data = setting.config(rows[0]).data
        key = data.corpus, data.text_field, data.stream.model_dump_json()
        if key not in self._tokens:
            self._tokens[key] = _estimate(data, setting.scale.vocabulary)
        tokens = self._tokens[key]
        if tokens is None:
            return Supply(setting, None, None)
        validation = round(tokens * data.validation_share)
        return Supply(setting, tokens - validation, validation, is_counted=False)


def _estimate(data: DataSettings, vocabulary: int) -> int | None:
    require_tokenizer(data)
    if data.streamed is None:
        return estimate_tokens(data, vocabulary)
    StreamedCorpus(data)
    return None
