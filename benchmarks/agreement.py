"""Measure how far honest and hostile contributions agree with the others of their round (`audit.gauntlet.agreement`).

    python benchmarks/agreement.py [--rounds 3] [--seed 1] [--json FILE]
    python benchmarks/agreement.py --closing 178m [--replicas 4 8 20] [--json FILE]

Trains the first rounds of each attack of `audit/attacks` without a defence, at scale micro on the CPU. Two of eight
replicas are hostile. A last case has eight honest replicas, each with a cluster of the text, as in DiLoCo's non-iid
rows. Reports the least agreement of an honest replica and the largest of a hostile one over all rounds.

With `--closing MODEL` it measures instead how many CPU seconds the check takes before a round closes, on one thread,
with made-up contributions of the default compression.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import origin, parse, parser_of, save
from launched import letters

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import TokenStore
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.research.experiments.corpus import Corpus, prepare_corpus
from hetero_pp.research.experiments.definition import Catalog
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.settings import ResearchConfig
from hetero_pp.research.trainer.hostile import HostileContributions
from hetero_pp.research.trainer.train import AllReplicas
from replica_groups.audit.gauntlet import SignCheck, agreements

FOLDER = Path(__file__).parents[1]
SMOKE = {"rounds": 1, "cases": 1}
VOCABULARY = 32_000
DISTINCT = 4
"""Made-up contributions that differ; with more replicas they repeat."""
WITHOUT, CLUSTERS = ", none", "eight honest, a cluster of text each"


def cases(setting: Setting, seed: int) -> dict[str, ResearchConfig]:
    """Return the runs by name: one for each attack, and one of honest replicas with different text."""
    rows = {row.name: setting.config(row, seed) for row in setting.experiment.rows}
    attacks = {name.removesuffix(WITHOUT): one for name, one in rows.items() if name.endswith(WITHOUT)}
    del attacks["eight honest"]  # has no attack, and keeps no contributions
    apart = rows["eight honest, bounds"]
    research = apart.research.model_copy(update={"clusters": len(apart.replicas)})
    return attacks | {CLUSTERS: apart.model_copy(update={"research": research})}


def measured(config: ResearchConfig, corpus: Corpus, rounds: int) -> dict[str, Any]:
    """Return the agreements of each round by replica, and the names of the hostile replicas."""
    assert isinstance(corpus.source, TokenStore)
    data = config.data.model_copy(update={"tokenizer": corpus.data.tokenizer})
    spec = RunSpec(config.model_copy(update={"data": data}), corpus.source.vocabulary)
    group, found = AllReplicas(spec, corpus.source), []
    contributions = group.contributions
    assert isinstance(contributions, HostileContributions)
    for round_ in range(1, rounds + 1):
        group.read_ahead(round_)
        group.round(round_)
        found.append(agreements(contributions._sent))
    return {"rounds": found, "hostile": contributions.told.hostile}


def extremes(one: dict[str, Any]) -> tuple[float, float]:
    """Return (least agreement of an honest replica, largest of a hostile one) over all rounds; NaN if there is none."""
    told = [(name in one["hostile"], value) for round_ in one["rounds"] for name, value in round_.items()]
    honest, hostile = ([value for is_hostile, value in told if is_hostile == kind] for kind in (False, True))
    return min(honest, default=float("nan")), max(hostile, default=float("nan"))


def measure(arguments: argparse.Namespace, cache: Path, text: Path | None) -> dict[str, Any]:
    catalog = Catalog(FOLDER / "configs" / "experiments")
    brought = None if text is None else str(text)
    setting = Setting(catalog.scale("micro"), catalog.experiment("audit/attacks"), corpus=brought)
    wanted = cases(setting, arguments.seed)
    corpus = prepare_corpus(next(iter(wanted.values())).data, setting.scale.vocabulary, cache)
    found = {}
    print(f"{'':<40}{'honest, least':>15}{'hostile, most':>15}")
    for name, config in list(wanted.items())[: arguments.cases]:
        found[name] = measured(config, corpus, arguments.rounds)
        honest, hostile = extremes(found[name])
        print(f"{name:<40}{honest:>15.2f}{hostile:>15.2f}", flush=True)
    return found


def closing(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the CPU seconds of the check of one round of made-up contributions, for each number of replicas."""
    names = [f"r{index:02d}" for index in range(max(arguments.replicas))]
    spec = RunSpec(
        RunConfig.model_validate(
            {
                "name": "closing",
                "model": {"preset": arguments.closing},
                "data": {"corpus": "made-up"},
                "outer": {"rounds": 1},
                "replicas": [{"name": name, "kind": "datacenter"} for name in names],
            }
        ),
        VOCABULARY,
    )
    torch.manual_seed(arguments.seed)
    settings, blobs = spec.config.outer.compression, dict[tuple[str, str], bytes]()
    for block, shapes in shapes_by_block(spec.parameter_shapes).items():
        common = {tensor: torch.randn(shape) for tensor, shape in shapes.items()}
        told = [
            [
                (tensor, shape, select(torch.zeros(shape), common[tensor] + 2 * torch.randn(shape), settings))
                for tensor, shape in shapes.items()
            ]
            for _ in range(DISTINCT)
        ]
        for index, name in enumerate(names):
            blobs[name, block] = encode_blob(BlobAddress(spec.run, 1, name, block), told[index % DISTINCT], settings)
    found = []
    for count in arguments.replicas:
        record = RoundRecord(round=1)
        for name in names[:count]:
            entry = record.contributions.add(replica=name, weight=1.0, tokens=1, steps=1)
            for (replica, block), data in blobs.items():
                if replica == name:
                    entry.blobs.add(block=block, sha256=hashlib.sha256(data).digest())
        size = sum(len(data) for (name, _), data in blobs.items() if name in names[:count])
        began, least = time.process_time(), GauntletSettings().agreement
        assert least is not None
        against = SignCheck(spec, least).against(record, lambda name, block: blobs[name, block])
        seconds = time.process_time() - began
        found.append({"replicas": count, "bytes": size, "cpu_seconds": seconds, "against": len(against)})
        print(f"{count:>3} replicas: {seconds:.2f} CPU s, {size / 1e6:.0f} MB of contributions", flush=True)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="outer rounds of each case")
    parser.add_argument("--cases", type=int, help="number of cases; by default all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--closing", metavar="MODEL", help="measure the CPU time of the check, for a model preset")
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 8, 20], help="with --closing: their numbers")
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    if arguments.closing:
        found = {"model": arguments.closing, "seed": arguments.seed, "rounds": closing(arguments)}
        save(origin() | found, arguments.json)
        return
    with tempfile.TemporaryDirectory(prefix="hetero-pp-agreement-") as name:
        text, cache = None, Path("runs/.tokens")
        if arguments.smoke:
            text, cache = Path(name, "made.txt"), Path(name)
            text.write_text(letters(2_000_000))
        found = measure(arguments, cache, text)
    save(origin() | {"seed": arguments.seed, "cases": found}, arguments.json)


if __name__ == "__main__":
    main()
