"""Helpers for tests that inspect, damage or remove the files of a run log that is kept in a folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import TOGETHER, ContributionLog, checkpoint_key, round_key


def folder_of(log: ContributionLog) -> Path:
    """Return the folder of the log's store."""
    assert isinstance(log.store, FolderStore)
    return log.store.folder


def checkpoint_path(log: ContributionLog, round_: int) -> Path:
    """Return the path of the run checkpoint after a round. The file may be missing."""
    return folder_of(log) / checkpoint_key(round_)


def stored_blob(log: ContributionLog, round_: int, replica: str, generation: int, block: str) -> str:
    """Return the key of the only blob in the log for this round, replica, generation and block.

    If it is stored together with others, an object of this key is read in its place.
    """
    folder = f"{round_key(round_)}/{replica}/{generation}"
    found = [f"{folder}/{name}" for name in log.store.names(folder)]
    (key,) = {key for one in found for key in _held_by(log, one) if key.startswith(f"{folder}/{block}.")}
    return key


def stored_bytes(log: ContributionLog, round_: int, replica: str, generation: int, block: str) -> bytes:
    """Return the blob of `stored_blob` as it is, without a look at its digest."""
    key = stored_blob(log, round_, replica, generation, block)
    folder, _, name = key.rpartition("/")
    if name in log.store.names(folder):
        return log.store.get(key)
    (together,) = (one for one in log.store.below(folder) if one.endswith(TOGETHER) and key in log.index(one))
    start, size = log.index(together)[key]
    return log.store.get(together)[start : start + size]


def _held_by(log: ContributionLog, key: str) -> Collection[str]:
    return log.index(key) if key.endswith(TOGETHER) else [key]
