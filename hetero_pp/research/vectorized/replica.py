"""A whole replica of a table's row: its boundaries may be another method's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hetero_pp.research.peers.peer import Peer
from replica_groups.whole import WholeReplica
from stages.own_parameters import OwnParameters


class TableReplica(WholeReplica):
    """A whole replica whose boundaries `peer` replaces, if it is set."""

    peer: Peer | None = None
    """A published method's boundaries."""

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """Return the input of the next stage; `key` selects the noise of gradient rounding."""
        if self.peer is None:
            return super().cross(hop, x_BLD, tokens_BL, key)
        return self.peer.cross(hop, x_BLD, tokens_BL, key)

    @property
    def own(self) -> Sequence[OwnParameters]:
        """Parameters that the replica trains beside the synchronised model."""
        return [*super().own, *([self.peer] if isinstance(self.peer, OwnParameters) else [])]
