"""A member's link to the exchange, on which a round is carried while the member trains the next one.

Contributions wait until all of a member's are there. Then a thread brings them, waits for the round's record and
fetches what that names: whoever asks for the record later finds all of it here, unless training took less time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress

from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import LinkSpec
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.outer.exchange_service import ExchangeService
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from replica_groups.exchange.shaped import ShapedExchange
from replica_groups.stopping import NEVER_STOPPED, Stopping

_Blob = tuple[str, BlobAddress, bytes, int | None, int]
"""What `deposit` takes."""
_Fetched = dict[tuple[str, str], bytes]
"""Blobs of a round, by replica and block."""


class CarriedExchange(ShapedExchange):
    """Implements ExchangeService; of one member, which asks for one round after the other."""

    def __init__(
        self,
        exchange: ExchangeService,
        spec: LinkSpec,
        seed: int,
        lines: Lines | None = None,
        stopping: Stopping = NEVER_STOPPED,
    ) -> None:
        super().__init__(exchange, spec, seed, lines, stopping)
        self._waiting: list[_Blob] = []
        self._carried: tuple[int, Future[tuple[RoundRecord, _Fetched]]] | None = None
        """The round that a thread is at. One that was given up may still wait; nobody waits for it."""
        self._fetched: tuple[int, _Fetched] = 0, {}

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        """See ExchangeService. It is on its way once `carry` is called, or the record is asked for, which raises what
        this would.
        """
        self._waiting.append((member, address, data, epoch, steps))

    def carry(self, member: str, round_: int, replica: str, blocks: Collection[str]) -> None:
        """Bring what was deposited, and fetch what others have sent of these blocks; `replica` is the member's."""
        waiting, self._waiting, found = self._waiting, [], Future[tuple[RoundRecord, _Fetched]]()
        self._carried, self._fetched = (round_, found), (0, {})

        def run() -> None:
            try:
                record = self._record(waiting, round_, member)
                fetched = self._fetch_all(member, record, replica, blocks, found.cancelled)
                with suppress(InvalidStateError):  # it was given up
                    found.set_result((record, fetched))
            except BaseException as error:  # noqa: BLE001 - whoever asks for the record gets it
                with suppress(InvalidStateError):
                    found.set_exception(error)

        threading.Thread(target=run, name=f"carries round {round_} of {member}", daemon=True).start()

    def give_up(self) -> None:
        """What is under way is not waited for any more, and what was not brought never is."""
        self._waiting = []
        if self._carried is not None:
            self._carried[1].cancel()
            self._carried = None

    def record(self, round_: int, member: str | None = None) -> RoundRecord:
        """See ExchangeService."""
        carried, self._carried = self._carried, None
        if carried is None or carried[0] != round_:
            waiting, self._waiting = self._waiting, []
            return self._record(waiting, round_, member)
        with self._stopping.allowed(round_):
            record, fetched = carried[1].result()
        self._fetched = round_, fetched
        return record

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService. What was fetched is given away once."""
        of_round, fetched = self._fetched
        data = fetched.pop((replica, block), None) if of_round == round_ else None
        return super().fetch(member, round_, replica, block) if data is None else data

    def _record(self, waiting: list[_Blob], round_: int, member: str | None) -> RoundRecord:
        for blob in waiting:
            super().deposit(*blob)
        return super().record(round_, member)

    def _fetch_all(
        self,
        member: str,
        record: RoundRecord,
        replica: str,
        blocks: Collection[str],
        is_over: Callable[[], bool],
    ) -> _Fetched:
        return {
            (entry.replica, blob.block): super(CarriedExchange, self).fetch(
                member, record.round, entry.replica, blob.block
            )
            for entry in record.contributions
            for blob in entry.blobs
            if blob.block in blocks and entry.replica != replica and not is_over()
        }
