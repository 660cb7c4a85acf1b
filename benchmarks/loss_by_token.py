"""Where two rows of a table differ: by a token's position in its sequence, by its frequency, and by what came before.

    python benchmarks/loss_by_token.py [--table NAME] [--rows NAME NAME] [--seeds N N] [--device cpu|cuda] [--json FILE]

Trains two rows; by default those of `beyond/gap` without compression and with it. Then it evaluates each token of the
validation sequences in the forward of the first replica. Positions are grouped by powers of two, and tokens by their
rank in the training text, the most frequent first. A token is a repetition if it followed the token before it earlier
in its sequence, too: a model can copy it. A group's gap is the second row's mean loss less the first's.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from command_line import origin, parse, parser_of, save
from launched import letters
from torch import Tensor

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import TokenStore
from hetero_pp.research.experiments.command import SCALE
from hetero_pp.research.experiments.corpus import prepare_corpus
from hetero_pp.research.experiments.definition import Catalog
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.trainer.replica import TableReplica
from hetero_pp.research.trainer.train import AllReplicas

FOLDER = Path(__file__).parents[1]
SMOKE = {"rounds": 1, "sequences": 2}
RANKS = (0, 16, 64, 256)
"""First ranks of the groups of tokens."""


def token_losses(replica: TableReplica, batches: Sequence[Tensor]) -> Tensor:
    """Return the loss of each token [N, L] of batches [b, L + 1] in a replica's forward."""
    found = []
    replica.module.loss = _each_loss(replica)  # type: ignore[method-assign]
    with torch.no_grad():
        for tokens in batches:
            found.append(replica.loss(tokens))
    return torch.cat(found).cpu()


def _each_loss(replica: TableReplica) -> Callable[..., Tensor]:
    def losses(inputs: Tensor, targets_BL: Tensor, after_layer: Any = None) -> Tensor:
        logits_BLV = replica.module(inputs, after_layer)
        return F.cross_entropy(logits_BLV.transpose(1, 2).float(), targets_BL, reduction="none")

    return losses


def trained(config: RunConfig, store: TokenStore, device: torch.device) -> AllReplicas:
    """Return the replicas of a row after its last round. Layers are compiled, as for tables."""
    group = AllReplicas(RunSpec(config, store.vocabulary), store, compiles=True, device=device)
    for round_ in range(1, config.rounds + 1):
        group.read_ahead(round_)
        if not group.round(round_):
            raise SystemExit(f"{config.name} diverged in round {round_}")
    return group


def groups(tokens_NL: Tensor, counts_V: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return the groups of the targets of tokens [N, L + 1] by kind and name, each a mask [N, L]."""
    targets_NL, repeats_NL = tokens_NL[:, 1:], repetitions(tokens_NL)
    positions = torch.arange(targets_NL.shape[1]).expand_as(targets_NL)
    starts = [0, *(2**power for power in range(targets_NL.shape[1].bit_length() - 1))]
    ranks = counts_V.argsort(descending=True).argsort()[targets_NL]
    return {
        "position": _parts(positions, starts, targets_NL.shape[1]),
        "rank": _parts(ranks, RANKS, len(counts_V)),
        "pair": {"repeated": repeats_NL, "new": ~repeats_NL},
    }


def repetitions(tokens_NL: Tensor) -> Tensor:
    """Return whether each target of tokens [N, L + 1] followed the same token earlier in its sequence, bool [N, L]."""
    pairs_NL = tokens_NL[:, :-1] * (tokens_NL.max() + 1) + tokens_NL[:, 1:]
    return (pairs_NL[:, :, None] == pairs_NL[:, None, :]).tril(-1).any(dim=2)


def _parts(values: Tensor, starts: Sequence[int], end: int) -> dict[str, Tensor]:
    ends = [*starts[1:], end]
    return {f"{a} to {b - 1}": (values >= a) & (values < b) for a, b in zip(starts, ends, strict=True)}


def measure(arguments: argparse.Namespace, cache: Path, text: Path | None) -> dict[str, Any]:
    """Train both rows, and return the mean losses and the shares of tokens by group.

    Reads `text` instead of the table's corpus if there is one.
    """
    catalog, device = Catalog(FOLDER / "configs" / "experiments"), torch.device(arguments.device)
    table = catalog.experiment(arguments.table)
    setting = Setting(catalog.scale_of(table, table.scale or SCALE), table, corpus=None if text is None else str(text))
    rows = {row.name: row for row in table.rows}
    configs = [setting.config(rows[name], seed) for name, seed in zip(arguments.rows, arguments.seeds, strict=True)]
    corpus = prepare_corpus(configs[0].data, setting.scale.vocabulary, cache)
    assert isinstance(corpus.source, TokenStore)
    counts_V = torch.bincount(torch.from_numpy(corpus.source.train.astype("int64")), minlength=setting.scale.vocabulary)
    losses, tokens_NL = [], torch.empty(0)
    for config in configs:
        data = config.data.model_copy(update={"tokenizer": corpus.data.tokenizer})
        outer = config.outer.model_copy(update={"rounds": arguments.rounds or config.rounds})
        if arguments.sequences:
            data = data.model_copy(update={"validation_sequences": arguments.sequences})
        group = trained(config.model_copy(update={"data": data, "outer": outer}), corpus.source, device)
        tokens_NL = torch.cat(group.validation).cpu().long()
        losses.append(token_losses(group.replicas[0], group.validation))
    return {
        kind: {name: _group(mask, losses) for name, mask in parts.items()}
        for kind, parts in groups(tokens_NL, counts_V).items()
    }


def _group(mask: Tensor, losses: Sequence[Tensor]) -> dict[str, Any]:
    means = [one[mask].mean().item() for one in losses]
    return {"share": mask.sum().item() / mask.numel(), "losses": means, "gap": means[1] - means[0]}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--table", default="beyond/gap", help="an experiment of configs/experiments")
    parser.add_argument("--rows", nargs=2, default=["none", "all"], metavar="NAME", help="two rows of the table")
    parser.add_argument("--seeds", nargs=2, type=int, default=[1, 1], metavar="N", help="seed of each row")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, help="outer rounds, instead of the row's")
    parser.add_argument("--sequences", type=int, help="validation sequences, instead of the row's")
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hetero-pp-loss-") as name:
        text, cache = None, Path("runs/.tokens")
        if arguments.smoke:
            text, cache = Path(name, "made.txt"), Path(name)
            text.write_text(letters(300_000))
        found = measure(arguments, cache, text)
    for kind, parts in found.items():
        print(f"{kind:<14}{'of tokens':>10}{'first':>12}{'second':>12}{'gap':>9}{'%':>7}")
        for name, one in parts.items():
            first, second = one["losses"]
            share = f"{name:<14}{100 * one['share']:>8.1f} %{first:>12.3f}{second:>12.3f}"
            print(f"{share}{one['gap']:>9.3f}{100 * one['gap'] / first:>7.1f}")
    asked = {name: getattr(arguments, name) for name in ("table", "rows", "seeds", "device")}
    save(origin() | asked | {"groups": found}, arguments.json)


if __name__ == "__main__":
    main()
