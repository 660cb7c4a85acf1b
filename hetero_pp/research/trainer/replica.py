"""A whole replica of a table's row: the uncut model, with the boundaries of its stages as operations inside it.

A crossing has the same arithmetic as two stages and a link (`stages.boundary`). This replica and a group of stages with
the same name, split and boundary therefore compute the same result; only the order of some sums differs.

Ablations are parts of a compressed replica that are off by default, each one cell of `research.ablations`. Sources:
Het-PP section 2.4 and Table 5; Subspace Networks (Ramasinghe et al. 2025) for weight projection, modified AdamW and
Grassmann updates. Shapes: B sequences, L positions, V vocabulary, D width, K rank, F any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.seeds import seed_of
from hetero_pp.model.inner import InnerSettings, SubspaceOptimizer, inner_optimizer
from hetero_pp.model.part_settings import EmbeddingTraining
from hetero_pp.model.transformer import EMBEDDING, Transformer, build_filled
from hetero_pp.pipeline.coefficients import Symbols, noise_key
from hetero_pp.research.attacks import Attack
from hetero_pp.research.settings import AblationSettings, ablations_of, attack_of
from hetero_pp.research.trainer.peers import Peer, peer_of
from replica_groups.engines.plain import WholeReplica, whole_loss
from stages.anchors import Anchors, OwnParameters, anchors_of
from stages.boundary import Boundary, boundary_of

OUTPUT_PROJECTIONS = ("attention.wo.weight", "feed_forward.w2.weight")
"""W_p1 and W_p2 [D, F]: their outputs in the residual stream should lie in the subspace. Het-PP names only W_p1."""


class TableReplica(WholeReplica):
    """A model, its inner optimizer, and its boundaries: `boundary` applies after each layer of `cuts`."""

    def __init__(
        self,
        name: str,
        module: Transformer,
        inner: InnerSettings,
        total_steps: int | None,
        micro_batches: int = 1,
        boundary: Boundary | None = None,
        cuts: Sequence[int] = (),
        seed: int = 0,
        anchors: Sequence[Anchors] = (),
        peer: Peer | None = None,
        attack: Attack | None = None,
    ) -> None:
        """`anchors`: one per entry of `cuts`, or none.

        `peer`: a published method's boundaries, used instead of `boundary`. `attack`: what a hostile replica changes in
        its text and in its middle layer.
        """
        super().__init__(name, module, inner, total_steps, micro_batches)
        self.boundary, self.anchors, self.peer = boundary, anchors, peer
        self.hops = {layer: hop for hop, layer in enumerate(cuts)}
        self.seed = seed
        self.change_text = None if attack is None else attack.text
        if attack is not None and (change := attack.activations) is not None:
            layers = list(module.layers.values())
            layers[(len(layers) - 1) // 2].register_forward_hook(lambda layer, inputs, output: change(output))

    def split_embedding(self) -> None:
        """Derive T_perp [V, D] from the synchronised token embedding; called after every outer round."""
        if self.boundary is not None and self.hops:
            self.boundary.split(self.parameters[EMBEDDING])
            if isinstance(self.boundary, AblatedBoundary):
                self.boundary.discard(self.parameters[EMBEDDING])
            self.optimizer.perpendicular = self.boundary.perpendicular

    def move_basis(self, basis_DK: Tensor) -> None:
        """Change to another basis, at an outer round; the embedding has to be split again."""
        if self.boundary is not None and self.boundary.basis is not None:
            self.boundary.move(basis_DK)
            if isinstance(self.optimizer, AblatedOptimizer):
                self.optimizer.turn(basis_DK)

    def loss(self, tokens: Tensor, step: int = 0, micro_batch: int = 0) -> Tensor:
        boundary = self.boundary
        if boundary is None or not self.hops:
            return super().loss(tokens, step, micro_batch)
        tokens = tokens.to(self.parameters[EMBEDDING].device)
        inputs = tokens[:, :-1]
        keys = {hop: noise_key(self.seed, self.name, hop, step, micro_batch) for hop in self.hops.values()}

        def after_layer(layer: int, x_BLD: Tensor) -> Tensor:
            hop = self.hops.get(layer)
            if hop is None:
                return x_BLD
            if self.peer is not None:
                received = self.peer.cross(hop, x_BLD.float(), inputs, keys[hop])
            else:
                received = boundary.cross(x_BLD.float(), inputs, keys[hop])
                received = self.anchors[hop].add(received, inputs) if self.anchors else received
            return received.to(x_BLD.dtype)

        return whole_loss(self.module, tokens, after_layer)

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        if self.change_text is not None:
            draw = torch.Generator().manual_seed(seed_of("text", self.seed, self.name, step))
            tokens = self.change_text(tokens, self.module.shape.vocabulary, draw)
        found = super().inner_step(tokens, step)
        self.step_own(step)
        return found

    @property
    def own(self) -> list[OwnParameters]:
        """Parameters that the replica trains beside the synchronised model."""
        return [*self.anchors, *([self.peer] if isinstance(self.peer, OwnParameters) else [])]

    def enter_round(self, round_: int) -> None:
        """Prepare for a round, before its first step. The evaluation after the round belongs to it."""
        for anchors in self.anchors:
            anchors.enter_round(round_)

    def step_own(self, step: int) -> None:
        """Run an optimizer step of the replica's own parameters, which are not part of the synchronised model."""
        for own in self.own:
            own.step(step)

    def drop(self) -> None:
        super().drop()
        for own in self.own:
            own.drop()

    def state(self) -> dict[str, Any]:
        boundary = self.boundary
        is_stale = isinstance(boundary, AblatedBoundary) and boundary.is_stale
        return super().state() | {
            "basis": None if boundary is None else boundary.basis,
            "perpendicular": boundary.perpendicular if boundary is not None and is_stale else None,
            "own": [own.tensors() for own in self.own],
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        embedding, boundary = self.parameters[EMBEDDING], self.boundary
        if boundary is not None and self.hops and state["basis"] is not None:
            self.move_basis(state["basis"].to(embedding.device))  # first, as saved moments have been turned
        super().load(state)
        for own, saved in zip(self.own, state["own"], strict=True):
            own.load_tensors(saved)
        if boundary is None or not self.hops:
            return
        if state["perpendicular"] is not None:
            boundary.perpendicular = state["perpendicular"].to(embedding.device)
        boundary.split(embedding)  # without `discard`: that was done before it was saved
        self.optimizer.perpendicular = boundary.perpendicular


def forward_of(replica: ReplicaSettings) -> object:
    """Return a key that is equal for replicas with equal forwards."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return replica.precision
    owner = replica.name if replica.boundary.anchors is not None else None
    return replica.boundary.model_dump_json(), str(replica.stages), owner, replica.precision


def constraint_of(replica: ReplicaSettings) -> object:
    """Return a key that is equal for replicas that take equal steps from equal parameters and gradients."""
    if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1 and replica.boundary.rank != "full":
        return replica.boundary.rank, replica.boundary.embedding
    return None


def build_whole(spec: RunSpec, member: MemberSpec, checkpoint: RunCheckpoint, device: torch.device) -> TableReplica:
    """Build the whole replica to which `member` belongs, with the run checkpoint's parameters."""
    replica, inner, shape, total_steps = member.replica, spec.config.inner, spec.shape, spec.total_steps
    dtype = torch.bfloat16 if replica.precision == "bf16" else None  # `auto` is fp32 in tables, on every device
    module = build_filled(
        shape, checkpoint.parameters, device=device, compute_dtype=dtype, recomputes=replica.recompute == "layers"
    )
    boundary, cuts, anchors, peer = None, [], [], None
    ablations = ablations_of(spec.config, replica)
    is_ablated = ablations != AblationSettings()
    if isinstance(replica, ParticipantsReplica):
        basis = None if checkpoint.basis is None else checkpoint.basis.to(device)
        boundary = boundary_of(replica.boundary, shape.width, basis)
        if is_ablated:
            boundary = AblatedBoundary(
                boundary.width,
                boundary.format,
                boundary.basis,
                is_stale=ablations.adaptation != "on",
                discards=ablations.adaptation == "discarded",
                keeps_gradient=ablations.grassmann_every is not None,
            )
        cuts = [layers.stop - 1 for layers in replica.layer_ranges(shape.layers)[:-1]]
        for hop in range(len(cuts)):
            of, rounds = (spec.config.seed, replica.name, hop), spec.config.rounds
            one = anchors_of(replica.boundary.anchors, shape, inner, total_steps, rounds, *of)
            if one is not None:
                one.to(device)
                anchors.append(one)
        seed = seed_of("peer", spec.config.seed)  # the same in all replicas, which keep the peers equal
        peer = peer_of(ablations.peer, replica.boundary, shape, len(cuts), inner, total_steps, seed)
        if isinstance(peer, OwnParameters):
            peer.to(device)
    whole = TableReplica(
        replica.name,
        module,
        inner,
        total_steps,
        replica.micro_batches,
        boundary=boundary,
        cuts=cuts,
        seed=spec.config.seed,
        anchors=anchors,
        peer=peer,
        attack=attack_of(spec.config, replica.name),
    )
    if isinstance(replica, ParticipantsReplica) and boundary is not None and boundary.basis is not None and cuts:
        needed = (whole.parameters, inner, total_steps, boundary.basis, replica.boundary.embedding)
        whole.optimizer = AblatedOptimizer(*needed, ablations) if is_ablated else inner_optimizer(*needed)
    return whole


@dataclass
class AblatedBoundary(Boundary):
    """Boundary with ablations."""

    is_stale: bool = False  # whether T_perp stays as in the first split
    discards: bool = False
    """Whether replicas also drop what the synchronized embedding gained outside the subspace since."""
    keeps_gradient: bool = False
    last_gradient: Tensor | None = None
    """Newest gradient [B, L, D] that crossed, if `keeps_gradient` (for Grassmann updates of U)."""

    def split(self, embedding: Tensor) -> None:
        if not (self.is_stale and self.perpendicular is not None):
            super().split(embedding)

    @torch.no_grad()
    def discard(self, embedding: Tensor) -> None:
        """Replace the embedding [V, D], in place, by its projected form at the start of a round, if it `discards`."""
        if self.discards and self.basis is not None and self.perpendicular is not None:
            embedding.copy_(self.perpendicular + (embedding @ self.basis) @ self.basis.T)

    def move(self, basis_DK: Tensor) -> None:
        super().move(basis_DK)
        self.last_gradient = None

    def encode_gradient(self, gradient_BLD: Tensor, key: Tensor) -> Symbols:
        if self.keeps_gradient:
            self.last_gradient = gradient_BLD.detach()
        return super().encode_gradient(gradient_BLD, key)


class AblatedOptimizer(SubspaceOptimizer):
    """Inner optimizer of a replica whose boundaries have the basis U [D, K], with ablations."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: InnerSettings,
        total_steps: int | None,
        basis: Tensor,
        embedding: EmbeddingTraining,
        ablations: AblationSettings,
    ) -> None:
        self.ablations = ablations
        super().__init__(parameters, settings, total_steps, basis, embedding)

    def _adamw(self, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        rate, betas, epsilon = self.settings.learning_rate, self.settings.betas, self.settings.epsilon
        shared = [group for group in groups if "shared_dim" in group]
        optimizers = super()._adamw([group for group in groups if "shared_dim" not in group])
        if shared:
            optimizers.append(SharedSecondMomentAdamW(shared, lr=rate, betas=betas, eps=epsilon))
        return optimizers

    def _groups(self) -> Iterator[dict[str, Any]]:
        """Yield the groups; `shared_dim` marks those of modified AdamW."""
        groups = list(super()._groups())
        if self.ablations.modified_adamw:
            special = [p for name, p in self._named.items() if name.endswith(OUTPUT_PROJECTIONS)]
            for group in groups:
                group["params"] = [p for p in group["params"] if not any(p is one for one in special)]
            embedding = [group | {"shared_dim": 1} for group in groups if group.get("embeds")]
            rest = [group for group in groups if not group.get("embeds")]
            shared = {"params": special, "weight_decay": self.settings.weight_decay, "shared_dim": 0}
            groups = [*rest, shared, *embedding]
        return (group for group in groups if group["params"])

    @torch.no_grad()
    def turn(self, basis_DK: Tensor) -> None:
        """Change to the basis U', and turn the moments of C [V, K] as the next split turns C: C' = C R, R = U^T U'.

            m' = m R,    v'_j = sum_i v_i R_ij^2

        v' is exact if gradients of different coefficients are uncorrelated. The sources do not say what moments become.
        A second moment that is shared along a row (`modified_adamw`) stays.
        """
        turn_KK, self.basis = self.basis.T @ basis_DK, basis_DK
        if self.coefficients is None:
            return
        for optimizer in self.optimizers:
            state = optimizer.state.get(self.coefficients, {})
            for name, by in (("exp_avg", turn_KK), ("mean", turn_KK), ("exp_avg_sq", turn_KK.square())):
                if name in state:
                    state[name].copy_(state[name] @ by)

    @torch.no_grad()
    def _after(self) -> None:
        """Project the output projections onto the subspace, W <- U U^T W, before the embedding is put together."""
        if self.ablations.weight_projection:
            names = OUTPUT_PROJECTIONS[:1] if self.ablations.weight_projection == "w_p1" else OUTPUT_PROJECTIONS
            for name, parameter in self._named.items():
                if name.endswith(names):
                    parameter.copy_(self.basis @ (self.basis.T @ parameter))
        super()._after()


class SharedSecondMomentAdamW(torch.optim.Optimizer):
    """AdamW whose second moment is averaged along one dimension of each matrix.

    All entries along `shared_dim` (0 for output projections, 1 for the embedding) are divided by the same number. So an
    update from a gradient in the subspace stays in it. Groups hold `params`, `lr`, `weight_decay`, `shared_dim`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "shared_dim": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (first, second) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(parameter)
            state["square"] = torch.zeros_like(parameter.sum(group["shared_dim"], keepdim=True))
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - first)
        state["square"].lerp_(gradient.square().mean(group["shared_dim"], keepdim=True), 1 - second)
        scale = (state["square"] / (1 - second ** state["step"])).sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(state["mean"] / (1 - first ** state["step"]) / scale * group["lr"])


def grassmann_step(basis_DK: Tensor, gradients_ND: Tensor, size: float = 0.1) -> Tensor:
    """Return U after a step on the Grassmann manifold towards the directions of the gradients [N, D].

    The ascent direction of |G U|^2 is (I - U U^T) G^T G U. It is scaled so that `size` is the tangent of the largest
    angle by which the subspace turns; QR restores orthonormal columns. Difference from the source: Subspace Networks
    tune the step, which Het-PP does not specify.
    """
    toward = gradients_ND.T @ (gradients_ND @ basis_DK)
    toward = toward - basis_DK @ (basis_DK.T @ toward)
    largest = torch.linalg.matrix_norm(toward, ord=2)
    if not bool(largest > 0):
        return basis_DK
    moved, upper = torch.linalg.qr((basis_DK + toward * (size / largest)).double())
    return (moved * upper.diagonal().sign()).float().contiguous()
