"""The interface of the exchange to audits. Without audits nothing happens; replica_groups/audit fills it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.memberships import Memberships


class AuditHook:
    """Audits of a run that has none: nothing is attached to blobs, shown, or left out of a round."""

    def __init__(self, refused: Callable[[str, str], Refused]) -> None:
        """`refused` counts a refusal of a sender, with its reason."""
        self._refused = refused

    # ---- the run ----

    def admit(self, guests: Memberships | None, authority: bytes | None) -> None:
        """Take the members with a ticket, and the certificate (PEM) of the authority; None: there are none of them."""

    def prepare(self, last_round: int, spec: RunSpec | None) -> None:
        """Do what has to be done before the round after `last_round` opens."""

    def begin(self, last_round: int) -> None:
        """Begin or resume after a round."""

    def end(self) -> None:
        """End all waits, because the members have left after the last round."""

    # ---- a round ----

    def attach(self, member: str, round_: int, generation: int, commitment: pb.Commitment, holder: int) -> str | None:
        """Keep what came with a blob that is awaited; return a complaint if it is to be refused."""
        return None

    def decide(self, record: pb.RoundRecord) -> None:
        """Change a record that nobody has read yet: leave out contributions, set weights, add commitments."""

    def why(self, round_: int, replica: str) -> str:
        """Return why an audit left a replica out of a round; empty if none did."""
        return ""

    def closed(self, record: pb.RoundRecord) -> None:
        """Note that a round is closed. The caller holds the lock of the decisions."""

    def differed(self, replica: str, round_: int) -> None:
        """Note that a replica's parameters after a round differ from the log's, so it begins the next one with them."""

    def judge(self, request: pb.JudgeRequest, caller: Caller) -> pb.Nothing:
        """Take judgements of a validator. Raises Refused for all of them if one is wrong, or nobody asked for any."""
        raise Refused("this run has no audits: its YAML has neither `audit.gauntlet` nor `audit.recompute`")

    # ---- what members show ----

    def asks(self, member: str, holder: int, incarnation: int) -> pb.Asked | None:
        """Return what a member has to show, if there is anything."""
        return None

    def expected(self, member: str) -> bytes:
        """Return the digest of the state with which a member begins the open round; empty: a fresh one."""
        return b""

    def expect_file(self, header: pb.ShownFile, caller: Caller) -> None:
        """Raise Refused for a file that a member was not asked for, or that is too large."""
        reason = "shows a file, and no audit of this run asks for any"
        raise self._refused(caller.name, reason)

    def lacks_room(self, header: pb.ShownFile, caller: Caller) -> None:
        """Note that the exchange has no room for an expected file, which is not the member's fault."""

    def take_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        """Take a file that has arrived. Raises Refused as `expect_file`, and if a member committed to another."""
        self.expect_file(header, caller)
