"""Defences against hostile replicas in tables: the product's own bounds, scores and draws, on contributions in memory.

As in a run, bounds act on the round itself. Scores and recomputation follow the round, and act from the next one on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hetero_pp.core.seeds import seed_of
from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, Losses, RoundRecord
from hetero_pp.model.transformer import block_of
from hetero_pp.pseudo_gradient.contribution import DecodedTensor, scale_of
from hetero_pp.research.settings import AttackSettings
from hetero_pp.run.spec import RunSpec
from replica_groups.audit.gauntlet.agreement import agreements, too_low
from replica_groups.audit.gauntlet.book import RoundFacts, ScoreBook
from replica_groups.audit.gauntlet.check import draw
from replica_groups.audit.gauntlet.losses import SEQUENCES_OF_A_PAIR, copy_of, losses_of, median_of
from replica_groups.audit.gauntlet.overlap import overlapping
from replica_groups.exchange.limits import contribution_limits
from replica_groups.exchange.magnitudes import bound, remembered_before

Contribution = Mapping[str, DecodedTensor]
"""Sent values by parameter."""

_DRAWS = 2**63
BYTES_OF_A_CHECKPOINT = 16
"""Bytes for each parameter: its value, two moments, and error feedback."""


def entry_of(spec: RunSpec, replica: str, sent: Contribution) -> ContributionEntry:
    """Return the entry of a contribution in a round record, as far as bounds read it."""
    blocks: dict[str, list[Tensor]] = {}
    for name, one in sent.items():
        blocks.setdefault(block_of(name), []).append(one.values)
    blobs = [
        BlobEntry(
            block=block,
            norm=math.sqrt(sum(float(one.double().square().sum()) for one in values)),
            peak=max(float(one.abs().max()) for one in values),
        )
        for block, values in blocks.items()
    ]
    steps = spec.inner_steps
    [own] = [one for one in spec.config.replicas if one.name == replica]
    tokens = steps * own.batch_size * spec.config.data.sequence_length
    return ContributionEntry(replica=replica, weight=1.0, blobs=blobs, steps=steps, tokens=tokens)


class Bounds:
    """`exchange.magnitudes` on contributions in memory."""

    def __init__(self, spec: RunSpec, settings: AttackSettings, theta: Mapping[str, Tensor]) -> None:
        assert settings.bounds is not None
        self._spec, self._settings, self._limits = spec, settings.bounds, contribution_limits(spec)
        if self._limits is not None:
            self._limits.begin(theta, 0)
        self.records: dict[int, RoundRecord] = {}

    def scales(self, round_: int, sent: Mapping[str, Contribution]) -> dict[str, float]:
        """Return the factor of each contribution's values by replica; 0 for those that are left out."""
        entries = [entry_of(self._spec, name, one) for name, one in sent.items()]
        record = RoundRecord(round=round_, contributions=entries)
        before = [self.records[one] for one in remembered_before(round_) if one in self.records]
        bound(record, before, self._settings, limits=self._limits)
        self.records[round_] = record
        return dict.fromkeys(record.left_out, 0.0) | {one.replica: scale_of(one) for one in record.contributions}


class Scores:
    """`audit.gauntlet` on contributions in memory, with the median of the losses of several validators."""

    def __init__(self, spec: RunSpec, settings: AttackSettings) -> None:
        assert settings.scores is not None
        self.settings, self._validators, self._spec = settings.scores, settings.validators, spec
        self.book = ScoreBook(settings.scores, [one.name for one in spec.config.replicas])
        self.forwards = 0
        """Sequences that were evaluated, over all rounds and by one validator."""

    def judge(
        self,
        round_: int,
        theta: Mapping[str, Tensor],
        sent: Mapping[str, Contribution],
        included: frozenset[str],
        text: Callable[[str], tuple[Tensor, Tensor]],
        lie: Callable[[str, Losses], Losses],
    ) -> dict[str, str]:
        """Take a round into the book; return why by replica for those that are excluded from the next round on.

        `text` returns a replica's assigned tokens and others [S, L + 1]. `lie` is what the first validator makes of the
        losses of a replica's contribution.
        """
        seed, outer = self._spec.config.seed, self._spec.config.outer
        drawn = draw(f"secret of seed {seed}".encode(), str(round_).encode(), sorted(included), self.settings.evaluated)
        rate = self.settings.step * outer.learning_rate_in(round_)
        losses = {}
        for name in drawn:
            assigned, other = (tokens[: self.settings.sequences] for tokens in text(name))
            found = losses_of(theta, sent[name], self._spec.shape, assigned, other, rate, outer)
            losses[name] = median_of([lie(name, found), *[found] * (self._validators - 1)])
            self.forwards += 2 * (len(assigned) + len(other))
        copies = {}
        for pair in overlapping(sent, self.settings.overlap):
            texts = text(pair[0])[0][:SEQUENCES_OF_A_PAIR], text(pair[1])[0][:SEQUENCES_OF_A_PAIR]
            self.forwards += 2 * len(pair) * sum(map(len, texts))
            if (copy := copy_of(pair, sent, theta, self._spec.shape, texts, rate, outer)) is not None:
                [copies[copy]] = {*pair} - {copy}
        facts = RoundFacts(
            round=round_,
            included=included,
            missed=frozenset(),
            left_out=frozenset(sent) - included,
            synchronisation=dict.fromkeys(sent, 1.0),
            copies=copies,
            against=against_others(self._spec, {name: sent[name] for name in included}, self.settings.agreement),
        )
        self.book.update(facts, losses)
        return dict(self.book.to_exclude())


def against_others(spec: RunSpec, sent: Mapping[str, Contribution], least: float | None) -> dict[str, float]:
    """Return the agreements that are too low, by replica; none without a limit."""
    tokens = {one.name: one.batch_size for one in spec.config.replicas}
    return {} if least is None else too_low(agreements(sent), tokens, least)


def recomputed(seed: int, round_: int, replica: str, share: float) -> bool:
    """Return whether a replica's round is computed again. A round drawn at a share is drawn at any larger one."""
    return seed_of("recomputed", seed, round_, replica) / _DRAWS < share


def equal_bits(one: Contribution, other: Contribution) -> bool:
    """Return whether two contributions have the same values at the same positions."""
    return all(
        torch.equal(tensor.indices, other[name].indices) and torch.equal(tensor.values, other[name].values)
        for name, tensor in one.items()
    )
