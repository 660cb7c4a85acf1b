"""The state of a run of the fast path as a file, so that an interrupted row goes on where it was.

One file per rank; a run with several ranks goes on only if all of them have the state after the same round.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero_pp.errors import ConfigError
from hetero_pp.files import PART, complaint, flush, naming, remove_parts
from hetero_pp.tensor_files import save_object
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
        """Save the state after a round, so that no reader ever sees half of it.

        If the disk of a rank does not take it, what was saved before stays, and it is tried again when it is due next.
        """
        self._saved = time.monotonic()
        content = {"run": self.run, "round": round_, **state}
        part = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}{PART}")
        failure = self._failure_of(partial(self._write, content, part))
        if not any(self.ranks.gather(float(bool(failure)))):  # nobody's file is replaced before all are written
            failure = self._failure_of(partial(self._name, part))
        with suppress(OSError):  # it has its name, or was never made
            part.unlink()
        if failure:
            print(f"{failure}; training goes on, and is saved later", file=sys.stderr, flush=True)

    def _failure_of(self, do: Callable[[], object]) -> str:
        """Do something; what an OSError says, empty if there is none."""
        try:
            with naming(self.path):
                do()
        except OSError as error:
            return complaint(error)
        return ""

    def _write(self, content: dict[str, Any], part: Path) -> None:
        part.parent.mkdir(parents=True, exist_ok=True)
        save_object(content, part)
        flush(part)

    def _name(self, part: Path) -> None:
        part.replace(self.path)
        flush(self.path.parent)

    def remove(self) -> None:
        """Remove the file, if its disk allows it: the run is over."""
        with suppress(OSError):
            self.path.unlink()
