"""Row checkpoint: the state of a row in training as a file, from which an interrupted row resumes.

There is one file per rank. A run with several ranks resumes only if all of them have the state after the same round.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import PART, complaint, flush, naming
from hetero_pp.core.tensor_files import save_object
from replica_groups.engines.ranks import Ranks


class Checkpoint:
    """At most one saved state of the run `run`, in `path` (with several ranks, in files named after it).

    All ranks must call every method.
    """

    def __init__(self, path: Path, run: str, ranks: Ranks, seconds: float) -> None:
        self.path = path if ranks.world == 1 else path.with_name(f"{path.name}.{ranks.rank}-of-{ranks.world}")
        self.run, self.ranks = run, ranks
        self.seconds = seconds
        """Seconds between two saves of the state."""
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state, on the CPU; None if there is none, or if the ranks' rounds differ.

        Raises ConfigError if the file belongs to another run.
        """
        for part in self.path.parent.glob(f"{self.path.name}.*{PART}"):  # of a killed writer
            part.unlink(missing_ok=True)
        found: dict[str, Any] | None = None
        if self.path.exists():
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            assert found is not None
            if found["run"] != self.run:
                told = "found the checkpoint of another configuration; delete it to start from the beginning"
                raise ConfigError((), f"{self.path}: {told}")
        rounds = self.ranks.gather(-1 if found is None else found["round"])
        return found if found is not None and len(set(rounds)) == 1 else None

    def is_due(self) -> bool:
        """Return whether it is time to save, by the first rank's clock."""
        return self.ranks.gather(time.monotonic() - self._saved)[0] >= self.seconds

    def save(self, round_: int, state: dict[str, Any]) -> None:
        """Save the state after a round atomically: no reader sees half of it.

        If a rank cannot write its file, the previous save stays, and the next due save tries again.
        """
        self._saved = time.monotonic()
        part = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}{PART}")

        def write() -> None:
            part.parent.mkdir(parents=True, exist_ok=True)
            save_object({"run": self.run, "round": round_, **state}, part)
            flush(part)

        def replace() -> None:
            part.replace(self.path)
            flush(self.path.parent)

        failure = self._failure_of(write)
        if not any(self.ranks.gather(float(bool(failure)))):  # no file is replaced before all ranks have written theirs
            failure = self._failure_of(replace)
        with suppress(OSError):  # the part was renamed, or never made
            part.unlink()
        if failure:
            told = "training continues, and the next checkpoint is saved on schedule"
            print(f"{failure}; {told}", file=sys.stderr, flush=True)

    def _failure_of(self, do: Callable[[], object]) -> str:
        """Run `do`; return the message of an OSError, empty if there is none."""
        try:
            with naming(self.path):
                do()
        except OSError as error:
            return complaint(error)
        return ""

    def remove(self) -> None:
        """Remove the file at the end of the run, if its disk allows it."""
        with suppress(OSError):
            self.path.unlink()
