"""Definitions as data, and the folder that holds them: scales, experiments, rows, claims and trends.

A row is changed cells of a scale's base; a claim is an inequality between rows. A file that cannot be used is reported,
and the others stay usable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, Field, PositiveFloat, PrivateAttr, ValidationError, model_validator

from hetero_pp.config.yaml_file import YamlLines, complaint
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.settings import Ratio, Settings
from hetero_pp.core.shipped import shipped
from hetero_pp.model.part_settings import EmbeddingTraining, Rank
from hetero_pp.research.settings import Every

Cells = dict[str, Any]
"""Changed cells of a run by dotted name, as `outer.method: diloco`; `replicas.batch_size` changes every replica."""


def is_a_name(text: str) -> bool:
    """Return whether the text can be a path for results: `rank`, `mine/rank`."""
    return re.fullmatch(r"\w[\w.+-]*(/\w[\w.+-]*)*", text) is not None


def _checked(name: str) -> str:
    if not is_a_name(name):
        raise ValueError(f"found `{name}`, expected a valid file name, such as `mine/rank`")
    return name


Name = Annotated[str, AfterValidator(_checked)]


_Others = Literal["adamw_ddp", "adamw", "muon", "demo", "sparseloco"]
_DiLoCo = Literal["diloco", "diloco_one_worker", "diloco_sgd", "diloco_momentum", "diloco_adam", "diloco_lom"]
_HetPP = Literal["pp_compress", "pp_compress_free", "het_pp_compress", "het_pp_compress_free"]
Method = Literal[_Others, _DiLoCo, _HetPP]
"""Methods that have a learning rate of their own.

`adamw` is one worker. `diloco` has Nesterov momentum, `diloco_sgd` none. `pp_compress` has only compressed replicas,
`het_pp_compress` also others. `_free` trains the whole embedding, which Het-PP (2.4) keeps in the subspace.
"""


class Definition(Settings):
    """Content of one definition file."""

    _file: Path | None = PrivateAttr(None)

    def located(self, error: ConfigError) -> ConfigError:
        """Return the error with the file and the line of its key, if the definition was read from a file."""
        return error if self._file is None else YamlLines(self._file).located(error, type(self))

    def read_from(self, file: Path) -> None:
        self._file = file

    def beside(self, path: str) -> Path:
        """Return a path that is relative to the folder of the definition's file."""
        return Path(path) if self._file is None else self._file.parent / path


class Bring(Settings):
    """Data that the user must supply for a scale of a paper."""

    paper: str = Field(description="paper and section that name the data")
    corpus: str = Field(description="value for --corpus")
    tokenizer: str = Field(description="tokenizer to supply, in words; its size has to equal the scale's `vocabulary`")


class Scale(Definition):
    """A size at which tables are made; `base` is a run's configuration without name, seed and replicas."""

    name: Name
    about: str = ""
    experiments: str | None = Field(
        None,
        description="folder of the experiments that use this scale instead of the scale of the same name without this "
        "key: each paper has its own recipe",
    )
    replicas: int = Field(ge=1, description="number of replicas (M)")
    stages: int = Field(ge=1, description="stages of a compressed replica")
    batch_size: int = Field(ge=1, description="sequences per replica and inner step")
    vocabulary: int = Field(description="size of a byte-pair encoding trained on the corpus, or of `data.tokenizer`")
    hardware: Literal["cpu", "gpu"] = Field(
        description="required hardware; without it, rows of this scale are only validated"
    )
    bring: Bring | None = None
    base: dict[str, Any]
    sizes: dict[str, Cells] = Field(
        default_factory=dict, description="changed cells of rows with this size, by name of the size"
    )
    rates: dict[Method, PositiveFloat] = Field(
        default_factory=dict,
        description="learning rate of rows by method, instead of the one in `base`; a row, its size or its table can "
        "set another",
    )
    budgets: Name | None = Field(
        None, description="experiment with rows of one method, model and text at several numbers of tokens"
    )

    @property
    def key(self) -> str:
        """Return the unique name: `paper`, or `paper/diloco` for the recipe of a folder of experiments."""
        return self.name if self.experiments is None else f"{self.name}/{self.experiments}"


class Row(Settings):
    """One line of a table: which replicas are compressed, how, and other changed cells."""

    name: str
    compressed: Literal["none", "half", "all"] | Ratio = Field(
        "none", description="share of replicas that are compressed"
    )
    rank: Rank = "full"
    bits: int | None = None
    embedding: EmbeddingTraining | None = Field(
        None,
        description="training of a compressed replica's embedding, as in `boundary.embedding`; by default the method's",
    )
    ablations: dict[str, Any] = Field(default_factory=dict, description="values of `research.ablations`")
    cells: Cells = Field(default_factory=dict)
    at: dict[str, Cells] = Field(default_factory=dict, description="cells at a scale, in place of `cells`, by scale")
    size: str | None = Field(None, description="one of the scale's `sizes`")
    budget: float = Field(1.0, gt=0, description="number of tokens, as a multiple of the scale's")
    steps: int | None = Field(
        None, ge=1, description="inner steps per round (H) at an equal number of tokens; the number of rounds follows"
    )
    replicas: int | None = Field(None, ge=1, description="number of replicas (M), instead of the scale's")
    paper: float | None = Field(None, description="loss in the paper")
    baseline: str | None = Field(None, description="row that percentages refer to; by default the experiment's")
    timed: str | None = Field(
        None, description="row of `simulate.rows` of the experiment's clock that predicts its time"
    )

    @property
    def compressed_share(self) -> float:
        """Share of the replicas that is compressed: 1 - alpha in equation 5."""
        named = {"none": 0.0, "half": 0.5, "all": 1.0}
        return named[self.compressed] if isinstance(self.compressed, str) else self.compressed


Forward = Literal["own", "compressed", "uncompressed"]
Way = Literal["gather", "ring", "sparse_ring"]
OfOuterGradient = Literal["norm", "uncorrelated", "momentum", "kept_momentum"]
OfAttack = Literal["caught", "until_caught", "honest_out", "evaluation", "recomputation", "audit_megabytes", "backdoor"]
_OfRounds = Literal["bias", "similarity"]
_Predicted = Literal["hours"]
Measurement = Literal[_OfRounds, Way, OfOuterGradient, OfAttack, _Predicted]

FORWARDS: tuple[Forward, ...] = get_args(Forward)  # forwards in which the synced model has a loss
WAYS: tuple[Way, ...] = get_args(Way)  # collectives for which the size of contributions is measured
OF_OUTER_GRADIENTS: tuple[OfOuterGradient, ...] = get_args(OfOuterGradient)
"""Measurements of outer gradients, in the order of OuterGradient."""
MEASUREMENTS: tuple[Measurement, ...] = get_args(Measurement)

EVERY: dict[str, str] = {
    "bias": "bias_every",
    "similarity": "similarity_every",
    **dict.fromkeys(WAYS, "volume_every"),
    **dict.fromkeys(OF_OUTER_GRADIENTS, "outer_every"),
}
"""Key of an experiment that sets how often each quantity is measured."""

SEEDLESS = (*WAYS, "hours")
"""Quantities that do not depend on the seed, or hardly: a claim about them has a verdict with one seed."""

KINDS = ("lower", "equal", "grows", "proportional", "inverse_root", "at_least", "at_most")
"""Keys of a claim that state it."""


class ClockSettings(Settings):
    """A deployment that predicts how long rows would take, or several."""

    run: str = Field(description="file of a run with `simulate.rows`, relative to this file")
    cells: Cells = Field(default_factory=dict, description="changed keys of that run")
    at: dict[str, Cells] = Field(
        default_factory=dict, description="deployments by name, such as one bandwidth each: further changed keys"
    )
    losses: list[float] = Field(
        default_factory=list, description="losses for which the table says when each row reaches them"
    )


class Claim(Settings):
    """A statement about losses in one forward, or about another measurement; exactly one of these is set.

    lower: [a, b] says that a's loss is lower than b's.
    equal: [a, b] says that they differ by less than `margin`.
    at_most: [a, b] says that a's loss is lower than that of b plus `margin`.
    grows: [[a, b], [c, d], ...] says that b - a is smaller than d - c, and so on.
    proportional: [a, b, ...] says that each other value is a's times the ratio of their shares of compressed replicas,
    within `margin`.
    inverse_root: [a, b, ...] says that each other value is a's, times the root of a's number of replicas divided by the
    row's, within `margin`.
    at_least: [a, 0.9] says that a's value is at least that.
    """

    text: str
    of: Forward | Measurement = Field(
        "own",
        description="measured quantity. A loss: `own` (mean over replicas of the loss in their own "
        "forward), `compressed` (forward of a compressed replica) or `uncompressed` "
        "(forward without boundaries). Or: `bias` of equation 5, `similarity` (cosine of "
        "contributions), the megabytes that a replica sends over the run with "
        "`gather`, `ring` or `sparse_ring`, the `norm` of the outer gradient, that of `uncorrelated` contributions, "
        "the cosine of a replica's memory and the momentum of all (`momentum`, or `kept_momentum` after dropped or "
        "sent values are removed), or the predicted `hours` of a row by the experiment's clock; or of a row with "
        "`research.attacks`: hostile replicas `caught` and rounds `until_caught`, honest replicas excluded "
        "(`honest_out`), shares of compute (`evaluation`, `recomputation`), `audit_megabytes`, and the share of "
        "triggers that a `backdoor` answers",
    )
    lower: tuple[str, str] | None = None
    equal: tuple[str, str] | None = None
    at_most: tuple[str, str] | None = None
    grows: list[tuple[str, str]] | None = None
    proportional: list[str] | None = Field(None, min_length=2)
    inverse_root: list[str] | None = Field(None, min_length=2)
    at_least: tuple[str, float] | None = None
    after: Ratio = Field(
        1.0, gt=0, le=1, description="share of the rounds after which the loss is compared; only for `own`"
    )
    by: str | None = Field(
        None, description="compare the losses at the predicted time at which this row ends; only for `own`"
    )
    at: str = Field("", description="deployment of the clock's `at` that predicts the hours of `by` or of `hours`")
    margin: float = Field(
        0.03, gt=0, description="allowed difference, in nats, as a share (bias), a cosine, or megabytes"
    )
    ours: bool = Field(False, description="whether the claim is ours, and not one that the paper makes")
    why: str = Field(
        "",
        description="explanation, where the verdict differs from the paper's; it needs `shown_by`, or the words `not "
        "known`",
    )
    shown_by: list[str] = Field(
        default_factory=list,
        description="rows that show the explanation: a row of this table, `TABLE`, or `TABLE | ROW` of another table",
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Claim:
        if sum(getattr(self, kind) is not None for kind in KINDS) != 1:
            raise ValueError(f"expected exactly one of {', '.join(f'`{kind}`' for kind in KINDS)}")
        if self.why and not self.shown_by and "not known" not in self.why.lower():
            raise ValueError("found `why` without `shown_by`, expected rows that show it, or `not known` in its text")
        for key, is_set in (("after", self.after < 1), ("by", self.by is not None)):
            if is_set and self.of != "own":
                raise ValueError(f"found `{key}` with `of: {self.of}`, expected `own`, the loss of every round")
        return self

    def rows(self) -> set[str]:
        """Return the names of the rows in the claim."""
        pairs = [pair for pair in (self.lower, self.equal, self.at_most) if pair is not None] + (self.grows or [])
        bounded = [] if self.at_least is None else [self.at_least[0]]
        return {name for pair in pairs for name in pair}.union(self.proportional or self.inverse_root or bounded)


class Trend(Settings):
    """How the gap between rows and their baselines depends on the width of the model."""

    name: str
    rows: list[str] = Field(min_length=2, description="one row per width")
    of: Forward = Field("own", description="forward of the loss, as in a claim")
    paper: dict[int, float] = Field(default_factory=dict, description="gaps in the paper in percent, by width")


class Experiment(Definition):
    """One table or figure."""

    name: Name
    title: str
    paper: str = Field("", description="location of the numbers in the paper")
    ours: bool = Field(False, description="whether all claims of the table are ours, and none the paper's")
    note: str = ""
    corpus: str | None = Field(None, description="corpus, instead of the scale's")
    scale: Name | None = Field(
        None, description="the only scale of the experiment beside those in `at`; rows use its `sizes`"
    )
    bring: str | None = Field(None, description="corpus to supply at a scale of a paper, instead of the scale's")
    at: dict[str, Cells] = Field(default_factory=dict, description="changed cells of every row, by scale")
    bias_every: int | None = Field(None, ge=1, description="rounds between measurements of the bias in equation 5")
    similarity_every: int | None = Field(
        None, ge=1, description="rounds between measurements of the cosines of contributions"
    )
    volume_every: int | None = Field(
        None, ge=1, description="rounds between measurements of the size of contributions with each collective"
    )
    outer_every: int | None = Field(
        None,
        ge=1,
        description="rounds between measurements of the outer gradient: its norm, and the cosines of each replica's "
        "memory and the momentum of all",
    )
    clock: ClockSettings | None = Field(None, description="deployment that predicts the time of rows")
    first_seed: int = Field(
        1, ge=1, description="first seed; larger than 1 if seeds of an earlier search must not be reused"
    )
    baseline: str
    rows: list[Row] = Field(min_length=1)
    claims: list[Claim] = Field(default_factory=list)
    trends: list[Trend] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits_its_rows(self) -> Experiment:
        names = [row.name for row in self.rows]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"found two rows named `{twice[0]}`, expected unique names")
        wanted = {self.baseline, *(row.baseline for row in self.rows if row.baseline is not None)}
        wanted = wanted.union(*(claim.rows() for claim in self.claims), *(trend.rows for trend in self.trends))
        wanted |= {claim.by for claim in self.claims if claim.by is not None}
        if unknown := sorted(wanted - set(names)):
            raise ValueError(f"found no row `{unknown[0]}`, expected one of {', '.join(f'`{name}`' for name in names)}")
        counted = {row.name for row in self.rows if row.replicas is not None}
        timed = [row.name for row in self.rows if row.timed is not None]
        for claim in self.claims:
            if uncounted := sorted(set(claim.inverse_root or ()) - counted):
                raise ValueError(f"found no `replicas` in row `{uncounted[0]}`, expected it for a claim about it")
            needs_time = claim.rows() if claim.of == "hours" or claim.by is not None else set[str]()
            if untimed := sorted((needs_time | ({claim.by} if claim.by is not None else set())) - set(timed)):
                raise ValueError(f"found no `timed` in row `{untimed[0]}`, expected it for a claim about time")
            deployments = [] if self.clock is None else list(self.clock.at) or [""]
            if needs_time and claim.at not in deployments:
                raise ValueError(f"found `at: {claim.at}` in a claim about time, expected one of {deployments}")
            every = EVERY.get(claim.of)
            if every is not None and getattr(self, every) is None:
                raise ValueError(
                    f"found a claim about {claim.of} without `{every}`, expected the rounds between measurements"
                )
        if self.clock is None and timed:
            raise ValueError(f"found `timed` in row `{timed[0]}` without `clock`, expected the file that predicts it")
        return self

    def is_ours(self, claim: Claim) -> bool:
        """Return whether a claim is ours, and not one that a paper makes."""
        return self.ours or claim.ours or not self.paper

    @property
    def folder(self) -> str:
        """Return the folder in the experiment's name, which is the paper's; an empty string without one."""
        return self.name.rpartition("/")[0]

    @property
    def every(self) -> Every:
        """Rounds between measurements."""
        return Every(self.bias_every, self.similarity_every, self.volume_every, self.outer_every)

    def has_scale(self, name: str) -> bool:
        """Return whether the experiment is defined for a scale."""
        return self.scale in (None, name) or name in self.at

    def baseline_of(self, row: Row) -> str:
        """Return the name of the row to which a row's percentage refers."""
        return row.baseline or self.baseline


SHIPPED_SCALES = shipped("configs/experiments/scales")

Kind = TypeVar("Kind", Scale, Experiment)


class Catalog:
    """Experiments and scales that the YAML files of a folder and of its direct subfolders define.

    A file with the key `base`, or in a folder `scales`, is a scale; any other file is an experiment. Shipped scales are
    added if the folder has none of that name, with the recipes of single papers in `scales/NAME/`. `broken` maps the
    names of unusable experiments to their errors.

    Raises ConfigError if there is no such folder.
    """

    def __init__(self, folder: Path, scales: Path = SHIPPED_SCALES) -> None:
        if not folder.is_dir():
            raise ConfigError((), f"{folder}: found no folder, expected a folder with experiments")
        self.folder = folder
        self.scales: dict[str, Scale] = {}
        self.experiments: dict[str, Experiment] = {}
        self.broken: dict[str, ConfigError] = {}
        self._broken_scales: dict[str, ConfigError] = {}
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml"), *folder.glob("scales/*/*.yaml")]):
            self._add(path, path.relative_to(folder).with_suffix("").as_posix())
        own = {*self.scales, *self._broken_scales}
        for path in sorted(scales.glob("**/*.yaml")):
            called = path.relative_to(scales).with_suffix("").as_posix()
            if not own & {called, called.partition("/")[0]}:
                self._add(path, called)
        unknown = {name: error for name, one in self.experiments.items() if (error := self._unknown_reason(one))}
        self.experiments = {name: one for name, one in self.experiments.items() if name not in unknown}
        self.broken |= unknown

    def _unknown_reason(self, experiment: Experiment) -> ConfigError | None:
        """Return the error of a claim whose `shown_by` names a table or a row that does not exist."""
        known = {row.name for row in experiment.rows}
        for index, claim in enumerate(experiment.claims):
            for shown in claim.shown_by:
                table, _, row = shown.partition(" | ")
                other = self.experiments.get(table)
                rows = [] if other is None else [one.name for one in other.rows]
                if shown not in known and (other is None or (row and row not in rows)):
                    found = f"found `{shown}`, expected a row of this table, the name of a table, or `TABLE | ROW`"
                    return experiment.located(ConfigError(("claims", index, "shown_by"), found))
        return None

    def scale(self, name: str) -> Scale:
        """Return a scale by name. Raises ConfigError: the error of its file, or a list of the known names."""
        return _find(name, self.scales, self._broken_scales, "scale")

    def scale_of(self, experiment: Experiment, name: str) -> Scale:
        """Return an experiment's scale by name: its paper's recipe if there is one. Raises ConfigError.

        An experiment cannot have another paper's recipe.
        """
        recipe = f"{name}/{experiment.folder}"
        scale = self.scale(recipe if recipe in {*self.scales, *self._broken_scales} else name)
        if scale.experiments not in (None, experiment.folder):
            found = f"found the experiment `{experiment.name}`, expected one in the folder `{scale.experiments}`"
            raise scale.located(ConfigError(("experiments",), f"{found}: this is the recipe of another paper"))
        return scale

    def experiment(self, name: str) -> Experiment:
        """Return an experiment by name. Raises ConfigError: the error of its file, or a list of the known names."""
        return _find(name, self.experiments, self.broken, "experiment")

    def _add(self, path: Path, called: str) -> None:
        """Add the scale or experiment of a file; a broken file without a usable name is recorded under `called`."""
        content: Any = {}
        is_scale = path.parent.name == "scales"
        try:
            lines = YamlLines(path)
            content = lines.root
            is_scale = is_scale or "base" in content
            if is_scale:
                _define(Scale, content, lines, self.scales)
            else:
                _define(Experiment, content, lines, self.experiments)
        except ConfigError as error:
            said = str(content.get("name", called))
            if is_scale:
                self._broken_scales[f"{said}/{content['experiments']}" if "experiments" in content else said] = error
            else:
                self.broken[said if is_a_name(said) and said not in self.experiments else called] = error


def _define(kind: type[Kind], content: Any, lines: YamlLines, known: dict[str, Kind]) -> None:
    """Add the definition in a file. Raises ConfigError with file, line and key."""
    try:
        defined = kind.model_validate(content)
    except ValidationError as error:
        raise lines.located(complaint(error, kind), kind) from None
    key = defined.key if isinstance(defined, Scale) else defined.name
    if key in known:
        message = f"found `{key}`, which is the name of another file, expected a unique name"
        raise lines.located(ConfigError(("name",), message), kind)
    defined.read_from(lines.path)
    known[key] = defined


def _find(name: str, known: Mapping[str, Kind], broken: Mapping[str, ConfigError], what: str) -> Kind:
    if name in known:
        return known[name]
    if name in broken:
        raise broken[name]
    raise ConfigError((), f"found no {what} `{name}`, expected one of {', '.join(sorted({*known, *broken}))}")
