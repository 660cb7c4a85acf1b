"""Writing of a model as a LLaMA checkpoint that `transformers`, vLLM and llama.cpp load; needs none of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hetero_pp.core.files import whole, write_whole
from hetero_pp.core.tensor_files import save_tensors
from hetero_pp.data.settings import DataSettings
from hetero_pp.hugging_face.config_json import positions_of, to_json
from hetero_pp.hugging_face.names import OUR_EMBEDDING, OUR_HEAD, halves_of_pairs, is_rotated, their_name
from hetero_pp.hugging_face.tokenizer_files import write_tokenizer
from hetero_pp.model.transformer import ModelShape

DTypeName = Literal["bf16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = 5 * 10**9
"""Largest size of a file; a larger model is written as several, one of which is held in memory at a time."""

Parameters = Callable[[str], Tensor]
"""Returns the parameter of a name (ours) in fp32."""


def write_model(
    folder: Path,
    parameters: Parameters,
    shapes: Mapping[str, tuple[int, ...]],
    shape: ModelShape,
    data: DataSettings,
    dtype: DTypeName,
    start: str | None = None,
) -> int:
    """Write weights, configuration and tokenizer to an existing folder; return the bytes of the weights.

    `shapes` are those of all parameters, by our names. The configuration's longest text is as long as the run's
    sequences, or as that of the checkpoint in the folder `start`, from which the run started. An embedding and a head
    with equal values are written once, as tied. Raises ConfigError if the tokenizer can no longer be read.
    """
    separator = write_tokenizer(data, folder)
    is_tied = torch.equal(parameters(OUR_EMBEDDING), parameters(OUR_HEAD))
    written = {name: sizes for name, sizes in shapes.items() if not (is_tied and name == OUR_HEAD)}
    size = write_weights(folder, parameters, written, shape.head_size, _DTYPES[dtype])
    name = str(_DTYPES[dtype]).removeprefix("torch.")
    ends = {"bos_token_id": separator, "eos_token_id": separator}
    _write_json(folder / "generation_config.json", {**ends, "max_length": data.sequence_length})
    earlier = None if start is None else positions_of(Path(start))
    _write_json(folder / "config.json", to_json(shape, data.sequence_length, separator, name, is_tied, earlier))
    return size


def write_weights(
    folder: Path,
    parameters: Parameters,
    shapes: Mapping[str, tuple[int, ...]],
    head_width: int,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write all parameters as model.safetensors, or as shards of at most `shard_bytes` with an index."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = shards_of(sizes, shard_bytes)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {their_name(name): _converted(name, parameters(name), head_width, dtype) for name in names}
        with whole(folder / file) as part:
            save_tensors(tensors, part, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    total = sum(sizes.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    return total


def shards_of(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Split names, in order, into as few shards as stay under a limit; a larger item has a shard of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _converted(name: str, parameter: Tensor, head_width: int, dtype: torch.dtype) -> Tensor:
    parameter = parameter.to(dtype)
    return (halves_of_pairs(parameter, head_width) if is_rotated(name) else parameter).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())
