"""Helpers for tests that inspect, damage or remove the files of a run log that is kept in a folder."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog, round_key, snapshot_key


def folder_of(log: ContributionLog) -> Path:
    """Return the folder of the log's store."""
    assert isinstance(log.store, FolderStore)
    return log.store.folder


def snapshot_path(log: ContributionLog, round_: int) -> Path:
    """Return the path of the snapshot after a round. The file may be missing."""
    return folder_of(log) / snapshot_key(round_)


def stored_blob(log: ContributionLog, round_: int, replica: str, epoch: int, block: str) -> str:
    """Return the key of the only blob in the log for this round, replica, generation and block."""
    folder = f"{round_key(round_)}/{replica}/{epoch}"
    (name,) = (name for name in log.store.names(folder) if name.startswith(f"{block}."))
    return f"{folder}/{name}"
