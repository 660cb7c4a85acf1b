"""The folder of a run, runs/<name>/, found by name or path, and the paths below it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.text import is_ticket
from hetero_pp.core.units import format_names

CONFIG = "config.yaml"
CACHE = ".tokens"


@dataclass(unsafe_hash=True)
class RunFolder:
    """Paths in a run's folder. Their readers and writers define the contents; docs/architecture.md has the purposes."""

    path: Path
    config_name: str = CONFIG
    """File of the resolved configuration. Hosts that only have members of a run use another name."""

    def __post_init__(self) -> None:
        self.config = self.path / self.config_name
        # Keys that were changed when the run was resumed; `config` has the values of its start.
        self.changes = self.path / "changes.yaml"
        self.log = self.path / "log"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.rehearsal = self.path / "rehearsal.json"  # measurements of a rehearsal, beside its prediction
        self.token = self.path / "token"
        # Address and secret of the exchange, for validators on its host; only in a run that has some.
        self.validators = self.path / "validators.json"
        # Invitations, and the members that hold slots by them; on the exchange's host.
        self.memberships = self.path / "authority" / "members.sqlite"
        # Marker on a host without an exchange: the exchange has reported that the run is over.
        self.over = self.path / "over.json"
        self.text = self.path / "text"  # digest of the run's text, as the first reader told the exchange
        self.so_far = self.path / "so_far"  # counters after the last audited round, on the exchange's host
        self.cache = self.path.parent / CACHE  # encoded corpora, beside the runs and shared by them
        # State that processes share to take turns on one line; useless after they have ended.
        self.lines = self.path / "lines"

    def identity(self, ticket: str) -> Path:
        """Return the folder of the files that a host received for a ticket."""
        return self.path / "identity" / ticket

    def state(self, member: str) -> Path:
        """Return the path of the saved state, from which a member resumes."""
        return self.path / "state" / member

    def committed(self, member: str) -> Path:
        """Return the folder of a member's checkpoints that an audit by recomputation may ask for."""
        return self.path / "committed" / member

    def output(self, member: str) -> Path:
        """Return the file that keeps the output of a member's process."""
        return self.path / "logs" / f"{member}.log"


def run_folder(runs: Path, run: str) -> RunFolder:
    """Return the folder of a run that this host started, serves or joined, named by its name in `runs` or its path.

    Raises ConfigError with similar names if none exists.
    """
    if is_ticket(run):  # it is a secret, so it is not printed
        raise ConfigError((), "found a ticket, expected the name or the folder of a run")
    runs = runs.absolute()
    for path in (runs / run, Path(run).absolute()):
        if path != runs and _is_of_a_run(path):
            return RunFolder(path)
    names = sorted(path.name for path in runs.glob("*/") if _is_of_a_run(path))
    near = get_close_matches(run, names, n=3)
    there = f"known runs: {format_names(names, 8)}" if names else "this folder has no runs"
    if near:
        there = f"did you mean {' or '.join(near)}?"
    raise ConfigError((), f"{runs}: found no run {run} that this host started, serves or joined: {there}")


def _is_of_a_run(path: Path) -> bool:
    folder = RunFolder(path)
    try:
        return folder.config.is_file() or folder.identity("").is_dir() or bool(own_parts(folder))
    except (OSError, ValueError):  # no system has such a path
        return False


def own_parts(folder: RunFolder) -> list[str]:
    """Return the members or replicas of a run served elsewhere that this host started with the run's token."""
    return sorted(path.stem.removeprefix("config-") for path in folder.path.glob("config-*.yaml"))


def recorded_run(runs: Path, run: str) -> RunFolder:
    """Return the folder of a run that this host recorded. Raises ConfigError if this host only joined the run."""
    folder = run_folder(runs, run)
    if not folder.config.is_file():
        told = "found no log and no model: this host joined the run, and its exchange has both; export the model there"
        raise ConfigError((), f"{folder.path}: {told}: hetero-pp export {folder.path.name} --to FOLDER")
    return folder
