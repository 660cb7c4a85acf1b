"""Measure the bits of a contribution per position and value, beside the limit and other coders, and the coder's speed.

    python benchmarks/codec.py [--json FILE]

`uniform` positions are drawn at random. Their limit is log2 C(4096, k) / k bits. `real` positions are those that the
first replica would send in the seventh round of a small run. It is trained here (two replicas, width 128, a vocabulary
of 4096). A message for 512M parameters is encoded whole. Its positions are uniform, and its values are drawn
from those of the real run. Needs `pip install hetero-pp[benchmarks,numba]`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compressors
import numpy as np
import torch
import zstandard
from command_line import extra, origin, parse, parser_of, save
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.settings import DataSettings
from hetero_pp.model.transformer import ModelSettings, Transformer, shapes_by_block
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, Shape, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection, select
from hetero_pp.pseudo_gradient.quantise import quantise_as
from hetero_pp.pseudo_gradient.selection import Group, groups_of, random_positions
from hetero_pp.pseudo_gradient.streams import Reader, Writer, by_columns, read_positions, scans_columns, write_positions
from hetero_pp.research.experiments.corpus import Corpus, prepare_corpus
from hetero_pp.research.trainer.train import AllReplicas

with extra("benchmarks"):
    import constriction

CHUNK = 4096
LENGTH = 128
ADDRESS = BlobAddress("0" * 32, 1, "replica", "block")
VALUES = {"2-bit codes": ("levels", 2), "signs": ("signs", 1), "fp32": ("levels", 32)}


@dataclass(frozen=True)
class Size:
    """Sizes of a measurement."""

    kept: Sequence[int]
    """Kept values of the 4096 of a chunk."""
    message_kept: Sequence[int]
    """Kept values per chunk in a whole message."""
    preset: str
    """Model preset of the message."""
    positions: int
    """Number of uniform positions."""
    rounds: int
    """Rounds of the real run before the measured one."""
    steps: int
    """Inner steps of a round."""
    text: str | None
    """Text that the real run reads; None for the standard library."""


FULL = Size((32, 128, 256), (32, 128), "512m", 1 << 19, 6, 10, None)
SMALLEST = Size((32, 128), (32,), "micro", 1 << 12, 1, 2, Path(__file__).read_text())


def limit(kept: int) -> float:
    """Return the limit log2 C(4096, k) / k, in bits per position."""
    combinations = math.lgamma(CHUNK + 1) - math.lgamma(kept + 1) - math.lgamma(CHUNK - kept + 1)
    return combinations / math.log(2) / kept


# ---- coders of positions: [chunks, k] ascending -> bits ----


def plain_zstd(positions: Tensor) -> float:
    """Return the bits of 16-bit positions compressed by zstd."""
    return 8 * len(zstandard.ZstdCompressor(level=3).compress(positions.numpy().astype("<u2").tobytes()))


def rice(positions: Tensor) -> float:
    """Return the exact bits of Golomb-Rice codes of the gaps with the best parameter, without writing them."""
    gaps = _gaps(positions)
    return float(min((gaps >> low).sum() + len(gaps) * (1 + low) for low in range(12)))


def range_coder(positions: Tensor) -> float:
    """Return the bits of constriction's ANS with the gaps' own frequencies as its model, without the model."""
    gaps = _gaps(positions).astype(np.int32)
    model = constriction.stream.model.Categorical(
        np.bincount(gaps).astype(np.float32) / np.float32(len(gaps)), perfect=False
    )
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(gaps, model)
    return float(coder.num_bits())


CODERS: dict[str, Callable[[Tensor], float]] = {
    "ours": lambda positions: 8 * len(_encoded(positions)),  # gaps as bytes, low bits apart, zstd
    "constriction": range_coder,
    "rice": rice,
    "zstd": plain_zstd,
    "12 bits": lambda positions: 12 * positions.numel(),
}


def _gaps(positions: Tensor) -> NDArray[np.int64]:
    return np.diff(positions.numpy(), axis=1, prepend=-1).reshape(-1) - 1


def _group(positions: Tensor) -> Group:
    return next(groups_of((64 * len(positions), 64), (64, 64)))


def _encoded(positions: Tensor) -> bytes:
    writer = Writer()
    write_positions(writer, _group(positions), positions)
    return writer.take()


def uniform(size: Size) -> dict[int, Tensor]:
    """Return about `size.positions` uniform positions for each k."""
    generator = torch.Generator().manual_seed(0)
    return {kept: random_positions(size.positions // kept, CHUNK, kept, generator) for kept in size.kept}


def coder_speed(positions: Tensor) -> dict[str, float]:
    """Return the values per CPU second that this project's coder encodes and decodes."""
    data, group = _encoded(positions), _group(positions)
    encode = compressors.cpu_seconds(lambda: write_positions(Writer(), group, positions))
    decode = compressors.cpu_seconds(lambda: read_positions(Reader(data, "x"), group, positions.shape[1]))
    return {"encode": positions.numel() / encode, "decode": positions.numel() / decode}


# ---- a real run ----


@dataclass(frozen=True)
class Sent:
    """Error feedback and pseudo-gradient of one tensor of one replica."""

    name: str
    error: Tensor
    delta: Tensor

    @property
    def kind(self) -> str:
        return _kind(self.name)


def real_run(size: Size, kept: int, corpus: Corpus) -> list[Sent]:
    """Return what the first replica would send after all rounds and the inner steps of one more round."""
    spec = RunSpec(_config(size, kept / CHUNK, corpus.data), corpus.source.vocabulary)
    replicas = AllReplicas(spec, corpus.source)
    for round_ in range(1, size.rounds + 1):
        replicas.round(round_)
    first, batches = replicas.replicas[0], replicas.batches[0]
    for step in range(size.rounds * size.steps, (size.rounds + 1) * size.steps):
        first.inner_step(batches.train(step), step)
    return [
        Sent(name, replicas.errors[0][name], (start - first.parameters[name]).detach())
        for name, start in sorted(replicas.theta.items())
    ]


def _kind(name: str) -> str:
    for part, kind in (("tok_embeddings", "embedding"), ("lm_head", "head"), ("norm", "norms")):
        if part in name:
            return kind
    return "layers"


def _corpus(text: str | None, folder: Path) -> Corpus:
    """Prepare a corpus of byte pairs in this folder.

    Without a text, it is the standard library, which is kept for later calls.
    """
    if text is None:
        cache = Path(tempfile.gettempdir()) / "hetero-pp-codec"
        return prepare_corpus(DataSettings(sequence_length=LENGTH), CHUNK, cache)
    path = folder / "corpus.txt"
    path.write_text(text)
    data = DataSettings(corpus=str(path), sequence_length=LENGTH, validation_share=0.1, validation_sequences=1)
    return prepare_corpus(data, CHUNK, folder)


def _config(size: Size, density: float, data: DataSettings) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "codec",
            "seed": 1,
            "model": {"preset": "micro", "width": 128, "heads": 4, "feed_forward": 384},
            "data": data,
            "inner": {"steps": size.steps, "learning_rate": 6e-3, "warmup_steps": 10},
            "outer": {
                "rounds": size.rounds + 1,
                "compression": {"density": density, "value_bits": 2, "quantiser": "levels"},
            },
            "replicas": [{"name": f"r{index}", "kind": "datacenter", "batch_size": 8} for index in range(2)],
        }
    )


def _compression(kept: int, values: str) -> CompressionSettings:
    quantiser, width = VALUES[values]
    return CompressionSettings.model_validate(
        {"density": kept / CHUNK, "quantiser": quantiser, "value_bits": width, "error_feedback_decay": 0.95}
    )


def real_sizes(kept: int, sent: list[Sent]) -> dict[str, Any]:
    """Return bits per position by kind of tensor, and bits per value of the whole contribution by quantiser."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for one in sent:
        compression = _compression(kept, "fp32")
        chosen = select(one.error.clone(), one.delta, compression)
        groups = list(groups_of(tuple(one.delta.shape), compression.tile))
        turns = scans_columns(groups, chosen.positions)
        writer = Writer()
        for group, positions in zip(groups, chosen.positions, strict=True):
            write_positions(writer, group, by_columns(group, positions)[0] if turns else positions)
        for kind in (one.kind, "all"):
            found[kind][0] += 8 * len(writer.take())
            found[kind][1] += chosen.kept_values
            found[kind][2] += turns
    return {
        "bits_per_position": {kind: size / count for kind, (size, count, _) in found.items()},
        "scanned_by_columns": {kind: int(turns) for kind, (_, _, turns) in found.items()},
        "bits_per_value": {values: _whole(kept, sent, values) for values in VALUES}
        | {"templar's layout": peers_bits(kept, sent)},
    }


def peers_bits(kept: int, sent: list[Sent]) -> float:
    """Return bits per value in templar's layout (12-bit positions, a byte per code) for the whole tiles of the run."""
    size = count = 0
    for one in sent:
        if one.delta.ndim == 2 and all(side % 64 == 0 for side in one.delta.shape):
            packed, codes = compressors.templar(one.error.clone(), one.delta, kept)
            size, count = size + 8 * (packed.numel() + codes.numel()), count + codes.numel()
    return size / count


def _whole(kept: int, sent: list[Sent], values: str) -> float:
    """Return bits per kept value of the blobs, including their headers."""
    compression = _compression(kept, values)
    by_name = {one.name: one for one in sent}
    size = count = 0
    for shapes in shapes_by_block({one.name: tuple(one.delta.shape) for one in sent}).values():
        chosen = [
            (name, shape, select(by_name[name].error.clone(), by_name[name].delta, compression))
            for name, shape in shapes.items()
        ]
        size += len(encode_blob(ADDRESS, chosen, compression))
        count += sum(selection.kept_values for _, _, selection in chosen)
    return 8 * size / count


# ---- a message for a large model ----


def megabytes(preset: str, kept: int, sent: list[Sent], values: str) -> float:
    """Return the megabytes of a contribution to a model of this preset."""
    compression, pools = _compression(kept, values), _pools(kept, sent)
    with torch.device("meta"):
        model = Transformer(ModelSettings.model_validate({"preset": preset, "vocabulary": 32000}).resolve(None))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    generator, blocks = torch.Generator().manual_seed(0), shapes_by_block(shapes).values()
    drawn = (_drawn(block, compression, pools, generator) for block in blocks)
    return sum(len(encode_blob(ADDRESS, one, compression)) for one in drawn) / 1e6


def _pools(kept: int, sent: list[Sent]) -> dict[str, Tensor]:
    """Return kept values of the real run by kind of tensor. Each tensor is scaled to a mean magnitude of 1."""
    pools = defaultdict(list)
    for one in sent:
        values = select(one.error.clone(), one.delta, _compression(kept, "fp32")).values
        pools[one.kind].append(values / values.abs().mean().clamp(min=1e-30))
    return {kind: torch.cat(values) for kind, values in pools.items()}


def _drawn(
    shapes: dict[str, Shape], compression: CompressionSettings, pools: dict[str, Tensor], generator: torch.Generator
) -> Iterator[tuple[str, Shape, Selection]]:
    for name, shape in shapes.items():
        positions = [
            torch.cat(
                [random_positions(b.count, b.size, b.kept(compression.density), generator) for b in group.bands()]
            )
            for group in groups_of(shape, compression.tile)
        ]
        pool = pools[_kind(name)]
        count = sum(one.numel() for one in positions)
        values = pool[torch.randint(len(pool), (count,), generator=generator)]
        quantised = quantise_as(compression, values, [(len(one), one.shape[1]) for one in positions])
        yield name, shape, Selection(tuple(positions), torch.empty(0, dtype=torch.int64), quantised)


# ---- all of it ----


def measure(size: Size) -> dict[str, Any]:
    torch.set_num_threads(1)
    drawn = uniform(size)
    with tempfile.TemporaryDirectory(prefix="hetero-pp-codec-") as folder:
        corpus = _corpus(size.text, Path(folder))
        runs = {kept: real_run(size, kept, corpus) for kept in size.kept}
    real = {kept: real_sizes(kept, sent) for kept, sent in runs.items()}
    coders = {
        name: {str(kept): coder(positions) / positions.numel() for kept, positions in drawn.items()}
        for name, coder in CODERS.items()
    }
    return origin() | {
        "limit": {str(kept): limit(kept) for kept in size.kept},
        "bits_per_position": {
            "uniform": coders["ours"],
            "real": {str(kept): found["bits_per_position"]["all"] for kept, found in real.items()},
        },
        "coders": coders,
        "real": {str(kept): found for kept, found in real.items()},
        "values_per_cpu_second": {str(kept): coder_speed(positions) for kept, positions in drawn.items()},
        f"megabytes_{size.preset}": _messages(size, runs, "2-bit codes"),
        f"megabytes_{size.preset}_signs": _messages(size, runs, "signs"),
    }


def _messages(size: Size, runs: dict[int, list[Sent]], values: str) -> dict[str, float]:
    """Return the megabytes of a message by density."""
    return {f"{kept / CHUNK:.4f}": megabytes(size.preset, kept, runs[kept], values) for kept in size.message_kept}


def show(found: dict[str, Any]) -> None:
    console = Console(width=120)
    table = PlainTable(["bits a position (of 4096)"], [f"k = {kept}" for kept in found["limit"]])
    for name, sizes in {"limit": found["limit"], **found["coders"]}.items():
        table.add_row(name, *(f"{bits:.3f}" for bits in sizes.values()))
    for kind in ("all", "embedding", "layers", "head"):
        cells = (real["bits_per_position"][kind] for real in found["real"].values())
        table.add_row(f"ours, real run: {kind}", *(f"{cell:.3f}" for cell in cells))
    for values in (*VALUES, "templar's layout"):
        cells = (real["bits_per_value"][values] for real in found["real"].values())
        table.add_row(f"position and value, real run: {values}", *(f"{cell:.3f}" for cell in cells))
    console.print(table)
    for name in (key for key in found if key.startswith("megabytes_")):
        console.print(f"{name}: " + ", ".join(f"{size:.2f} MB at {share}" for share, size in found[name].items()))
    for kept, speed in found["values_per_cpu_second"].items():
        rates = f"{speed['encode'] / 1e6:.0f} M values a CPU second in, {speed['decode'] / 1e6:.0f} out"
        console.print(f"coder at k = {kept}: {rates}")


def main() -> None:
    parser = parser_of(__doc__)
    arguments = parse(parser, {})
    started = time.perf_counter()
    found = measure(SMALLEST if arguments.smoke else FULL)
    show(found)
    print(f"{time.perf_counter() - started:.0f} s")
    save(found, arguments.json)


if __name__ == "__main__":
    main()
