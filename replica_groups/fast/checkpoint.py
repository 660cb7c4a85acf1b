"""The state of a run of the fast path as a file, so that an interrupted row goes on where it was.

One file per rank; a run with several ranks goes on only if all of them have the state after the same round.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from hetero_pp.errors import ConfigError
from hetero_pp.files import remove_parts, whole
from replica_groups.ranks import Ranks


class Checkpoint:
    """At most one saved state of the run `run`, in `path` (with several ranks, in files named after it).

    Every method has to be called by all ranks.
    """

    def __init__(self, path: Path, run: str, ranks: Ranks, seconds: float) -> None:
        self.path = path if ranks.world == 1 else path.with_name(f"{path.name}.{ranks.rank}-of-{ranks.world}")
        self.run = run
        self.ranks = ranks
        self.seconds = seconds
        """Between two times that the state is saved."""
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """What was saved last, on the CPU; None if nothing was, or not the same round by all ranks.

        Raises ConfigError if another run is in the file.
        """
        remove_parts(self.path.parent, f"{self.path.name}.*")
        found: dict[str, Any] | None = None
        if self.path.exists():
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            assert found is not None
            if found["run"] != self.run:
                raise ConfigError(
                    (), f"{self.path}: found the checkpoint of another configuration; delete it to start from nothing"
                )
        rounds = self.ranks.gather(-1 if found is None else found["round"])
        return found if found is not None and len(set(rounds)) == 1 else None

    def is_due(self) -> bool:
        """Whether it is time to save, by the first rank's clock."""
        return self.ranks.gather(time.monotonic() - self._saved)[0] >= self.seconds

    def save(self, round_: int, state: dict[str, Any]) -> None:
        """Save the state after a round, so that no reader ever sees half of it."""
        with whole(self.path) as part:
            torch.save({"run": self.run, "round": round_, **state}, part)
            self.ranks.wait()  # nobody replaces its file before everybody has written one
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Forget it: the run is over."""
        self.path.unlink(missing_ok=True)
