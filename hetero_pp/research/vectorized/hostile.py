"""Contributions to rounds with hostile replicas: what an attack sends in place of what was trained, and defences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.audit import FORWARDS_A_STEP, GauntletSettings
from hetero_pp.core.device import CPU
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.seeds import seed_of
from hetero_pp.data.shares import SharedBatches
from hetero_pp.messages.messages_pb2 import Losses, RoundRecord
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import give_back, select
from hetero_pp.pseudo_gradient.selection import generator_of
from hetero_pp.research.attacks.attack import Known, as_trained
from hetero_pp.research.attacks.registry import ATTACKS
from hetero_pp.research.settings import AttackSettings, research_of
from hetero_pp.research.vectorized.contributions import Contributions, Mean
from hetero_pp.research.vectorized.defences import (
    BYTES_OF_A_CHECKPOINT,
    Bounds,
    Contribution,
    Scores,
    against_others,
    equal_bits,
    recomputed,
)
from hetero_pp.research.vectorized.measured import Measured
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.traffic import blob_sizes
from replica_groups.audit.gauntlet.agreement import why
from replica_groups.audit.gauntlet.book import ScoreBook
from replica_groups.engines.ranks import Ranks

EXCLUDED_ROUNDS = GauntletSettings().excluded_rounds

FOR_EVER = 2**31
"""Last round of the exclusion of a replica whose ticket is revoked."""


@dataclass
class Told:
    """Outcome of a row with attacks beside its losses."""

    excluded: dict[str, int] = field(default_factory=dict)
    """Round after which a replica was first excluded, or its contribution left out, by replica."""
    causes: dict[str, str] = field(default_factory=dict)
    """Why, by replica."""
    hostile: list[str] = field(default_factory=list)
    scaled: dict[str, int] = field(default_factory=dict)
    """Rounds in which a replica's contribution was scaled down, by replica."""
    recomputations: int = 0
    """Replica-rounds that were computed again."""
    evaluation_share: float = 0.0
    """Compute of the primary evaluation by one validator, as a share of that of all replicas."""
    recomputation_share: float = 0.0
    """Compute of recomputation, as a share of that of all replicas."""
    audit_bytes: int = 0
    """Bytes that one validator reads: contributions for scores, and checkpoints for recomputation."""


class HostileContributions(Contributions):
    """Contributions of honest and hostile replicas, and which of them count.

    They are made and judged on the CPU, whatever device trains: attacks and audits draw their random numbers there.
    """

    def __init__(
        self,
        spec: RunSpec,
        names: Sequence[str],
        theta: Mapping[str, Tensor],
        ranks: Ranks,
        measured: Measured,
        settings: AttackSettings,
        batches: Sequence[SharedBatches],
    ) -> None:
        super().__init__(spec, names, theta, ranks, measured, kept_on=CPU)
        self._settings, self._batches, self._trained = settings, batches, theta
        self._theta = {name: tensor.to(CPU) for name, tensor in theta.items()}
        """Parameters at the start of the round."""
        self._attack, self._hostile = ATTACKS[settings.attack], settings.hostile_of(names)
        self._bounds = None if settings.bounds is None else Bounds(spec, settings, theta)
        self._scores = None if settings.scores is None else Scores(spec, settings)
        self._until: dict[str, int] = {}
        """Last round of a replica's exclusion."""
        self._first: dict[str, Tensor] = {}
        self._sent: dict[str, Contribution] = {}
        self._scales: dict[str, float] = {}
        self._contribution_bytes = max(sum(blobs.values()) for blobs in blob_sizes(spec).values())
        self.told = Told(hostile=list(self._hostile))

    def barred(self, round_: int) -> frozenset[str]:
        barred = frozenset(name for name, until in self._until.items() if round_ <= until)
        return barred if len(barred) < len(self._names) else frozenset()

    def prepare(self, round_: int, deltas: Callable[[str], Iterable[tuple[int, Tensor]]]) -> None:
        self._round = round_
        self._theta = {name: tensor.to(CPU) for name, tensor in self._trained.items()}
        programs: dict[str, dict[str, DecodedTensor]] = {}
        for parameter in self._theta:
            for index, delta in deltas(parameter):
                name = self._names[index]
                programs.setdefault(name, {})[parameter] = self._selected(
                    name, parameter, self.errors[index], delta.to(CPU)
                )
        self._sent = dict(programs) | self._attacked(programs)
        against = against_others(self._spec, self._sent, self._settings.signs)
        for name, agreement in against.items():
            self._exclude(name, round_ + EXCLUDED_ROUNDS, why(round_, agreement))
        left = {name: one for name, one in self._sent.items() if name not in against}
        bounded = dict.fromkeys(left, 1.0) if self._bounds is None else self._bounds.scales(round_, left)
        self._scales = dict.fromkeys(against, 0.0) | bounded
        for name, scale in bounded.items():
            if scale == 0:
                self._exclude(name, round_, "its contribution is far too large")
            elif scale < 1:
                self.told.scaled[name] = self.told.scaled.get(name, 0) + 1
        self._audit(round_, programs)

    def begin(self, round_: int, weights: Mapping[str, float]) -> None:
        super().begin(round_, weights)
        self.missed = frozenset(name for name, scale in self._scales.items() if scale == 0)
        self._counted = sum(weights[name] for name, scale in self._scales.items() if scale > 0)

    def state(self) -> dict[str, Any]:
        records = {} if self._bounds is None else self._bounds.records
        return {
            "told": asdict(self.told),
            "until": self._until,
            "first": self._first,
            "records": {round_: record.SerializeToString().hex() for round_, record in records.items()},
            "book": None if self._scores is None else self._scores.book.to_json(),
            "forwards": 0 if self._scores is None else self._scores.forwards,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.told, self._until, self._first = Told(**state["told"]), dict(state["until"]), dict(state["first"])
        if self._bounds is not None:
            records = state["records"].items()
            self._bounds.records = {one: RoundRecord.FromString(bytes.fromhex(record)) for one, record in records}
        if self._scores is not None:
            self._scores.book = ScoreBook.from_json(self._scores.settings, state["book"])
            self._scores.forwards = state["forwards"]

    def _send(self, index: int, name: str, delta: Tensor, mean: Mean) -> DecodedTensor:
        replica = self._names[index]
        sent, scale = self._sent[replica][name], self._scales[replica]
        if scale == 0:
            give_back(self.errors[index][name], sent.indices, sent.values, self._spec.config.outer.given_back)
        else:
            scaled = sent.scaled(scale)
            on_device = DecodedTensor(scaled.indices.to(self._device), scaled.values.to(self._device))
            mean.add(on_device, self._weights[replica])
        return sent

    def _selected(self, replica: str, parameter: str, errors: Mapping[str, Tensor], delta: Tensor) -> DecodedTensor:
        """Return what the program sends of a parameter, as an honest replica's does."""
        generator = generator_of(self._spec.run, self._round, replica, parameter)
        found = select(errors[parameter], delta, self._spec.config.outer.compression, generator=generator)
        return DecodedTensor(found.indices, found.values)

    def _attacked(self, programs: Mapping[str, Contribution]) -> dict[str, Contribution]:
        """Return what the hostile replicas that take part send."""
        taking_part = [name for name in self._hostile if name in programs]
        honest = [self._vector(one) for name, one in programs.items() if name not in self._hostile]
        fellows = [self._vector(programs[name]) for name in taking_part]
        contribution = as_trained if self._attack.needs_honest and not honest else self._attack.contribution
        found: dict[str, Contribution] = {}
        for place, name in enumerate(taking_part):
            known = Known(
                round=self._round,
                place=place,
                theta=torch.cat([tensor.flatten() for tensor in self._theta.values()]),
                fellows=fellows,
                honest=torch.stack(honest) if honest else torch.empty(0, self._parts()[-1].stop),
                first=self._first.setdefault(name, fellows[place]),
                parts=self._parts(),
                kept=lambda vector: self._vector(self._formatted(vector)),
                draw=torch.Generator().manual_seed(seed_of("attack", self._spec.config.seed, self._round, name)),
            )
            vector = contribution(known)
            found[name] = programs[name] if vector is fellows[place] else self._formatted(vector)
        return found

    def _parts(self) -> list[slice]:
        ends = accumulate((tensor.numel() for tensor in self._theta.values()), initial=0)
        return [slice(*both) for both in pairwise(ends)]

    def _vector(self, sent: Contribution) -> Tensor:
        """Return a contribution as a vector [P]."""
        parts = self._parts()
        vector = torch.zeros(parts[-1].stop)
        for part, name in zip(parts, self._theta, strict=True):
            sent[name].add_to(vector[part], 1.0)
        return vector

    def _formatted(self, vector: Tensor) -> Contribution:
        """Return what the format keeps of a vector [P], without error feedback."""
        plain = {"memory": "error_feedback", "error_feedback_decay": 0.0, "transform": "none"}
        compression = self._spec.config.outer.compression.model_copy(update=plain)
        found = {}
        for part, (name, tensor) in zip(self._parts(), self._theta.items(), strict=True):
            delta = vector[part].view_as(tensor)
            generator = generator_of(self._spec.run, self._round, "attack", name)
            selection = select(torch.zeros_like(delta), delta, compression, generator=generator)
            found[name] = DecodedTensor(selection.indices, selection.values)
        return found

    def _audit(self, round_: int, programs: Mapping[str, Contribution]) -> None:
        """Score the round's contributions and compute drawn ones again; exclude replicas from the next round on."""
        included = frozenset(name for name, scale in self._scales.items() if scale > 0)
        if self._scores is not None:
            causes = self._scores.judge(round_, self._theta, self._sent, included, self._text, self._lie)
            for name in included & causes.keys():
                self._exclude(name, round_ + self._scores.settings.excluded_rounds, causes[name])
            self.told.audit_bytes += self._contribution_bytes * len(self._sent)
        if (again := self._settings.recomputes) is not None:
            for name, sent in self._sent.items():
                if name in included and recomputed(self._spec.config.seed, round_, name, again.share):
                    self.told.recomputations += 1
                    self.told.audit_bytes += BYTES_OF_A_CHECKPOINT * self._parts()[-1].stop
                    lies = name in self._hostile and self._attack.trains_otherwise
                    if lies or not equal_bits(sent, programs[name]):
                        self._exclude(name, FOR_EVER, "its round, computed again, gives another contribution")
        self._count(round_)

    def _exclude(self, name: str, until: int, cause: str) -> None:
        self._until[name] = max(until, self._until.get(name, 0))
        self.told.excluded.setdefault(name, self._round)
        self.told.causes.setdefault(name, cause)

    def _text(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the tokens that a replica was assigned in the round, and those of another one."""
        steps = range((self._round - 1) * self._spec.inner_steps, self._round * self._spec.inner_steps)
        index = self._names.index(name)
        away = 1 + seed_of("other text", self._spec.config.seed, self._round, name) % (len(self._names) - 1)
        own, other = (self._batches[one] for one in (index, (index + away) % len(self._names)))
        return _sampled(own, steps, self._round), _sampled(other, steps, self._round)

    def _lie(self, name: str, losses: Losses) -> Losses:
        return losses if self._attack.losses is None else self._attack.losses(name in self._hostile, losses)

    def _count(self, round_: int) -> None:
        """Add up what audits have cost so far."""
        spec = self._spec
        sequences = round_ * spec.inner_steps * sum(one.batch_size for one in spec.config.replicas)
        forwards = 0 if self._scores is None else self._scores.forwards
        self.told.evaluation_share = forwards / (FORWARDS_A_STEP * sequences)
        self.told.recomputation_share = self.told.recomputations / (round_ * len(self._names))


def _sampled(batches: SharedBatches, steps: range, seed: int) -> Tensor:
    """Return the tokens of all steps [S, L + 1], in random order."""
    tokens = torch.cat([batches.train(step) for step in steps])
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))]


def contributions_of(
    spec: RunSpec,
    names: Sequence[str],
    theta: Mapping[str, Tensor],
    ranks: Ranks,
    measured: Measured,
    batches: Sequence[SharedBatches],
) -> Contributions:
    """Return the contributions of a row. Raises ConfigError for attacks on several ranks."""
    attacks = research_of(spec.config).attacks
    if attacks is None:
        return Contributions(spec, names, theta, ranks, measured)
    if ranks.world > 1:
        raise ConfigError(("research", "attacks"), f"found {ranks.world} ranks, expected one process")
    return HostileContributions(spec, names, theta, ranks, measured, attacks, batches)
