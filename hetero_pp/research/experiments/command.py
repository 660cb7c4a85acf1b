"""`hetero-pp reproduce`: train the rows without an outcome, write tables and verdicts; `--list`, and `--dry-run`."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from hetero_pp.config.folder import CACHE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError, RunFailed
from hetero_pp.core.files import write_whole
from hetero_pp.core.shipped import shipped
from hetero_pp.core.units import format_bytes, format_flops, format_number
from hetero_pp.data.settings import STREAMED
from hetero_pp.program.report.output import say, shown_reading, standard_output, tell
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.research.experiments.claims import deployments_of, known_values
from hetero_pp.research.experiments.corpus import Corpus, Supply, prepare_corpus, require_text, with_tokenizer
from hetero_pp.research.experiments.definition import Catalog, Row
from hetero_pp.research.experiments.outcomes import ROWS, Outcome, alone, read_outcomes
from hetero_pp.research.experiments.result import (
    print_result,
    result_of,
    token_count,
    write_result,
)
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.training import Job, Training, known_outcomes, make_job, train
from hetero_pp.research.trainer.measurements import contribution_bytes

EXPERIMENTS, RESULTS = Path("configs/experiments"), Path("benchmarks/results")
"""Default folders. In a folder without them, the program uses its own files."""
SCALE = "micro"  # default scale
SECONDS_PER_FLOP = {"cpu": 1 / 2.0e10, "gpu": 1 / 4.0e13}
"""Seconds per FLOP of one core at the micro scale (measured), and of one large GPU at a tenth of its peak (assumed)."""
_ENDINGS = re.compile(r"(\.(txt|jsonl?|parquet|gz|zst|bz2|xz))+$")


@dataclass(frozen=True)
class Request:
    """A request to `hetero-pp reproduce`."""

    catalog: Catalog
    names: Sequence[str] = ()
    scale: str = SCALE
    rows: Sequence[str] = ()  # patterns of the names of rows to train, such as `128,*`; empty for all rows
    seeds: int = 3
    workers: int = 1
    corpus: str | None = None
    tokenizer: str | None = None
    repeat: bool = False
    runs: Path = Path("runs")
    results: Path = RESULTS
    trains: bool = True  # whether rows are trained; if False, tables are written from the existing outcomes
    training: Training = field(default_factory=Training)
    can_train: bool = True  # whether this machine has the scale's hardware

    def settings(self) -> tuple[list[Setting], dict[str, ConfigError]]:
        """Return the requested experiments, and the errors of unusable ones by name.

        Experiments with changed rows or text get names of their own. If no name was given, all usable experiments are
        returned. Raises ConfigError for an unknown scale or name, and for a named experiment that cannot be used.
        """
        scale = with_tokenizer(self.catalog.scale(self.scale), self.tokenizer)
        if self.names:
            return [self._setting(name) for name in self.names], {}
        found, broken = [], dict(self.catalog.broken)
        for name, experiment in sorted(self.catalog.experiments.items()):
            if not experiment.has_scale(scale.name) or scale.experiments not in (None, experiment.folder):
                continue
            try:
                found.append(self._setting(name))
            except ConfigError as error:
                broken[name] = error
        return found, broken

    def _setting(self, name: str) -> Setting:
        """Return an experiment with all its rows validated. Raises ConfigError if one is no valid run."""
        experiment = self.catalog.experiment(name)
        scale = with_tokenizer(self.catalog.scale_of(experiment, self.scale), self.tokenizer)
        if not experiment.has_scale(scale.name):
            raise ConfigError((), f"--scale {scale.name}: {name} is only defined for {experiment.scale}")
        words = ["hetero-pp", "reproduce", experiment.name]
        if self.catalog.folder != experiments_in(EXPERIMENTS):
            words += ["--experiments", str(self.catalog.folder)]
        if self.scale != (experiment.scale or SCALE):
            words += ["--scale", self.scale]
        words += [] if self.corpus is None else ["--corpus", self.corpus]
        words += [] if self.tokenizer is None else ["--tokenizer", self.tokenizer]
        command = shlex.join(words + ["--repeat"] * self.repeat)
        setting = Setting(scale, experiment, self.can_train, self.corpus, self.repeat, command)
        deployments_of(experiment)
        for row in experiment.rows:
            if setting.not_representable(row) is None:
                setting.config(row)
        brought = [short_name(one) for one in (self.corpus, self.tokenizer) if one is not None]
        named = setting.experiment.model_copy(update={"name": "-".join([setting.experiment.name, *brought])})
        return replace(setting, experiment=named) if brought else setting


def experiments_in(folder: Path) -> Path:
    """Return the folder of experiments: the shipped ones in place of a missing default folder."""
    return shipped(str(EXPERIMENTS)) if folder == EXPERIMENTS and not folder.exists() else folder


def results_in(folder: Path, writes: bool) -> Path:
    """Return the folder of results. A missing default folder begins as a copy of the shipped ones if it is written."""
    if folder != RESULTS or folder.exists():
        return folder
    if not writes:
        return shipped(str(RESULTS))
    shutil.copytree(shipped(str(RESULTS)), folder)
    return folder


def scale_of(catalog: Catalog, names: Sequence[str]) -> str:
    """Return the default scale of the experiments. Raises ConfigError if they have different ones."""
    scales = {catalog.experiment(name).scale or SCALE for name in names} or {SCALE}
    if len(scales) > 1:
        raise ConfigError((), f"found experiments for the scales {', '.join(sorted(scales))}, expected one at a time")
    return scales.pop()


def short_name(brought: str) -> str:
    """Return a short name for a corpus or tokenizer: the last part of its path that is specific.

    `dclm-baseline-1.0` for `hf:mlfoundations/dclm-baseline-1.0`, `llama-2` for `data/llama-2/tokenizer.json`, `c4` for
    `hf:/data/c4/*.json.gz`.
    """
    parts = [part for part in Path(brought.removeprefix(STREAMED)).parts if "*" not in part]
    parts = [part for part in parts if part != "tokenizer.json"] or parts
    return re.sub(r"[^\w.+-]", "_", _ENDINGS.sub("", parts[-1])) if parts else "corpus"


def with_device(request: Request, device: str) -> Request:
    """Return the request with its device: `cpu`, `cuda`, or for `auto` the scale's hardware if it is available.

    Rows of a scale for CPUs keep fp32 products on a GPU, so that they can be compared with rows of CPUs. Raises
    ConfigError for `cuda` if torch finds no GPU.
    """
    has_gpu, wants_gpu = torch.cuda.is_available(), request.catalog.scale(request.scale).hardware == "gpu"
    if device == "cuda" and not has_gpu:
        raise ConfigError((), "--device cuda: found no GPU that torch can use")
    chosen = device if device != "auto" else "cuda" if wants_gpu and has_gpu else "cpu"
    can_train = not wants_gpu or chosen == "cuda" or device == "cpu"
    training = replace(request.training, device=chosen, rounds_products=wants_gpu)
    return replace(request, training=training, can_train=can_train)


def reproduce(request: Request) -> None:
    """Train the missing rows, then write every table and its verdicts. Raises RunFailed if a row was not trained."""
    console = standard_output()
    settings, broken = request.settings()
    rows = request.results.absolute() / request.catalog.scale(request.scale).name / ROWS
    outcomes = known_outcomes(read_outcomes(rows))
    tables = {setting.experiment.name: _Table(setting, request, rows, outcomes, console) for setting in settings}
    asked: dict[str, Job] = {}
    for table in tables.values():
        for _, job in table.asked:
            if not request.rows or any(fnmatchcase(job.name, pattern) for pattern in request.rows):
                asked.setdefault(job.key, job)
    missing = [job for key, job in asked.items() if key not in outcomes]
    failures: Mapping[str, str] = {}
    notes = [note for table in tables.values() if table.corpus is not None for note in table.corpus.source.notes]
    for note in dict.fromkeys(notes):  # parts of the corpora that are skipped
        tell(console, note)
    if request.trains:
        failures = train(missing, request.training, request.workers, console)
    with alone(rows):
        outcomes = known_outcomes(read_outcomes(rows))
        curve = _curve(request, rows, outcomes, console)
        for table in tables.values():
            table.write(request.results, outcomes, console, curve)
        _tell_differences(missing, outcomes, rows, console)
    _print_broken(console, broken)
    for name, cause in failures.items():
        tell(console, f"{name} failed: {cause}", style="red")
    if failures:
        raise RunFailed(f"{len(failures)} of {len(missing)} rows did not finish training")


def _tell_differences(trained: Sequence[Job], outcomes: Mapping[str, Outcome], rows: Path, console: Console) -> None:
    """Compare each row that was trained again with the row of the repository, for a folder of results elsewhere."""
    committed = shipped(str(RESULTS / rows.parent.name / ROWS)).absolute()
    earlier = {} if committed == rows else known_outcomes(read_outcomes(committed))
    for job in trained:
        if job.key in outcomes and job.key in earlier:
            here, there = outcomes[job.key]["validation_loss"][-1], earlier[job.key]["validation_loss"][-1]
            told = f"loss {here:.4f} here, {there:.4f} in the repository's rows, difference {here - there:+.4f}"
            tell(console, f"{job.name}, seed {job.seed}: {told}")


def _curve(
    request: Request, rows: Path, outcomes: Mapping[str, Outcome], console: Console
) -> tuple[RunConfig, Mapping[float, float]] | None:
    """Return a run of the scale's `budgets` without compression, and its losses by tokens."""
    scale = request.catalog.scale(request.scale)
    if scale.budgets not in request.catalog.experiments or request.corpus is not None or request.tokenizer is not None:
        return None
    [setting], _ = replace(request, names=[scale.budgets], trains=False).settings()
    known = _Table(setting, replace(request, trains=False), rows, outcomes, console).outcomes(outcomes)
    losses, points = known_values(known)["own"], dict[float, float]()
    baselines = [row for row in setting.rows() if row.compressed_share == 0 and losses.get(row.name)]
    for row in baselines:
        seeds = losses[row.name]
        points[known[row.name][min(seeds)]["tokens"]] = fmean(seeds.values())
    return (setting.config(baselines[0]), points) if points else None


class _Table:
    """Jobs of one experiment: the requested ones, and further seeds that already have outcomes."""

    def __init__(
        self, setting: Setting, request: Request, rows: Path, outcomes: Mapping[str, Outcome], console: Console
    ) -> None:
        self.setting, self.seeds = setting, request.seeds
        self.corpus: Corpus | None = None
        self.asked: list[tuple[Row, Job]] = []
        self.known: list[tuple[Row, Job]] = []
        if not setting.rows():
            return
        data = setting.config(setting.rows()[0]).data
        with shown_reading(console, f"reading {data.corpus}") as on_progress:
            cache = request.runs.absolute() / CACHE
            self.corpus = prepare_corpus(data, setting.scale.vocabulary, cache, on_progress)
        supply = Supply(setting, self.corpus.source)
        supply.require_enough()
        if request.trains:
            _print_supply(console, supply)
        first = setting.experiment.first_seed
        for seed in count(first):
            jobs = [(row, make_job(setting, row, seed, self.corpus, rows)) for row in setting.rows()]
            done = [(row, job) for row, job in jobs if job.key in outcomes]
            if seed < first + request.seeds:
                self.asked += jobs
            elif not done:
                break
            else:
                self.known += done

    def outcomes(self, outcomes: Mapping[str, Outcome]) -> dict[str, dict[int, Outcome]]:
        """Return all known outcomes by row and seed."""
        known: dict[str, dict[int, Outcome]] = {}
        for row, job in self.asked + self.known:
            if (outcome := outcomes.get(job.key)) is not None:
                known.setdefault(row.name, {})[job.seed] = outcome
        return known

    def write(
        self,
        folder: Path,
        outcomes: Mapping[str, Outcome],
        console: Console,
        curve: tuple[RunConfig, Mapping[float, float]] | None,
    ) -> None:
        """Write the table of all known outcomes; keep an existing table with results if nothing is known."""
        known = self.outcomes(outcomes)
        path = folder / self.setting.scale.name / f"{self.setting.experiment.name}.json"
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not known and any(row["ours"] is not None for row in earlier.get("rows", [])):
            say(console, f"{path} was not changed: none of its rows was trained on this corpus", style="yellow")
            return
        seeds = max(map(len, known.values()), default=self.seeds)
        command = f"{self.setting.command} --seeds {seeds}"
        result = result_of(self.setting, self.corpus, known, command, earlier.get("trained", []), curve)
        write_result(result, known, path)
        print_result(console, result, path)


def list_experiments(request: Request, path: Path | None) -> None:
    """Print every experiment with its claims, cost and state; write them as JSON if `path` is set."""
    settings, broken = request.settings()
    entries: list[dict[str, Any]] = []
    table = PlainTable(["experiment", "title"], ["rows", "claims", "hours", "known"])
    for setting in settings:
        experiment, scale, representable = setting.experiment, setting.scale, setting.representable()
        file = request.results / scale.name / f"{experiment.name}.json"
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": [], "claims": []}
        done = f"{sum(row['ours'] is not None for row in known['rows'])} of {len(representable)}"
        verdicts = {claim["text"]: claim["verdict"] for claim in known["claims"]}
        claims = [{"text": one.text, "verdict": verdicts.get(one.text, "not run")} for one in experiment.claims]
        hours = sum(_hours(setting, row) for row in representable) * request.seeds
        entry: dict[str, Any] = {"name": experiment.name, "title": experiment.title, "paper": experiment.paper}
        entry |= {"rows": len(experiment.rows), "claims": claims, "hours": hours}
        entries.append(entry | {"state": f"{done} rows at scale {scale.name}"})
        numbers = str(len(experiment.rows)), str(len(claims)), format_number(hours, 2)
        table.add_row(experiment.name, experiment.title, *numbers, done)
    for name, error in broken.items():
        entries.append({"name": name, "state": "broken", "error": str(error)})
        table.add_row(name, "broken")
    if path is not None:
        write_whole(path, (json.dumps(entries, indent=1) + "\n").encode())
    console = standard_output()
    console.print(table)
    _print_broken(console, broken)
    notes = (
        f"`known`: trained rows, of the rows that the scale {request.scale} can represent. `hours`: "
        f"{_unit(request)}, for {request.seeds} seeds of every row, including known rows."
    )
    say(console, notes, style="dim")


def dry_run(request: Request) -> None:
    """Validate every row at the scale and print its cost.

    Prints parameters, tokens, FLOPs, bytes, an estimate of the time, and what the corpus has to have.
    """
    console = standard_output()
    settings, broken = request.settings()
    for setting in settings:
        if rows := setting.representable():
            require_text(setting.config(rows[0]).data)
        table = PlainTable(["row"], ["parameters", "tokens", "compute", "sends", "hours"], ["state"])
        for row in setting.experiment.rows:
            if (reason := setting.not_representable(row)) is not None:
                table.add_row(row.name, "", "", "", "", "", reason)
                continue
            spec = RunSpec(setting.config(row), setting.scale.vocabulary)
            sizes = f"{spec.parameter_count:,}", f"{token_count(spec):,}", format_flops(_flops(spec))
            sent = format_bytes(contribution_bytes(spec, spec.config.rounds))
            hours = format_number(_hours(setting, row), 2)
            table.add_row(row.name, *sizes, sent, hours, setting.why_not(row) or "ready")
        name = setting.experiment.name
        say(console, f"{name} at scale {setting.scale.name}", bold=name)
        console.print(table)
        if rows:
            _print_supply(console, Supply(setting))
    say(
        console,
        "`compute`: 6 floating-point operations per parameter and token. `sends`: all contributions of all "
        f"rounds. `hours`: {_unit(request)}, for one seed.",
        style="dim",
    )
    _print_broken(console, broken)


def _flops(spec: RunSpec) -> float:
    """Return the FLOPs of training by the usual estimate of 6 per parameter and token."""
    return 6.0 * spec.parameter_count * token_count(spec)


def _hours(setting: Setting, row: Row) -> float:
    spec = RunSpec(setting.config(row), setting.scale.vocabulary)
    return _flops(spec) * SECONDS_PER_FLOP[setting.scale.hardware] / 3600


def _unit(request: Request) -> str:
    is_cpu = request.catalog.scale(request.scale).hardware == "cpu"
    return "of one core" if is_cpu else "of one GPU (assumed speed)"


def _print_broken(console: Console, broken: Mapping[str, ConfigError]) -> None:
    for name, error in broken.items():
        tell(console, f"{name} is invalid: {error}", style="red")


def _print_supply(console: Console, supply: Supply) -> None:
    for sentence in supply.describe():
        say(console, f"{sentence}.", indent="  ")
