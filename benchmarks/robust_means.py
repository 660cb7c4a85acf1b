"""Measure the time and the memory of robust means of contributions beside those of the mean.

    python benchmarks/robust_means.py [--elements 1048576] [--json FILE]

The contributions of 8 and of 64 replicas to one matrix are combined, sparse as in SparseLoCo (1/32 of the values) and
dense as in DiLoCo. Values are random around one direction. Seconds are CPU seconds of one thread, the median of three.
Memory is the growth of the resident set beyond the decoded contributions, which a robust mean needs all at once, and
the mean one after the other. `held` is their size. Decoding is not part of the seconds.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from command_line import origin, parse, parser_of, save
from processes import reset_peak, status_bytes
from torch import Tensor

from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.robust import robust_mean
from hetero_pp.outer.step import mean_of
from hetero_pp.pseudo_gradient.contribution import DecodedTensor

MEANS = ("mean", "trimmed_mean", "centred_clipping", "geometric_median")
WIDTH = 1024
REPEATS = 3


def contributions(replicas: int, elements: int, density: float) -> list[tuple[float, DecodedTensor]]:
    """Return contributions with equal weights; each replica sends other coordinates."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(replicas):
        where = torch.arange(elements)
        if density < 1:
            where = torch.randint(elements, (round(elements * density),), generator=generator).unique()
        found.append((1.0, DecodedTensor(where, torch.randn(len(where), generator=generator) + 0.5)))
    return found


def combine(name: str, shape: tuple[int, int], weighted: list[tuple[float, DecodedTensor]]) -> Tensor:
    if name == "mean":
        return mean_of(shape, weighted)
    return robust_mean(shape, weighted, OuterSettings.model_validate({"rounds": 1, "aggregation": name}))


def measured(run: Callable[[], Tensor]) -> tuple[float, int]:
    """Return (CPU seconds, bytes by which the resident set grew at most) in a process of its own."""
    context = multiprocessing.get_context("fork")  # shares the contributions
    ours, theirs = context.Pipe()

    def work() -> None:
        before, seconds = reset_peak(), []
        for _ in range(REPEATS):
            started = time.process_time()
            run()
            seconds.append(time.process_time() - started)
        theirs.send((median(seconds), status_bytes("VmHWM") - before))

    process = context.Process(target=work)
    process.start()
    found: tuple[float, int] = ours.recv()
    process.join()
    return found


def measure(replicas: int, elements: int, density: float) -> list[dict[str, Any]]:
    """Return one entry for each mean."""
    weighted = contributions(replicas, elements, density)
    held = sum(one.indices.nbytes + one.values.nbytes for _, one in weighted)
    found: list[dict[str, Any]] = []
    for name in MEANS:
        seconds, grown = measured(partial(combine, name, (elements // WIDTH, WIDTH), weighted))
        ratio = seconds / found[0]["seconds"] if found else 1.0
        entry = {"mean": name, "replicas": replicas, "density": density, "seconds": seconds, "over_the_mean": ratio}
        found.append({**entry, "grown_bytes": grown, "held_bytes": held})
        cost, memory, holds = seconds * 1e9 / elements, grown / elements, held / elements
        print(f"{replicas:3} x {density:<8.3g}{name:18} {cost:7.1f} ns a value {ratio:6.1f} times the mean", end="")
        print(f" {memory:6.1f} bytes a value, held {holds:5.1f}")
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64])
    arguments = parse(parser, {"elements": 1 << 14, "replicas": [8]})
    torch.set_num_threads(1)
    found = [
        entry
        for replicas in arguments.replicas
        for density in (1 / 32, 1.0)
        for entry in measure(replicas, arguments.elements, density)
    ]
    save(origin() | {"elements": arguments.elements, "means": found}, arguments.json)


if __name__ == "__main__":
    main()
