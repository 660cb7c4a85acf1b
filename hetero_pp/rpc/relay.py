"""Relay of stage links, for two ends of which neither can be dialled. It is part of the exchange's process.

Each end makes a call that names the link. When both are there, each gets a key, dials the relay's port and shows the
key, and the relay passes on the bytes between the two connections. These bytes are a TLS connection from end to end, so
that the exchange can cut it but neither read nor change it. A call stays open as long as its connection: it tells the
relay at once if its member is gone or no longer admitted.

The bytes do not pass through gRPC, because that takes more than twice the CPU time (benchmarks/link.py). An end that
does not read stops the other one by TCP.

The relay cannot see what it carries, so two ends could use it as a tunnel. So it carries one connection of each link,
while the group of the link trains. Each direction gets a few times the bytes that the run predicts for a round.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import grpc

from hetero_pp.core.errors import AskAgain, Forbidden
from hetero_pp.link.allowance import Budget, LinkLimit, TrainedRound
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, RelayedLink, RelayPlace
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import Callers
from hetero_pp.rpc.meeting_point import MeetingPoint
from hetero_pp.rpc.pass_on import cut, pass_on, without_delay
from hetero_pp.rpc.services import LONGEST_WAIT, Authenticator

SERVICE = DESCRIPTOR.services_by_name["Relay"]

MOST_CARRIED = 8
"""Open calls of one member: for each link one in use, remains of former ones, and one to come."""

IDLE_SECONDS = 10.0
"""Seconds after which a connection is cut whose group does not train."""

_POLL_SECONDS = 0.05
"""Interval at which an end that has to wait checks whether its group trains, or trains another round."""

LOOK_SECONDS = 1.0
"""Interval in seconds at which it is checked whether the sender is still admitted."""

_MOST_WAITING = 4
"""Waiting calls of one link: a machine that was cut off may have left some that are not known to be gone."""

_LAST_BYTES_SECONDS = 10.0
"""Seconds for an end to read what is in transit, once the other end has gone."""


class Relay:
    """Relay of one run."""

    def __init__(
        self,
        callers: Callers,
        counts: Mapping[tuple[str, str], str],
        authenticator: Authenticator,
        meeting_point: MeetingPoint,
        limits: Mapping[tuple[str, str], LinkLimit],
        trains: Callable[[str], TrainedRound | None],
    ) -> None:
        """`counts`: (link, direction) -> member that sends there (Roster.counts).

        `limits`: what they may carry; `trains`: what the group of a link trains, None if nothing.
        """
        self.carried: Counter[str] = Counter()
        """Link -> relayed bytes in both directions."""
        self._callers, self._counts, self._meeting_point = callers, counts, meeting_point
        self._authenticator, self._trains = authenticator, trains
        self._budgets = {key: Budget(limit) for key, limit in limits.items()}
        self._in_use: dict[str, _End] = {}
        """Link -> the end that dialled last."""
        self._changed = threading.Condition()
        self._waiting: Mapping[str, deque[_End]] = defaultdict(deque)
        reason = "found an unknown key at the relay's port"
        meeting_point.refuse = lambda peer: authenticator.refuse(peer, reason, Kind.STRANGER)

    @property
    def port(self) -> int:
        """Port of the exchange's host at which both ends connect."""
        return self._meeting_point.port

    def carried_for(self, member: str) -> int:
        """Return the relayed bytes, in both directions, of all links of a member."""
        links = {link for (link, _), sender in self._counts.items() if sender == member}
        with self._changed:
            return sum(self.carried[link] for link in links)

    def Carry(self, request: RelayedLink, context: grpc.ServicerContext) -> Iterator[RelayPlace]:
        """Relay one connection for its end. Raises Forbidden for a caller that is no end of the link.

        Raises AskAgain if the other end does not come, and Refused once the caller is no longer admitted.
        """
        sender, dials = self._sender(request.link, context)
        budget = self._budgets[request.link, "forward" if dials else "backward"]
        end = _End(request.link, sender, budget, self._changed)
        try:
            if not context.add_callback(end.close):
                return
            peer = self._find(end) if dials else self._be_found(end)
            with self._meeting_point.expecting(end.take) as key:
                yield RelayPlace(port=self.port, key=key)
                own, its = end.connected(), peer.connected()
            pass_on(own, its, partial(self._passed, end, context))
            with self._changed:
                end.has_ended = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: peer.has_ended or end.is_closed, _LAST_BYTES_SECONDS)
        finally:
            self._leave(end)

    def _sender(self, link: str, context: grpc.ServicerContext) -> tuple[str, bool]:
        """Return the caller, and whether it is the end of the link that dials.

        Here the stage before is the one that dials; the relay works alike for both.
        """
        caller = self._callers.of(context).name
        dialler, listener = (self._counts.get((link, direction)) for direction in ("forward", "backward"))
        if dialler == listener or caller not in (dialler, listener):
            raise Forbidden(f"{caller} is not an end of the requested link")
        return caller, caller == dialler

    def _be_found(self, end: _End) -> _End:
        """Wait for the end that dials, and return it."""
        with self._changed:
            waiting = self._waiting[end.link]
            waiting.append(end)
            if len(waiting) > _MOST_WAITING:
                waiting.popleft().close()
            self._changed.notify_all()
            self._changed.wait_for(lambda: end.peer is not None or end.is_closed, LONGEST_WAIT)
            if end.peer is None:
                raise AskAgain(f"no member dialled {end.link}")
            return end.peer

    def _find(self, end: _End) -> _End:
        """Meet an end that waits to be dialled, and return it: the newest one, which is the likeliest to be there.

        The connection that the link had before is cut, so that it has one.
        """
        until = time.monotonic() + LONGEST_WAIT
        with self._changed:
            waiting = self._waiting[end.link]
            while not waiting or self._trains(end.link) is None:
                if end.is_closed or time.monotonic() > until:
                    why = "is not connected" if not waiting else "is of a group that does not train"
                    raise AskAgain(f"the other end of {end.link} {why}")
                self._changed.wait(_POLL_SECONDS if waiting else 1.0)
            other = waiting.pop()
            other.peer, end.peer = end, other
            if (former := self._in_use.get(end.link)) is not None:
                for one in (former, former.peer):
                    if one is not None:
                        one.close()
            self._in_use[end.link] = end
            self._changed.notify_all()
            return other

    def _passed(self, end: _End, context: grpc.ServicerContext, count: int) -> None:
        """Count bytes of an end, and wait until it may send more.

        Raises Refused if its ticket has been revoked, AskAgain if its group trains no more.
        """
        trains = partial(self._trains, end.link)
        with self._changed:
            self.carried[end.link] += count
            may_send = end.budget.carry(count, trains)
        while True:
            if (now := time.monotonic()) >= end.look_at:
                self._callers.let_in(context)
                end.look_at = now + LOOK_SECONDS
                end.trained_at = now if trains() is not None else end.trained_at
                if now - end.trained_at > IDLE_SECONDS:
                    raise AskAgain(f"the group of {end.link} does not train")
            if may_send or count == 0:
                return
            with self._changed:
                is_counted = end.budget.is_newly_used_up()
            if is_counted:
                reason = f"sends more through the relay than {end.link} may carry in a round"
                self._authenticator.refuse(end.sender, reason, Kind.UNEXPECTED)
            with self._changed:
                if self._changed.wait_for(lambda: end.is_closed, _POLL_SECONDS):
                    return
                may_send = end.budget.carry(0, trains)

    def _leave(self, end: _End) -> None:
        """End a connection for both ends. The last call to leave closes it, when no thread uses it any more."""
        with self._changed:
            end.has_ended = end.has_left = True
            both = [one for one in (end, end.peer) if one is not None]
            for one in both:
                one.close()
            if end in self._waiting[end.link]:
                self._waiting[end.link].remove(end)
            if self._in_use.get(end.link) is end:
                del self._in_use[end.link]
            if all(one.has_left for one in both):
                for one in both:
                    one.discard()


class _End:
    """One end of a relayed connection."""

    def __init__(self, link: str, sender: str, budget: Budget, changed: threading.Condition) -> None:
        """`sender`: its member. `budget`: what it may send. `changed`: lock of all ends."""
        self.link, self.sender, self.budget = link, sender, budget
        self.peer: _End | None = None
        self.look_at, self.trained_at = 0.0, time.monotonic()
        """When it is checked next whether its member is admitted; when its group was last seen to train."""
        self.is_closed = False
        """Whether it was cut."""
        self.has_ended = False
        """Whether no byte follows from it."""
        self.has_left = False
        """Whether its call no longer uses the connections."""
        self._changed = changed
        self._connection: socket.socket | None = None

    def take(self, connection: socket.socket) -> None:
        """Take the connection that showed the key of this end."""
        connection.settimeout(LOOK_SECONDS)
        with self._changed:
            if self.is_closed:
                connection.close()
                return
            self._connection = without_delay(connection)
            self._changed.notify_all()

    def connected(self) -> socket.socket:
        """Return the connection once it is there. Raises AskAgain."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self._connection is not None, LONGEST_WAIT)
            if self.is_closed or self._connection is None:
                raise AskAgain(f"an end of {self.link} did not dial the relay's port")
            return self._connection

    def close(self) -> None:
        """Cut the connection. Its descriptor stays open for the threads that use it."""
        with self._changed:
            self.is_closed = True
            if self._connection is not None:
                cut(self._connection)
            self._changed.notify_all()

    def discard(self) -> None:
        """Close the connection, which no thread uses, and drop the references between both ends."""
        self.peer = None
        if self._connection is not None:
            self._connection.close()
