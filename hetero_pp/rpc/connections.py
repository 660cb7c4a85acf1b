"""How a member that is a process of its own reaches the rest of its run: over gRPC."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from types import TracebackType

from hetero_pp.errors import ExchangeLost, HeteroPPError, LinkClosed, LinkTimeout
from hetero_pp.faults import NO_FAULTS, Faults
from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import RELAYED, stage_link_name
from hetero_pp.messages.messages_pb2 import Failure, Refusal, Report
from hetero_pp.refusals import Refusals
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.link_end import GrpcLinkEnd
from hetero_pp.rpc.relayed import RelayedDialler, RelayedListener
from hetero_pp.rpc.stage_link import StageLinkDialer, StageLinkServer
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.topology import ParticipantsReplica

CONNECT_TIMEOUT = 120.0
DIRECT_SECONDS = 10.0
"""For so long a neighbour is dialled where it says that it listens, before it is sought through the relay."""
LOOPBACK = ("127.", "localhost:", "[::1]:")
CUT_OFF_SECONDS = 60.0
"""For so long a link between stages that is cut off is dialled again: the neighbour may live."""

REMEMBERED_REPORTS = 20_000
"""By which a report that comes again is known; more than an exchange tells again."""


def reports_of(
    address: str, credentials: Credentials, on_silence: Callable[[bool], None] = lambda _: None
) -> Iterator[Report]:
    """Every report of the run whose exchange is at an address, until it is over; see ExchangeClient.watch.

    An exchange that is gone is waited for: another may take its place, and begins in its own way. `on_silence` is told
    when it is gone or does not answer, and when it does again.
    """
    with closing(ExchangeClient(address, credentials)) as exchange:
        exchange.wait_until_ready(CONNECT_TIMEOUT)  # on a busy machine the first attempt may fail
        is_new = _Once()
        while True:
            try:
                yield from filter(is_new, exchange.watch())
                return
            except ExchangeLost:
                on_silence(True)
                exchange.pause()
                exchange.wait_until_ready(CONNECT_TIMEOUT)
                on_silence(False)


class _Once:
    """Lets every report through once: an exchange that was out of reach, and is not another one, tells them again."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}

    def __call__(self, report: Report) -> bool:
        key = hashlib.blake2b(report.SerializeToString(deterministic=True), digest_size=16).digest()
        if key in self._known:
            return False
        self._known[key] = None
        if len(self._known) > REMEMBERED_REPORTS:
            del self._known[next(iter(self._known))]
        return True


def tell_died(address: str, credentials: Credentials, member: str, cause: str, term: int | None) -> None:
    """Tell the exchange at an address that a member's process has ended; in vain if it is gone, too."""
    client = ExchangeClient(address, credentials, timeout=CONNECT_TIMEOUT)
    with closing(client) as exchange, suppress(HeteroPPError):
        exchange.wait_until_ready(CONNECT_TIMEOUT)
        exchange.died(member, cause, term)


def reports_to_members(
    address: str,
    credentials: Credentials,
    members: Sequence[str],
    timeout: float,
    on_wait: Callable[[float], None],
) -> Iterator[Report]:
    """What some members tell, and what concerns everybody, until these members are through.

    An exchange that is gone is waited for, as another may take its place. While none answers `on_wait` is told for how
    long, at growing intervals. Raises LinkTimeout, and LinkClosed if the run ends before these members are through.
    """
    left = set(members)
    with closing(ExchangeClient(address, credentials)) as exchange:
        is_new = _Once()
        while True:
            exchange.wait_until_ready(timeout, on_wait)
            with suppress(ExchangeLost):
                for report in filter(is_new, exchange.watch(members)):
                    yield report
                    if report.HasField("finished"):
                        left.discard(report.member)
                    if not left:
                        return
                raise LinkClosed(f"the exchange at {address} has ended the run")
            exchange.pause()


class NetworkConnections:
    """Of a member to the exchange at `address` and to the stages beside it. Implements Connections."""

    def __init__(
        self,
        spec: RunSpec,
        member: MemberSpec,
        address: str,
        credentials: Credentials,
        lines: Lines,
        faults: Faults = NO_FAULTS,
        listen: str = "",
    ) -> None:
        """`listen`: for the stage before, instead of where the configuration says."""
        self.lines, self._faults, self._listen = lines, faults, listen
        self.exchange = ExchangeClient(address, credentials, timeout=spec.config.exchange.timeout)
        self._spec, self._member, self._credentials = spec, member, credentials
        self._refusals = Refusals(self._report_refusal)
        self._server: StageLinkServer | None = None
        self._dialer = self._make_dialer()
        self._address, self._unreached = address, set[str]()
        self._to_relay: RelayedDialler | None = None
        self._from_relay: RelayedListener | None = None
        self._ends = LinkEnds()

    def __enter__(self) -> NetworkConnections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the links, or abort them with what went wrong; listen no more, and leave the exchange."""
        if error is None:
            self._ends.close()
        else:
            self._ends.abort(str(error))
        if self._dialer is not None:
            self._dialer.close()
        if self._server is not None:
            self._server.close()
        for relayed in (self._to_relay, self._from_relay):
            if relayed is not None:
                relayed.close()
        self._refusals.flush()
        self.exchange.close()

    def listen(self) -> str:
        """See Connections."""
        replica, stage = self._member.replica, self._member.stage
        if stage is None or stage.is_first or not isinstance(replica, ParticipantsReplica):
            return ""
        link = self._spec.links[stage_link_name(replica.name, stage.index - 1)]
        seed = self._spec.config.seed
        own, refused = self._credentials.of_link(link.name), self._refusals.add
        self._server = StageLinkServer(link, own, self._member.name, seed, refused, self.lines, CUT_OFF_SECONDS)
        settings = replica.stage_settings(stage.index)
        listen = self._listen or (settings and settings.listen) or "127.0.0.1:0"
        if listen == RELAYED:
            self._from_relay = RelayedListener(self._address, self._credentials, link.name)
            self._server.listen(self._from_relay.address)
            return RELAYED
        address = f"{listen.rsplit(':', 1)[0]}:{self._server.listen(listen)}"
        if self._may_be_relayed(address):
            self._from_relay = RelayedListener(self._address, self._credentials, link.name, address)
        return address

    def open(self, epoch: int, downstream: str) -> LinkEnds:
        """See Connections: dial the stage after, and wait for the stage before."""
        below, above = None, None
        if self._dialer is not None:
            below = self._dial(self._dialer, downstream, epoch)
            self._ends = LinkEnds(None, below)
        if self._server is not None:
            above = self._server.accept(CONNECT_TIMEOUT, epoch)
        self._ends = LinkEnds(above, below)
        return self._ends

    def give_up(self, before: int, cause: str) -> None:
        """See Connections."""
        for links in (self._dialer, self._server):
            if links is not None:
                links.give_up(before, cause)

    def _dial(self, dialer: StageLinkDialer, address: str, epoch: int) -> GrpcLinkEnd:
        """Where the stage after says that it listens, or else through the relay."""
        if address != RELAYED and address not in self._unreached:
            relayed = self._may_be_relayed(address)
            routed = self._faults.route(dialer.link, address)
            try:
                return dialer.dial(routed, epoch, DIRECT_SECONDS if relayed else CONNECT_TIMEOUT)
            except LinkTimeout as error:
                if not relayed:
                    raise
                self._unreached.add(address)
                print(f"{self._member.name}: {error}: sought through the relay", file=sys.stderr, flush=True)
        if self._to_relay is None:
            self._to_relay = RelayedDialler(self._address, self._credentials, dialer.link)
        return dialer.dial(self._to_relay.address, epoch, CONNECT_TIMEOUT)

    def _may_be_relayed(self, address: str) -> bool:
        """Whether who listens there may be out of reach: on another machine, of a run that has a relay."""
        return self._credentials.identity is not None and not address.startswith(LOOPBACK)

    def _make_dialer(self) -> StageLinkDialer | None:
        replica, stage = self._member.replica, self._member.stage
        if stage is None or stage.is_last:
            return None
        link = self._spec.links[stage_link_name(replica.name, stage.index)]
        seed = self._spec.config.seed
        own = self._credentials.of_link(link.name)
        return StageLinkDialer(link, own, self._member.name, seed, self.lines, CUT_OFF_SECONDS)

    def report_failure(self, cause: str, is_consequence: bool = False) -> None:
        """Say why, before the connection's end says only that this member is gone."""
        failure = Failure(cause=cause, consequence=is_consequence)
        with suppress(HeteroPPError):  # if the exchange is gone too, the launcher sees the exit code
            self.exchange.report([Report(member=self._member.name, failure=failure)])

    def _report_refusal(self, refusal: Refusal) -> None:
        """So that what a stage did not let in is counted for the run."""
        with suppress(HeteroPPError):  # who is refused is no reason to fail
            self.exchange.report([Report(member=self._member.name, refusal=refusal)])
