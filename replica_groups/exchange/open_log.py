"""Opens the run log in the folder or store that the configuration names."""

from __future__ import annotations

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.core.errors import ConfigError
from replica_groups.exchange.log import ContributionLog


def open_log(config: RunConfig, folder: RunFolder) -> ContributionLog:
    """Return the log. Raises ConfigError or StoreError, one line, if there is no such store."""
    return ContributionLog(config.store.open(config.name, folder.log))


def keep_configuration(config: RunConfig, folder: RunFolder, log: ContributionLog) -> None:
    """Write the run's configuration into a log that is not in the run's folder."""
    if config.store.url is not None:
        for path in (folder.config, folder.changes):
            if path.is_file():
                log.store.put_file(path.name, path)


def fetch_configuration(config: RunConfig, folder: RunFolder) -> None:
    """Create the folder of a run that began on another machine, if its log has the run's configuration."""
    if config.store.url is not None and not folder.config.is_file():
        store = open_log(config, folder).store
        for path in (folder.config, folder.changes):
            if path.name in store.names():
                store.get_to(path.name, path)


def require_unused(log: ContributionLog) -> None:
    """Raise ConfigError if the store of a new run has a run already, because nothing is ever overwritten."""
    if log.last_record() or log.checkpoints():
        raise ConfigError(
            ("store", "url"),
            f"found a run in {log.store.url()}, expected none; resume it with --resume, or use another `name`",
        )
