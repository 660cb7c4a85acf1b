"""Connections of a member that is a process of its own to the rest of its run, over gRPC."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from types import TracebackType

from hetero_pp.config.lines import EXCHANGE, RELAYED, stage_link_name
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import ExchangeLost, HeteroPPError, LinkClosed, RunOver
from hetero_pp.link.protocol import NOT_KNOWN, Holders, LinkEnds
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import Failure, Refusal, Report
from hetero_pp.messages.refusals import Refusals
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials, IdentitySigner
from hetero_pp.rpc.limits import CONNECT_TIMEOUT, CUT_OFF_SECONDS
from hetero_pp.rpc.link_end import LinkSide
from hetero_pp.rpc.relay import LocalAddress
from hetero_pp.rpc.stage_link import StageLink
from hetero_pp.store.faults import NO_FAULTS, Faults

REMEMBERED_REPORTS = 20_000
"""Number of reports that are remembered to drop repeated ones: more than an exchange repeats."""


def reports_of(
    address: str, credentials: Credentials, on_silence: Callable[[bool], None] = lambda _: None
) -> Iterator[Report]:
    """Yield every report of a run from the exchange at an address, until the run is over.

    An exchange that is gone is waited for, as another may take its place. `on_silence` is told when it is gone or does
    not answer, and when it answers again.
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
    """Passes every report once, because an exchange repeats its reports after an interruption."""

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


def reports_to_members(
    address: str,
    credentials: Credentials,
    members: Sequence[str],
    timeout: float,
    on_wait: Callable[[float, bool], None],
    on_refused: Callable[[str], None] = lambda _: None,
    beside: Sequence[str] = (),
) -> Iterator[Report]:
    """Yield the state of the run, then reports of some members and those that concern all, until these are through.

    `beside`: further members, whose reports are wanted, too.

    An exchange that is gone is waited for, as another may take its place. While none answers, `on_wait` receives at
    growing intervals the seconds waited and whether one had answered before. `on_refused`: as in
    ExchangeClient.wait_until_ready.

    Raises LinkTimeout, Refused if the exchange is not of the run. If the exchange ends before these members are
    through: RunOver after the last round, else LinkClosed.
    """
    left, over, has_answered = {*members, *beside} - {EXCHANGE}, None, False

    def waits(seconds: float) -> None:
        on_wait(seconds, has_answered)

    with closing(ExchangeClient(address, credentials)) as exchange:
        is_new = _Once()
        while True:
            exchange.wait_until_ready(timeout, waits, on_refused)
            has_answered = True
            with suppress(ExchangeLost):
                for report in filter(is_new, exchange.watch([*members, *beside], so_far=True)):
                    yield report
                    if report.HasField("over"):
                        over = RunOver.after(report.over.round, report.over.rounds)
                    if report.HasField("finished"):
                        left.discard(report.member)
                    if not left:
                        return
                raise over or LinkClosed(f"the exchange at {address} has ended the run")
            if over is not None:
                raise over
            exchange.pause()


class NetworkConnections:
    """Connections of a member to the exchange at `address` and to its neighbouring stages. Implements Connections."""

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
        """`listen`: address for the neighbouring stages, instead of the configured one."""
        self.lines, self._listen = lines, listen
        stores, timeout = spec.config.store.origins(), spec.config.exchange.timeout
        self.exchange = ExchangeClient(address, credentials, timeout=timeout, stores=stores)
        self._member = member
        self._signer = None if credentials.identity is None else IdentitySigner(credentials.identity)

        def report(refusal: Refusal) -> None:
            """Report a refusal of a neighbour, so that the run counts it."""
            with suppress(HeteroPPError):  # a refused neighbour is no reason to fail
                self.exchange.report([Report(member=member.name, refusal=refusal)])

        self._refusals = Refusals(report)

        def neighbour(index: int) -> StageLink:
            link = spec.links[stage_link_name(member.replica.name, index)]
            own, seed, refused = credentials.of_link(link.name), spec.config.seed, self._refusals.add
            side = LinkSide(link, own, member.name, seed, lines, CUT_OFF_SECONDS, on_refusal=refused)
            return StageLink(side, exchange=address, faults=faults)

        stage = member.stage
        self._before = None if stage is None or stage.is_first else neighbour(stage.index - 1)
        self._after = None if stage is None or stage.is_last else neighbour(stage.index)
        self._local: LocalAddress | None = None
        self._ends = LinkEnds()

    def __enter__(self) -> NetworkConnections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the links, or abort them with the error; stop listening, and leave the exchange."""
        if error is None:
            self._ends.close()
        else:
            self._ends.abort(str(error))
        for neighbour in self._both:
            neighbour.close()
        if self._local is not None:
            self._local.close()
        self._refusals.flush()
        self.exchange.close()

    @property
    def _both(self) -> list[StageLink]:
        return [neighbour for neighbour in (self._before, self._after) if neighbour is not None]

    def listen(self) -> str:
        replica, stage = self._member.replica, self._member.stage
        if not self._both or stage is None or not isinstance(replica, ParticipantsReplica):
            return ""
        listen = self._listen or replica.listen_of(stage.index) or ("" if stage.is_first else "127.0.0.1:0")
        if listen == "":
            return ""
        first, *others = self._both
        if listen == RELAYED:
            self._local = LocalAddress()
            first.listen(str(self._local), *others)
            found = str(self._local)
        else:
            found = f"{listen.rsplit(':', 1)[0]}:{first.listen(listen, *others)}"
        for neighbour in self._both:
            neighbour.listens = found
        return RELAYED if listen == RELAYED else found

    def open(self, generation: int, upstream: str, downstream: str, holders: Holders = NOT_KNOWN) -> LinkEnds:
        for neighbour, holder in zip((self._before, self._after), holders, strict=True):
            if neighbour is not None:
                neighbour.expect(generation, holder)
        for neighbour, address in ((self._before, upstream), (self._after, downstream)):
            if neighbour is not None and not address:
                neighbour.be_found(generation)
        before, after = holders
        above = self._before.reach(upstream, generation, before) if self._before is not None and upstream else None
        self._ends = LinkEnds(above, None)
        below = self._after.reach(downstream, generation, after) if self._after is not None and downstream else None
        self._ends = LinkEnds(above, below)
        if self._before is not None and above is None:
            above = self._before.accept(CONNECT_TIMEOUT, generation)
            self._ends = LinkEnds(above, below)
        if self._after is not None and below is None:
            below = self._after.accept(CONNECT_TIMEOUT, generation)
        self._ends = LinkEnds(above, below, generation, self._signer, holders)
        return self._ends

    def give_up(self, before: int, cause: str) -> None:
        for neighbour in self._both:
            neighbour.give_up(before, cause)

    def report_failure(self, cause: str, is_consequence: bool = False) -> None:
        """Report the cause, before the end of the connection tells only that this member is gone."""
        failure = Failure(cause=cause, consequence=is_consequence)
        with suppress(HeteroPPError):  # if the exchange is gone too, the launcher sees the exit code
            self.exchange.report([Report(member=self._member.name, failure=failure)])
