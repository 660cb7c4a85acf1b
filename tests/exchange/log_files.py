"""The files of a log that is in a folder, for tests that look at them, damage and remove them."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog, snapshot_key


def folder_of(log: ContributionLog) -> Path:
    """The folder of its store."""
    assert isinstance(log.store, FolderStore)
    return log.store.folder


def snapshot_path(log: ContributionLog, round_: int) -> Path:
    """The snapshot after a round, whether it is there or not."""
    return folder_of(log) / snapshot_key(round_)
