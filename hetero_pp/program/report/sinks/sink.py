"""A place that scalars of a run go to, and how a command chooses further ones."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.program.report.state import RunState

PROJECT = "hetero-pp"
"""Project under which services keep runs."""


@dataclass(frozen=True)
class Scalar:
    """One value of a curve."""

    time: float
    """Seconds since 1970."""
    tag: str
    """Name of the curve, such as `training_loss/dc`."""
    value: float
    step: int
    """Position on the axis."""
    axis: Literal["inner_step", "round"]


class Sink(Protocol):
    """Takes the scalars of a run. Its methods may raise any exception."""

    def write(self, scalar: Scalar) -> None:
        """Take one scalar."""

    def close(self) -> None:
        """Finish, once all scalars are written."""


@dataclass(frozen=True)
class ServiceRun:
    """A run of a service, which every start of a run continues."""

    id: str
    folder: Path
    """Folder for the service's files, in the folder of the run."""
    goes_on: bool
    """Whether the run was there before."""

    @classmethod
    def at(cls, folder: Path) -> ServiceRun:
        """Return what a folder keeps. Without a file `id` there, another id is drawn and kept. Raises OSError."""
        file = folder / "id"
        if file.is_file():
            return cls(file.read_text(encoding="utf-8").strip(), folder, goes_on=True)
        folder.mkdir(parents=True, exist_ok=True)
        drawn = secrets.token_hex(4)
        write_whole(file, drawn.encode())
        return cls(drawn, folder, goes_on=False)


MakeSink = Callable[[RunState, ServiceRun], Sink]

BOARDS = {"wandb": "WandbSink", "trackio": "TrackioSink"}
"""Name of an extra and its package -> class of the sink, in the module NAME_sink."""


def makers_of(names: Sequence[str]) -> dict[str, MakeSink]:
    """Return functions that make the named sinks. Raises ConfigError for a name that is unknown or not installed."""
    for name in names:
        if name not in BOARDS:
            raise ConfigError((), f"--board: found `{name}`, expected one of {', '.join(BOARDS)}")
        if find_spec(name) is None:
            mend = f"install it with: pip install 'hetero-pp[{name}]'"
            raise ConfigError((), f"--board {name}: the package is not installed; {mend}")
    modules = {name: import_module(f"hetero_pp.program.report.sinks.{name}_sink") for name in names}
    return {name: getattr(module, BOARDS[name]) for name, module in modules.items()}


class OptionalSink:
    """A sink without which the run continues: it complains once about a failure, and takes no more scalars."""

    def __init__(
        self, name: str, make: MakeSink, state: RunState, folder: Path, complain: Callable[[str], None]
    ) -> None:
        """`folder`: keeps the service's files and the id of its run."""
        self._name, self._complain = name, complain
        self._sink: Sink | None = None
        self._has_earlier = False
        """Whether the service has what is told again until `go_on`."""
        try:
            kept = ServiceRun.at(folder)
            self._has_earlier = kept.goes_on
            self._sink = make(state, kept)
        except Exception as error:  # noqa: BLE001 (another program's bug or absence must not fail the run)
            self._fails(error)

    def write(self, scalar: Scalar) -> None:
        """Take one scalar, unless the sink has failed."""
        if self._sink is not None and not self._has_earlier:
            try:
                self._sink.write(scalar)
            except Exception as error:  # noqa: BLE001 (as above)
                self._fails(error)

    def go_on(self) -> None:
        """Take scalars from here on: those of earlier rounds were told again."""
        self._has_earlier = False

    def close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 (as above)
                self._fails(error)

    def _fails(self, error: Exception) -> None:
        self._sink = None
        why = " ".join(str(error).split()) or type(error).__name__
        self._complain(f"{self._name} gets no more curves, but the run continues: {why}")
