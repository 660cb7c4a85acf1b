"""Paths below the folder of a run, runs/<name>/: results of the run, and files that it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.yaml"
CACHE = ".tokens"


@dataclass(frozen=True)
class RunFolder:
    """Paths in a run's folder. Their readers and writers define the contents; docs/architecture.md has the purposes."""

    path: Path
    config_name: str = CONFIG
    """File of the resolved configuration. Hosts that only have members of a run use another name."""

    @property
    def config(self) -> Path:
        return self.path / self.config_name

    @property
    def changes(self) -> Path:
        """Keys that were changed when the run was resumed; `config` has the values of its start."""
        return self.path / "changes.yaml"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def rehearsal(self) -> Path:
        """Measurements of a rehearsal, beside its prediction."""
        return self.path / "rehearsal.json"

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def validators(self) -> Path:
        """Address and secret of the exchange, for validators on its host; only in a run that has some."""
        return self.path / "validators.json"

    @property
    def memberships(self) -> Path:
        """Invitations, and the members that hold slots by them; on the exchange's host."""
        return self.path / "authority" / "members.sqlite"

    @property
    def over(self) -> Path:
        """Marker on a host without an exchange: the exchange has reported that the run is over."""
        return self.path / "over.json"

    @property
    def text(self) -> Path:
        """Digest of the run's text, as the first reader told the exchange."""
        return self.path / "text"

    def identity(self, ticket: str) -> Path:
        """Return the folder of the files that a host received for a ticket."""
        return self.path / "identity" / ticket

    @property
    def cache(self) -> Path:
        """Encoded corpora, beside the runs and shared by them."""
        return self.path.parent / CACHE

    @property
    def lines(self) -> Path:
        """State that processes share to take turns on one line; useless after they have ended."""
        return self.path / "lines"

    def state(self, member: str) -> Path:
        """Return the path of the member checkpoint, from which a member resumes."""
        return self.path / "state" / member

    def committed(self, member: str) -> Path:
        """Return the folder of a member's checkpoints that an audit by recomputation may ask for."""
        return self.path / "committed" / member

    def output(self, member: str) -> Path:
        """Return the file that keeps the output of a member's process."""
        return self.path / "logs" / f"{member}.log"
