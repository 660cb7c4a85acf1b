"""Program of one rank of test_replicas_on_ranks.py: `rank.py CORPUS FOLDER METHOD...`.

It writes losses, hashes after each round and the embedding after the first to FOLDER/<method>/<rank>-of-<world>.json.

The file also names the threads of the process group that are left after it was closed. Such a thread may abort the
process at its end.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.outer.step import parameter_sha256, parameters_sha256
from hetero_pp.research.settings import Every, ResearchConfig
from hetero_pp.research.trainer.train import AllReplicas, train_fast
from replica_groups.engines.ranks import Ranks, init_ranks

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "sparseloco": ({"compression": {"density": 1 / 16}}, {"anchors": {"rank": 4}}, {"missed": 0.4}),
    "adamw_ddp": ({"method": "adamw_ddp"}, {}, {}),
    "grassmann": (
        {"method": "diloco", "aggregation": "geometric_median"},
        {},
        {"averages_moments": True, "ablations": {"grassmann_every": 2}},
    ),
}
"""Settings of `outer`, of the boundary, and of `research`."""


class _Interrupted(Exception):
    pass


def _spec(corpus: str, method: str) -> RunSpec:
    """Return a run of two uncompressed and two compressed replicas, in this order.

    The compressed ones are on the last rank.
    """
    outer, boundary, research = METHODS[method]
    home = {"kind": "participants", "stages": 2, "boundary": {"rank": "1/4", "dtype": "fp32", **boundary}}
    config = ResearchConfig.model_validate(
        {
            "name": "t",
            "model": {"width": 32, "heads": 2, "feed_forward": 48, "layers": 2},
            "data": {"corpus": corpus, "sequence_length": 32, "validation_share": 0.2, "validation_sequences": 8},
            "inner": {"steps": 2, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": 3, **outer},
            "research": research,
            "replicas": [
                {"name": f"r{index}", "batch_size": 4} | (home if index > 1 else {"kind": "datacenter"})
                for index in range(4)
            ],
        }
    )
    return RunSpec(config, 256)


def _rounds(group: AllReplicas, rounds: int) -> dict[str, Any]:
    """Return the hash of each replica's parameters after each round, and the embedding after the first."""
    hashes, embedding = [], None
    for round_ in range(1, rounds + 1):
        assert group.round(round_)
        hashes.append(
            [
                parameters_sha256({name: parameter_sha256(p) for name, p in replica.parameters.items()}).hex()
                for replica in group.replicas
            ]
        )
        embedding = group.replicas[0].parameters[EMBEDDING].tolist() if embedding is None else embedding
    return {"hashes": hashes, "embedding": embedding}


def _resumed(spec: RunSpec, folder: Path, ranks: Ranks) -> list[float]:
    """Return the losses of a run that ended after two rounds and was resumed."""

    def interrupt(round_: int, loss: float) -> None:
        if round_ == 2:
            raise _Interrupted

    store, path = prepare_tokens(spec.config.data, folder), folder / "checkpoint"
    try:
        train_fast(spec, store, interrupt, ranks=ranks, checkpoint=path, checkpoint_seconds=0)
    except _Interrupted:
        assert list(folder.glob("checkpoint*"))
    return train_fast(spec, store, ranks=ranks, checkpoint=path).validation_loss


def _stops_if_one_diverges(spec: RunSpec, folder: Path, ranks: Ranks) -> bool:
    group = AllReplicas(spec, prepare_tokens(spec.config.data, folder), ranks=ranks)
    if ranks.rank == ranks.world - 1:
        group.replicas[0].inner_step = lambda tokens, step: (0.0, math.nan, 0.0)  # type: ignore[method-assign]
    return not group.round(1)


def _threads() -> list[str]:
    """Return the names of this process's threads, also of those that Python did not start."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def _found(spec: RunSpec, method: str, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Return the results of training. A single rank is not interrupted."""
    store = prepare_tokens(spec.config.data, folder / f"tokens-{ranks.rank}")
    found = dataclasses.asdict(train_fast(spec, store, ranks=ranks, every=Every(bias=2)))
    rounds = 1 if ranks.world == 1 else spec.config.outer.rounds  # hashes are compared between ranks
    found |= _rounds(AllReplicas(spec, store, ranks=ranks), rounds)
    if ranks.world == 1:
        return found
    found["resumed"] = _resumed(spec, folder, ranks)
    found["stops"] = method == "adamw_ddp" or _stops_if_one_diverges(spec, folder, ranks)
    return found


def main(corpus: str, folder: Path, methods: list[str]) -> None:
    """Train with each method and write the results."""
    torch.set_num_threads(1)
    ranks = init_ranks(torch.device("cpu"))
    found = {method: _found(_spec(corpus, method), method, folder / method, ranks) for method in methods}
    ranks.close()
    threads = [name for name in _threads() if "gloo" in name]
    for method, outcome in found.items():
        path = folder / method / f"{ranks.rank}-of-{ranks.world}.json"
        path.write_text(json.dumps(outcome | {"threads": threads}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
