"""Tests of contributions (Gauntlet, arXiv:2505.21684): losses on text, copies, and signs against all others.

A validator tries drawn contributions: it measures the loss before and after one alone is applied, on the text that its
replica was assigned, and on other text. It reads the assigned text itself from a corpus that is encoded once, and has
it shown from one that is streamed. It looks for copies among all by the positions and signs of their values. The
exchange itself compares signs before a round closes, so that no round has what goes against all others.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median, median_high, stdev
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hetero_pp.config.audit import FORWARDS_A_STEP, LEAST_SEQUENCES, PARAMETERS, TEXTS, GauntletSettings
from hetero_pp.config.member_inputs import batches_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.sources import Source, StreamedCorpus
from hetero_pp.messages.messages_pb2 import ContributionEntry, Judgement, Losses, RoundRecord
from hetero_pp.messages.report_bounds import MOST_LOSS
from hetero_pp.model.transformer import ModelShape, Transformer, build_filled, parameters_of
from hetero_pp.outer.apply_round import FetchBlob, shapes_in
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import mean_of, outer_step
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, ReceivedBlob, decode_blob, scale_of
from hetero_pp.pseudo_gradient.cosines import restored
from replica_groups.exchange.log import ContributionLog
from replica_groups.rounds.draws import ROUNDS_TO_SHOW_TEXT, draw_key, text_key

T = TypeVar("T")

# ---- losses before and after a contribution ----

CLEAR = 4.0
"""Standard errors between the improvements on two texts from which on a contribution was trained on one of them."""

SEQUENCES_OF_A_PAIR = 64
"""Most sequences of each of two replicas of which one sent a copy. Few rounds have such a pair."""

_MOST_STEPS = 4096  # inner steps of a round whose windows are read; hostile members may tell of any number
_TRIES = 16  # windows that are drawn for each one that is needed, because some may be assigned to a replica


def losses_of(
    theta: Mapping[str, Tensor],
    contribution: Mapping[str, DecodedTensor],
    shape: ModelShape,
    assigned: Tensor,
    other: Tensor,
    rate: float,
    outer: OuterSettings,
) -> Losses:
    """Return the mean losses in nats of theta and of theta - rate * contribution; theta is not changed.

    `assigned` and `other` are tokens [S, L + 1] of the replica's text of the round, and of nobody's; S >= 2. `rate` is
    `audit.gauntlet.step` times the outer learning rate of the round. A contribution of coefficients or for signs is
    applied as the outer step would; momentum is not. Runs on theta's device, one sequence at a time.
    """
    module = build_filled(shape, theta, device=next(iter(theta.values())).device)
    before = [_losses(module, assigned), _losses(module, other)]
    with torch.no_grad():
        parameters = parameters_of(module)
        for name, sent in contribution.items():
            parameter = parameters[name]
            step = mean_of(tuple(parameter.shape), [(1.0, sent)])
            step = restored(step, outer.compression.tile) if outer.compression.transform == "dct" else step
            outer_step(parameter, step.sign_() if outer.aggregation == "sign" else step, rate)
    after = [_losses(module, assigned), _losses(module, other)]
    gains = [_gains(*both) for both in zip(before, after, strict=True)]
    are_finite = all(math.isfinite(one) for of_text in gains for one in of_text)
    return Losses(
        assigned_before=fmean(before[0]),
        assigned_after=fmean(after[0]),
        other_before=fmean(before[1]),
        other_after=fmean(after[1]),
        # The standard error of the difference of two mean gains.
        error=math.sqrt(sum(stdev(of_text) ** 2 / len(of_text) for of_text in gains)) if are_finite else 0.0,
    )


def copy_of(
    pair: tuple[str, str],
    sent: Mapping[str, Mapping[str, DecodedTensor]],
    theta: Mapping[str, Tensor],
    shape: ModelShape,
    texts: tuple[Tensor, Tensor],
    rate: float,
    outer: OuterSettings,
) -> str | None:
    """Return which of two replicas sent a copy: the one on whose text the contributions improve less; None if unclear.

    The order in which they arrived says nothing: one that trains on the text of a slower replica sends first. `sent`
    has the contributions of both, and `texts` the tokens [S, L + 1] that each was assigned. Others as of `losses_of`.
    """
    clear = []
    for name in pair:
        found = losses_of(theta, sent[name], shape, *texts, rate, outer)
        gains = _gains([found.assigned_before, found.other_before], [found.assigned_after, found.other_after])
        clear.append((gains[0] - gains[1]) / found.error if found.error > 0 else 0.0)
    if max(map(abs, clear)) < CLEAR or min(clear) * max(clear) <= 0:
        return None
    return pair[1] if clear[0] > 0 else pair[0]


def median_of(told: Sequence[Losses]) -> Losses:
    """Return the median of each number over the losses that several validators measured for one contribution."""
    names = [number.name for number in Losses.DESCRIPTOR.fields]
    return Losses(**{name: median(getattr(one, name) for one in told) for name in names})


@torch.no_grad()
def _losses(module: Transformer, tokens: Tensor) -> list[float]:
    """Return the loss of each sequence; infinite if it is no number or larger than any that counts."""
    rows = tokens.to(next(module.parameters()).device).split(1)
    found = [module.loss(row[:, :-1], row[:, 1:]).item() for row in rows]
    return [one if one <= MOST_LOSS else math.inf for one in found]


def _gains(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [(one - then) / one for one, then in zip(before, after, strict=True)]


class AssignedTexts:
    """Text that replicas trained on in a round, of a run with a corpus that is encoded once."""

    def __init__(self, spec: RunSpec, source: Source, rows: int) -> None:
        """`rows`: least number of sequences of each kind. Raises ConfigError for a corpus with fewer."""
        self._spec, self._source = spec, source
        self._members = {member.replica.name: member for member in spec.members.values()}
        batches = self._batches(next(iter(self._members)), 1)
        self._windows = len(batches.store.train) // (batches.sequence_length + 1)
        if self._windows < rows:
            key, found = ("audit", "gauntlet", "sequences"), f"found {rows}, expected at most {self._windows}"
            raise ConfigError(key, f"{found}, the sequences of the corpus")

    def of(self, replica: str, record: RoundRecord, rows: int, drawing: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return drawn sequences that a replica trained on in a round, and others, int64 [rows, L + 1] each.

        The corpus may be smaller than `rows`.

        The others are assigned to no replica of the record. If there are too few, because a round reads nearly the
        whole corpus, the rest are any that are not assigned to this replica, and then any.
        """
        assigned = {one.replica: self._assigned(one, record.round, drawing) for one in record.contributions}
        own, batches = assigned[replica], self._batches(replica, record.round)
        rows = min(rows, self._windows)
        all_ = np.concatenate([*assigned.values()])
        candidates = drawing.permutation(min(self._windows, 1 << 20))
        if self._windows > len(candidates):
            candidates = drawing.integers(self._windows, size=_TRIES * rows)
        known = np.where(np.isin(candidates, own), 2, np.isin(candidates, all_))
        others = candidates[np.argsort(known, kind="stable")][:rows]
        return batches.rows(drawing.choice(own, rows, replace=len(own) < rows)), batches.rows(others)

    def of_pair(
        self, pair: tuple[str, str], record: RoundRecord, drawing: np.random.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return drawn sequences that each of two replicas was assigned in a round, int64 [S, L + 1] each."""
        entries = {one.replica: one for one in record.contributions}
        assigned = [self._assigned(entries[name], record.round, drawing) for name in pair]
        drawn = [drawing.permutation(own)[:SEQUENCES_OF_A_PAIR] for own in assigned]
        one, other = (self._batches(name, record.round).rows(rows) for name, rows in zip(pair, drawn, strict=True))
        return one, other

    def _assigned(self, entry: ContributionEntry, round_: int, drawing: np.random.Generator) -> np.ndarray:
        """Return the numbers of the training windows that a replica reads in a round, or of some of very many steps.

        In rounds of a fixed time, its member has committed to the first batch, and the record has the steps.
        """
        share, steps = self._spec.share_of(entry.replica, round_), entry.steps
        if self._spec.config.inner.steps is not None:
            first = (round_ - 1) * steps - (share.first_step or 0)
        else:
            first = next(one.first for one in entry.commitments if one.text)
        some = range(steps) if steps <= _MOST_STEPS else sorted({*drawing.integers(steps, size=_MOST_STEPS).tolist()})
        batches = self._batches(entry.replica, round_)
        return np.concatenate([batches.windows(first + step) for step in some])

    def _batches(self, replica: str, round_: int) -> StoreBatches:
        share = self._spec.share_of(replica, round_)
        batches = batches_of(self._spec, self._members[replica], self._source, share)
        assert isinstance(batches, StoreBatches), "a validator does not read streams"
        return batches


# ---- copies ----

Contribution = Mapping[str, DecodedTensor]  # tensors by the parameters' names

FEW = 0.9
"""Usual overlap of two among fewer than four replicas, where nothing tells two copies from two with little noise."""

_LEAST = 0.02  # overlap of two replicas below which it is mostly noise


def overlap(one: Contribution, other: Contribution) -> float:
    """Return the overlap of two contributions to one model: 1 if equal, about 0 if unrelated.

    It is the cosine of a tensor, and the mean over tensors, weighted by the number of values that they keep. Positions
    alone would say nothing about contributions of all values.
    """
    total = 0.0
    kept = {name: min(len(one[name].indices), len(other[name].indices)) for name in one}
    for name, count in kept.items():
        total += count * _cosine(one[name], other[name])
    return total / max(1, sum(kept.values()))


def overlapping(contributions: Mapping[str, Contribution], limit: float) -> list[tuple[str, str]]:
    """Return the pairs of contributions that overlap too much, the nearest first: at least one of each is a copy.

    `limit` is on a scale from what is usual of a pair (0) to equal contributions (1): what is usual differs between
    methods, and grows with the batches.
    """
    names = sorted(contributions)
    pairs = {pair: overlap(contributions[pair[0]], contributions[pair[1]]) for pair in combinations(names, 2)}
    between = pairs | {(other, one): share for (one, other), share in pairs.items()}
    least = median(pairs.values()) if pairs else 0.0
    found: list[tuple[str, str]] = []
    for (one, other), share in sorted(pairs.items(), key=lambda pair: -pair[1]):
        known = {pair[1] for pair in found}  # one of each pair does not tell what is usual
        others = [name for name in names if name not in (one, other) and name not in known]
        usual = max(least, _usual(one, other, others, between))
        if share - usual > limit * (1 - usual):
            found.append((one, other))
    return found


def _usual(one: str, other: str, others: Sequence[str], between: Mapping[tuple[str, str], float]) -> float:
    """Return the overlap that two honest replicas have, as their overlaps with all others tell.

    The noise of two honest replicas is independent, so their overlap is r_one r_other: each is the part of a
    contribution that is no noise. Three overlaps tell one of these parts. The median is over pairs of the others.
    """
    if len(others) < 2:
        return FEW
    found = [
        between[one, a] * between[one, b] * between[other, a] * between[other, b] / between[a, b] ** 2
        for a, b in combinations(others, 2)
        if abs(between[a, b]) > _LEAST
    ]
    return min(1.0, math.sqrt(max(0.0, median(found)))) if found else 0.0


def _cosine(one: DecodedTensor, other: DecodedTensor) -> float:
    if not len(one.indices) or not len(other.indices):
        return 0.0
    size = int(torch.maximum(one.indices.max(), other.indices.max())) + 1
    dense = torch.zeros(size, device=one.values.device).index_copy_(0, one.indices, one.values)
    norms = float(one.values.norm()) * float(other.values.norm())
    return float(dense.index_select(0, other.indices) @ other.values) / norms if norms > 0 else 0.0


# ---- signs against the others ----

_CHANCE = 0.5
_DEVIATIONS = 8.0
"""Least standard deviations by which the usual agreement exceeds chance. With fewer, nobody is judged."""

_FEWEST = 3  # contributions among which the others of one can be more than half

MOST_PLACES = 1 << 24
"""Places of a model that are compared. A larger model has every m-th compared, and all contributions decide which."""


class SignCheck:
    """Compares the contributions of a round before its record is written, so that harm is in no round."""

    def __init__(self, spec: RunSpec, least: float) -> None:
        """`least`: as `audit.gauntlet.agreement`."""
        self._spec, self._least = spec, least

    def against(self, record: RoundRecord, fetch: FetchBlob) -> dict[str, float]:
        """Return the agreement of each contribution for which it is too low, by replica.

        Reads each blob once, and holds those of one block. Raises what `fetch` raises.
        """
        names = sorted(one.replica for one in record.contributions)
        if len(names) < _FEWEST:
            return {}
        changed = shapes_in(record, self._spec.parameter_shapes)
        sizes = [math.prod(shape) for shapes in changed.values() for shape in shapes.values()]
        every = math.ceil(sum(sizes) / MOST_PLACES)
        digests = sorted(blob.sha256 for one in record.contributions for blob in one.blobs)
        drawn = int.from_bytes(hashlib.sha256(b"".join(digests)).digest()) % every
        comparison = _SignCounts(names, every, drawn)
        for block, shapes in changed.items():
            settings = self._spec.config.outer.compression
            at = {name: BlobAddress(self._spec.run, record.round, name, block) for name in names}
            blobs = [ReceivedBlob(fetch(name, block), at[name], shapes, settings) for name in names]
            for tensor in shapes:
                comparison.add([blob.tensor(tensor) for blob in blobs])
        tokens = {one.replica: one.tokens for one in record.contributions}
        return too_low(comparison.agreements(), tokens, self._least)


def why(round_: int, agreement: float) -> str:
    """Return why a replica with this agreement is excluded."""
    what = f"its contribution to round {round_} goes another way than the others"
    return f"{what}: agreement {agreement:.2f}, where 0 is chance and 1 is usual"


def too_low(found: Mapping[str, float], tokens: Mapping[str, int], least: float) -> dict[str, float]:
    """Return the agreements below `least`, which is lower for replicas that trained on fewer tokens than most.

    The signal of a contribution grows with the root of its tokens, in proportion to its noise.
    """
    usual = median(tokens[name] for name in found) if found else 0
    share = {name: min(1.0, math.sqrt(tokens[name] / usual)) if usual else 1.0 for name in found}
    return {name: value for name, value in found.items() if value < least * share[name]}


def agreements(contributions: Mapping[str, Contribution]) -> dict[str, float]:
    """Return how far each contribution agrees with the others: 0 as by chance, 1 as usual, below 0 if against them.

    Two contributions agree in the share of the places that both keep in which their signs are equal. A contribution's
    agreement is the median over the others, and the usual one is the median over all. So fewer than half of the
    replicas cannot change the verdict on the rest, whatever the sizes of their values are. Empty if the round shares
    too few places to tell the usual agreement from chance.
    """
    names = sorted(contributions)
    comparison = _SignCounts(names)
    for tensor in contributions[names[0]] if len(names) >= _FEWEST else ():
        comparison.add([contributions[name][tensor] for name in names])
    return comparison.agreements()


class _SignCounts:
    """Numbers of places of every pair of contributions that both keep, and that have equal signs in both."""

    def __init__(self, names: Sequence[str], every: int = 1, first: int = 0) -> None:
        """The places `first`, `first + every` and so on of each tensor count."""
        self._names, self._every, self._first = names, every, first
        self._products = torch.zeros(len(names), len(names), dtype=torch.float64)
        self._shared = self._products.clone()

    def add(self, tensors: Sequence[DecodedTensor]) -> None:
        """Count the places of one tensor, of all contributions in the order of their names."""
        size = max((int(one.indices.max()) + 1 for one in tensors if len(one.indices)), default=0)
        count = len(range(self._first, size, self._every))
        signs = torch.zeros(len(tensors), count, device=tensors[0].values.device)
        for row, one in zip(signs, tensors, strict=True):
            counts = one.indices % self._every == self._first
            row[one.indices[counts] // self._every] = one.values[counts].sign().float()
        self._products += (signs @ signs.T).cpu()  # sums of up to 2^24 ones are exact
        signs.abs_()
        self._shared += (signs @ signs.T).cpu()

    def agreements(self) -> dict[str, float]:
        """Return as `agreements`."""
        count = len(self._names)
        if count < _FEWEST:
            return {}
        shares = torch.where(self._shared > 0, _CHANCE + 0.5 * self._products / self._shared, _CHANCE).tolist()
        places, others = self._shared.tolist(), [[at for at in range(count) if at != own] for own in range(count)]
        found = [median_high(shares[own][at] for at in others[own]) for own in range(count)]
        usual = median_high(found) - _CHANCE
        # Most pairs may have a hostile replica, so a median over pairs would let few silent ones end the check.
        shared = median_high(median_high(places[own][at] for at in others[own]) for own in range(count))
        if usual * math.sqrt(shared) < _DEVIATIONS * _CHANCE:  # a share of n places deviates by .5 / sqrt(n)
            return {}
        return {name: (share - _CHANCE) / usual for name, share in zip(self._names, found, strict=True)}


# ---- the check of a round ----


def decoded(spec: RunSpec, record: RoundRecord, replica: str, fetch: FetchBlob) -> dict[str, DecodedTensor]:
    """Return a contribution as the round applies it, by name."""
    settings, found = spec.config.outer.compression, dict[str, DecodedTensor]()
    scale = scale_of(next(one for one in record.contributions if one.replica == replica))
    for block, shapes in shapes_in(record, spec.parameter_shapes).items():
        address = BlobAddress(spec.run, record.round, replica, block)
        blob = decode_blob(fetch(replica, block), address, shapes, settings)
        found |= {name: tensor.scaled(scale) for name, tensor in blob.items()}
    return found


class ValidatedRun(Protocol):
    """The run that a validator follows."""

    @property
    def log(self) -> ContributionLog:
        """The run's log."""

    def record(self, round_: int) -> RoundRecord:
        """Wait until a round is closed; return its record. Raises RunFailed if it never will be."""

    def last_round(self) -> int:
        """Return the last closed round."""

    def retry(self, do: Callable[[], T]) -> T:
        """Do what needs the store, and retry while the store cannot be reached."""

    def wait_for(self, find: Callable[[], T]) -> T:
        """Return what `find` returns, once it raises FileNotFoundError no more. Raises RunFailed if the run fails."""

    def take(self, judgements: Sequence[Judgement]) -> None:
        """Hand over the judgements about one round."""


class GauntletCheck:
    """Judges contributions by losses. Implements RoundCheck.

    It waits for the draw of a round, and for the text that members show. It yields all judgements about a round at
    once, so that none comes after the round has its scores.
    """

    def __init__(
        self, spec: RunSpec, settings: GauntletSettings, source: Source, run: ValidatedRun, device: torch.device
    ) -> None:
        self._spec, self._settings, self._run, self._device = spec, settings, run, device
        self._texts = None
        if isinstance(source, StreamedCorpus):
            # Nobody can know which text a validator reads: its order follows from a number of its own.
            length, seed = spec.config.data.sequence_length, secrets.randbits(63)
            self._other = source.batches(length, seed, 0, 1, 1).stream
            self._other.repeat = True
        else:
            self._texts = AssignedTexts(spec, source, settings.sequences or LEAST_SEQUENCES)

    def check(self, record: RoundRecord, theta: Mapping[str, Tensor], fetch: FetchBlob) -> Iterator[Judgement]:
        """Yield what was found about the contributions that a round includes. `theta` is from before the round."""
        found = self._await(draw_key(record.round), record.round, 0)
        drawn: dict[str, Any] = json.loads(found or b"{}")
        if drawn.get("record") != record.sha256.hex():
            return  # the exchange ended before it drew
        outer = self._spec.at(record.round).outer
        sent = {one.replica: decoded(self._spec, record, one.replica, fetch) for one in record.contributions}
        on_device = {name: tensor.to(self._device) for name, tensor in theta.items()}
        rate = self._settings.step * outer.learning_rate_in(record.round, record.tokens)
        shown = {name: self._shown(record.round, name, rows) for name, rows in drawn["tried"].items() if rows}

        def random(*names: str) -> np.random.Generator:
            seed = hashlib.sha256(b"text" + bytes.fromhex(drawn["secret"]) + " ".join(names).encode()).digest()
            return np.random.default_rng(list(seed))

        for pair in overlapping(sent, self._settings.overlap):
            if self._texts is not None:
                of_both = self._texts.of_pair(pair, record, random(*pair))
            elif (one := shown.get(pair[0])) is not None and (other := shown.get(pair[1])) is not None:
                of_both = one, other
            else:
                continue
            moved = {name: self._moved(sent[name]) for name in pair}
            copy = copy_of(pair, moved, on_device, self._spec.shape, of_both, rate, outer)
            if copy is not None:
                [original] = {*pair} - {copy}
                yield Judgement(round=record.round, replica=copy, copies=original)
        read = sum(one.tokens for one in record.contributions) // self._spec.config.data.sequence_length
        sequences = self._settings.sizes(len(sent), read).sequences
        for name in drawn["tried"]:
            if self._texts is not None:
                texts = self._texts.of(name, record, sequences, random(name))
            elif (own := shown.get(name)) is not None:
                others = self._other.take(len(own) * own.shape[1]).reshape(len(own), -1)
                texts = own, torch.from_numpy(others)
            else:
                continue
            losses = losses_of(on_device, self._moved(sent[name]), self._spec.shape, *texts, rate, outer)
            yield Judgement(round=record.round, replica=name, losses=losses)

    def _shown(self, round_: int, replica: str, rows: Sequence[int]) -> Tensor | None:
        """Wait for the drawn sequences of a replica, and return them, int64 [S, L + 1]; None if it did not show them.

        The exchange has compared them with what the replica committed to.
        """
        data = self._await(text_key(round_, replica), round_, ROUNDS_TO_SHOW_TEXT + 1)
        size = 4 * len(rows) * (self._spec.config.data.sequence_length + 1)  # the digests of all sequences come first
        tokens = np.frombuffer(data[-size:], "<i4").reshape(len(rows), -1).astype(np.int64) if data else None
        return None if tokens is None else torch.from_numpy(tokens)

    def _await(self, key: str, round_: int, most: int) -> bytes:
        """Return an object of the log once it is there; empty if more than `most` rounds closed after `round_`."""

        def find() -> bytes:
            is_late = self._run.last_round() > round_ + most
            try:
                return self._run.log.store.get(key)
            except FileNotFoundError:
                if not is_late:
                    raise
                return b""

        return self._run.wait_for(find)

    def finish(self) -> Iterator[Judgement]:
        """Yield nothing: each round is judged as it closes."""
        yield from ()

    def _moved(self, contribution: Mapping[str, DecodedTensor]) -> dict[str, DecodedTensor]:
        return {
            name: DecodedTensor(one.indices.to(self._device), one.values.to(self._device))
            for name, one in contribution.items()
        }


def share_of_compute(settings: GauntletSettings, replicas: int, sequences: int) -> float:
    """Return the compute of one validator as a share of that of the replicas; so much of each replica's, on average.

    `sequences`: training sequences of all replicas in a round, as inner steps x the sum of the batch sizes.
    """
    sizes = settings.sizes(replicas, sequences)
    tried = sizes.evaluated * sizes.sequences * TEXTS * PARAMETERS
    return tried / (FORWARDS_A_STEP * sequences)
