"""Interface of the audits of a run to the exchange, implemented for a run without audits."""

from __future__ import annotations

from hetero_pp.core.errors import Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.memberships import Memberships


class NoAudits:
    """Audits of a run that has none: nothing is left out. Audits override these methods."""

    def admit(self, guests: Memberships | None) -> None:
        """Take the database of the members with a ticket."""

    def begin(self, last_round: int) -> None:
        """Begin or resume after a round."""

    def decide(self, record: pb.RoundRecord, owing: dict[str, str]) -> None:
        """Leave out contributions of a record that nobody has read yet, and set weights.

        `owing`: replicas that owe a checkpoint, each with the reason.
        """

    def why(self, round_: int, replica: str) -> str:
        """Return why an audit left a replica out of a round; empty if none did."""
        return ""

    def closed(self, round_: int) -> None:
        """Note that a round is closed. The caller holds the lock of the decisions."""

    def differed(self, replica: str, round_: int) -> None:
        """Note that a replica's parameters after a round differ from the log's, so it begins the next one with them."""

    def unshown(self, found: pb.Judgement) -> None:
        """Take what the exchange found about a member that did not show the checkpoint of a drawn round."""

    def judge(self, request: pb.JudgeRequest, caller: Caller) -> pb.Nothing:
        """Take judgements of a validator. Raises Refused for all of them if one is wrong, or nobody asked for any."""
        raise Refused("this run has no audits: its YAML has neither `audit.gauntlet` nor `audit.recompute`")
