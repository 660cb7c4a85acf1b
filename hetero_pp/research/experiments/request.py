"""The user's request to `hetero-pp reproduce`: experiments, scale, sweeps and corpus."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.shipped import shipped
from hetero_pp.data.settings import STREAMED
from hetero_pp.research.experiments.catalog import Catalog
from hetero_pp.research.experiments.clock import deployments_of
from hetero_pp.research.experiments.corpus import with_tokenizer
from hetero_pp.research.experiments.jobs import RowTraining
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.sweep import swept

EXPERIMENTS, RESULTS = Path("configs/experiments"), Path("benchmarks/results")
"""Default folders. In a folder without them, the program uses its own files."""
SCALE = "micro"
"""Default scale."""
_ENDINGS = re.compile(r"(\.(txt|jsonl?|parquet|gz|zst|bz2|xz))+$")


@dataclass(frozen=True)
class Request:
    """A request to `hetero-pp reproduce`."""

    catalog: Catalog
    names: Sequence[str] = ()
    scale: str = SCALE
    rows: Sequence[str] = ()
    """Patterns of the names of rows to train, such as `128,*`; empty for all rows."""
    seeds: int = 3
    workers: int = 1
    corpus: str | None = None
    tokenizer: str | None = None
    repeat: bool = False
    sweeps: Sequence[str] = ()
    runs: Path = Path("runs")
    results: Path = RESULTS
    trains: bool = True
    """Whether rows are trained; if False, tables are written from the existing outcomes."""
    training: RowTraining = field(default_factory=RowTraining)
    can_train: bool = True
    """Whether this machine has the scale's hardware."""

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

    def trains_row(self, name: str) -> bool:
        """Return whether the row is one of those to train."""
        return not self.rows or any(fnmatchcase(name, pattern) for pattern in self.rows)

    def _setting(self, name: str) -> Setting:
        """Return an experiment with all its rows validated. Raises ConfigError if one is no valid run."""
        experiment = self.catalog.experiment(name)
        scale = with_tokenizer(self.catalog.scale_of(experiment, self.scale), self.tokenizer)
        if not experiment.has_scale(scale.name):
            raise ConfigError((), f"--scale {scale.name}: {name} is only defined for {experiment.scale}")
        command = self._command(experiment.name)
        setting = Setting(scale, experiment, self.can_train, self.corpus, self.repeat, command)
        deployments_of(experiment)
        for row in experiment.rows:
            if setting.not_representable(row) is None:
                setting.config(row)
        if self.sweeps:
            setting = swept(setting, self.sweeps)
        brought = [short_name(one) for one in (self.corpus, self.tokenizer) if one is not None]
        if not brought:
            return setting
        named = setting.experiment.model_copy(update={"name": "-".join([setting.experiment.name, *brought])})
        return replace(setting, experiment=named)

    def _command(self, name: str) -> str:
        """Return the command that makes the experiment's table for this request, without the number of seeds."""
        words = ["hetero-pp", "reproduce", name]
        if self.catalog.folder != experiments_in(EXPERIMENTS):
            words += ["--experiments", str(self.catalog.folder)]
        if self.scale != (self.catalog.experiment(name).scale or SCALE):
            words += ["--scale", self.scale]
        words += [word for sweep in self.sweeps for word in ("--sweep", sweep)]
        if self.corpus is not None:
            words += ["--corpus", self.corpus]
        if self.tokenizer is not None:
            words += ["--tokenizer", self.tokenizer]
        return shlex.join(words + ["--repeat"] * self.repeat)


def experiments_in(folder: Path) -> Path:
    """Return the folder of experiments: the shipped ones in place of a missing default folder."""
    return shipped(str(EXPERIMENTS)) if _is_missing_default(folder, EXPERIMENTS) else folder


def results_in(folder: Path, writes: bool) -> Path:
    """Return the folder of results. A missing default folder begins as a copy of the shipped ones if it is written."""
    if not _is_missing_default(folder, RESULTS):
        return folder
    if not writes:
        return shipped(str(RESULTS))
    shutil.copytree(shipped(str(RESULTS)), folder)
    return folder


def _is_missing_default(folder: Path, default: Path) -> bool:
    return folder == default and not folder.exists()


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
    import torch

    has_gpu, wants_gpu = torch.cuda.is_available(), request.catalog.scale(request.scale).hardware == "gpu"
    if device == "cuda" and not has_gpu:
        raise ConfigError((), "--device cuda: found no GPU that torch can use")
    chosen = device if device != "auto" else "cuda" if wants_gpu and has_gpu else "cpu"
    can_train = not wants_gpu or chosen == "cuda" or device == "cpu"
    training = replace(request.training, device=chosen, rounds_products=wants_gpu)
    return replace(request, training=training, can_train=can_train)
