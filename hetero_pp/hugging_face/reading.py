"""Reading of a LLaMA checkpoint's weights in the format of `transformers`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.core.settings import Settings
from hetero_pp.hugging_face.config_json import WEIGHTS_KEY, Architecture, read_architecture, read_json
from hetero_pp.hugging_face.names import EMBEDDING, HEAD, is_rotated, pairs_of_halves, their_name
from hetero_pp.model.transformer import ModelShape

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DERIVED = "rotary_emb.inv_freq"
"""End of the names of tensors that follow from the configuration; older checkpoints hold them."""


def require_checkpoint(folder: Path, shape: ModelShape, shapes: Mapping[str, tuple[int, ...]]) -> Architecture:
    """Raise ConfigError if a checkpoint is missing or not of this shape; reads headers only.

    `shapes` are those of all parameters, by our names. Returns the checkpoint's architecture.
    """
    architecture = read_architecture(folder)
    for (name, value), (_, expected) in zip(shape, architecture.shape, strict=True):
        if value != expected:
            told = f"found {_shown(value)}, expected {_shown(expected)} as in {folder / 'config.json'}"
            raise ConfigError(("model", name), told)
    with _opened(folder) as files:
        _require_tensors(files, architecture, shapes)
    return architecture


def _shown(value: object) -> str:
    return json.dumps(value.model_dump() if isinstance(value, Settings) else value)


def read_parameters(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], on_progress: OnProgress = untold
) -> dict[str, Tensor]:
    """Read the parameters of a checkpoint by our names, in fp32.

    A head tied to the embedding is copied. The function is the same, but the copies train separately. Raises
    ConfigError if `shapes`, all of the model's, are not the checkpoint's.
    """
    architecture = read_architecture(folder)
    with _opened(folder) as files:
        _require_tensors(files, architecture, shapes)
        parameters, done, whole = {}, 0, sum(map(math.prod, shapes.values()))
        for name in sorted(shapes):
            parameters[name] = _read(files, name, architecture)
            done += parameters[name].numel()
            on_progress("reading the weights", done / whole)
        return parameters


def _read(files: Mapping[str, Any], name: str, architecture: Architecture) -> Tensor:
    source = _source(name, architecture)
    weight = files[source].get_tensor(source).to(torch.float32, copy=True)
    if not torch.isfinite(weight).all():  # each member would train to NaN, and its contribution would be refused
        wrong = f"{int((~torch.isfinite(weight)).sum()):,} of {weight.numel():,} values that are NaN or infinite"
        raise ConfigError(WEIGHTS_KEY, f"found {wrong} in `{source}`, expected finite weights")
    return pairs_of_halves(weight, architecture.shape.head_size) if is_rotated(name) else weight


def _source(name: str, architecture: Architecture) -> str:
    theirs = their_name(name)
    return EMBEDDING if theirs == HEAD and architecture.is_tied else theirs


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield for every tensor of a checkpoint the open file that holds it."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _paths(folder):
            try:
                file = stack.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                expected = "expected weights as safetensors"
                raise ConfigError(WEIGHTS_KEY, f"found no readable {path} ({error}), {expected}") from None
            files |= dict.fromkeys(file.keys(), file)
        yield files


def _paths(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        return [folder / _SINGLE]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ConfigError(WEIGHTS_KEY, f"found no `weight_map` in {index}, expected the file of each tensor")
    for tensor, name in names.items():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            expected = f"expected the name of a file in {folder}"
            raise ConfigError(WEIGHTS_KEY, f"{index}: weight_map.{tensor}: found `{name}`, {expected}")
    return sorted({folder / name for name in names.values()})


def _require_tensors(
    files: Mapping[str, Any], architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    unused = {name for name in files if not name.endswith(_DERIVED)}
    for name, shape in shapes.items():
        source = _source(name, architecture)
        if source not in files:
            raise ConfigError(WEIGHTS_KEY, f"found no tensor `{source}`, expected all tensors of a LLaMA of this shape")
        found = files[source].get_slice(source).get_shape()
        if found != list(shape):
            raise ConfigError(WEIGHTS_KEY, f"found {found} as the shape of `{source}`, expected {list(shape)}")
        unused -= {source}
    unused -= {HEAD} if architecture.is_tied else set()
    if unused:
        raise ConfigError(
            WEIGHTS_KEY, f"found the tensor `{min(unused)}`, expected only the tensors of a LLaMA without biases"
        )
