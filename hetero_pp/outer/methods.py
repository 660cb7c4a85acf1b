"""Outer methods as tables of settings: SparseLoCo, DiLoCo, AdamW DDP and others, as changed cells.

`outer.method` names a method. Single cells can be overridden beside it, and an ablation is one changed cell.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hetero_pp.core.settings import Beta, Count, NotPartOf, Ratio, Settings
from hetero_pp.messages.report_bounds import MOST_RATE
from hetero_pp.model.learning_rates import BySteps
from hetero_pp.model.part_settings import EmbeddingTraining
from hetero_pp.outer.fragments import Fragments, Pattern
from hetero_pp.pseudo_gradient.compression import CompressionSettings

MethodName = Literal[
    "het_pp",
    "sparseloco",
    "sparseloco_signs",
    "diloco",
    "diloco_lom",
    "demo",
    "adamw_ddp",
]

DEFAULT_METHOD: MethodName = "sparseloco_signs"

_DENSE = {"density": 1.0, "value_bits": 32, "error_feedback_decay": 0.0}
_LOCAL_MOMENTUM = {"density": 1.0, "value_bits": 32, "memory": "momentum", "error_feedback_decay": 0.9}


@dataclass(frozen=True)
class Method:
    """An outer method: its paper, the cells of `outer` that it sets, and how its compressed groups train T_S."""

    paper: str  # paper and section
    cells: Mapping[str, Any]  # cells that differ from the defaults
    embedding: EmbeddingTraining = "free"  # default of `boundary.embedding`


METHODS: dict[str, Method] = {
    "het_pp": Method(
        "Het-PP (2026), sections 2.4 and 3, table 9: SparseLoCo without quantisation",
        {"compression": {"density": 1 / 128, "value_bits": 32}},
        embedding="coefficients",
    ),
    "sparseloco": Method(
        "SparseLoCo (Sarfi et al. 2025), algorithm 1, tables 1 and 9; table 1's other density is 1/32",
        {"compression": {"density": 1 / 128, "quantiser": "levels", "value_bits": 2}},
    ),
    "sparseloco_signs": Method("Ours: SparseLoCo with density 1/32, and one bit per value", {}),
    "diloco": Method(
        "DiLoCo (Douillard et al. 2023), algorithm 1",
        {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True, "compression": _DENSE},
    ),
    "diloco_lom": Method(
        "SparseLoCo, section 2.2: a momentum of each replica's own",
        {"learning_rate": 0.6, "compression": _LOCAL_MOMENTUM},
    ),
    "demo": Method(
        "DeMo (Peng et al. 2024); SparseLoCo, table 1: with inner SGD and H = 1",
        {
            "aggregation": "sign",
            "learning_rate": 1e-3,
            "compression": {
                "transform": "dct",
                "density": 1 / 128,
                "quantiser": "levels",
                "value_bits": 8,
                "error_feedback_decay": 0.999,
            },
        },
    ),
    "adamw_ddp": Method(
        "Het-PP, table 4: gradients averaged every step, then clipped, for one AdamW",
        {"source": "gradient", "compression": _DENSE},
    ),
}
"""Methods by name; the cells of `sparseloco_signs` are the defaults."""


def change_method(outer: MutableMapping[str, Any], method: Any) -> None:
    """Change the method of an `outer` section of a YAML; drop the cells that either method sets.

    They were set for the previous method.
    """
    before = outer.get("method", DEFAULT_METHOD)
    for name in (before, method) if before != method else ():
        if isinstance(name, str) and name in METHODS:
            _drop(outer, METHODS[name].cells)
    outer["method"] = method


def with_embeddings(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of a run's YAML with the method's `embedding` in boundaries of groups that do not have one.

    Invalid sections are left for their own checks.
    """
    outer, entries = run.get("outer"), run.get("replicas")
    name = outer.get("method") if isinstance(outer, Mapping) else getattr(outer, "method", None)
    embedding = METHODS[name].embedding if isinstance(name, str) and name in METHODS else "free"
    if embedding == "free" or not isinstance(entries, list):
        return run
    replicas = []
    for entry in entries:
        is_group = isinstance(entry, Mapping) and entry.get("kind") == "participants"
        own = entry.get("boundary", {}) if is_group else None
        replicas.append({**entry, "boundary": {"embedding": embedding} | own} if isinstance(own, dict) else entry)
    return {**run, "replicas": replicas}


def _drop(section: MutableMapping[str, Any], cells: Mapping[str, Any]) -> None:
    for cell, value in cells.items():
        own = section.get(cell)
        if isinstance(value, Mapping) and isinstance(own, MutableMapping):
            _drop(own, value)
        else:
            section.pop(cell, None)


class OuterSettings(Settings):
    """Settings of the outer rounds."""

    rounds: Annotated[int | None, NotPartOf.PAST] = Field(None, ge=1, description="number of rounds, or `tokens`")
    tokens: Annotated[Count | None, NotPartOf.PAST] = Field(
        None,
        ge=1,
        description="end of the run instead of `rounds`: it is over with the first round by which its contributions "
        "were trained on so many tokens. Learning rates follow the tokens, too",
    )
    # What it sets decides the outcome, and its name does not.
    method: Annotated[MethodName, NotPartOf.OUTCOME] = Field(
        DEFAULT_METHOD, description="method, which sets the keys below and the default of `boundary.embedding`"
    )
    source: Literal["difference", "gradient"] = Field(
        "difference", description="values to average: parameter differences after H steps, or gradients in every step"
    )
    learning_rate: Annotated[float, NotPartOf.PAST] = Field(
        1.0, gt=0, le=MOST_RATE, description="outer learning rate (eta in the papers)"
    )
    final_learning_rate_share: Annotated[float, NotPartOf.PAST] = Field(
        1.0,
        ge=0,
        le=1,
        description="outer learning rate at the end of a cosine over the rounds, as "
        "a share of `learning_rate`; 1: constant",
    )
    warmup_rounds: Annotated[int, NotPartOf.PAST] = Field(
        0, ge=0, description="rounds of linear warmup of `learning_rate`"
    )
    aggregation: Literal["mean", "sign", "trimmed_mean", "centred_clipping", "geometric_median"] = Field(
        "mean",
        description="input of the outer step: the mean of the contributions, its signs as in DeMo, or a mean that a "
        "hostile minority moves only so far (`hetero_pp/outer/robust.py`)",
    )
    trim: Ratio = Field(
        0.25, ge=0, lt=0.5, description="share of a coordinate's values that `trimmed_mean` leaves out at either end"
    )
    radius: Ratio = Field(
        1.0, gt=0, description="distance to which `centred_clipping` shortens, relative to the median distance"
    )
    optimizer: Literal["sgd", "adam"] = Field(
        "sgd",
        description="optimizer of the outer step: SGD with `momentum` and `nesterov`, or Adam "
        "with `betas` and `epsilon`",
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of the two moments of outer Adam")
    epsilon: float = Field(0.1, gt=0, description="epsilon of outer Adam (DiLoCo, section 3.1)")
    momentum: float = Field(0.0, ge=0, lt=1)
    nesterov: bool = False
    divides_by: Literal["replicas", "senders"] = Field(
        "replicas", description="divisor of a coordinate's mean: all replicas, or only the replicas that sent it"
    )
    weights: Literal["equal", "tokens", "scores"] = Field(
        "equal",
        description="weight of a contribution in a round's mean: `equal`, or the `tokens` that the replica trained on "
        "in the round, or its `scores` (`audit.gauntlet`)",
    )
    returned: Ratio = Field(
        0.5, ge=0, le=1, description="share of an excluded contribution that is restored to error feedback"
    )
    keep_local: bool = Field(
        False,
        description="a replica that is excluded from a round continues from its own parameters, and "
        "sends its total difference in the next round that includes it. `returned` then "
        "applies only to contributions that were excluded as too large",
    )
    overlap: Literal[0, 1] = Field(
        0, description="1: a replica trains the next round while its contribution is in flight"
    )
    presumed: Ratio | None = Field(
        None,
        ge=0,
        le=1,
        description="with overlap or `mixing`, share of a contribution that its replica treats as applied before "
        "the mean is known; by default 1 if every value is sent, otherwise 1/2",
    )
    fragments: int = Field(
        1,
        ge=1,
        description="number of fragments F of the model. A round synchronises one of them in turn, so a parameter is "
        "synchronised every F rounds (Streaming DiLoCo)",
    )
    pattern: Pattern = Field(
        "strided", description="layers of a fragment: every F-th (`strided`), or consecutive ones (`sequential`)"
    )
    mixing: Ratio = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of its own parameters that a replica keeps of a fragment when it is synchronised; the rest "
        "are the synchronised ones",
    )
    keep_on_device: Annotated[bool, NotPartOf.EITHER] = Field(
        False,
        description="keep the round's start and the error feedback, 8 bytes per parameter, on the member's device "
        "instead of in the host's memory",
    )
    compression: CompressionSettings = CompressionSettings()

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_method(cls, values: Any) -> Any:
        """Fill cells that the user did not set from the method."""
        if not isinstance(values, dict):
            return values
        method = values.get("method", DEFAULT_METHOD)
        row = METHODS[method].cells if isinstance(method, str) and method in METHODS else {}
        filled = {**row, **values}
        own = values.get("compression", {})
        if "compression" in row and isinstance(own, dict):
            filled["compression"] = {**row["compression"], **own}
        return filled

    @model_validator(mode="after")
    def _parts_are_compatible(self) -> OuterSettings:
        own, adam, sums = self.compression, self.optimizer == "adam", self.source == "gradient"
        momentum, overlap = f"momentum {self.momentum:g}", f"overlap {self.overlap}"
        plain = {"aggregation": "mean", "optimizer": "sgd", "memory": "error_feedback", "transform": "none"}
        parts = self.model_dump(include={*plain}) | own.model_dump(include={*plain})
        varied = min((f"{name}: {value}" for name, value in parts.items() if value != plain[name]), default="")
        exclusions = [
            (
                adam and self.momentum > 0,
                f"{momentum} with `optimizer: adam`, which has its own in `betas`, expected 0, or `optimizer: sgd`",
            ),
            (
                own.memory == "momentum" and (self.momentum > 0 or adam),
                f"{'`optimizer: adam`' if adam else momentum} beside `compression.memory: momentum`, expected only one "
                "momentum: momentum 0, or `memory: error_feedback`",
            ),
            (
                own.memory == "momentum" and own.density < 1,
                f"density {own.density:g} with `compression.memory: momentum`, expected density 1, or `memory: "
                "error_feedback`: this memory keeps nothing of values that are not sent",
            ),
            (
                sums and self.overlap > 0,
                f"{overlap} with averaged gradients, which every step needs, expected 0, or `source: difference`",
            ),
            (
                sums and varied != "",
                f"`{varied}` with averaged gradients, expected `source: difference`: the inner AdamW applies the "
                "averages as they are",
            ),
            (sums and self.weights != "equal", f"weights `{self.weights}` with averaged gradients, expected `equal`"),
            (
                self.is_robust and self.divides_by != "replicas",
                f"`divides_by: {self.divides_by}` with `aggregation: {self.aggregation}`, expected `replicas`",
            ),
            (
                self.aggregation in ("trimmed_mean", "centred_clipping") and self.weights != "equal",
                f"weights `{self.weights}` with `aggregation: {self.aggregation}`, which has no weights, expected "
                "`equal`, or `aggregation: geometric_median`",
            ),
            (
                own.transform == "dct" and (self.overlap > 0 or self.mixing > 0),
                f"`{'overlap: 1' if self.overlap else f'mixing: {self.mixing:g}'}` with `compression.transform: dct`, "
                "expected 0, or `transform: none`: a replica applies the values that it sent",
            ),
            (
                self.is_streaming and sums,
                f"{self.streaming} with averaged gradients, which every step needs whole, expected `fragments: 1` and "
                "`mixing: 0`, or `source: difference`",
            ),
            (
                self.is_streaming and self.keep_local,
                f"{self.streaming} with `keep_local`, expected `fragments: 1` and `mixing: 0`, or `keep_local: false`",
            ),
            (
                self.mixing > 0 and self.fragments == 1 and self.overlap > 0,
                f"{self.streaming} with `overlap: 1` and one fragment, expected `mixing: 0`, or more `fragments`: a "
                "round that is trained ahead is measured from its own start",
            ),
            (
                self.keep_local and (sums or self.overlap > 0),
                f"`keep_local` with {'averaged gradients' if sums else '`overlap: 1`'}, expected false, or `source: "
                "difference` with `overlap: 0`",
            ),
        ]
        for is_so, found in exclusions:
            if is_so:
                raise ValueError(f"{self.method}: found {found}")
        return self

    def rounds_at(self, round_: int, tokens: int) -> float:
        """Return the number of rounds of a run that had so many tokens after `round_` (RoundRecord.tokens).

        The share `round_ / rounds_at` is that of the run's tokens, so the clock of a run does not jump where replicas
        come or go: only its rounds get larger or smaller.
        """
        return self.rounds if self.rounds is not None else (self.tokens or 0) * round_ / max(1, tokens)

    def planned(self, round_: int, tokens: int) -> int:
        """Return `rounds_at` after a round as a whole number: `round_` if the run is over after it, else more."""
        return self.rounds or max(round_, -(-(self.tokens or 0) * round_ // max(1, tokens)))

    def is_over(self, round_: int, tokens: int) -> bool:
        """Return whether the run is over after `round_`, with the tokens of its record."""
        return tokens >= self.tokens if self.tokens is not None else round_ >= (self.rounds or 0)

    def learning_rate_in(self, round_: int, tokens: int = 0) -> float:
        """Return a round's learning rate: linear warm-up, then a cosine to the final share.

        `tokens` are those of the round's record, for a run that ends after a number of tokens.
        """
        if self.final_learning_rate_share == 1 and self.warmup_rounds == 0:
            return self.learning_rate
        rounds = self.rounds_at(round_, tokens)
        rates = BySteps(self.learning_rate, self.final_learning_rate_share, self.warmup_rounds, rounds)
        return float(f"{rates.at(round_ - 1):.6g}")  # the last bit of a cosine differs between machines

    @property
    def is_streaming(self) -> bool:
        """Whether replicas keep parameters of their own beyond a round: in fragments, or mixed with the others'."""
        return self.fragments > 1 or self.mixing > 0

    @property
    def streaming(self) -> str:
        """The setting with which replicas keep parameters of their own, in words."""
        return f"`fragments: {self.fragments}`" if self.fragments > 1 else f"`mixing: {self.mixing:g}`"

    def fragments_of(self, layers: int) -> Fragments:
        """Return the fragments of a model with so many layers."""
        return Fragments(self.fragments, self.pattern, layers)

    @property
    def is_sparse(self) -> bool:
        """Whether a replica sends a part of its difference, and error feedback keeps the rest, as in SparseLoCo."""
        own = self.compression
        sends_a_part = self.source == "difference" and own.density < 1 and self.aggregation != "sign"
        return sends_a_part and own.memory == "error_feedback" and own.error_feedback_decay > 0

    @property
    def is_robust(self) -> bool:
        """Whether contributions are combined by one of the means of `outer.robust`."""
        return self.aggregation not in ("mean", "sign")

    @property
    def presumes(self) -> float:
        """Share of its own contribution that a replica applies before the mean is known, by default 0.5 or 1.

        With sparse values a replica's own are divided by the number of replicas, and others' add to them. With all
        values sent, each replica's are about the same.
        """
        if self.presumed is not None:
            return self.presumed
        return 1.0 if self.compression.density == 1 else 0.5

    @property
    def given_back(self) -> float:
        """Share of an excluded contribution that is restored to error feedback; 0 for a momentum, which includes it."""
        return self.returned if self.compression.memory == "error_feedback" else 0.0

    def weight(self, tokens: int) -> float:
        """Return the weight of a contribution from `tokens` trained in the round.

        The mean divides by the sum of the weights of the included contributions.
        """
        return float(tokens) if self.weights == "tokens" else 1.0
