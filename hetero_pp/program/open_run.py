"""Opens a run, current or past, by its name, its folder or the URL of its log in a store."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hetero_pp.config.folder import RunFolder, recorded_run
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_trained
from hetero_pp.core.errors import ConfigError
from hetero_pp.store.opening import folder_of, open_store
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.open_log import open_log


def open_run(runs: Path, run: str) -> tuple[RunSpec, ContributionLog]:
    """Return a run's specification and its log. `run`: its name in `runs`, its folder or the URL of its log.

    A log in a store holds the run's configuration. Raises ConfigError if there is no such run here.
    """
    if (local := folder_of(run)) is not None:
        folder = recorded_run(runs, str(local))
        spec = read_trained(folder)
        return spec, open_log(spec.config, folder)
    log = ContributionLog(open_store(run))
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch))
        for path in (folder.config, folder.changes):
            if path.name in log.store.names():
                log.store.get_to(path.name, path)
        if not folder.config.is_file():
            raise ConfigError((), f"{log.store.url()}: found no config.yaml, expected a run log")
        return read_trained(folder), log
