"""Fuzz the decoder of contributions by code coverage: any bytes give valid values or MalformedContribution.

    python benchmarks/fuzz_contribution.py --inputs 10000000 [--seed N] [--corpus FOLDER] [--json FILE]

Needs `pip install hetero-pp[fuzz]` (atheris). Inputs that reach new code are kept in the corpus folder, from which a
later call continues. `--smoke` mutates honest blobs at random, without atheris.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

with suppress(ModuleNotFoundError):  # --smoke works without atheris
    import atheris

    with atheris.instrument_imports(include=["hetero_pp.pseudo_gradient", "hetero_pp.core.bits"]):
        import contribution_target  # noqa: F401

import torch
from command_line import extra, origin, parse, parser_of, save
from contribution_target import Count, mutated, seeds, try_one

SMOKE = {"inputs": 1000}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path)
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    if arguments.smoke:
        mutate(arguments.inputs, arguments.seed)
    else:
        fuzz(arguments.inputs, arguments.seed, arguments.corpus or Path(tempfile.mkdtemp()), arguments.json)


def mutate(inputs: int, seed: int) -> None:
    """Decode honest blobs with a few random changes."""
    dice, honest, count, started = random.Random(seed), list(seeds()), Count(), time.process_time()
    for _ in range(inputs):
        try_one(mutated(dice.choice(honest), dice.choice(honest), dice), count)
    report(count, time.process_time() - started, 0, None)


def fuzz(inputs: int, seed: int, corpus: Path, path: Path | None) -> None:
    """Fuzz with atheris, which looks for inputs that reach new code."""
    with extra("fuzz"):
        import atheris
    corpus.mkdir(parents=True, exist_ok=True)
    for number, honest in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(honest)
    count, started = Count(), time.process_time()

    def target(data: bytes) -> None:
        try_one(data, count)
        if count.inputs % 100_000 == 0 or count.inputs == inputs:
            report(count, time.process_time() - started, len(list(corpus.iterdir())), path)

    options = [f"-runs={inputs}", f"-seed={seed}", "-max_len=4096", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], target)
    atheris.Fuzz()


def report(count: Count, seconds: float, corpus: int, path: Path | None) -> None:
    print(f"{count.inputs:,} inputs: {count.decoded:,} valid, {count.refused:,} refused; {corpus} kept", flush=True)
    found = {
        "inputs": count.inputs,
        "valid": count.decoded,
        "refused": count.refused,
        "escaped": 0,
        "reached_new_code": corpus,
        "cpu_seconds": seconds,
        "reasons": dict(sorted(count.reasons.items(), key=lambda one: -one[1])),
    }
    save(origin() | found, path)


if __name__ == "__main__":
    main()
