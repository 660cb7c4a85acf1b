"""A small run for tests of rounds and slots: an exchange on a simulated clock, and members that deposit."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from deposits import deposit
from members import FOR_EVER, TIMEOUT, assign_all, begin, in_thread

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.config.spec import Roster
from hetero_pp.config.topology import MagnitudeSettings
from hetero_pp.messages.messages_pb2 import AssignReply
from hetero_pp.messages.messages_pb2 import MembershipEvent as Told
from hetero_pp.model.transformer import ModelShape, block_of, shapes_by_block, shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.folder import FolderStore
from hetero_pp.store.store import Store
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.rounds import events as e
from replica_groups.rounds.rules import Rules, Window

SHAPE = ModelShape(width=16, layers=1, heads=2, feed_forward=24, vocabulary=40)
ROUNDS = 9
SETTINGS = OuterSettings(
    rounds=ROUNDS, learning_rate=0.7, momentum=0.5, compression=CompressionSettings(density=1 / 8, tile=(8, 8))
)
GRACE = Window(2.0, 10.0, 100.0)
LIMIT = 1000.0
LEASE = Window(3.0, 15.0, 60.0)


class Clock:
    """A clock in seconds that only tests advance."""

    def __init__(self) -> None:
        self.time = 50.0

    def __call__(self) -> float:
        return self.time


class Run:
    """An exchange whose clock only advances in `passes`. In a group of n stages, each holds every n-th block."""

    def __init__(
        self,
        where: Path | Store,
        groups: dict[str, int],
        quorum: float = 0.5,
        lease: Window = FOR_EVER,
        weighs_tokens: bool = False,
        magnitudes: MagnitudeSettings | None = None,
        optional: Collection[str] = (),
        overlap: bool = False,
        so_far: Path | None = None,
    ) -> None:
        """`groups`: replica -> number of stages; 1 means a datacenter replica.

        `where`: a folder or a store for the run log. `so_far`: as in Reports.
        """
        self.checkpoint: RunCheckpoint = initial_checkpoint(SHAPE, None, seed=1)
        blocks = sorted(set(map(block_of, self.checkpoint.parameters)))
        members, owned = {}, {}
        for replica, stages in groups.items():
            for stage in range(stages):
                member = replica if stages == 1 else f"{replica}.{stage}"
                members[member] = replica
                owned[member] = frozenset(blocks[stage::stages])
        self.roster = Roster(members, owned)
        self.log = ContributionLog(FolderStore(where) if isinstance(where, Path) else where)
        self.clock = Clock()
        self.tokens = dict.fromkeys(groups, 100)
        weights = self.tokens if weighs_tokens else None
        self.rules = Rules(
            members,
            owned,
            quorum,
            grace=GRACE,
            limit=LIMIT,
            lease=lease,
            hang=FOR_EVER,
            tokens_a_step=weights,
            overlap=overlap,
            optional=frozenset(optional),
        )
        self._magnitudes, self._so_far = magnitudes, so_far
        self.exchange = self._open(goes_on=False)
        begin(self.exchange, self.checkpoint)

    def _open(self, goes_on: bool) -> Exchange:
        exchange = Exchange(
            "run",
            self.roster,
            None,
            SETTINGS,
            self.log,
            rules=self.rules,
            goes_on=goes_on,
            tokens_a_step=self.tokens,
            magnitudes=self._magnitudes,
            clock=self.clock,
            so_far=self._so_far,
        )
        exchange.runner.end()  # no thread of its own: `passes` advances the time
        return exchange

    def take_over(self, *died: str) -> None:
        """Replace the exchange with a new one that resumes from the run log, and hears first that members died."""
        self.exchange = self._open(goes_on=True)
        for member in died:
            self.exchange.died(member, "its host died with the exchange")
        self.exchange.begin(self.checkpoint, last_round=self.exchange.log.last_record())

    def assign(self, holds: int, *members: str) -> dict[str, int]:
        """Let these members, or all, ask for work; return member -> round."""
        found = assign_all(self.exchange, holds, members or None)
        return {member: work.round for member, work in found.items()}

    def ask_in_thread(self, member: str, holds: int) -> Future[AssignReply]:
        """Let a member ask for work that it has to wait for. Returns once it has asked."""
        asked = threading.Event()

        tell = self.exchange.runner.tell

        def told(event: e.Event) -> Sequence[e.Effect]:
            effects = tell(event)
            asked.set()
            return effects

        self.exchange.runner.tell = told  # type: ignore[method-assign]
        found = in_thread(lambda: self.exchange.assign(member, holds))
        assert asked.wait(TIMEOUT)
        self.exchange.runner.tell = tell  # type: ignore[method-assign]
        return found

    def passes(self, seconds: float, heard: tuple[str, ...] = ()) -> None:
        """Advance the time; these members send a heartbeat every second."""
        end = self.clock.time + seconds
        while self.clock.time < end:
            self.clock.time = min(self.clock.time + 1.0, end)
            for member in heard:
                self.exchange.heartbeat(member)
            self.exchange.runner.tell(e.Tick())

    def blob(self, address: BlobAddress, seed: int = 0, size: float = 1.0) -> bytes:
        """Return an honest member's blob, with its values multiplied by `size`."""
        shapes = shapes_by_block(shapes_of(self.checkpoint.parameters))[address.block]
        selections = []
        for name, shape in shapes.items():
            delta = size * torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(name)))
            selections.append((name, shape, select(torch.zeros(shape), delta, SETTINGS.compression)))
        return encode_blob(address, selections, SETTINGS.compression)

    def deposit(
        self, round_: int, *members: str, generation: int | None = None, incarnation: int | None = None
    ) -> None:
        """Deposit all blobs of these members for a round."""
        for member in members:
            replica = self.roster.members[member]
            current = self.exchange.coordinator.replicas[replica].generation
            for block in sorted(self.roster.blocks[member]):
                address = BlobAddress("run", round_, replica, block)
                deposit(
                    self.exchange, Caller(member, incarnation), address, self.blob(address), generation or current, 7
                )

    def counted(self, round_: int) -> dict[str, int]:
        """Return the replicas that a round includes -> their generations. Raises FileNotFoundError while it is open."""
        return {one.replica: one.generation for one in self.exchange.log.read_record(round_).contributions}

    def late(self, round_: int) -> list[str]:
        """Return the late replicas of a round."""
        return list(self.exchange.log.read_record(round_).late)

    def told(self) -> list[Told]:
        """Return the membership events that the exchange reported; it reports nothing afterwards."""
        watching = self.exchange.watch()
        self.exchange.end_watching()
        return [report.membership_event for report in watching if report.HasField("membership_event")]


def closed(run: Run) -> int:
    """Return the last decided round."""
    return run.exchange.coordinator.last_round
