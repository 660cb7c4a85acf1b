"""Compare rows of the papers' tables that are trained by the trainer of tables, staged in process, and over gRPC.

    python benchmarks/engines_agree.py [--rows ROW ...] [--ways WAY ...] [--seeds N] [--json FILE]

At a seed, all ways of a row begin with the same weights and read the same tokens. So they differ only in rounding and
in how sums are grouped. `compiled` and `eager` are the trainer of tables, which makes the tables. `staged` runs a
thread for each member, over links in memory. `launched` is `hetero-pp launch`: a process for each member, over gRPC.
`kept` is not trained. It is the row of `benchmarks/results/<scale>/rows.jsonl`, from which the tables are written, if
there is one of the same corpus.

The difference of a pair of ways is the second's loss minus the first's at the same seed. Its mean with a 95 % interval
and its value farthest from 0 are reported, after the first round and after the last. Beside them is the spread of each
way over seeds. With --json, runs that the file contains are not trained again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from command_line import earlier, parse, parser_of, save
from launched import run_quietly, summary_of

from hetero_pp.config.folder import CACHE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import save_config
from hetero_pp.data.sources import open_source
from hetero_pp.research.experiments.claims import interval_of
from hetero_pp.research.experiments.corpus import Corpus, prepare_corpus
from hetero_pp.research.experiments.definition import Catalog, Scale
from hetero_pp.research.experiments.outcomes import ROWS as KEPT
from hetero_pp.research.experiments.outcomes import commit, machine, read_outcomes
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.training import Job, make_job
from hetero_pp.research.trainer.train import train_fast

ROWS = {
    "Het-PP": ("het-pp/table1", "Het-PP-Compress (1/2)"),
    "Het-PP, 4 bits": ("beyond/rank_for_bits", "30 x 4 bits, half"),
    "SparseLoCo": ("beyond/sign_codes", "2-bit codes, 1/128"),
    "DiLoCo": ("beyond/missed", "DiLoCo, none missed"),
}
"""Experiment and row by name. Two rows of Het-PP compress half of the replicas, in bf16 and in few bits.

The other two rows send what the other two papers send.
"""

WAYS = ("kept", "compiled", "eager", "staged", "launched")
PAIRS = (
    *(("staged", "compiled"), ("staged", "eager"), ("staged", "launched")),
    *(("launched", "compiled"), ("launched", "eager"), ("kept", "compiled"), ("kept", "launched")),
)
LEAST = Scale.model_validate(
    {
        "name": "least",
        "replicas": 2,
        "stages": 2,
        "batch_size": 2,
        "vocabulary": 300,
        "hardware": "cpu",
        "base": {
            "model": {"preset": "micro", "width": 32, "layers": 2, "heads": 2, "feed_forward": 32},
            "data": {"sequence_length": 16, "validation_share": 0.1, "validation_sequences": 4},
            "inner": {"steps": 2, "warmup_steps": 2},
            "outer": {"rounds": 2},
        },
    }
)
SMOKE = {"scale": "least", "seeds": 1, "rows": ["Het-PP, 4 bits"], "ways": ["eager", "staged", "launched"]}
CATALOG = Catalog(Path(__file__).parents[1] / "configs" / "experiments")
RESULTS = Path(__file__).parent / "results"
RUNS = Path("runs/engines_agree")


def text_of(scale: Scale, folder: Path) -> str | None:
    """Return a small text for the smallest scale, which it writes to the folder; None for the others."""
    if scale is not LEAST:
        return None
    path = folder.absolute() / "text.txt"
    path.write_text(Path(__file__).read_text())
    return str(path)


class Jobs:
    """The rows at a scale, each as `reproduce` would train it."""

    def __init__(self, scale: str) -> None:
        self._scale = CATALOG.scales.get(scale, LEAST)
        self._text = text_of(self._scale, RUNS)
        self._kept = RESULTS / scale / KEPT
        self._outcomes = read_outcomes(self._kept)
        self._prepared: dict[str, Corpus] = {}

    def job(self, name: str, seed: int) -> Job:
        """Return the job of a row at a seed. Encodes the job's corpus if necessary."""
        experiment, row = ROWS[name]
        setting = Setting(self._scale, CATALOG.experiment(experiment), corpus=self._text)
        [one] = [one for one in setting.rows() if one.name == row]
        data = setting.config(one).data
        if data.corpus not in self._prepared:
            cache = RUNS.absolute() / CACHE
            self._prepared[data.corpus] = prepare_corpus(data, self._scale.vocabulary, cache)
        return make_job(setting, one, seed, self._prepared[data.corpus], self._kept)

    def kept(self, job: Job) -> list[list[float]]:
        """Return the validation losses of the job's row in the tables. The list is empty if there is no row."""
        return [self._outcomes[job.key]["validation_loss"]] if job.key in self._outcomes else []


def train(job: Job, way: str) -> list[float]:
    """Train a job. Return the validation loss of every round, which is the replica forward averaged over replicas."""
    if way in ("compiled", "eager"):
        source = open_source(job.config.data, job.cache)
        result = train_fast(RunSpec(job.config, source.vocabulary), source, compiles=way == "compiled")
        assert result.compiled == (way == "compiled"), "torch.compile does not work on this machine"
        return result.validation_loss
    yaml = RUNS / "run.yaml"
    run = job.config.model_dump(mode="json", exclude={"research"})  # without settings that only the tables have
    save_config(RunConfig.model_validate(run), yaml)
    folder = run_quietly(yaml, [], RUNS, in_process=way == "staged")
    losses: list[float] = summary_of(folder)["validation_loss"]
    shutil.rmtree(folder.path)
    return losses


def measure(job: Job, way: str, jobs: Jobs) -> Iterator[dict[str, Any]]:
    """Train a job, and yield its run. The way `kept` yields the kept run, or nothing if there is none."""
    run = {"way": way, "seed": job.seed, "key": job.key}
    if way == "kept":
        yield from (run | {"validation_loss": losses} for losses in jobs.kept(job))
        return
    began, started = commit(), time.monotonic()
    losses, seconds = train(job, way), time.monotonic() - started
    print(f"{job.experiment}: {job.name}, {way}, seed {job.seed}: {losses[-1]:.4f} in {seconds:.0f} s", flush=True)
    yield run | {"commit": began, "seconds": seconds, "validation_loss": losses}


def compared(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the comparison of each pair of ways of each row, at the seeds that both have."""
    losses: dict[tuple[str, str], dict[int, list[float]]] = {}
    for run in runs:
        losses.setdefault((run["row"], run["way"]), {})[run["seed"]] = run["validation_loss"]
    for row in ROWS:
        for one, other in PAIRS:
            first, second = losses.get((row, one), {}), losses.get((row, other), {})
            if seeds := sorted({*first} & {*second}):
                yield {
                    "row": row,
                    "ways": [one, other],
                    "seeds": seeds,
                    "same_bits": all(first[seed] == second[seed] for seed in seeds),
                    "first_round": _differences([second[seed][0] - first[seed][0] for seed in seeds]),
                    "last_round": _differences([second[seed][-1] - first[seed][-1] for seed in seeds]),
                    "seeds_apart": [_apart(first), _apart(second)],
                }


def _differences(values: Sequence[float]) -> dict[str, Any]:
    interval = interval_of(values) if len(values) > 1 else None
    return {"mean": fmean(values), "interval": interval, "farthest": max(values, key=abs)}


def _apart(losses: Mapping[int, Sequence[float]]) -> float:
    """Return the largest last loss minus the smallest one, over all seeds."""
    last = [of_seed[-1] for of_seed in losses.values()]
    return max(last) - min(last)


def show(found: Mapping[str, Any]) -> None:
    """Print the losses of all ways, and a line for each pair of ways."""
    runs = found["runs"]
    print(f"{'row':<16}{'way':<22}loss after the last round, seed by seed")
    for row, way in dict.fromkeys((run["row"], run["way"]) for run in runs):
        own = [(one["seed"], one["validation_loss"][-1]) for one in runs if (one["row"], one["way"]) == (row, way)]
        print(f"{row:<16}{way:<22}" + "  ".join(f"{seed}: {loss:.4f}" for seed, loss in sorted(own)))
    print(f"\n{'':<38}{'first round':>13}{'last: mean':>12}{'95 %':>20}{'farthest':>10}{'seeds apart':>18}")
    for pair in found["pairs"]:
        first, last = pair["first_round"], pair["last_round"]
        interval = "{:+.4f} to {:+.4f}".format(*last["interval"]) if last["interval"] else ""
        numbers = f"{first['farthest']:>+13.0e}{last['mean']:>+12.4f}{interval:>20}{last['farthest']:>+10.4f}"
        apart = "{:.4f}, {:.4f}".format(*pair["seeds_apart"])
        same = "  the same bits" if pair["same_bits"] else ""
        print(f"{pair['row']:<16}{' to '.join(pair['ways']):<22}{numbers}{apart:>18}{same}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scale", choices=[LEAST.name, *CATALOG.scales], default="micro")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="; ".join(ROWS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["kept", "compiled", "staged", "launched"])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    RUNS.mkdir(parents=True, exist_ok=True)
    found = earlier(arguments.json) or {"machine": machine(), "scale": arguments.scale, "runs": [], "pairs": []}
    jobs = Jobs(arguments.scale)
    for seed in range(1, arguments.seeds + 1):
        for row in arguments.rows:
            job = jobs.job(row, seed)
            for way in arguments.ways:
                if all((run["row"], run["way"], run["seed"]) != (row, way, seed) for run in found["runs"]):
                    found["runs"] += [{"row": row, **run} for run in measure(job, way, jobs)]
                    save(found, arguments.json)
    found["pairs"] = list(compared(found["runs"]))
    save(found, arguments.json)
    show(found)


if __name__ == "__main__":
    main()
