"""Trains a run with all members as threads of one process: the bit-exact reference for the networked run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from hetero_pp.config.changes import LAST, Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, stage_link_name
from hetero_pp.config.member_inputs import devices_of, stage_devices
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica
from hetero_pp.core.errors import ConfigError, LinkClosed, OutOfMemory, RunFailed
from hetero_pp.link.in_process import InProcessLink
from hetero_pp.link.protocol import NOT_KNOWN, Holders, LinkEnds
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import GIVEN_UP, Failure, MembershipEvent, Report
from hetero_pp.program.launch.supervisor import Watcher
from hetero_pp.program.report.recorder import INTERRUPTED
from hetero_pp.store.faults import FaultPhase, Faults
from replica_groups.audit.commitments import audited_member
from replica_groups.audit.in_exchange import Followers, audited, followed
from replica_groups.engines.ranks import Ranks
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.host import begin_run, make_exchange, rules_of
from replica_groups.member.gate import Gate
from replica_groups.member.inner_loops import StepsOf
from replica_groups.member.take_part import take_part

_SECONDS_BETWEEN_LOOKS = 1.0  # interval at which a wait for a member looks whether the run continues without it


def run_in_process(
    spec: RunSpec,
    folder: RunFolder,
    on_report: Callable[[Report], None],
    resume: Values | None = None,
    steps_of: StepsOf | None = None,
    missed: Mapping[str, frozenset[int]] = MappingProxyType({}),
    restarts: Mapping[str, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> None:
    """Train the whole topology, or resume the run in the folder. `resume` is as in `supervisor.launch`.

    `steps_of`: for rounds of fixed duration, the steps that they had in an earlier run; the result is then equal to the
    bit. `missed`: replica -> rounds whose records exist before its contributions arrive. `restarts`: slot -> (round,
    step) at which another holder took it, in their order, as in the records of an earlier run; the step after the last
    one is the contribution. The result is equal to the bit if both runs saved their states after the round before.

    Raises the first error of a member, ConfigError for replicas that need separate processes, and RunFailed if reports
    could not be followed.
    """
    members = MemberThreads(spec, folder, on_report, resume, steps_of, missed, restarts)
    try:
        members.begin()
        members.gate.open(LAST)
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
    """Raise ConfigError for engines that start processes, and for audits by other processes."""
    if spec.config.audit.by == "validators":
        raise ConfigError(("audit", "by"), "found `validators`, expected `exchange` with --in-process")
    for index, replica in enumerate(spec.config.replicas):
        if isinstance(replica, DatacenterReplica) and replica.engine != "torch":
            expected = "expected `torch` with --in-process; leave out --in-process"
            raise ConfigError(("replicas", index, "engine"), f"found `{replica.engine}`, {expected}")


class _Died(Exception):
    """A member's thread ends, as its process might, and another one takes its slot."""


class _ThreadFaults(Faults):
    """Lets a member's contributions to some rounds come late, and the member die at the given steps."""

    def __init__(self, run: MemberThreads, spec: RunSpec, member: MemberSpec) -> None:
        replica, self._run, self._member = member.replica.name, run, member
        self.missed, self._steps = run.missed.get(replica, frozenset()), spec.steps_of(replica)
        self._is_first = member.stage is not None and member.stage.is_first

    def computes(self, round_: int, step: int, micro_batch: int, is_forward: bool) -> None:
        # All stages have applied the step before once the first one has got a gradient, and another one an activation,
        # or the flush after the last step.
        if is_forward is not self._is_first:
            self._die_at(round_, step)

    def reached(self, phase: FaultPhase, round_: int) -> None:
        if phase is not FaultPhase.CONTRIBUTING:
            return
        run, runner, end = self._run, self._run.exchange.runner, [(round_, self._steps)]
        replica = runner.coordinator.replicas[self._member.replica.name]
        slots = [slot.name for slot in replica.slots]

        def is_due() -> bool:
            # A first stage gets no message after the last step. Once the next stage contributes, that has applied it.
            if self._is_first and run.restarts.get(self._member.name, [])[:1] == end:
                return run.contributing.get(slots[1]) == round_
            # In fragments the others may complete a contribution without a stage that is to die before.
            return not any(run.restarts.get(slot, [])[:1] == end for slot in slots)

        with runner.changed:
            run.contributing[self._member.name] = round_
            runner.changed.notify_all()
            runner.changed.wait_for(lambda: is_due() or replica.round != round_ or runner.failure is not None)
            if not is_due():
                return  # its group has lost another stage, and resumes
        self._die_at(round_, self._steps)

    def _die_at(self, round_: int, step: int | None) -> None:
        if self._run.restarts.get(self._member.name, [])[:1] == [(round_, step)]:
            raise _Died(f"restarted at step {step} of round {round_}")


class ThreadConnections:
    """Implements Connections for a member by the exchange and the links of this process."""

    def __init__(
        self, exchange: Exchange, lines: Lines, upstream: InProcessLink | None, downstream: InProcessLink | None
    ) -> None:
        self.exchange, self.lines = exchange, lines
        self._upstream, self._downstream = upstream, downstream
        self._ends = LinkEnds()

    def listen(self) -> str:
        """Return an empty address: neighbours share the link objects."""
        return ""

    def open(self, generation: int, upstream: str, downstream: str, holders: Holders = NOT_KNOWN) -> LinkEnds:
        above, below = self._upstream, self._downstream
        self._ends = LinkEnds(
            None if above is None else above.end("backward", generation),
            None if below is None else below.end("forward", generation),
        )
        return self._ends

    def give_up(self, before: int, cause: str) -> None:
        for link in (self._upstream, self._downstream):
            if link is not None:
                link.give_up(before, cause)

    def close(self) -> None:
        self._ends.close()


class MemberThreads:
    """The members of a run as threads, with the threads that follow their reports and audit rounds.

    Members train as far as the gate is open.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        on_report: Callable[[Report], None],
        resume: Values | None = None,
        steps_of: StepsOf | None = None,
        missed: Mapping[str, frozenset[int]] = MappingProxyType({}),
        restarts: Mapping[str, Sequence[tuple[int, int]]] = MappingProxyType({}),
    ) -> None:
        """`resume`, `steps_of`, `missed` and `restarts` are as in `run_in_process`.

        Raises ConfigError for replicas that need separate processes.
        """
        require_threads(spec)
        torch.set_num_threads(spec.config.threads)
        self.exchange = audited(make_exchange(spec, folder, resume, lonely=True), spec)
        self.gate = Gate(spec.needed)
        self._resume = resume
        self._steps_of, self.missed = steps_of, missed
        self.restarts = {slot: list(of) for slot, of in restarts.items()}  # those that have not happened
        self.contributing = dict[str, int]()  # by member, the last round to which it began to contribute
        self._spec, self._folder = spec, folder
        self._devices = devices_of(spec, list(spec.needed))
        self._lines = Lines()
        self._links = {
            (name := stage_link_name(replica.name, hop)): InProcessLink(spec.links[name], spec.config.seed, self._lines)
            for replica in spec.config.replicas
            if isinstance(replica, ParticipantsReplica)
            for hop in range(replica.stage_count - 1)
        }
        self._errors: list[Exception] = []
        self._on_report = on_report
        self._lost: set[str] = set()
        """Replicas without which the run continues, because a device of theirs has too little memory."""
        self._followers: Followers | None = None
        self._watcher = Watcher(self.exchange.watch, on_report)
        self._threads = [
            threading.Thread(target=self._run, args=(member,), name=member.name, daemon=True)
            for member in spec.needed.values()
        ]

    def begin(self) -> None:
        """Start the members, which join and evaluate their first parameters.

        Raises HeteroPPError if the run cannot begin.
        """
        for thread in self._threads:
            thread.start()
        auditor = begin_run(self.exchange, self._spec, self._folder, self._resume)
        self._followers = followed(auditor, self.exchange, self._spec, self._folder)

    def train(self, round_: int) -> None:
        """Train all rounds up to `round_` (0: none), and wait until all reports about them have been handed on.

        Raises the first error of a member, or RunFailed if the reports could not be followed.
        """
        self.gate.open(round_)
        self.gate.wait_for_members()
        if self.exchange.coordinator.is_over and not self._errors:
            self.join()  # also wait for the auditor, because no member does
        self._watcher.catch_up(self.exchange.reports.watchers.reported)
        self.raise_first_error()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the members and the auditor have ended, at most for this many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        for member, thread in zip(self._spec.needed.values(), self._threads, strict=True):
            while thread.is_alive() and member.replica.name not in self._lost and left() != 0:
                thread.join(min(_SECONDS_BETWEEN_LOOKS, left() or _SECONDS_BETWEEN_LOOKS))
        if self._followers is not None:
            self._followers.join(left())

    def end_watching(self) -> None:
        """Wait until the last report has been handed on."""
        self.exchange.end_watching()
        self._watcher.wait()

    def raise_first_error(self) -> None:
        """Raise the root error of the members, if any; else the error of the thread that follows the reports.

        An error that only follows from another member's error is raised if there is no other.
        """
        errors = self._errors
        if errors:
            raise next((error for error in errors if not isinstance(error, LinkClosed | RunFailed)), errors[0])
        self._watcher.raise_error()

    def abort(self, cause: str, links_cause: str) -> None:
        """End the run. Members that wait for the exchange or a neighbour raise the cause."""
        self.exchange.fail(cause)
        self.gate.shut(cause)
        for link in self._links.values():
            link.abort(links_cause)

    def _run(self, member: MemberSpec) -> None:
        torch.set_num_threads(self._spec.config.threads)
        name, stage = member.replica.name, member.stage
        hops = [] if stage is None else [stage.index - 1, stage.index]
        links = [self._links.get(stage_link_name(name, hop)) for hop in hops] or [None, None]
        connections = ThreadConnections(self.exchange, self._lines, *links)
        faults, is_over = _ThreadFaults(self, self._spec, member), False
        try:
            while not is_over:
                try:
                    take_part(
                        self._spec,
                        member,
                        connections,
                        self._folder,
                        Ranks(device=(device := self._devices[member.name]), devices=stage_devices(member, device)),
                        gate=self.gate,
                        steps_of=self._steps_of,
                        faults=faults,
                        audited=audited_member,
                    )
                    is_over = True
                except _Died as error:
                    generation = self.exchange.coordinator.generation_of(member.name)
                    self.exchange.died(member.name, str(error))
                    del self.restarts[member.name][0]  # not before: the others wait until the exchange knows
                    connections.give_up(generation + 1, str(error))
            connections.close()
        except Exception as error:  # noqa: BLE001 (a bug in one thread must not leave the others waiting)
            if isinstance(error, OutOfMemory) and self._goes_on_without(member, str(error)):
                return
            if member.replica.name not in self._lost:
                self._errors.append(error)
                self.abort(f"{member.name}: {error}", str(error))
        finally:
            self.gate.leave(member.name)

    def _goes_on_without(self, member: MemberSpec, cause: str) -> bool:
        """Report that a member has ended; return whether the run continues without its replica, as a launched one does.

        The other stages of its group then wait until the run is over.
        """
        if rules_of(self._spec).is_lost_without({*self._lost, member.replica.name}):
            return False
        self._lost.add(member.replica.name)
        told = f"{member.name}: {cause}, so the run continues without it"
        membership_event = MembershipEvent(what=GIVEN_UP, slot=member.name, cause=told)
        self._on_report(Report(time=time.time(), member=EXCHANGE, membership_event=membership_event))
        self.exchange.report([Report(member=member.name, failure=Failure(cause=cause))])
        for stage in self._spec.needed.values():
            if stage.replica is member.replica:
                self.gate.leave(stage.name)
        return True
