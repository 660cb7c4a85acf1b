"""Measurements during training, which do not affect it.

They are: similarity of contributions, their size on the wires, the outer gradient, and the bias of compression.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import Batches
from hetero_pp.model.inner import SubspaceOptimizer
from hetero_pp.model.transformer import block_of
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection
from hetero_pp.pseudo_gradient.volume import RoundVolume
from hetero_pp.research.settings import Every, research_of
from hetero_pp.research.trainer.participation import replicas_in
from hetero_pp.research.trainer.replica import TableReplica
from hetero_pp.simulator.traffic import blob_sizes
from replica_groups.engines.ranks import CPU

OuterGradient = tuple[int, float, float, float | None, float | None]
"""(round, norm, norm if contributions were uncorrelated, mean cosine of a_r and m before the removal, and after it).

The cosines are None for replicas without a memory.
"""


class Measured:
    """Measurements of contributions at intervals over a run."""

    def __init__(self, spec: RunSpec, every: Every, device: torch.device = CPU) -> None:
        """Raises ConfigError if gradients are averaged, because contributions are then not visible."""
        self._spec, self._every, self._device = spec, every, device
        for name in (f"{kind}_every" for kind in ("similarity", "volume", "outer") if getattr(every, kind) is not None):
            if spec.config.outer.source == "gradient":
                told = f"found {spec.config.outer.method} with `{name}`, expected one that contributes differences"
                raise ConfigError(("outer", "method"), told)
        if every.volume is not None and device.type != "cpu":
            raise ConfigError(
                ("volume_every",), f"found {device.type}, expected --device cpu, which encodes contributions"
            )
        self.similarity: list[tuple[int, float, float]] = []
        """(round, mean of the cosines of all pairs, their standard deviation)"""
        self.volume: list[tuple[int, float, float, float | None, float]] = []
        """(round, bytes that a replica sends in it with each collective of Volume)"""
        self.outer = None if every.outer is None else OuterGradients(spec.config.outer.compression, every.outer)
        self._alike: Similarities | None = None
        self._volume: RoundVolume | None = None

    def begin(self, round_: int) -> None:
        """Begin a round; the calls below are about it."""

        def is_due(every: int | None) -> bool:
            return every is not None and round_ % every == 0

        self._round = round_
        self._senders: set[str] = set()
        self._alike = Similarities() if is_due(self._every.similarity) else None
        self._volume = RoundVolume() if is_due(self._every.volume) else None
        if self.outer is not None:
            self.outer.begin(round_)

    def contribution(self, replica: str, name: str, selection: Selection) -> None:
        """Add a replica's contribution of one parameter, with its size in a blob of its block."""
        if self._volume is not None:
            self._senders.add(replica)
            own = (name, self._spec.parameter_shapes[name], selection)
            address = BlobAddress(self._spec.run, self._round, replica, block_of(name))
            self._volume.contribute(self._size(address, [own]) - self._size(address))

    def parameter(self, name: str, sent: Sequence[DecodedTensor], counted: float) -> None:
        """Add every replica's contribution of one parameter, in the same order every time.

        `counted` is the sum of the weights of the replicas that the round includes.
        """
        shape = self._spec.parameter_shapes[name]
        if self.outer is not None:
            self.outer.parameter(name, counted)
        if self._alike is not None:
            self._alike.add(sent, shape)
        if self._volume is not None and sent:
            self._volume.add(shape, sent)

    def finish(self) -> None:
        if self.outer is not None:
            self.outer.finish()
        if self._alike is not None and (found := self._alike.of_pairs()) is not None:
            self.similarity.append((self._round, *found))
        if self._volume is not None:
            for replica in self._senders:
                blocks = {block_of(name) for name in self._spec.parameter_shapes}
                for block in self._spec.fragments.among(blocks, self._round):
                    self._volume.contribute(self._size(BlobAddress(self._spec.run, self._round, replica, block)))
            if (volume := self._volume.volume()) is not None:
                self.volume.append((self._round, *astuple(volume)))

    def _size(self, address: BlobAddress, tensors: Sequence[tuple[str, tuple[int, ...], Selection]] = ()) -> int:
        return len(encode_blob(address, tensors, self._spec.config.outer.compression))

    def state(self) -> dict[str, Any]:
        found = [] if self.outer is None else self.outer.found
        reference = {} if self.outer is None else self.outer.reference
        return {
            "similarity": self.similarity,
            "volume": self.volume,
            "outer_gradients": found,
            "reference": reference,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.similarity, self.volume = state["similarity"], state["volume"]
        if self.outer is not None:
            self.outer.found = state["outer_gradients"]
            self.outer.reference = {name: tensor.to(self._device) for name, tensor in state["reference"].items()}


class Similarities:
    """Cosines of the angles between all pairs of contributions to one round, gathered parameter by parameter.

    Source: DiLoCo (Douillard et al. 2023), A.1, Figures 10 and 11, for outer gradients. Here the cosines are of the
    sent values. They equal DiLoCo's for dense contributions. A compressed contribution is decoded, with 0 for values
    not sent.
    """

    def __init__(self) -> None:
        self._products: Tensor | None = None
        """Products [n, n] of the n vectors over the parameters added so far, in fp64."""

    def add(self, sent: Sequence[DecodedTensor], shape: Sequence[int]) -> None:
        """Add every replica's contribution of one parameter, in the same order every time."""
        vectors = []
        for one in sent:
            dense = one.values.new_zeros(tuple(shape))
            one.add_to(dense, 1.0)
            vectors.append(dense.view(-1))
        if vectors:
            rows = torch.stack(vectors).double()
            products = (rows @ rows.T).cpu()
            self._products = products if self._products is None else self._products + products

    def of_pairs(self) -> tuple[float, float] | None:
        """Return mean and standard deviation over all pairs; None without pairs. A zero vector's pairs are 0."""
        products = self._products
        if products is None or len(products) < 2:
            return None
        lengths = products.diagonal().sqrt()
        cosines = products / torch.outer(lengths, lengths).clamp_min(torch.finfo(torch.float64).tiny)
        pairs = cosines[torch.ones_like(cosines).triu(1).bool()]
        return pairs.mean().item(), pairs.std(correction=0).item()


class OuterGradients:
    """The outer gradient of every `every`-th round: its norm, and how well each replica's memory follows its momentum.

        Delta = sum_r w_r Delta_r / sum_r w_r,  m <- beta m + Delta      r: the k replicas that a round includes
        uncorrelated = sqrt(sum_r w_r^2 |Delta_r|^2) / sum_r w_r         |Delta| for orthogonal Delta_r

    The reference momentum m advances in all rounds. Sources: DiLoCo (Douillard et al. 2023), section 6.2, says that
    |Delta| falls as 1 / sqrt(k). SparseLoCo (Sarfi et al. 2025), A.1, reports the cosine of such a reference m and the
    momentum a_r of each replica. Here a_r is also the error feedback, and beta is that of a_r. The paper does not say
    whether a_r is taken before or after its largest values are removed, by LOM-Sub-k or because they are sent. Both are
    measured.
    """

    def __init__(self, compression: CompressionSettings, every: int) -> None:
        """Raises ConfigError for a transform, as coefficients have no angle to a momentum of parameters."""
        if compression.transform != "none":
            raise ConfigError(
                ("outer_every",), f"found transform {compression.transform}, expected contributions without transform"
            )
        self._every, self._decay = every, compression.error_feedback_decay
        self.found: list[OuterGradient] = []
        self.reference: dict[str, Tensor] = {}

    def begin(self, round_: int) -> None:
        self._round = round_
        self._squares, self._own_squares, self._weight = 0.0, 0.0, 0.0
        self._products: dict[str, list[float]] = {}
        """By replica, over the parameters added so far, in fp64: |m|^2, |before|^2, |after|^2, before m, after m."""
        self._waiting: list[tuple[str, Tensor, Tensor]] = []
        self._sum: Tensor | None = None

    def contribution(self, replica: str, weight: float, delta: Tensor, before: Tensor, after: Tensor) -> None:
        """Add a replica's pseudo-gradient of one parameter, and its memory before and after the removal."""
        self._sum = delta * weight if self._sum is None else self._sum.add_(delta, alpha=weight)
        if self._round % self._every == 0:
            self._own_squares += weight**2 * _product(delta, delta)
            if self._decay > 0:
                self._waiting.append((replica, before, after.clone()))

    def parameter(self, name: str, counted: float) -> None:
        """End a parameter: all included replicas have contributed; `counted` is the sum of their weights."""
        if self._sum is None:
            return
        mean = self._sum / counted
        reference = self.reference.setdefault(name, torch.zeros_like(mean)).mul_(self._decay).add_(mean)
        self._squares, self._weight = self._squares + _product(mean, mean), counted
        for replica, before, after in self._waiting:
            pairs = (reference, reference), (before, before), (after, after), (before, reference), (after, reference)
            sums = self._products.get(replica, [0.0] * len(pairs))
            self._products[replica] = [total + _product(*pair) for total, pair in zip(sums, pairs, strict=True)]
        self._waiting, self._sum = [], None

    def finish(self) -> None:
        if self._round % self._every == 0 and self._weight > 0:
            cosines: list[float | None] = []
            for kind in (1, 2):  # before and after the removal; the cosine of a zero vector is 0
                lengths = [math.sqrt(sums[kind] * sums[0]) for sums in self._products.values()]
                products = [sums[2 + kind] for sums in self._products.values()]
                own = [one / length if length > 0 else 0.0 for one, length in zip(products, lengths, strict=True)]
                cosines.append(sum(own) / len(own) if own else None)
            norms = math.sqrt(self._squares), math.sqrt(self._own_squares) / self._weight
            self.found.append((self._round, *norms, cosines[0], cosines[1]))


def _product(one: Tensor, other: Tensor) -> float:
    return torch.dot(one.flatten().double(), other.flatten().double()).item()


class BiasMeter:
    """Equation 5 of Het-PP in one round: how far compression moves the averaged pseudo-gradient from the unbiased one.

    The compressed replicas run twice, from the same weights and optimizer state and on the same data: with and without
    compression. A replica's difference is B plus noise, as each replica has its own data. Equation 5 says that the mean
    over all replicas is (1 - alpha) B on average. The norm of that mean would include the noise, most of all if few
    replicas are compressed. Squared lengths are therefore means of products of two *different* replicas' vectors, in
    which noise averages out. If only one replica is compressed, its second sample uses data that no replica trains on.
    The second runs do not affect training.

    The meter is created before the inner steps of the round, and read after them and before the outer round.
    """

    def __init__(
        self, replicas: Sequence[TableReplica], batches: Sequence[Batches], steps: range, fresh: int, compressed: int
    ) -> None:
        """`compressed`: number of compressed replicas. `fresh`: offset in steps to unused data."""
        self.replicas = replicas
        self.compressed = compressed
        self.unbiased: dict[int, Mapping[str, Tensor]] = {}
        """Parameters of each compressed replica, by index, if it took these steps without compression."""
        self.more: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = []
        """Parameters after the same steps on other data, with compression and without."""

        def after(twin: TableReplica, own: Batches, later: int) -> Mapping[str, Tensor]:
            for step in steps:
                twin.inner_step(own.train(step + later), step)
            return twin.parameters

        for index, replica in enumerate(replicas):
            if replica.boundary is None or replica.boundary.basis is None or not replica.hops:
                continue
            self.unbiased[index] = after(uncompressed_twin(replica), batches[index], 0)
            if compressed == 1:
                twins = copy.deepcopy(replica), uncompressed_twin(replica)
                biased, unbiased = (after(twin, batches[index], fresh) for twin in twins)
                self.more.append((biased, unbiased))

    @torch.no_grad()
    def share(self, theta: Mapping[str, Tensor]) -> float:
        """Return || mean (Delta* - Delta) || / || mean Delta* || without noise.

        Delta = theta - parameters after the inner steps. The result is negative if the mean product of two differences
        is, which is the case half of the time for pure noise.
        """
        count = len(self.replicas)
        pairs = [
            (replica.parameters, self.unbiased[i]) for i, replica in enumerate(self.replicas) if i in self.unbiased
        ]
        samples = len(pairs) + len(self.more)
        if samples == 0:
            return 0.0
        biases, wholes = Products(), Products()
        for name, start in theta.items():
            biases.add(start, [biased[name] - unbiased[name] for biased, unbiased in pairs + self.more])
            ends = [self.unbiased.get(i, replica.parameters)[name] for i, replica in enumerate(self.replicas)]
            wholes.add(start, [start - parameter for parameter in ends])
        bias = (self.compressed / count) ** 2 * biases.mean(samples)
        return math.copysign(math.sqrt(abs(bias) / wholes.mean(count)), bias)


class Products:
    """Mean product of two different vectors of a set; the vectors arrive part by part."""

    def __init__(self) -> None:
        self._of_sum = self._of_each = 0.0

    def add(self, like: Tensor, parts: Sequence[Tensor]) -> None:
        """Add the same part of each vector, with the shape of `like`."""
        total = torch.zeros_like(like)
        for part in parts:
            total += part
        self._of_sum += total.double().square().sum().item()
        self._of_each += sum(part.double().square().sum().item() for part in parts)

    def mean(self, count: int) -> float:
        """Return the mean over all pairs of `count` vectors; for one vector, its square."""
        return self._of_each if count == 1 else (self._of_sum - self._of_each) / (count * (count - 1))


def uncompressed_twin(replica: TableReplica) -> TableReplica:
    """Copy a compressed replica, with its weights and optimizer state, into one that trains without compression.

    An embedding that is kept in the subspace stays in it: then the bias is that of the boundaries alone.
    """
    twin = copy.deepcopy(replica)
    twin.boundary, twin.hops, twin.anchors, twin.peer = None, {}, (), None
    if not isinstance(twin.optimizer, SubspaceOptimizer) or twin.optimizer.trains == "free":
        twin.optimizer.perpendicular = None
    return twin


def require_equal_rounds(spec: RunSpec) -> None:
    """Raise ConfigError unless all replicas start every round together, as measuring the bias needs."""
    told = "`bias_every` compares replicas that start a round together"
    outer = spec.config.outer
    if outer.overlap:
        raise ConfigError(("outer", "overlap"), f"found 1, expected 0: {told}")
    if outer.is_streaming:
        raise ConfigError(("outer",), f"found {outer.streaming}, expected `fragments: 1` and `mixing: 0`: {told}")
    if outer.keep_local:
        raise ConfigError(("outer", "keep_local"), f"found true, expected false: {told}")
    if research_of(spec.config).counts:
        found = "found rounds with only some of the replicas, expected all: `bias_every` compares all"
        raise ConfigError(("research", "taking_part"), found)


def contribution_bytes(spec: RunSpec, rounds: int) -> int:
    """Return the bytes of all contributions to the first `rounds` rounds, with averaged moments if there are any."""
    averages = research_of(spec.config).averages_moments
    moments = 8 * sum(map(math.prod, spec.parameter_shapes.values())) if averages else 0
    sizes, total = blob_sizes(spec), 0
    for round_ in range(1, rounds + 1):
        for replica in replicas_in(spec.config, round_):
            blobs = sizes[replica.name]
            total += moments + sum(blobs[block] for block in spec.fragments.among(blobs, round_))
    return total
