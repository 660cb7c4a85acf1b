"""Builds the whole replicas of a row, and says which of them are alike."""

from __future__ import annotations

import torch

from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.seeds import seed_of
from hetero_pp.model.subspace_optimizer import inner_optimizer
from hetero_pp.model.transformer import build_filled
from hetero_pp.pipeline.coefficients import format_of
from hetero_pp.research.ablations import AblatedOptimizer, with_ablations
from hetero_pp.research.peers.peer import peer_of
from hetero_pp.research.settings import AblationSettings, ablations_of, attack_of
from hetero_pp.research.vectorized.hostile_replica import HostileReplica
from hetero_pp.research.vectorized.replica import TableReplica
from hetero_pp.run.snapshot import Snapshot
from hetero_pp.run.spec import MemberSpec, RunSpec
from stages.anchors import Anchors, anchors_of
from stages.boundary import boundary_of
from stages.own_parameters import OwnParameters

_STACKED = AblationSettings().model_dump(include={"weight_projection"})
"""The ablation that a stack of replicas can have, at its default."""


def forward_of(replica: ReplicaSettings) -> object:
    """Return a key that is equal for replicas with equal forwards."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count == 1:
        return replica.precision
    owner = replica.name if replica.boundary.anchors is not None else None
    return replica.boundary.model_dump_json(), str(replica.stages), owner, replica.precision


def can_stack(replica: ReplicaSettings, ablations: AblationSettings) -> bool:
    """Return whether replicas with these settings can take their steps together."""
    if replica.precision == "bf16":
        return False
    if not isinstance(replica, ParticipantsReplica):
        return True
    boundary, others = replica.boundary, ablations.model_copy(update=_STACKED)
    return format_of(boundary).is_elementwise and boundary.anchors is None and others == AblationSettings()


def build_whole(spec: RunSpec, member: MemberSpec, snapshot: Snapshot, device: torch.device) -> TableReplica:
    """Build the whole replica to which `member` belongs, with the snapshot's parameters."""
    replica, inner = member.replica, spec.config.inner
    dtype = torch.bfloat16 if replica.precision == "bf16" else None  # `auto` is fp32 in tables, on every device
    module = build_filled(
        spec.shape, snapshot.parameters, device=device, compute_dtype=dtype, recomputes=replica.recompute == "layers"
    )
    boundary, cuts, ablations = None, [], ablations_of(spec.config, replica)
    anchors: list[Anchors] = []
    peer = None
    if isinstance(replica, ParticipantsReplica):
        basis = None if snapshot.basis is None else snapshot.basis.to(device)
        boundary = boundary_of(replica.boundary, spec.shape.width, basis)
        cuts = [layers.stop - 1 for layers in replica.layer_ranges(spec.shape.layers)[:-1]]
        if ablations != AblationSettings():
            boundary = with_ablations(boundary, ablations)
        for hop in range(len(cuts)):
            of, own, rounds = (spec.config.seed, replica.name, hop), replica.boundary.anchors, spec.config.outer.rounds
            if (one := anchors_of(own, spec.shape, spec.config.inner, spec.total_steps, rounds, *of)) is not None:
                one.to(device)
                anchors.append(one)
        seed = seed_of("peer", spec.config.seed)  # the same in all replicas, which keep the peers equal
        peer = peer_of(
            ablations.peer, replica.boundary, spec.shape, len(cuts), spec.config.inner, spec.total_steps, seed
        )
        if isinstance(peer, OwnParameters):
            peer.to(device)
    attack = attack_of(spec.config, replica.name)
    whole = (TableReplica if attack is None else HostileReplica)(
        replica.name,
        module,
        inner,
        spec.total_steps,
        replica.micro_batches,
        boundary=boundary,
        cuts=cuts,
        seed=spec.config.seed,
        anchors=anchors,
        peer=peer,
    )
    if attack is not None and isinstance(whole, HostileReplica):
        whole.turn(attack)
    if isinstance(replica, ParticipantsReplica) and boundary is not None and boundary.basis is not None and cuts:
        needed = (whole.parameters, inner, spec.total_steps, boundary.basis, replica.boundary.embedding)
        is_ablated = ablations != AblationSettings()
        whole.optimizer = AblatedOptimizer(*needed, ablations) if is_ablated else inner_optimizer(*needed)
    return whole
