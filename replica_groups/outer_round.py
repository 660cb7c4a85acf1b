"""A member's side of the outer round: contribute its parameters, apply what was counted, prove what it holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hetero_pp.errors import HeteroPPError
from hetero_pp.outer.exchange_port import ExchangePort
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer, parameter_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from replica_groups.replay import replay, shapes_by_block, shapes_of


class OuterRound:
    """Keeps theta at the start of the round and the error feedback of the parameters that a member owns.

    `followed` are parameters that it needs a synced copy of but does not train (the token embedding, at stages that
    derive T_perp from it).
    """

    def __init__(
        self,
        run: str,
        member: str,
        replica: str,
        parameters: Mapping[str, nn.Parameter],
        followed: Mapping[str, Tensor],
        exchange: ExchangePort,
        settings: OuterSettings,
        optimizer: RoundOptimizer | None = None,
    ) -> None:
        self.run, self.member, self.replica = run, member, replica
        self.exchange = exchange
        self.settings = settings
        self.optimizer = optimizer or OuterOptimizer(settings)
        self.parameters = parameters
        self.theta = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.theta |= {name: tensor.clone() for name, tensor in followed.items()}
        self.error = {name: torch.zeros_like(self.theta[name]) for name in parameters}
        self.starts: dict[str, Tensor] = {}
        """What this replica starts the round with, where that is not theta (an ablation of the embedding's split)."""

    @torch.no_grad()
    def synchronise(self, round_: int) -> None:
        """Bring this member's parameters to what all replicas hold after the round."""
        own = self._contribute(round_)
        record = self.exchange.record(round_)

        def fetch(replica: str, block: str) -> bytes:
            if replica == self.replica and block in own:
                return own[block]
            return self.exchange.fetch(self.member, round_, replica, block)

        replay(self.theta, self.run, record, fetch, self.optimizer)
        for name, parameter in self.parameters.items():
            parameter.copy_(self.theta[name])
        hashes = {name: parameter_sha256(tensor) for name, tensor in self.theta.items()}
        self.exchange.confirm(self.member, round_, hashes)

    def _contributed(self, name: str) -> Tensor:
        """The pseudo-gradient, or the gradient, which is then used up."""
        parameter = self.parameters[name]
        if self.settings.source == "difference":
            return self.starts.get(name, self.theta[name]) - parameter
        gradient, parameter.grad = parameter.grad, None
        return torch.zeros_like(parameter) if gradient is None else gradient

    def _contribute(self, round_: int) -> dict[str, bytes]:
        """Compress and hand in every block; returns the blobs."""
        blobs: dict[str, bytes] = {}
        compression = self.settings.compression
        for block, shapes in shapes_by_block(shapes_of(self.parameters)).items():
            selections = {}
            for name, shape in shapes.items():
                delta = self._contributed(name)
                if not bool(torch.isfinite(delta).all()):
                    raise HeteroPPError(f"{self.member} diverged: {name} is not finite after round {round_}")
                selections[name] = (shape, select(self.error[name], delta, compression))
            address = BlobAddress(self.run, round_, self.replica, block)
            blobs[block] = encode_blob(address, selections, compression)
            self.exchange.deposit(self.member, address, blobs[block])
        return blobs
