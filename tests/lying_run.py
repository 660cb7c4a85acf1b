"""A live run of three replicas, in threads and over gRPC with TLS, in which one member's calls are altered."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from google.protobuf.message import Message
from members import TIMEOUT

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from lies import WORST, Call, Lie, lies_about

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import LAUNCHER
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.shared import told_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError, LinkError, RunFailed, RunOver
from hetero_pp.link.shaping import Lines
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import BlobHeader, MembershipEventKind, Report
from hetero_pp.program.launch.supervisor import tell_died
from hetero_pp.pseudo_gradient.contribution import split_blobs
from hetero_pp.rpc import services
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Credentials, Identity, Secret, as_text, digest_of, make_ticket, new_key
from hetero_pp.rpc.relay import MeetingPoint
from hetero_pp.simulator.planner.grouping import group_spares
from replica_groups.audit.commitments import audited_member
from replica_groups.audit.in_exchange import audited, followed
from replica_groups.exchange import memberships
from replica_groups.exchange import server as served_exchange
from replica_groups.exchange.admission import RunForGuests
from replica_groups.exchange.audits import read_audit
from replica_groups.exchange.host import begin_run, make_exchange
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.server import OpenHouse, serve_exchange
from replica_groups.exchange.waiting_room import WaitingRoom
from replica_groups.member import session
from replica_groups.member.take_part import take_part

SECRET = Secret("the secret of a run that has liars")
HOUR = 3600.0
HONEST = ("a", "b")
MOST_RESTARTS = 400
MOST_MISSED = 4
"""Consecutive rounds without a liar's replica before it is made to return."""
SECONDS_TO_RETURN = 3.0
SECONDS_A_RUN = 240.0
"""Far longer than a run takes; a run that has not ended by then is stalled."""


def lying_spec(
    corpus: Path,
    rounds: int,
    liars: Mapping[str, Mapping[str, Any]],
    overlap: bool = False,
    layers: int = 1,
    **changes: Any,
) -> RunSpec:
    """Return a run of the honest replicas `a` and `b`, and of the replicas `liars`: name -> description."""
    honest = [{"name": name, "kind": "datacenter", "batch_size": 1} for name in HONEST]
    config = {
        "name": "t",
        "seed": 3,
        "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": layers},
        "data": {"corpus": str(corpus), "sequence_length": 16, "validation_sequences": 1, "repeat": True},
        "inner": {"steps": 2, "learning_rate": 0.01, "final_learning_rate_share": 1},
        "outer": {"rounds": rounds, "weights": "tokens", "compression": {"density": 1 / 8}, "overlap": int(overlap)},
        "checkpoints": {"every": 5},
        "exchange": {"grace": {"least": "20 s", "most": "20 s"}, "lease": {"least": "60 s", "most": "60 s"}},
        "replicas": [*honest, *({"name": name, "batch_size": 1, **one} for name, one in liars.items())],
    }
    return RunSpec(RunConfig.model_validate(config | changes), 256)


class LyingRun:
    """One run from start to end.

    Members of other replicas than `a` and `b` were invited by tickets. They are restarted after a failure, as by a
    supervisor.
    """

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.spec = spec
        self.folder = RunFolder(folder / "runs" / "t")
        self.errors: dict[str, list[Exception]] = defaultdict(list)
        """Member -> errors with which it failed."""
        self.told: list[Report] = []
        """Reports that an observer of the run received."""
        self.deposited: dict[tuple[str, int, str], set[tuple[bytes, int]]] = defaultdict(set)
        """(replica, round, block) -> digests and steps of the blobs that its members passed to their clients."""
        self._waited_in = 0
        """Last round that was held open for liars."""
        self._stack = ExitStack()
        self._threads: list[threading.Thread] = []

    # ---- parts of the run ----

    def __enter__(self) -> LyingRun:
        self.folder.path.mkdir(parents=True)
        self.exchange = audited(make_exchange(self.spec, self.folder), self.spec)
        self.memberships = Memberships(self.folder.memberships)
        self._stack.callback(self.memberships.close)
        house = OpenHouse(
            self.memberships,
            RunForGuests(*told_of(self.spec.config)),
            WaitingRoom(self.spec.optional_slots, group_spares),
            self.spec.unnamed_slots,
        )
        self._stack.enter_context(mock.patch.object(served_exchange, "JOINS_AT_ONCE", MOST_RESTARTS))
        self._stack.enter_context(mock.patch.object(memberships, "MOST_BLAMED", MOST_RESTARTS))
        # Otherwise a liar, whose lies have many megabytes, waits for most of the run, and is in few rounds.
        self._stack.enter_context(mock.patch.object(services, "REQUEST_BYTES_A_SECOND", 1e12))
        self.meeting_point = MeetingPoint("127.0.0.1:0")
        self._stack.callback(self.meeting_point.close)
        server, port = serve_exchange(
            self.exchange, SECRET, "127.0.0.1:0", encrypted=True, open_house=house, meeting_point=self.meeting_point
        )
        self._stack.callback(lambda: server.stop(None).wait(TIMEOUT))
        self._stack.callback(self.exchange.fail, "the test is over")
        self.address = f"127.0.0.1:{port}"
        self.credentials = {name: self._credentials_of(name) for name in self.spec.members}
        self._stack.enter_context(
            mock.patch.object(ExchangeClient, "deposit_blob", self._noting(ExchangeClient.deposit_blob))
        )
        self._stack.enter_context(mock.patch.object(session, "SECONDS_BETWEEN_HEARTBEATS", 0.2))
        self._stack.enter_context(mock.patch.object(served_exchange, "LONGEST_WAIT", 1.0))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for thread in self._threads:
            thread.join(TIMEOUT)

    def _credentials_of(self, member: str) -> Credentials:
        if self.spec.members[member].replica.name in HONEST:
            return SECRET.credentials(member, encrypted=True)
        key, ticket = new_key(), self.memberships.invite(member, HOUR)
        holder = self.memberships.enrol(ticket, digest_of(key.public_key()), [], HOUR)
        certificate = SECRET.authority.sign(key.public_key(), member, holder.number, holder.until)
        return Credentials(member, identity=Identity(certificate, as_text(key), SECRET.authority.certificate))

    def ticket(self) -> Credentials:
        """Return the credentials of a host that shows a ticket."""
        ticket = make_ticket(
            "t", self.address, SECRET.authority, self.memberships.invite(None, HOUR), time.time() + HOUR
        )
        return Credentials(ticket.identity.shown.name, identity=ticket.identity)

    def _noting(self, deposit: Callable[..., None]) -> Callable[..., None]:
        """Record what members deposit, before it is altered."""

        def note(client: ExchangeClient, header: BlobHeader, data: bytes, caller: Caller) -> None:
            if caller.name == HONEST[0] and header.round > self._waited_in:
                self._waited_in = header.round
                self._wait_for_liars()
            for one, part in split_blobs(header, data):
                own = self.deposited[one.replica, one.round, one.block]
                own.add((hashlib.sha256(part).digest(), one.steps))
            deposit(client, header, data, caller)

        return note

    def _wait_for_liars(self) -> None:
        """Wait until the liars train again, so that few rounds close without them.

        Some lies leave them without work.
        """
        liars = [one for name, one in self.exchange.coordinator.replicas.items() if name not in HONEST]
        with self.exchange.runner.changed:
            self.exchange.runner.changed.wait_for(
                lambda: all(one.alive and one.round is not None for one in liars), SECONDS_TO_RETURN
            )

    # ---- running ----

    def until_over(self) -> None:
        """Train all rounds. Raises AssertionError if the run stalls."""
        self._threads = [threading.Thread(target=self._serve, name="serve", daemon=True)]
        self._threads += [
            threading.Thread(target=self._supervise, args=(name,), name=name, daemon=True) for name in self.spec.members
        ]
        watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in (watcher, *self._threads):
            thread.start()
        until = time.monotonic() + SECONDS_A_RUN
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            assert not thread.is_alive(), f"after {SECONDS_A_RUN:.0f} s, these threads go on:\n{self._stacks()}"
        watcher.join(TIMEOUT)

    def _stacks(self) -> str:
        """Return where each thread of a run is that has not ended."""
        frames = sys._current_frames()
        alive = [(one.name, frame) for one in self._threads if (frame := frames.get(one.ident or 0)) is not None]
        return "\n".join(f"{name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in alive)

    def _watch(self) -> None:
        """Record reports. End a liar's incarnations once rounds exclude its replica repeatedly, so that it returns."""
        missed = Counter[str]()
        for report in self.exchange.watch():
            self.told.append(report)
            if not report.HasField("round_closed"):
                continue
            counted = {one.replica for one in report.round_closed.contributions}
            for name, member in self.spec.members.items():
                missed[name] = 0 if member.replica.name in {*counted, *HONEST} else missed[name] + 1
                if missed[name] == MOST_MISSED:
                    missed[name] = 0
                    self.exchange.died(name, "it does not come back by itself")

    def _serve(self) -> None:
        with suppress(RunFailed):
            auditor = begin_run(self.exchange, self.spec, self.folder, None)
            followers = followed(auditor, self.exchange, self.spec, self.folder)
            self.exchange.wait_until_finished()
            followers.join()
        self.exchange.end_watching()

    def _supervise(self, name: str) -> None:
        """Run a member; restart the members of liars as long as the run continues.

        A member that gave its slot back is invited again.
        """
        torch.set_num_threads(1)
        launcher = SECRET.credentials(LAUNCHER, encrypted=True)
        while len(self.errors[name]) < MOST_RESTARTS:
            try:
                self._take_part(name)
            except (RunOver, RunFailed):
                return
            except Exception as error:  # noqa: BLE001 (reported with the result of the run)
                self.errors[name].append(error)
            if name in HONEST:
                return
            tell_died(self.address, launcher, name, "its process has ended", None)
            if self.exchange.coordinator.is_over or self.exchange.runner.failure:
                return
            if self.memberships.held_by(name) is None:
                self.credentials[name] = self._credentials_of(name)

    def _take_part(self, name: str) -> None:
        """Take part as a separate process does."""
        member = self.spec.members[name]
        with NetworkConnections(self.spec, member, self.address, self.credentials[name], Lines()) as connections:
            try:
                take_part(self.spec, member, connections, self.folder, audited=audited_member)
            except HeteroPPError as error:
                if connections.exchange.has_joined:
                    connections.report_failure(str(error), isinstance(error, LinkError | RunFailed))
                raise

    # ---- results ----

    def harm(self) -> list[str]:
        """Return the harm done by lies: empty if no result was altered and the run neither stalled nor failed."""
        found = [f"the run failed: {self.exchange.runner.failure}"] if self.exchange.runner.failure else []
        found += [f"{name} failed: {error!r}" for name in HONEST for error in self.errors[name]]
        last_round, rounds = self.exchange.coordinator.last_round, self.spec.config.rounds
        found += [] if last_round == rounds else [f"it ended after round {last_round} of {rounds}"]
        for round_ in range(1, last_round + 1):
            found += [f"round {round_}: {what}" for what in self._bent(round_)]
        return [*found, *self._blamed()]

    def _bent(self, round_: int) -> Iterator[str]:
        """Yield deviations of a round: included blobs that no honest member sent, missing replicas, wrong weights."""
        record = self.exchange.log.read_record(round_)
        for missing in {*HONEST} - {one.replica for one in record.contributions}:
            yield f"{missing} is not counted"
        for one in record.contributions:
            if one.weight != 2 * 16:
                yield f"{one.replica} weighs {one.weight}"
            if one.scale:
                yield f"{one.replica} is scaled by {one.scale}"
            for blob in one.blobs:
                if (blob.sha256, one.steps) not in self.deposited[one.replica, round_, blob.block]:
                    yield f"`{blob.block}` of {one.replica}, {one.steps} steps, was never sent"
        verified = {told.replica: told.parameters_sha256.hex() for told in self._verified(round_)}
        right = read_audit(self.exchange.log.store, round_).parameters_sha256
        for name in HONEST:
            if verified.get(name) != right:
                yield f"{name} holds {verified.get(name)}, and replay gives {right}"

    def _verified(self, round_: int) -> list[Any]:
        told = [one.round_verified for one in self.told if one.HasField("round_verified")]
        return [one for one in told if one.round == round_]

    def _blamed(self) -> Iterator[str]:
        """Yield reports that blame an honest member or replica."""
        members = {name for name, member in self.spec.members.items() if member.replica.name in HONEST}
        for one in self.told:
            if one.HasField("membership_event") and {one.membership_event.slot, one.membership_event.replica} & {
                *members,
                *HONEST,
            }:
                told = one.membership_event
                yield f"{told.slot or told.replica}: {MembershipEventKind.Name(told.what)}"
            if one.HasField("refusal") and one.refusal.sender in members:
                yield f"refused of {one.refusal.sender}: {one.refusal.reason}"
            if one.HasField("round_closed") and {*one.round_closed.late, *one.round_closed.left_out} & {*HONEST}:
                yield f"late in round {one.round_closed.round}"


class Replacer:
    """A member that sends each of the worst lies once, instead of an honest message."""

    def __init__(self, run: LyingRun, paced: Mapping[str, bool], told: set[tuple[str, str, str]] | None = None) -> None:
        """`paced` names the calls or messages to lie about.

        The value is true if the member lies only once per round, because it may fail by the lie and has to return.
        Members with the same `told` share the lies. It gets the call or message, the field and the value of each.
        """
        self._run, self._paced = run, paced
        self.said: set[tuple[str, str]] = set()
        """Pairs of a call or message and a field that were lied about."""
        self._done = set[tuple[str, str, str]]() if told is None else told
        self._round = 0
        self._lock = threading.Lock()

    def change(self, call: Call) -> Call:
        """Change a call to the exchange if a lie is due."""
        assert call.message is not None
        lie = self._due(call.name, call.message)
        return call if lie is None else call.saying(lie.message)

    def change_message(self, message: Message) -> Message:
        """Change a message to a neighbouring stage if a lie is due."""
        lie = self._due(type(message).__name__, message)
        return message if lie is None else lie.message

    def _due(self, name: str, message: Message) -> Lie | None:
        with self._lock:
            last_round, is_paced = self._run.exchange.coordinator.last_round, self._paced.get(name)
            if is_paced is None or (is_paced and self._round > last_round):
                return None
            for lie in lies_about(message, partial(self._is_wanted, name, message)):
                key = (name, lie.path, lie.what)
                if key not in self._done:
                    self._done.add(key)
                    self.said.add((name, lie.path))
                    self._round = last_round + 1 if is_paced else self._round
                    return lie
        return None

    def _is_wanted(self, name: str, message: Message, path: str, what: str) -> bool:
        """Return whether to make a lie.

        Long lies are made once. The others are made again, so that another lie with the same bytes is not sent.
        """
        if what.startswith("far too") and (name, path, what) in self._done:
            return False
        return what in WORST and _is_usual(path, message)


def _is_usual(path: str, message: Message) -> bool:
    """Return whether a changed report keeps its event. Lies beside honest calls cover these."""
    _, _, inner = path.partition(".")
    event, _, field = inner.partition(".")
    return not isinstance(message, pb.ReportRequest) or not field or message.reports[0].WhichOneof("event") == event
