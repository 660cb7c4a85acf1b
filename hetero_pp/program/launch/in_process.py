"""All members as threads of one process, with in-process links: the reference for the networked run, to the bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from hetero_pp.changed_keys import Values
from hetero_pp.errors import ConfigError, LinkClosed, RunFailed
from hetero_pp.faults import Missed
from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.in_process import InProcessLink
from hetero_pp.link.shared_lines import Lines
from hetero_pp.links import stage_link_name
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.watcher import Watcher
from hetero_pp.program.report.recorder import INTERRUPTED
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.topology import DatacenterReplica, ParticipantsReplica
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.host import begin_run, make_exchange
from replica_groups.gate import Gate
from replica_groups.round_length import StepsOf
from replica_groups.take_part import take_part


def run_in_process(
    spec: RunSpec,
    folder: RunFolder,
    on_report: Callable[[Report], None],
    resume: Values | None = None,
    steps_of: StepsOf | None = None,
    missed: Mapping[str, frozenset[int]] = MappingProxyType({}),
) -> None:
    """Train the whole topology, or go on with the run in the folder (see crew.launch).

    Where rounds are time, `steps_of` may say how many steps they had: a run with the same is the same, to the bit.
    `missed`: of replicas, the rounds whose records are there before their contributions arrive.

    Raises the first member's error, if any fails, ConfigError for replicas that need processes of their own, RunFailed
    if reports could not be followed.
    """
    members = MemberThreads(spec, folder, on_report, resume, steps_of, missed)
    try:
        members.begin()
        members.gate.open(spec.latest.outer.rounds)
        members.gate.wait_for_members()
        members.join()
    except BaseException as error:
        cause = str(error) or INTERRUPTED
        members.abort(cause, cause)
        raise
    finally:
        members.end_watching()
    members.raise_first_error()


def require_threads(spec: RunSpec) -> None:
    """Raise ConfigError for a replica whose engine starts processes of its own."""
    for index, replica in enumerate(spec.config.replicas):
        if isinstance(replica, DatacenterReplica) and replica.engine != "torch":
            raise ConfigError(
                ("replicas", index, "engine"),
                f"found `{replica.engine}`, expected `torch` with --in-process; leave out --in-process",
            )


class ThreadConnections:
    """Of a member to what is in this process. Implements Connections."""

    def __init__(
        self, exchange: Exchange, lines: Lines, upstream: InProcessLink | None, downstream: InProcessLink | None
    ) -> None:
        self.exchange, self.lines = exchange, lines
        self._upstream, self._downstream = upstream, downstream
        self._ends = LinkEnds()

    def listen(self) -> str:
        """See Connections: nobody has to find it."""
        return ""

    def open(self, epoch: int, upstream: str, downstream: str) -> LinkEnds:
        """See Connections."""
        above, below = self._upstream, self._downstream
        self._ends = LinkEnds(
            None if above is None else above.end("backward", epoch),
            None if below is None else below.end("forward", epoch),
        )
        return self._ends

    def give_up(self, before: int, cause: str) -> None:
        """See Connections."""
        for link in (self._upstream, self._downstream):
            if link is not None:
                link.give_up(before, cause)

    def close(self) -> None:
        """Close the links in use."""
        self._ends.close()


class MemberThreads:
    """The members of a run, each a thread, and who watches and audits them. They train as far as the gate is open."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        on_report: Callable[[Report], None],
        resume: Values | None = None,
        steps_of: StepsOf | None = None,
        missed: Mapping[str, frozenset[int]] = MappingProxyType({}),
    ) -> None:
        """`resume`, `missed`: see run_in_process. Raises ConfigError for replicas that need processes of their own."""
        require_threads(spec)
        torch.set_num_threads(spec.config.threads)
        self.exchange = make_exchange(spec, folder, resume, lonely=True)
        self.gate = Gate(spec.needed)
        self._resume = resume
        self._steps_of, self._missed = steps_of, missed
        self._spec, self._folder = spec, folder
        self._lines = Lines()
        self._links = _links(spec, self._lines)
        self._errors: list[Exception] = []
        self._auditor: Auditor | None = None
        self._watcher = Watcher(self.exchange.watch, on_report)
        self._threads = [
            threading.Thread(target=self._run, args=(member,), name=member.name, daemon=True)
            for member in spec.needed.values()
        ]

    def begin(self) -> None:
        """Let them join, and evaluate what they begin or go on with. Raises HeteroPPError, see begin_run."""
        for thread in self._threads:
            thread.start()
        self._auditor = begin_run(self.exchange, self._spec, self._folder, self._resume)

    def train(self, round_: int) -> None:
        """Let them train all rounds up to this one (0: none), and wait until all that they report of it is told.

        Raises the first error of a member, RunFailed if the reports could not be followed.
        """
        self.gate.open(round_)
        self.gate.wait_for_members()
        if round_ == self._spec.latest.outer.rounds and not self._errors:
            self.join()  # the auditor, too, for which no member waits
        self._watcher.catch_up(self.exchange.reported)
        self.raise_first_error()

    def join(self, seconds: float | None = None) -> None:
        """Wait for their end and the auditor's, for so long at most."""
        deadline = None if seconds is None else time.monotonic() + seconds

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        for thread in self._threads:
            if thread.is_alive():
                thread.join(left())
        if self._auditor is not None:
            self._auditor.join(left())

    def end_watching(self) -> None:
        """Wait until the last report is told; none comes after it."""
        self.exchange.end_watching()
        self._watcher.wait()

    def raise_first_error(self) -> None:
        """That of a member that did not fail because of another, if there is one, or of who follows the reports."""
        errors = self._errors
        if errors:
            raise next((error for error in errors if not isinstance(error, LinkClosed | RunFailed)), errors[0])
        self._watcher.raise_error()

    def abort(self, cause: str, links_cause: str) -> None:
        """End the run: whoever waits for the exchange, or for a neighbour, hears why."""
        self.exchange.fail(cause)
        self.gate.shut(cause)
        for link in self._links.values():
            link.abort(links_cause)

    def _run(self, member: MemberSpec) -> None:
        torch.set_num_threads(self._spec.config.threads)
        connections, faults = self._connections(member), Missed(self._missed.get(member.replica.name, ()))
        try:
            take_part(
                self._spec,
                member,
                connections,
                self._folder,
                gate=self.gate,
                steps_of=self._steps_of,
                faults=faults,
            )
            connections.close()
        except Exception as error:  # noqa: BLE001 (a bug in one thread must not leave the others waiting)
            self._errors.append(error)
            self.abort(f"{member.name}: {error}", str(error))
        finally:
            self.gate.leave(member.name)

    def _connections(self, member: MemberSpec) -> ThreadConnections:
        name, stage = member.replica.name, member.stage
        hops = [] if stage is None else [stage.index - 1, stage.index]
        links = [self._links.get(stage_link_name(name, hop)) for hop in hops] or [None, None]
        return ThreadConnections(self.exchange, self._lines, *links)


def _links(spec: RunSpec, lines: Lines) -> Mapping[str, InProcessLink]:
    """The links between the stages of all groups, by name."""
    names = [
        stage_link_name(replica.name, hop)
        for replica in spec.config.replicas
        if isinstance(replica, ParticipantsReplica)
        for hop in range(replica.stage_count - 1)
    ]
    return {name: InProcessLink(spec.links[name], spec.config.seed, lines) for name in names}
