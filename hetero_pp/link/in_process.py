"""Link between two stages of one process: no copies, but the shaping and the byte counts of a real link."""

from __future__ import annotations

import threading

from hetero_pp.config.lines import Direction, LinkShape, LinkSpec
from hetero_pp.core.errors import LinkClosed, PeerAtFault
from hetero_pp.link.protocol import END_CLOSED, Ledger, Message, sealed, wire_frames
from hetero_pp.link.shaping import Lines, ShapedQueue, StreamQueue, busy_seconds

Queue = ShapedQueue[Message] | StreamQueue[Message]


def in_process_pair(
    spec: LinkSpec, seed: int, lines: Lines | None = None, ledgers: tuple[Ledger, Ledger] | None = None
) -> tuple[InProcessLinkEnd, InProcessLinkEnd]:
    """Return both ends of a link: the first sends forward, the second backward.

    All links of a machine share `lines`. `ledgers` (forward, backward) continue earlier counts; by default, each end
    starts a new one.
    """
    lines = lines or Lines()
    sent_forward, sent_backward = ledgers or (Ledger(), Ledger())
    forward: Queue = lines.leaving(spec, "forward", seed, is_here=True)
    backward: Queue = lines.leaving(spec, "backward", seed, is_here=True)
    return (
        InProcessLinkEnd(spec.forward, forward, backward, sent_forward, spec.target),
        InProcessLinkEnd(spec.backward, backward, forward, sent_backward, spec.source),
    )


class InProcessLink:
    """Link between two neighbouring stages of one process: a pair of ends for each generation of their group."""

    def __init__(self, spec: LinkSpec, seed: int, lines: Lines) -> None:
        self._spec, self._seed, self._lines = spec, seed, lines
        self._ledgers = Ledger(), Ledger()
        self._lock = threading.Lock()
        self._generation = 0
        self._ends: tuple[InProcessLinkEnd, InProcessLinkEnd] | None = None
        self._cause = ""
        self._over: str | None = None

    def end(self, direction: Direction, generation: int) -> InProcessLinkEnd:
        """Return the end that sends in `direction` in a generation, and end earlier generations.

        Makes a new link if the link of this generation was aborted. Raises LinkClosed if this generation, or the whole
        link, has ended.
        """
        name = self._spec.source if direction == "forward" else self._spec.target
        self.give_up(generation, f"{name} is at generation {generation}")
        with self._lock:
            if generation < self._generation or self._over is not None:
                raise LinkClosed(self._over or self._cause)
            if self._ends is None or any(end.is_over for end in self._ends):
                self._ends = in_process_pair(self._spec, self._seed, lines=self._lines, ledgers=self._ledgers)
            return self._ends[0 if direction == "forward" else 1]

    def give_up(self, before: int, cause: str) -> None:
        """End links of generations before `before`. Their users get LinkClosed(cause)."""
        with self._lock:
            if before <= self._generation:
                return
            older, self._ends = self._ends, None
            self._generation, self._cause = before, cause
        for end in older or ():
            end.abort(cause)

    def abort(self, cause: str) -> None:
        """End the current link and refuse new ones."""
        with self._lock:
            self._over = cause
            ends = self._ends
        for end in ends or ():
            end.abort(cause)


class InProcessLinkEnd:
    """End of an in-process link; implements LinkEnd. Messages are passed by reference."""

    def __init__(self, shape: LinkShape, outgoing: Queue, incoming: Queue, ledger: Ledger, peer: str) -> None:
        self.ledger = ledger
        self._peer = peer
        self._shape = shape
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False
        self.is_over = False  # whether this end was aborted

    def send(self, message: Message) -> None:
        if self._closed:
            raise LinkClosed(END_CLOSED)
        message = sealed(message)
        frames = wire_frames(message)
        self._outgoing.put(message, frames)
        wire = sum(frames)
        self.ledger.add(message.header.round, message.payload_bytes, wire, busy_seconds(self._shape, wire))

    def receive(self, timeout: float | None = None) -> Message:
        return self._incoming.get(timeout)

    def recycle(self, message: Message) -> None:
        """Do nothing: the tensors belong to the sender."""

    @property
    def unacknowledged(self) -> int:
        return 0

    def accuse(self, reason: str) -> PeerAtFault:
        cause = f"malformed data from {self._peer}: {reason}"
        self.abort(cause)
        return PeerAtFault(self._peer, cause)

    def close(self) -> None:
        self._closed = True
        self._outgoing.close()

    def abort(self, cause: str) -> None:
        self.is_over = True
        self._outgoing.abort(cause)
        self._incoming.abort(cause)
