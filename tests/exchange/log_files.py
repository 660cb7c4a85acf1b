"""The files of a log that is in a folder, for tests that look at them, damage and remove them."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog, round_key, snapshot_key


def folder_of(log: ContributionLog) -> Path:
    """The folder of its store."""
    assert isinstance(log.store, FolderStore)
    return log.store.folder


def snapshot_path(log: ContributionLog, round_: int) -> Path:
    """The snapshot after a round, whether it is there or not."""
    return folder_of(log) / snapshot_key(round_)


def stored_blob(log: ContributionLog, round_: int, replica: str, epoch: int, block: str) -> str:
    """The key of the only blob that a log holds of these."""
    folder = f"{round_key(round_)}/{replica}/{epoch}"
    (name,) = (name for name in log.store.names(folder) if name.startswith(f"{block}."))
    return f"{folder}/{name}"
