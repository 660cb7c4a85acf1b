"""A member's link to the exchange, shaped and counted like any other link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.errors import Stopped
from hetero_pp.link.ledger import Ledger, raw_frames, wire_bytes
from hetero_pp.link.shaper import Shaper
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import DIRECTIONS, LinkSpec
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.outer.exchange_service import NO_STATES, Assignment, AvailableStates, ExchangeService, Standing
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from replica_groups.stopping import NEVER_STOPPED, Stopping


class ShapedExchange:
    """Delays what a member sends to and fetches from the exchange as the link's shape says. Implements ExchangeService.

    Blobs and snapshots are shaped and counted; control messages and reports, some hundred bytes each, are not.
    """

    def __init__(
        self,
        exchange: ExchangeService,
        spec: LinkSpec,
        seed: int,
        lines: Lines | None = None,
        stopping: Stopping = NEVER_STOPPED,
    ) -> None:
        """`lines`: those of the member, which its stage links share. `stopping`: may interrupt the calls that wait."""
        lines = lines or Lines()
        self._exchange, self._stopping = exchange, stopping
        up, down = (lines.buckets(spec, way) for way in DIRECTIONS)
        self._up = Shaper(spec.forward, f"{seed}/{spec.name}/forward", lines.clock, up)
        self._down = Shaper(spec.backward, f"{seed}/{spec.name}/backward", lines.clock, down)
        self.forward = Ledger()
        self.backward = Ledger()

    def agree(self, member: str, configuration: str, tokens: str = "") -> str:
        """See ExchangeService."""
        return self._exchange.agree(member, configuration, tokens)

    def join(
        self, member: str, address: str, available: AvailableStates = NO_STATES, process: str | None = None
    ) -> int:
        """See ExchangeService."""
        return self._exchange.join(member, address, available, process)

    def last_round(self) -> int:
        """See ExchangeService."""
        return self._exchange.last_round()

    def changes(self) -> Changes:
        """See ExchangeService."""
        return self._exchange.changes()

    def newest_snapshot(self) -> tuple[int, Sequence[str]]:
        """See ExchangeService."""
        return self._exchange.newest_snapshot()

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        """See ExchangeService."""
        tensors = self._exchange.snapshot(names, round_)
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        _carry(self._down, self.backward, 0, size)
        return tensors

    def assign(self, member: str, holds: int, address: str = "", trained: int = 0) -> Assignment:
        """See ExchangeService."""
        with self._stopping.allowed():
            return self._exchange.assign(member, holds, address, trained)

    def beat(
        self, member: str, round_: int | None = None, epoch: int = 0, progress: int = 0, computes: bool = False
    ) -> Standing:
        """See ExchangeService."""
        return self._exchange.beat(member, round_, epoch, progress, computes)

    def broken(self, member: str, epoch: int, cause: str, blames: str = "") -> None:
        """See ExchangeService."""
        self._exchange.broken(member, epoch, cause, blames)

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        """See ExchangeService."""
        with self._stopping.allowed(address.round):  # the round may be decided by this blob
            _carry(self._up, self.forward, address.round, len(data))
            self._exchange.deposit(member, address, data, epoch, steps)

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        """See ExchangeService."""
        with self._stopping.allowed(round_):
            return self._exchange.record(round_, member)

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService."""
        data = self._exchange.fetch(member, round_, replica, block)
        _carry(self._down, self.backward, round_, len(data))
        return data

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """See ExchangeService.

        A member that is asked to stop and gets no answer goes on without one: it has applied the round.
        """
        with suppress(Stopped), self._stopping.allowed(round_):
            self._exchange.confirm(member, round_, sha256)

    def report(self, reports: Sequence[Report]) -> None:
        """See ExchangeService."""
        self._exchange.report(reports)


def _carry(shaper: Shaper, ledger: Ledger, round_: int, size: int) -> None:
    wire = wire_bytes(raw_frames(size))
    ledger.add(round_, size, wire, shaper.start_message().transmit(wire))
