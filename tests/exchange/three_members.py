"""An exchange of a group of two members and a datacenter, for tests of rounds: roster, blobs, deposits and reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from deposits import deposit
from members import assign_all, begin, patient

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.model.transformer import ModelShape, block_of, shapes_by_block, shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import parameter_sha256
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.runner import Notifier

TIMEOUT = 10.0
SHAPE = ModelShape(width=16, layers=2, heads=2, feed_forward=24, vocabulary=64)
ROUNDS = 3
SETTINGS = OuterSettings(rounds=ROUNDS, learning_rate=0.7, compression=CompressionSettings(density=1 / 8, tile=(8, 8)))
EMBEDDING = "tok_embeddings.weight"
FIRST = frozenset({"tok_embeddings", "layers.0"})
LAST = frozenset({"layers.1", "norm", "lm_head"})
ROSTER = Roster(
    members={"home.0": "home", "home.1": "home", "dc": "dc"},
    blocks={"home.0": FIRST, "home.1": LAST, "dc": FIRST | LAST},
    follows={"home.1": frozenset({"tok_embeddings"})},
)
GENERATIONS = {"home": 2, "dc": 1}
"""Generation of each replica: the sum of its members' incarnations, each of which is the first."""


def _address(replica: str, block: str, round_: int = 1) -> BlobAddress:
    return BlobAddress("run", round_, replica, block)


def _blob(checkpoint: RunCheckpoint, address: BlobAddress, seed: int = 0) -> bytes:
    """Return a valid blob for this address."""
    compression = SETTINGS.compression
    shapes = shapes_by_block(shapes_of(checkpoint.parameters))[address.block]
    selections = []
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(seed + len(name) + 1000 * len(address.replica))
        delta = torch.randn(shape, generator=generator)
        selections.append((name, shape, select(torch.zeros(shape), delta, compression)))
    return encode_blob(address, selections, compression)


def _deposits(round_: int = 1) -> list[tuple[str, BlobAddress]]:
    """Return every (member, address) that a round needs, with those of `home` first."""
    return [
        (member, _address(ROSTER.members[member], block, round_))
        for member in ("home.1", "home.0", "dc")
        for block in sorted(ROSTER.blocks[member])
    ]


def _deposit_all(exchange: Exchange, checkpoint: RunCheckpoint, round_: int = 1, steps: int = 0) -> None:
    """Deposit all blobs of a round. For rounds after the first, assign the round to all members before."""
    if round_ > 1:
        assign_all(exchange, round_ - 1)
    for member, address in _deposits(round_):
        deposit(exchange, member, address, _blob(checkpoint, address), steps=steps)


def _reports(exchange: Exchange) -> list[Report]:
    """Return all reports so far. There must be at least one."""
    watching = exchange.watch()
    first = next(watching)
    exchange.end_watching()
    return [first, *watching]


def _in_threads(*works: Callable[[], object]) -> list[HeteroPPError]:
    """Run all functions at once and return the errors that ended them."""
    errors: list[HeteroPPError] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except HeteroPPError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    return errors


def _deposit_all_others(exchange: Exchange, checkpoint: RunCheckpoint, but: BlobAddress) -> None:
    for member, address in _deposits():
        if address != but:
            deposit(exchange, member, address, _blob(checkpoint, address))


def _hashes(checkpoint: RunCheckpoint, blocks: frozenset[str]) -> dict[str, bytes]:
    return {n: parameter_sha256(t) for n, t in checkpoint.parameters.items() if block_of(n) in blocks}


class _Counted(Notifier):
    """Waits that count the calls that wait: each releases `waiting` while it holds the lock."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def wait_for(self, subject: str, is_so: Callable[[], bool]) -> None:
        def is_so_now() -> bool:
            found = is_so()
            if not found:
                self.waiting.release()
            return found

        super().wait_for(subject, is_so_now)


def _counted(exchange: Exchange) -> _Counted:
    """Replace the exchange's waits by ones that count the calls that wait."""
    exchange.runner.notifier = waits = _Counted()
    return waits


@contextmanager
def training(checkpoint: RunCheckpoint, folder: Path) -> Iterator[Exchange]:
    """An exchange in which every member trains round 1."""
    exchange = Exchange(
        "run", ROSTER, None, SETTINGS, ContributionLog(FolderStore(folder)),
        rules=patient(ROSTER), tokens_a_step={"home": 100, "dc": 300},
    )  # fmt: skip
    begin(exchange, checkpoint)
    assign_all(exchange)
    yield exchange
    exchange.end_watching()
