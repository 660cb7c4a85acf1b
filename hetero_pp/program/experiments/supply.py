"""Whether a table's corpus has as many tokens as its rows read, and what to bring if not: told before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hetero_pp.data.settings import DataSettings
from hetero_pp.data.sources import StreamedCorpus
from hetero_pp.errors import ConfigError
from hetero_pp.program.experiments.corpus import Corpus, estimate_tokens, require_tokenizer
from hetero_pp.program.experiments.facts import rounded
from hetero_pp.program.experiments.rows import Setting
from hetero_pp.run.config import RunConfig

MORE = "bring more text: --corpus PATH, or --corpus hf:NAME with --tokenizer PATH, which streams it"
SURE = 1.25
"""Times as many tokens as are needed, or as few, at which an estimate tells whether they are enough."""


def tokens_read(config: RunConfig) -> int:
    """How many tokens a run trains on, the last of each row of a batch among them."""
    steps = config.inner.require_steps("rows are compared after as many steps")
    counts = [config.outer.taking_part_in(round_) for round_ in range(1, config.outer.rounds + 1)]
    sequences = sum(replica.batch_size for count in counts for replica in config.replicas[:count])
    return steps * (config.data.sequence_length + 1) * sequences


@dataclass(frozen=True)
class Supply:
    """What the rows of a table need of a corpus, beside what it has to train and to validate on."""

    setting: Setting
    training: int | None
    """None: it is streamed, and not known before it is read."""
    validation: int | None
    is_counted: bool = True
    """Whether tokens were counted; else they are an estimate."""

    @cached_property
    def _configs(self) -> list[RunConfig]:
        rows = self.setting.experiment.rows
        return [self.setting.config(row) for row in rows if self.setting.not_representable(row) is None]

    @cached_property
    def needed(self) -> int:
        """By the row that trains on most."""
        return max(map(tokens_read, self._configs))

    @cached_property
    def needed_to_validate(self) -> int:
        """By the row that validates on most."""
        return max(one.data.validation_sequences * (one.data.sequence_length + 1) for one in self._configs)

    @property
    def epochs(self) -> float | None:
        """How often the corpus is read, if that is known."""
        return None if self.training is None else self.needed / max(1, self.training)

    def require_enough(self) -> None:
        """Raise ConfigError, saying what is lacking and what to bring, unless every row can be trained."""
        if (lacking := self._lacking()) is not None:
            of = f"{self.setting.experiment.name} at scale {self.setting.scale.name}"
            raise ConfigError(("data", "corpus"), f"{of}: {lacking}")

    def describe(self) -> Iterator[str]:
        """How many tokens there are, how many are needed, and what to bring: a sentence each."""
        yield f"Corpus of {self.setting.experiment.name}: {self._lacking() or self._enough()}"
        bring, setting = self.setting.scale.bring, self.setting
        if bring is not None and not (setting.corpus and self._configs[0].data.names_tokenizer):
            corpus = setting.experiment.bring or bring.corpus
            yield f"Bring what {bring.paper} has: --corpus {corpus}, --tokenizer PATH of {bring.tokenizer}"

    def _lacking(self) -> str | None:
        if self.training is None or self.validation is None:
            return self._lacking_of_stream()
        repeats = self._configs[0].data.repeat
        if not repeats and self.needed > self.training * self._tolerance:
            again = f"--repeat reads this {self._times} times"
            return self._too_few(self.training, "", self.needed, f"{MORE}; {again}")
        if self.needed_to_validate > self.validation * self._tolerance:
            mend = f"{MORE}; or a larger `data.validation_share`, or fewer `data.validation_sequences`"
            return self._too_few(self.validation, " to validate on", self.needed_to_validate, mend)
        return None

    def _lacking_of_stream(self) -> str | None:
        """Of a stream, text that nobody trains on: reaching it would cost reading all that lies before."""
        counts = [sum(one.kind == "participants" for one in config.replicas) for config in self._configs]
        if self.setting.experiment.bias_every is None or 1 not in counts:
            return None
        why = "the bias of one compressed replica is measured with text that nobody trains on"
        return f"found {self._name}, which is streamed, expected --corpus PATH: {why}"

    def _too_few(self, found: int, to_do: str, needed: int, mend: str) -> str:
        tokens = f"found {self._count(found)} tokens{to_do} in {self._name}, expected {needed:,}"
        return f"{tokens}: {self._count(needed - found)} are lacking ({mend})"

    def _enough(self) -> str:
        if self.training is None:
            unknown = f"{self._name} is streamed, and how many tokens it has is not known before they are read"
            stops = "rows stop with a checkpoint, from which --repeat goes on"
            ends = "it begins anew" if self._configs[0].data.repeat else stops
            return f"{unknown}. {self.needed:,} are needed; if it ends before, {ends}"
        there = f"{self._count(self.training)} tokens to train on in {self._name}, {self.needed:,} are needed"
        if self.needed * self._tolerance > self.training and not self._configs[0].data.repeat:
            return f"{there}: they are counted before anything is trained"
        return f"{there}: " + ("enough" if self.needed <= self.training else f"they are read {self._times} times")

    @property
    def _tolerance(self) -> float:
        return 1.0 if self.is_counted else SURE

    @property
    def _name(self) -> str:
        return self._configs[0].data.corpus

    @property
    def _times(self) -> str:
        """How often the corpus is read, in two digits or more."""
        epochs = self.epochs or 0.0
        return f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"

    def _count(self, tokens: int) -> str:
        return f"{tokens:,}" if self.is_counted else f"about {rounded(tokens)}"


def counted(setting: Setting, corpus: Corpus) -> Supply:
    """Of a corpus that is ready."""
    if isinstance(corpus.source, StreamedCorpus):
        return Supply(setting, None, None)
    return Supply(setting, len(corpus.source.train), len(corpus.source.validation))


class Estimates:
    """Of corpora of which nothing may be encoded yet: each is sampled once, and a streamed one opened, which reads a
    list of its files.
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, str, str], int | None] = {}

    def of(self, setting: Setting) -> Supply | None:
        """What the rows of a table need beside it; None if the scale has none of them.

        Raises ConfigError if the corpus, or the tokenizer that it needs, is not there.
        """
        rows = [row for row in setting.experiment.rows if setting.not_representable(row) is None]
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
