"""The folder of a run, runs/<name>/: where each part of what it leaves, and goes on from, is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONFIG = "config.yaml"
CACHE = ".tokens"


@dataclass(frozen=True)
class RunFolder:
    """Paths only: whoever writes or reads what is there says how. What each is for: docs/architecture.md."""

    path: Path
    config_name: str = CONFIG
    """Of the resolved configuration; hosts that carry only members of a run have one of their own."""

    @property
    def config(self) -> Path:
        return self.path / self.config_name

    @property
    def changes(self) -> Path:
        """Keys that were changed when the run went on; `config` is what it began with."""
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
    def token(self) -> Path:
        return self.path / "token"

    @property
    def memberships(self) -> Path:
        """Who was invited, and who holds a place by that: on the exchange's host."""
        return self.path / "authority" / "members.sqlite"

    @property
    def over(self) -> Path:
        """That the run is over, as a host heard it that carries no exchange."""
        return self.path / "over.json"

    @property
    def text(self) -> Path:
        """Which text the run is trained on, as the first that reads it told the exchange."""
        return self.path / "text"

    def identity(self, ticket: str) -> Path:
        """What a host was given for a ticket."""
        return self.path / "identity" / ticket

    @property
    def cache(self) -> Path:
        """Encoded corpora: beside the runs, shared by all of them."""
        return self.path.parent / CACHE

    @property
    def lines(self) -> Path:
        """What processes share to take turns on one line; of no use once they have ended."""
        return self.path / "lines"

    def state(self, member: str) -> Path:
        """What a member needs to go on."""
        return self.path / "state" / member

    def output(self, member: str) -> Path:
        """What a member's process prints."""
        return self.path / "logs" / f"{member}.log"
