"""Coverage-guided fuzzing of the decoder of contributions: any bytes give valid values or MalformedContribution.

    python benchmarks/fuzz_contribution.py --inputs 10000000 [--seed N] [--corpus FOLDER] [--json FILE]

Needs `pip install hetero-pp[fuzz]` (atheris). Inputs that reach new code are kept in the corpus folder, which a later
call goes on from.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hetero_pp.pseudo_gradient", "hetero_pp.bits"]):
    from contribution_target import Count, seeds, try_one

import torch

from hetero_pp.program.experiments.report import commit, machine


def main() -> None:
    """Fuzz, and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = arguments.corpus or Path(tempfile.mkdtemp())
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    count, started = Count(), time.process_time()

    def target(data: bytes) -> None:
        try_one(data, count)
        if count.inputs % 100_000 == 0 or count.inputs == arguments.inputs:
            report(count, time.process_time() - started, len(list(corpus.iterdir())), arguments.json)

    options = [f"-runs={arguments.inputs}", f"-seed={arguments.seed}", "-max_len=4096", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target)
    atheris.Fuzz()


def report(count: Count, seconds: float, corpus: int, path: Path | None) -> None:
    """Print how far it is; write it too."""
    print(f"{count.inputs:,} inputs: {count.decoded:,} valid, {count.refused:,} refused; {corpus} kept", flush=True)
    if path is not None:
        found = {
            "machine": machine(),
            "commit": commit(),
            "inputs": count.inputs,
            "valid": count.decoded,
            "refused": count.refused,
            "escaped": 0,
            "reached_new_code": corpus,
            "cpu_seconds": seconds,
            "reasons": dict(sorted(count.reasons.items(), key=lambda one: -one[1])),
        }
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
