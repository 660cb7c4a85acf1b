"""Decided rounds: their records, and the blobs that the records name."""

from __future__ import annotations

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import DamagedFile, Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.outer.exchange_service import Caller
from replica_groups.exchange.log import ContributionLog, key_of
from replica_groups.exchange.run_state import RunState
from replica_groups.exchange.uploads import download_url


class DecidedRounds:
    """The decided rounds of one run, from its log. Thread-safe."""

    def __init__(self, state: RunState, log: ContributionLog) -> None:
        self._state, self._log = state, log

    def record(self, request: pb.RecordRequest, caller: Caller) -> pb.RoundRecord:
        """Return the record of a round, once the round is decided."""
        round_, member, term = request.round, None, None
        if caller.name != EXCHANGE:
            member, term = caller.name, self._state.term(caller)
            if round_ < 1:
                raise self._state.refused(member, f"asked for the record of round {round_}, expected 1 or later")
        try:
            return self._state.decisions.wait_for_record(round_, member, term, caller.is_asked)
        except (DamagedFile, FileNotFoundError) as error:
            raise Refused(f"no record of round {round_}: {error}") from None

    def fetch(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        """Return one blob of a decided round."""
        key, blob = self._included(request, caller)
        try:
            return self._state.decisions.patiently(lambda: self._log.read_blob(key, blob.sha256))
        except FileNotFoundError:
            reason = f"the contribution of {request.replica} to round {request.round} is no longer in the log"
            raise Refused(reason) from None
        except DamagedFile as error:
            raise Refused(str(error)) from None

    def stored(self, request: pb.FetchRequest, caller: Caller) -> pb.StoredBlob | None:
        """Return where a member may read a blob from the store itself; None if the store has no such URLs."""
        key, blob = self._included(request, caller)
        url = self._state.decisions.patiently(lambda: download_url(self._log, key))
        return None if url is None else pb.StoredBlob(url=url, sha256=blob.sha256, size=blob.size)

    def _included(self, request: pb.FetchRequest, caller: Caller) -> tuple[str, pb.BlobEntry]:
        """Return the key of a blob, and its entry in the round's record."""
        self._state.decisions.require_alive()
        self._state.require_begun(caller.name)
        round_, wanted = request.round, (request.replica, request.block)
        if 1 <= round_ <= self._state.coordinator.last_round:
            record = self.record(pb.RecordRequest(round=round_), Caller(EXCHANGE))
            for entry in record.contributions:
                for blob in entry.blobs:
                    if (entry.replica, blob.block) == wanted:
                        return key_of(record, entry, blob), blob
        reason = f"no `{request.block}` of {request.replica} in a closed round {round_}"
        raise self._state.refused(caller.name, reason)
