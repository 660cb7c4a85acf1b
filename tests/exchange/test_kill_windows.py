"""A member is killed in every window of a round, one after the other, and the run has the bits of one in threads.

That one has no kills, but its stages begin again where the records say so: a group resumes after its last step.

Members are threads that call a real exchange over gRPC. A kill raises `_Killed` in the member's thread at one of its
operations: a call to the exchange, before it is sent or once its reply is here, or an operation on a file of its
states (each open, write, flush and rename). From then on the incarnation reaches neither the exchange nor its disk.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_disk import FailingDisk, patched
from google.protobuf.message import Message
from members import TIMEOUT
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError, RunFailed
from hetero_pp.link.shaping import Lines
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.program.launch.in_process import MemberThreads
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Arrived, Caller, ExchangeService, untold
from hetero_pp.rpc.identities import Secret, new_secret
from replica_groups.exchange import server
from replica_groups.exchange.host import begin_run, make_exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.server import serve_exchange
from replica_groups.member.take_part import take_part

ROUNDS = 400
"""More rounds than any member has windows."""


class _Killed(BaseException):
    """The member's process is killed here. No code of the member handles it."""


class _Windows(FailingDisk):
    """Kills one member's thread once at each kind of operation of a round: at one in one round, at another in the next.

    A kind is a call with its side, or an operation on a file or folder of a name. Each round begins with an assignment.
    All windows are tried once a round has no new one.
    """

    def __init__(self, folder: Path, member: str, is_last: bool) -> None:
        """`is_last`: whether the other replica contributes to a round only after this member has, or was killed."""
        super().__init__(folder)
        self.member, self._is_last = member, is_last
        self.round, self._kills = 0, False
        self.is_dead, self.are_through = False, threading.Event()
        self.kills: list[str] = []
        """The window of each kill."""
        self.may_contribute = 0
        """The last round to which the other replica may contribute."""
        self.changed = threading.Condition()

    def operate(self, path: Any, is_named: bool = False) -> None:
        if threading.current_thread().name == self.member and self.has(path):
            is_flushed = isinstance(path, int)
            name = (Path(f"/proc/self/fd/{path}").readlink() if is_flushed else Path(path)).name
            name = re.sub(r"-\d{6}|\.[0-9a-f]{8}(?=\.)", "", name)
            self.touch(f"{'flush' if is_flushed else 'enter' if is_named else 'fill'} {name}")

    def touch(self, name: str) -> None:
        """Kill the member here, if it was killed in no such window yet."""
        if threading.current_thread().name != self.member:
            return
        if self.is_dead:
            raise _Killed
        if self._kills and name not in self.kills:
            self.is_dead = True
            self.kills.append(name)
            raise _Killed

    def assigned(self, round_: int) -> None:
        """Note that the member trains a round. It is killed only in the first try of a round."""
        if self._kills:
            self.are_through.set()  # the round before had no new window
        self._kills = round_ > self.round and not self.are_through.is_set()
        self.round = round_

    def restart(self) -> None:
        self._kills, self.is_dead = False, False

    def lets(self, round_: int) -> None:
        with self.changed:
            self.may_contribute = max(self.may_contribute, round_)
            self.changed.notify_all()

    def wait_for_turn(self, round_: int) -> None:
        """Called by the other replica before it contributes."""
        with self.changed:
            assert not self._is_last or self.changed.wait_for(
                lambda: round_ <= self.may_contribute or self.are_through.is_set(), TIMEOUT
            )


class _Watched(ExchangeService):
    """A member's client of the exchange."""

    def __init__(self, client: ExchangeClient, windows: _Windows) -> None:
        self._exchange, self._windows = client, windows
        self.close = client.close

    def call(self, request: Message, caller: Caller) -> Any:
        return self._exchange.call(request, caller)

    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        return self._exchange.read_checkpoint(request, caller, arrived)

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        self._exchange.deposit_blob(header, data, caller)

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        return self._exchange.fetch_blob(request, caller)

    def show_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        self._exchange.show_file(header, path, caller)


class _Mortal(_Watched):
    """The client of the member that is killed."""

    def _require_alive(self) -> None:
        if self._windows.is_dead:
            raise RunFailed("the member is dead")

    @contextmanager
    def _both_sides(self, name: str) -> Iterator[None]:
        self._windows.touch(f"before {name}")
        self._require_alive()  # its other threads
        yield
        self._windows.touch(f"after {name}")

    def call(self, request: Message, caller: Caller) -> Any:
        windows = self._windows
        with self._both_sides(type(request).__name__):
            if isinstance(request, pb.RecordRequest):
                windows.lets(request.round)
            elif isinstance(request, pb.AssignRequest):
                windows.lets(windows.round)  # it may wait for the round of its last incarnation to close
            reply = super().call(request, caller)
            if isinstance(request, pb.AssignRequest):
                windows.assigned(reply.round)
            return reply

    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        with self._both_sides("RunCheckpoint"):
            return super().read_checkpoint(request, caller, arrived)

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        with self._both_sides("Deposit"):
            super().deposit_blob(header, data, caller)

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        with self._both_sides("Fetch"):
            return super().fetch_blob(request, caller)


class _Other(_Watched):
    """The client of the other replica."""

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        self._windows.wait_for_turn(header.round)
        super().deposit_blob(header, data, caller)


class _Run:
    """A run whose members are threads that call an exchange over gRPC, until all windows are through."""

    def __init__(self, spec: RunSpec, folder: Path, windows: _Windows) -> None:
        self._spec, self.folder, self._windows, self._secret = spec, RunFolder(folder), windows, Secret(new_secret())
        self._exchange = exchange = make_exchange(spec, self.folder)
        served, port = serve_exchange(exchange, self._secret, "127.0.0.1:0", encrypted=False)
        self._address, self._errors = f"127.0.0.1:{port}", list[BaseException]()
        threads = [threading.Thread(target=self._take, args=[name], name=name, daemon=True) for name in spec.members]
        for thread in threads:
            thread.start()
        auditor = begin_run(exchange, spec, self.folder, None)
        with exchange.runner.changed:
            exchange.runner.wait_until(windows.are_through.is_set)
        self.rounds = exchange.runner.halt()
        exchange.fail("enough rounds")
        for thread in threads:
            thread.join(TIMEOUT)
        auditor.join()
        exchange.end_watching()
        served.stop(None).wait(TIMEOUT)
        assert not self._errors, self._errors

    def _take(self, name: str) -> None:
        """Take part as the process of a member, and as those that replace it."""
        windows, member = self._windows, self._spec.members[name]
        torch.set_num_threads(1)
        while True:
            credentials = self._secret.credentials(name, encrypted=False)
            try:
                with NetworkConnections(self._spec, member, self._address, credentials, Lines()) as connections:
                    if name == windows.member:
                        connections.exchange = _Mortal(connections.exchange, windows)  # type: ignore[assignment]
                    elif member.stage is None:
                        connections.exchange = _Other(connections.exchange, windows)  # type: ignore[assignment]
                    take_part(self._spec, member, connections, self.folder)
                return
            except BaseException as error:  # noqa: BLE001 (raised by the caller)
                if name == windows.member and windows.is_dead:
                    # torch raises another error if one is raised while it writes
                    self._exchange.died(
                        name, f"killed {windows.kills[-1]}", self._exchange.coordinator.slots[name].incarnation
                    )
                    windows.restart()
                    continue
                if not isinstance(error, HeteroPPError):
                    self._errors.append(error)
                    self._exchange.fail(f"{name}: {error}")
                return


def _records(spec: RunSpec, folder: Path, rounds: int) -> list[RoundRecord]:
    log = ContributionLog(spec.config.store.open(spec.config.name, RunFolder(folder).log))
    return [log.read_record(round_) for round_ in range(1, rounds + 1)]


def _digests(records: list[RoundRecord]) -> list[dict[str, str]]:
    """Return the digests of each round's contributions, by replica."""
    return [{one.replica: one.digest.hex() for one in record.contributions} for record in records]


def _in_threads(spec: RunSpec, folder: Path, records: list[RoundRecord]) -> list[RoundRecord]:
    """Train as many rounds in this process, in which stages begin again as these records say; return the records."""
    restarts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        for one in [one for entry in record.contributions for one in entry.restarts]:
            restarts[one.slot].append((record.round, one.step))
    members = MemberThreads(spec, RunFolder(folder), lambda _: None, restarts=restarts)
    try:
        members.begin()
        members.train(len(records))
    finally:
        members.abort("enough rounds", "enough rounds")
        members.join(TIMEOUT)
        members.end_watching()
    return _records(spec, folder, len(records))


def _spec(corpus: Path, replica: dict[str, Any], settings: dict[str, Any]) -> RunSpec:
    config: dict[str, Any] = {
        "name": "killed",
        "model": {"preset": "micro", "width": 16, "heads": 2, "feed_forward": 24, "layers": replica.get("stages", 1)},
        "data": {"corpus": str(corpus), "sequence_length": 16, "validation_share": 0.2, "validation_sequences": 2},
        "inner": {"steps": 1, "learning_rate": 1e-2, "warmup_steps": 1},
        "outer": {"rounds": ROUNDS, "compression": {"density": 1 / 8}},
        "checkpoints": {"every": 3},
        "states": {"every": 1},
        "exchange": {"quorum": 1.0},
        "replicas": [DATACENTER | {"name": "dc"}, replica],
    }
    for key, changed in settings.items():
        config[key] = config[key] | changed
    return RunSpec(RunConfig.model_validate(config), 256)


DATACENTER = {"name": "a", "kind": "datacenter", "batch_size": 2, "device": "cpu"}
GROUP = {"name": "home", "kind": "participants", "stages": 2, "batch_size": 2, "device": "cpu"}


@pytest.mark.parametrize(
    ("member", "replica", "is_last", "settings"),
    [
        ("a", DATACENTER, False, {"states": {"every": 1, "undo": False}}),
        ("home.1", GROUP, True, {}),
    ],
    ids=["first", "stage"],
)
def test_a_kill_in_any_window_of_a_round_leaves_its_bits(
    member: str,
    replica: dict[str, Any],
    is_last: bool,
    settings: dict[str, Any],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slower replica holds the round of the stage open, until the member is back or its contribution sent."""
    monkeypatch.setattr(server, "JOINS_AT_ONCE", 10_000)
    spec, folder = _spec(corpus, replica, settings), tmp_path / "killed"
    windows = _Windows(RunFolder(folder).state(member), member, is_last)
    with patched(windows):
        killed = _Run(spec, folder, windows)
    records = _records(spec, folder, killed.rounds)
    found, expected = _digests(records), _digests(_in_threads(spec, tmp_path / "in threads", records))
    assert member == "a" or any(entry.restarts for record in records for entry in record.contributions)
    calls = {f"{side} {call}" for side in ("before", "after") for call in ("Deposit", "RecordRequest", "HashReport")}
    assert calls | {"enter pending", "enter round", "flush digests.json"} <= set(windows.kills)
    differs = next((n for n, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other), None)
    assert differs is None, f"round {differs + 1} differs, after kills at {windows.kills}"
