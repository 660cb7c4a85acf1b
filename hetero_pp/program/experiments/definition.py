"""What an experiment is: rows as changed cells over a scale's base, the paper's values, claims as inequalities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from hetero_pp.errors import ConfigError
from hetero_pp.settings import Ratio, Settings
from hetero_pp.topology import Rank

Cells = dict[str, Any]
"""Changed cells by dotted name: those of a run, as `outer.method: diloco`; `replicas.batch_size` is every replica's."""


class Scale(Settings):
    """A size at which tables are made: `base` is a run's configuration without name, seed and replicas."""

    name: str
    about: str
    replicas: int = Field(ge=1, description="M")
    stages: int = Field(ge=1, description="of a compressed replica")
    batch_size: int = Field(ge=1, description="sequences of a replica and inner step")
    vocabulary: int = Field(description="of a byte-pair encoding trained on the corpus")
    hardware: Literal["cpu", "gpu"] = Field(description="without it, rows of this scale are validated, not trained")
    base: dict[str, Any]


class Row(Settings):
    """One line of a table: which replicas are compressed, how, and other changed cells."""

    name: str
    compressed: Literal["none", "half", "all"] | Ratio = Field("none", description="share of the replicas")
    rank: Rank = "full"
    bits: int | None = None
    ablations: dict[str, Any] = Field(default_factory=dict, description="cells of `boundary.ablations`")
    cells: Cells = Field(default_factory=dict)
    at: dict[str, Cells] = Field(default_factory=dict, description="more cells, by scale")
    budget: float = Field(1.0, gt=0, description="tokens, as a multiple of the scale's")
    replicas: int | None = Field(None, ge=1, description="M, instead of the scale's")
    paper: float | None = Field(None, description="the paper's loss")

    @property
    def compressed_share(self) -> float:
        """The share of the replicas that is compressed: 1 - alpha in equation 5."""
        named = {"none": 0.0, "half": 0.5, "all": 1.0}
        return named[self.compressed] if isinstance(self.compressed, str) else self.compressed


class Claim(Settings):
    """A statement about losses (or biases); exactly one of `lower`, `equal` and `grows` is set.

    lower: [a, b] says that a's loss is lower than b's. equal: [a, b] says that they differ by less than `margin`.
    grows: [[a, b], [c, d], ...] says that b - a is smaller than d - c, and so on.
    """

    text: str
    of: Literal["loss", "bias"] = Field("loss", description="bias: of equation 5, as the experiment measures it")
    lower: tuple[str, str] | None = None
    equal: tuple[str, str] | None = None
    grows: list[tuple[str, str]] | None = None
    margin: float = Field(0.03, gt=0, description="nats, or a share for a bias")
    why: str = Field("", description="what we think, where the verdict is not the paper's")

    @model_validator(mode="after")
    def _exactly_one(self) -> Claim:
        if sum(part is not None for part in (self.lower, self.equal, self.grows)) != 1:
            raise ValueError("expected exactly one of `lower`, `equal`, `grows`")
        return self

    def rows(self) -> set[str]:
        """The rows that it speaks of."""
        pairs = [pair for pair in (self.lower, self.equal) if pair is not None] + (self.grows or [])
        return {name for pair in pairs for name in pair}


class Experiment(Settings):
    """One table or figure."""

    name: str
    title: str
    paper: str = Field(description="where its numbers stand")
    note: str = ""
    corpus: str | None = Field(None, description="instead of the scale's")
    at: dict[str, Cells] = Field(default_factory=dict, description="changed cells of every row, by scale")
    bias_every: int | None = Field(None, ge=1, description="rounds between measurements of equation 5's bias")
    baseline: str
    rows: list[Row] = Field(min_length=1)
    claims: list[Claim]

    @model_validator(mode="after")
    def _rows_exist(self) -> Experiment:
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise ValueError("found two rows of one name")
        wanted = {self.baseline}.union(*(claim.rows() for claim in self.claims))
        if wanted - set(names):
            raise ValueError(f"found no rows {sorted(wanted - set(names))}")
        return self


Loaded = TypeVar("Loaded", Scale, Experiment)


class Catalog:
    """The experiments and scales of a folder (`configs/experiments`)."""

    def __init__(self, folder: Path) -> None:
        self.scales = {path.stem: _load(path, Scale) for path in sorted((folder / "scales").glob("*.yaml"))}
        loaded = [_load(path, Experiment) for path in self._files(folder)]
        self.experiments = {experiment.name: experiment for experiment in loaded}

    @staticmethod
    def _files(folder: Path) -> Iterator[Path]:
        return (path for path in sorted(folder.glob("*/*.yaml")) if path.parent.name != "scales")

    def scale(self, name: str) -> Scale:
        """A scale by name; ConfigError lists the known ones."""
        if name not in self.scales:
            raise ConfigError((), f"found no scale `{name}`, expected one of {', '.join(self.scales)}")
        return self.scales[name]

    def experiment(self, name: str) -> Experiment:
        """An experiment by name; ConfigError lists the known ones."""
        if name not in self.experiments:
            raise ConfigError((), f"found no experiment `{name}`, expected one of {', '.join(self.experiments)}")
        return self.experiments[name]


def _load(path: Path, kind: type[Loaded]) -> Loaded:
    try:
        return kind.model_validate(YAML(typ="safe").load(path))
    except (ValidationError, YAMLError) as error:
        first = str(error).splitlines()
        raise ConfigError((), f"{path}: {' '.join(line.strip() for line in first[1:3]) or first[0]}") from None
