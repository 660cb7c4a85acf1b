"""Contributions to rounds with hostile replicas: what an attack sends in place of what was trained, and defences.

Defences are the product's own bounds, scores and draws, on contributions in memory. As in a run, bounds act on the
round itself. Scores and recomputation follow the round, and act from the next one on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.audit import FORWARDS_A_STEP, GauntletSettings
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.device import CPU
from hetero_pp.core.seeds import seed_of
from hetero_pp.data.batches import SharedBatches
from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, RoundRecord
from hetero_pp.model.transformer import block_of
from hetero_pp.pseudo_gradient.contribution import DecodedTensor, scale_of
from hetero_pp.pseudo_gradient.error_feedback import give_back, select
from hetero_pp.pseudo_gradient.selection import generator_of
from hetero_pp.research.attacks import ATTACKS, Known, as_trained
from hetero_pp.research.settings import AttackSettings
from hetero_pp.research.trainer.contributions import Contributions, Mean
from hetero_pp.research.trainer.measurements import Measured
from hetero_pp.simulator.traffic import blob_sizes
from replica_groups.audit.gauntlet import (
    SEQUENCES_OF_A_PAIR,
    agreements,
    copy_of,
    losses_of,
    median_of,
    overlapping,
    too_low,
    why,
)
from replica_groups.audit.replica_scores import ReplicaScores, RoundFacts
from replica_groups.exchange.magnitudes import bound, contribution_limits, remembered_before
from replica_groups.rounds.draws import drawn_for_trials

Contribution = Mapping[str, DecodedTensor]  # sent values by parameter

EXCLUDED_ROUNDS = GauntletSettings().excluded_rounds
FOR_EVER = 2**31  # last round of the exclusion of a replica whose ticket is revoked
BYTES_OF_A_CHECKPOINT = 16  # bytes for each parameter: its value, two moments, and error feedback
_DRAWS = 2**63


@dataclass
class Told:
    """Outcome of a row with attacks beside its losses."""

    excluded: dict[str, int] = field(default_factory=dict)
    """Round after which a replica was first excluded, or its contribution left out, by replica."""
    causes: dict[str, str] = field(default_factory=dict)  # why, by replica
    hostile: list[str] = field(default_factory=list)
    scaled: dict[str, int] = field(default_factory=dict)
    """Rounds in which a replica's contribution was scaled down, by replica."""
    recomputations: int = 0  # replica-rounds that were computed again
    evaluation_share: float = 0.0
    """Compute of the primary evaluation by one validator, as a share of that of all replicas."""
    recomputation_share: float = 0.0  # compute of recomputation, as a share of that of all replicas
    audit_bytes: int = 0  # bytes that one validator reads: contributions for scores, and checkpoints for recomputation


class HostileContributions(Contributions):
    """Contributions of honest and hostile replicas, and which of them count.

    They are made and judged on the CPU, whatever device trains: attacks and audits draw their random numbers there.
    """

    def __init__(
        self,
        spec: RunSpec,
        names: Sequence[str],
        theta: Mapping[str, Tensor],
        measured: Measured,
        settings: AttackSettings,
        batches: Sequence[SharedBatches],
    ) -> None:
        super().__init__(spec, names, theta, measured, kept_on=CPU)
        self._settings, self._batches, self._trained = settings, batches, theta
        self._attack, self._hostile = ATTACKS[settings.attack], settings.hostile_of(names)
        self.told = Told(hostile=list(self._hostile))
        self._theta = {name: tensor.to(CPU) for name, tensor in theta.items()}  # parameters at the start of the round
        ends = accumulate((tensor.numel() for tensor in theta.values()), initial=0)
        self._parts = [slice(*both) for both in pairwise(ends)]
        """Where each parameter is in a contribution as a vector [P]."""
        self._sent: dict[str, Contribution] = {}
        self._scales: dict[str, float] = {}
        """Factor of each contribution's values in the round; 0 for those that are left out."""
        self._until: dict[str, int] = {}  # last round of a replica's exclusion
        self._first: dict[str, Tensor] = {}  # each hostile replica's contribution to its first round [P]
        self._records: dict[int, RoundRecord] = {}  # records of earlier rounds, for bounds
        self._limits = None if settings.bounds is None else contribution_limits(spec)
        if self._limits is not None:
            self._limits.begin(theta, 0)
        self._book = None if settings.scores is None else ReplicaScores(settings.scores, list(names))
        self._forwards = 0  # sequences that one validator has evaluated, over all rounds
        self._contribution_bytes = max(sum(blobs.values()) for blobs in blob_sizes(spec).values())

    def barred(self, round_: int) -> frozenset[str]:
        barred = frozenset(name for name, until in self._until.items() if round_ <= until)
        return barred if len(barred) < len(self._names) else frozenset()

    def prepare(self, round_: int, deltas: Callable[[str], Iterable[tuple[int, Tensor]]]) -> None:
        self._round = round_
        self._theta = {name: tensor.to(CPU) for name, tensor in self._trained.items()}
        compression = self._spec.config.outer.compression
        programs: dict[str, dict[str, DecodedTensor]] = {}
        for parameter in self._theta:
            for index, delta in deltas(parameter):
                name, error = self._names[index], self.errors[index][parameter]
                generator = generator_of(self._spec.run, round_, name, parameter)
                found = select(error, delta.to(CPU), compression, generator=generator)
                programs.setdefault(name, {})[parameter] = DecodedTensor(found.indices, found.values)
        self._sent = dict(programs) | self._attacked(programs)
        against = self._against(self._sent, self._settings.signs)
        for name, agreement in against.items():
            self._exclude(name, round_ + EXCLUDED_ROUNDS, why(round_, agreement))
        left = {name: one for name, one in self._sent.items() if name not in against}
        bounded = dict.fromkeys(left, 1.0) if self._settings.bounds is None else self._bound(left)
        self._scales = dict.fromkeys(against, 0.0) | bounded
        for name, scale in bounded.items():
            if scale == 0:
                self._exclude(name, round_, "its contribution is far too large")
            elif scale < 1:
                self.told.scaled[name] = self.told.scaled.get(name, 0) + 1
        included = frozenset(name for name, scale in self._scales.items() if scale > 0)
        if self._book is not None:
            self._score(self._book, included)
        self._recompute(included, programs)
        sequences = round_ * self._spec.inner_steps * sum(one.batch_size for one in self._spec.config.replicas)
        self.told.evaluation_share = self._forwards / (FORWARDS_A_STEP * sequences)
        self.told.recomputation_share = self.told.recomputations / (round_ * len(self._names))

    def begin(self, round_: int, weights: Mapping[str, float], tokens: int = 0) -> None:
        super().begin(round_, weights)
        self.missed = frozenset(name for name, scale in self._scales.items() if scale == 0)
        self._taking_part = [name for name, scale in self._scales.items() if scale > 0]

    def state(self) -> dict[str, Any]:
        return {
            "told": asdict(self.told),
            "until": self._until,
            "first": self._first,
            "records": {round_: record.SerializeToString().hex() for round_, record in self._records.items()},
            "book": None if self._book is None else self._book.to_json(),
            "forwards": self._forwards,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.told, self._until, self._first = Told(**state["told"]), dict(state["until"]), dict(state["first"])
        records = state["records"].items()
        self._records = {round_: RoundRecord.FromString(bytes.fromhex(record)) for round_, record in records}
        if self._settings.scores is not None:
            self._book = ReplicaScores.from_json(self._settings.scores, state["book"])
        self._forwards = state["forwards"]

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

    def _attacked(self, programs: Mapping[str, Contribution]) -> dict[str, Contribution]:
        """Return what the hostile replicas that take part send; `programs` is what all programs would send."""
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
                honest=torch.stack(honest) if honest else torch.empty(0, self._parts[-1].stop),
                first=self._first.setdefault(name, fellows[place]),
                parts=self._parts,
                kept=lambda vector: self._vector(self._formatted(vector)),
                draw=torch.Generator().manual_seed(seed_of("attack", self._spec.config.seed, self._round, name)),
            )
            vector = contribution(known)
            found[name] = programs[name] if vector is fellows[place] else self._formatted(vector)
        return found

    def _vector(self, sent: Contribution) -> Tensor:
        """Return a contribution as a vector [P]."""
        vector = torch.zeros(self._parts[-1].stop)
        for part, name in zip(self._parts, self._theta, strict=True):
            sent[name].add_to(vector[part], 1.0)
        return vector

    def _formatted(self, vector: Tensor) -> Contribution:
        """Return what the format keeps of a vector [P], without error feedback."""
        plain = {"memory": "error_feedback", "error_feedback_decay": 0.0, "transform": "none"}
        compression = self._spec.config.outer.compression.model_copy(update=plain)
        found = {}
        for part, (name, tensor) in zip(self._parts, self._theta.items(), strict=True):
            delta = vector[part].view_as(tensor)
            generator = generator_of(self._spec.run, self._round, "attack", name)
            selection = select(torch.zeros_like(delta), delta, compression, generator=generator)
            found[name] = DecodedTensor(selection.indices, selection.values)
        return found

    def _against(self, sent: Mapping[str, Contribution], least: float | None) -> dict[str, float]:
        """Return the agreements that are too low, by replica; none without a limit."""
        tokens = {one.name: one.batch_size for one in self._spec.config.replicas}
        return {} if least is None else too_low(agreements(sent), tokens, least)

    def _bound(self, sent: Mapping[str, Contribution]) -> dict[str, float]:
        """Apply `exchange.magnitudes`; return the factor of each contribution's values, 0 for those left out."""
        assert self._settings.bounds is not None
        steps, length, entries = self._spec.inner_steps, self._spec.config.data.sequence_length, []
        batch_sizes = {one.name: one.batch_size for one in self._spec.config.replicas}
        for name, own in sent.items():  # a contribution's entry in a record, as far as bounds read it
            blocks: dict[str, list[Tensor]] = {}
            for parameter, one in own.items():
                blocks.setdefault(block_of(parameter), []).append(one.values)
            blobs = [
                BlobEntry(
                    block=block,
                    norm=math.sqrt(sum(float(one.double().square().sum()) for one in values)),
                    peak=max(float(one.abs().max()) for one in values),
                )
                for block, values in blocks.items()
            ]
            tokens = steps * batch_sizes[name] * length
            entries.append(ContributionEntry(replica=name, weight=1.0, blobs=blobs, steps=steps, tokens=tokens))
        record = RoundRecord(round=self._round, contributions=entries)
        before = [self._records[one] for one in remembered_before(self._round) if one in self._records]
        bound(record, before, self._settings.bounds, limits=self._limits)
        self._records[self._round] = record
        return dict.fromkeys(record.left_out, 0.0) | {one.replica: scale_of(one) for one in record.contributions}

    def _score(self, book: ReplicaScores, included: frozenset[str]) -> None:
        """Take the round into the book with the median losses of several validators, of which the first may lie.

        Replicas with a low score are excluded from the next round on.
        """
        settings, theta, shape = self._settings.scores, self._theta, self._spec.shape
        assert settings is not None
        seed, outer, sent = self._spec.config.seed, self._spec.config.outer, self._sent
        drawing = f"secret of seed {seed}".encode(), str(self._round).encode()
        drawn = drawn_for_trials(*drawing, sorted(included), settings.evaluated)
        rate = settings.step * outer.learning_rate_in(self._round)
        losses = {}
        for name in drawn:
            assigned, other = (tokens[: settings.sequences] for tokens in self._text(name))
            found = losses_of(theta, sent[name], shape, assigned, other, rate, outer)
            lie = found if self._attack.losses is None else self._attack.losses(name in self._hostile, found)
            losses[name] = median_of([lie, *[found] * (self._settings.validators - 1)])
            self._forwards += 2 * (len(assigned) + len(other))
        copies = {}
        for pair in overlapping(sent, settings.overlap):
            texts = self._text(pair[0])[0][:SEQUENCES_OF_A_PAIR], self._text(pair[1])[0][:SEQUENCES_OF_A_PAIR]
            self._forwards += 2 * len(pair) * sum(map(len, texts))
            if (copy := copy_of(pair, sent, theta, shape, texts, rate, outer)) is not None:
                [copies[copy]] = {*pair} - {copy}
        facts = RoundFacts(
            round=self._round,
            included=included,
            missed=frozenset(),
            left_out=frozenset(sent) - included,
            synchronisation=dict.fromkeys(sent, 1.0),
            copies=copies,
            against=self._against({name: sent[name] for name in included}, settings.agreement),
        )
        book.update(facts, losses)
        causes = dict(book.to_exclude())
        for name in included & causes.keys():
            self._exclude(name, self._round + settings.excluded_rounds, causes[name])
        self.told.audit_bytes += self._contribution_bytes * len(sent)

    def _text(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the tokens [S, L + 1] that a replica was assigned in the round, and those of another one."""
        steps = range((self._round - 1) * self._spec.inner_steps, self._round * self._spec.inner_steps)
        index = self._names.index(name)
        away = 1 + seed_of("other text", self._spec.config.seed, self._round, name) % (len(self._names) - 1)

        def sampled(batches: SharedBatches) -> Tensor:
            tokens = torch.cat([batches.train(step) for step in steps])
            return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(self._round))]

        return sampled(self._batches[index]), sampled(self._batches[(index + away) % len(self._names)])

    def _recompute(self, included: frozenset[str], programs: Mapping[str, Contribution]) -> None:
        """Compute drawn contributions again; exclude replicas that sent something else from the next round on."""
        if (again := self._settings.recomputes) is None:
            return
        for name, sent in self._sent.items():
            if name not in included or not recomputed(self._spec.config.seed, self._round, name, again.share):
                continue
            self.told.recomputations += 1
            self.told.audit_bytes += BYTES_OF_A_CHECKPOINT * self._parts[-1].stop
            is_other = self._attack.text is not None or self._attack.activations is not None
            trained_otherwise = name in self._hostile and is_other
            is_equal = all(
                one.indices.equal(programs[name][parameter].indices)
                and one.values.equal(programs[name][parameter].values)
                for parameter, one in sent.items()
            )
            if trained_otherwise or not is_equal:
                self._exclude(name, FOR_EVER, "its round, computed again, gives another contribution")

    def _exclude(self, name: str, until: int, cause: str) -> None:
        self._until[name] = max(until, self._until.get(name, 0))
        self.told.excluded.setdefault(name, self._round)
        self.told.causes.setdefault(name, cause)


def recomputed(seed: int, round_: int, replica: str, share: float) -> bool:
    """Return whether a replica's round is computed again. A round drawn at a share is drawn at any larger one."""
    return seed_of("recomputed", seed, round_, replica) / _DRAWS < share
