"""Frozen copy of a coordinator's state, for readers outside the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from replica_groups.protocol import events as e


@dataclass(frozen=True)
class SlotView:
    """A slot (`place`) and the round of its replica."""

    name: str
    replica: str
    term: int
    """Highest claimed incarnation."""
    epoch: int
    """Generation of its replica."""
    held: bool
    round: int
    """Round that its replica trains or has contributed to; 0: none."""
    computes: bool
    """Whether its holder is busy and waits for no other member, by its last heartbeat."""


@dataclass(frozen=True)
class OpenRoundView:
    """The undecided round."""

    number: int
    awaited: frozenset[str]
    """Replicas that take part, without the optional ones that are not complete."""
    deposited: Mapping[str, frozenset[str]]
    """Replica -> blocks that it has deposited."""


@dataclass(frozen=True)
class View:
    """State of a run at one moment."""

    last_round: int
    """The last decided round."""
    has_begun: bool
    is_over: bool
    """Whether every round is decided."""
    open: OpenRoundView | None
    """None before the run begins and after its last round."""
    paused: e.Paused | None
    """Present replicas, if they are too few to close the open round."""
    slots: tuple[SlotView, ...]
    replicas: int
    optional: frozenset[str]
    """Replicas without which the run begins."""
