"""Compare ideas for the boundary with the current boundary, at an equal number of bytes.

    python benchmarks/boundary_ideas.py [--ideas PATTERN] [--seeds N] [--json FILE]

Half of four replicas are compressed, as in `beyond/boundaries`, and trained by the trainer of tables. Each idea is
compared with the current boundary at as many bytes (forward and backward together), with equal anchors and seeds. A
difference above 0 means that the idea is worse. `own` is the loss of the replica forward, averaged over replicas.
`plain` is the loss of the synced model without boundaries. Two rows show where the loss comes from: only activations,
or only gradients, are compressed. With --json, runs that the file contains are not trained again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from command_line import earlier, parse, parser_of, save
from engines_agree import CATALOG, LEAST, text_of
from torch import Tensor, nn

from hetero_pp.config.folder import CACHE
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.seeds import seed_of
from hetero_pp.pipeline.coefficients import Bits, Floats, Symbols, format_of
from hetero_pp.pipeline.subspace import columns_of, expand_gradient, project
from hetero_pp.research.experiments.corpus import prepare_corpus
from hetero_pp.research.experiments.definition import Experiment, Row
from hetero_pp.research.experiments.outcomes import commit, machine
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.training import make_job
from hetero_pp.research.trainer.replica import TableReplica
from hetero_pp.research.trainer.train import AllReplicas
from stages.anchors import Anchors, OwnParameters, anchors_of
from stages.boundary import Boundary

RUNS = Path("runs/boundary_ideas")
SMOKE = {"scale": "least", "seeds": 1}


Change = Callable[[AllReplicas], None]


def compressed(group: AllReplicas) -> list[tuple[TableReplica, ParticipantsReplica]]:
    """Return the compressed replicas, which an idea changes, with their settings."""
    pairs = zip(group.replicas, group.settings, strict=True)
    return [(replica, settings) for replica, settings in pairs if isinstance(settings, ParticipantsReplica)]


# ---- gradients at the boundary ----


@dataclass
class Thinner(Boundary):
    """Boundary that sends gradients with other bits or with fewer coefficients.

    The coefficients are the first ones, or they are drawn for each message.
    """

    back: Bits = field(default_factory=lambda: Bits(4))
    share: float = 1.0
    is_random: bool = False
    _sent: Tensor | None = None

    def encode_gradient(self, gradient_BLD: Tensor, key: Tensor) -> Symbols:
        assert self.basis is not None
        self._sent = self.basis[:, : round(self.share * self.basis.shape[1])]
        if self.is_random:
            generator = torch.Generator().manual_seed(int(key) % 2**62)
            mixed = torch.linalg.qr(torch.randn(self.dimensions, self.dimensions, generator=generator))[0]
            self._sent = self.basis @ mixed[:, : self._sent.shape[1]]
        return self.back.gradient(project(gradient_BLD, self._sent), key)

    def decode_gradient(self, symbols: Symbols) -> Tensor:
        assert self._sent is not None
        return expand_gradient(self.back.coefficients(symbols), self._sent)


class WholeGradients(Boundary):
    """Boundary that compresses activations and not gradients."""

    def encode_gradient(self, gradient_BLD: Tensor, key: Tensor) -> Symbols:
        return (gradient_BLD,)

    def decode_gradient(self, symbols: Symbols) -> Tensor:
        return symbols[0]


class WholeActivations(Boundary):
    """Boundary that compresses gradients and not activations."""

    def encode_activation(self, x_BLD: Tensor) -> Symbols:
        return (x_BLD.detach(),)

    def decode_activation(self, symbols: Symbols, tokens_BL: Tensor) -> Tensor:
        return symbols[0].clone()


def boundary(kind: type[Boundary], **settings: Any) -> Change:
    """Return a change that gives compressed replicas a boundary of this kind."""

    def change(group: AllReplicas) -> None:
        for replica, of in compressed(group):
            assert replica.boundary is not None
            replica.boundary = kind(replica.boundary.width, format_of(of.boundary), replica.boundary.basis, **settings)

    return change


# ---- different bytes for each hop ----


@dataclass
class ByHop(Boundary):
    """Boundary with another boundary for each hop. Its own rank is the largest one, and splits the embedding."""

    hops: list[Boundary] = field(default_factory=list)

    def split(self, embedding: Tensor) -> None:
        super().split(embedding)
        for hop in self.hops:
            hop.split(embedding)


class Crossings:
    """Peer that crosses each hop with the boundary of that hop."""

    def __init__(self, hops: list[Boundary]) -> None:
        self._hops = hops

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        return self._hops[hop].cross(x_BLD, tokens_BL, key)


def by_hop(*shares: float) -> Change:
    """Return a change that gives each hop a share of the row's coefficients."""

    def change(group: AllReplicas) -> None:
        for replica, _ in compressed(group):
            most = replica.boundary
            assert most is not None and most.basis is not None
            ranks = [round(share * most.dimensions) for share in shares]
            hops = [Boundary(most.width, most.format, columns_of(most.basis, rank)) for rank in ranks]
            replica.boundary = ByHop(most.width, most.format, most.basis, hops=hops)
            replica.peer = Crossings(hops)

    return change


# ---- tables and layers that the receiver learns ----


class TokenBefore(Anchors):
    """Anchors with a second table, for the token before."""

    def more(self, vocabulary: int, width: int) -> dict[str, nn.Parameter]:
        return {"before": nn.Parameter(torch.zeros(vocabulary, width))}

    def add(self, x_BLD: Tensor, tokens_BL: Tensor) -> Tensor:
        before = F.pad(tokens_BL, (1, 0))[:, :-1]
        return super().add(x_BLD, tokens_BL) + F.embedding(before, self.parameters["before"])


class LinearMap(Anchors):
    """Anchors with a linear map of the reconstructed activation."""

    def more(self, vocabulary: int, width: int) -> dict[str, nn.Parameter]:
        return {"map": nn.Parameter(torch.zeros(width, width))}

    def add(self, x_BLD: Tensor, tokens_BL: Tensor) -> Tensor:
        return super().add(x_BLD, tokens_BL) + x_BLD @ self.parameters["map"]


class HiddenLayer(Anchors):
    """Anchors with a hidden layer over the reconstructed activation, as wide as the model."""

    def more(self, vocabulary: int, width: int) -> dict[str, nn.Parameter]:
        random = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
        return {"in": nn.Parameter(random / width**0.5), "out": nn.Parameter(torch.zeros(width, width))}

    def add(self, x_BLD: Tensor, tokens_BL: Tensor) -> Tensor:
        hidden = F.silu(F.rms_norm(x_BLD, (x_BLD.shape[-1],)) @ self.parameters["in"])
        return super().add(x_BLD, tokens_BL) + hidden @ self.parameters["out"]


def anchors(kind: type[TokenBefore | LinearMap | HiddenLayer]) -> Change:
    """Return a change that gives compressed replicas anchors of this kind."""

    def change(group: AllReplicas) -> None:
        for replica, of in compressed(group):
            assert of.boundary.anchors is not None
            shape, optimizer = replica.module.shape, replica.optimizer
            sizes = shape.vocabulary, shape.width, of.boundary.anchors.dimensions(shape.width)
            changed = []
            for hop in range(len(replica.anchors)):
                seed = seed_of("anchors", replica.seed, replica.name, hop)
                one = kind(*sizes, optimizer.settings, optimizer.total_steps, seed)
                parameters = {**one.parameters, **one.more(shape.vocabulary, shape.width)}
                OwnParameters.__init__(one, parameters, one.optimizer.settings, optimizer.total_steps)
                changed.append(one)
            replica.anchors = changed

    return change


def anchors_everywhere(group: AllReplicas) -> None:
    """Give anchors to uncompressed replicas, too, behind the same layers."""
    (like, of), *_ = compressed(group)
    config = group.spec.config
    for replica in group.replicas:
        if replica.boundary is None:
            of_run = like.module.shape, config.inner, group.spec.total_steps, config.rounds, config.seed
            found = [anchors_of(of.boundary.anchors, *of_run, replica.name, hop) for hop in like.hops.values()]
            replica.anchors = [one for one in found if one is not None]
            replica.hops, replica.boundary = like.hops, Boundary(like.module.shape.width, Floats(torch.float32))


def half_counted(group: AllReplicas) -> None:
    """Halve the weight of compressed replicas in outer rounds."""
    for replica, _ in compressed(group):
        group.weights[replica.name] /= 2


# ---- the ideas ----


@dataclass(frozen=True)
class Idea:
    """Row of compressed replicas, and the change to its run. `rank` is a share of the width."""

    rank: str
    bits: int
    change: Change = lambda group: None
    anchors: Mapping[str, Any] | None = None
    against: str = "as it is"


FULL, FADING = {"rank": "full"}, {"rank": "full", "fade": [0.3, 0.8]}
IDEAS = {
    "as it is": Idea("15/32", 4),
    "only activations are compressed": Idea("15/32", 4, boundary(WholeGradients)),
    "only gradients are compressed": Idea("15/32", 4, boundary(WholeActivations)),
    "60 x 2 bits": Idea("15/16", 2),
    "40 x 4 bits forward, 40 x 2 back": Idea("5/8", 4, boundary(Thinner, back=Bits(2))),
    "46 x 4 bits forward, 14 x 4 back": Idea("23/32", 4, boundary(Thinner, share=14 / 46)),
    "46 x 4 bits forward, 14 x 4 back, others each time": Idea(
        "23/32", 4, boundary(Thinner, share=14 / 46, is_random=True)
    ),
    "38, 30, 22 by hop": Idea("19/32", 4, by_hop(1, 30 / 38, 22 / 38)),
    "22, 30, 38 by hop": Idea("19/32", 4, by_hop(22 / 38, 30 / 38, 1)),
    "compressed replicas count half": Idea("15/32", 4, half_counted),
    "anchors": Idea("15/32", 4, anchors={"rank": 16}),
    "anchors and a linear map": Idea("15/32", 4, anchors(LinearMap), {"rank": 16}, "anchors"),
    "anchors and a hidden layer": Idea("15/32", 4, anchors(HiddenLayer), {"rank": 16}, "anchors"),
    "anchors and a table of the token before": Idea("15/32", 4, anchors(TokenBefore), {"rank": 16}, "anchors"),
    "4 bytes, full anchors": Idea("3/32", 4, anchors=FULL, against="4 bytes, full anchors"),
    "4 bytes, full anchors and a table of the token before": Idea(
        "3/32", 4, anchors(TokenBefore), FULL, "4 bytes, full anchors"
    ),
    "fading full anchors": Idea("15/32", 4, anchors=FADING),
    "fading full anchors in uncompressed replicas, too": Idea(
        "15/32", 4, anchors_everywhere, FADING, "fading full anchors"
    ),
}
"""Ideas by name. Numbers in the names hold at a width of 64. `against` is the idea that each one is compared with."""


def train(name: str, seed: int, scale_name: str) -> dict[str, Any]:
    """Train an idea, and return its losses after the last round."""
    idea, began, started = IDEAS[name], commit(), time.monotonic()
    cells = {} if idea.anchors is None else {"replicas.boundary.anchors": idea.anchors}
    row = Row.model_validate({"name": name, "compressed": "half", "rank": idea.rank, "bits": idea.bits, "cells": cells})
    scale = CATALOG.scales.get(scale_name, LEAST)
    experiment = Experiment(name="ideas", title="ideas", baseline=name, rows=[row])
    setting = Setting(scale, experiment, corpus=text_of(scale, RUNS))
    corpus = prepare_corpus(setting.config(row).data, scale.vocabulary, RUNS.absolute() / CACHE)
    config = make_job(setting, row, seed, corpus, RUNS).config
    group = AllReplicas(RunSpec(config, corpus.source.vocabulary), corpus.source, compiles=scale is not LEAST)
    idea.change(group)
    for replica in group.replicas:
        replica.split_embedding()
    for round_ in range(1, config.rounds + 1):
        group.read_ahead(round_)
        assert group.round(round_), f"{name} diverged in round {round_}"
    seconds = time.monotonic() - started
    own, plain = group.evaluate(), group.evaluate_uncompressed()
    print(f"{name}, seed {seed}: own {own:.4f}, plain {plain:.4f} in {seconds:.0f} s", flush=True)
    return {"idea": name, "seed": seed, "own": own, "plain": plain, "commit": began, "seconds": seconds}


def show(found: Mapping[str, Any]) -> None:
    """Print a line for each idea: its losses, and their difference from the idea that it is compared with."""
    runs = {(run["idea"], run["seed"]): run for run in found["runs"]}
    print(f"\n{'':<56}{'own':>8}{'plain':>8}{'against it: own':>17}{'plain':>9}  seeds")
    for name, idea in IDEAS.items():
        seeds = [seed for one, seed in runs if one == name and (idea.against, seed) in runs]
        if not seeds:
            continue
        losses = [fmean(runs[name, seed][what] for seed in seeds) for what in ("own", "plain")]
        line = f"{name:<56}{losses[0]:>8.4f}{losses[1]:>8.4f}"
        if name != idea.against:
            against = [fmean(runs[idea.against, seed][what] for seed in seeds) for what in ("own", "plain")]
            line += f"{losses[0] - against[0]:>+17.4f}{losses[1] - against[1]:>+9.4f}"
        print(f"{line:<98}  {', '.join(map(str, sorted(seeds)))}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--scale", choices=[LEAST.name, *CATALOG.scales], default="micro")
    parser.add_argument("--ideas", default="*", metavar="PATTERN", help="train ideas whose names match, such as `*hop`")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    RUNS.mkdir(parents=True, exist_ok=True)
    found = earlier(arguments.json) or {"machine": machine(), "scale": arguments.scale, "runs": []}
    for seed in range(1, arguments.seeds + 1):
        for name in IDEAS:
            has = any((run["idea"], run["seed"]) == (name, seed) for run in found["runs"])
            if fnmatchcase(name, arguments.ideas) and not has:
                found["runs"].append(train(name, seed, arguments.scale))
                save(found, arguments.json)
    show(found)


if __name__ == "__main__":
    main()
