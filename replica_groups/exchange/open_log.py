"""The log of a run, wherever its configuration says that it lies."""

from __future__ import annotations

from hetero_pp.errors import ConfigError
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from replica_groups.exchange.log import ContributionLog


def open_log(config: RunConfig, folder: RunFolder) -> ContributionLog:
    """Raises ConfigError or StoreError, one line, if there is no such store."""
    return ContributionLog(config.store.open(config.name, folder.log))


def keep_configuration(config: RunConfig, folder: RunFolder, log: ContributionLog) -> None:
    """Have a log that does not lie in its run's folder say what run it is of."""
    if config.store.url is not None:
        for path in (folder.config, folder.changes):
            if path.is_file():
                log.store.put_file(path.name, path)


def fetch_configuration(config: RunConfig, folder: RunFolder) -> None:
    """Have the folder of a run that began on another machine, if its log says what run it is of."""
    if config.store.url is not None and not folder.config.is_file():
        store = open_log(config, folder).store
        for path in (folder.config, folder.changes):
            if path.name in store.names():
                store.get_to(path.name, path)


def require_unused(log: ContributionLog) -> None:
    """Raise ConfigError if there is a run in a store that one is about to begin in: nothing is ever written over it."""
    if log.last_record() or log.snapshots():
        raise ConfigError(
            ("store", "url"),
            f"found a run in {log.store.url()}, expected none; resume it with --resume, or use another `name`",
        )
