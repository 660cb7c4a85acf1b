"""Link ends of a stage: one for the previous stage, one for the next stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hetero_pp.link.protocol import LinkEnd
from hetero_pp.messages.messages_pb2 import Statement

Holders = tuple[int | None, int | None]
"""Holder numbers of the previous and the next stage, as in AssignReply; None: unknown, or no stage."""
NOT_KNOWN: Holders = (None, None)


class Signer(Protocol):
    """Signs what a member has sent, and checks what its neighbours have signed."""

    def sign(self, data: bytes) -> Statement: ...

    def check(self, statement: Statement, data: bytes, member: str, holder: int | None = None) -> None:
        """Raise MalformedMessage unless `member` has signed these bytes, as this holder of its slot (None: any)."""


@dataclass(frozen=True)
class LinkEnds:
    """Link ends of a stage. An end is None at the first or last stage of a group, and in a replica without stages."""

    upstream: LinkEnd | None = None
    downstream: LinkEnd | None = None
    epoch: int = 0
    """Generation of the group."""
    signer: Signer | None = None
    """Set if members have certificates."""
    holders: Holders = NOT_KNOWN

    @property
    def both(self) -> list[LinkEnd]:
        return [end for end in (self.upstream, self.downstream) if end is not None]

    def close(self) -> None:
        for end in self.both:
            end.close()

    def abort(self, cause: str) -> None:
        for end in self.both:
            end.abort(cause)
