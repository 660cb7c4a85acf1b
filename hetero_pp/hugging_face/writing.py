"""Writing of a model and its tokenizer as a LLaMA checkpoint that `transformers`, vLLM and llama.cpp load."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import whole, write_whole
from hetero_pp.core.tensor_files import save_tensors
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import ByteTokenizer, load_tokenizer
from hetero_pp.hugging_face.config_json import positions_of, to_json
from hetero_pp.hugging_face.names import OUR_EMBEDDING, OUR_HEAD, halves_of_pairs, is_rotated, their_name
from hetero_pp.model.transformer import ModelShape

DTypeName = Literal["bf16", "fp32"]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = 5 * 10**9
"""Largest size of a file; a larger model is written as several, one of which is held in memory at a time."""

Parameters = Callable[[str], Tensor]  # returns the parameter of a name (ours) in fp32


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


# ---- the tokenizer ----

END_OF_TEXT = "<|endoftext|>"  # name of the separator if the tokenizer has none for it


def write_tokenizer(data: DataSettings, folder: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json of the tokenizer that `data` names; return the separator's id.

    A user's tokenizer.json is copied. A token for the separator is added if it has none.
    """
    config: dict[str, Any] = {}
    tokenizer = load_tokenizer(data)
    path = folder / "tokenizer.json"
    if isinstance(tokenizer, ByteTokenizer):
        byte_tokenizer().save(str(path))
    else:
        config = _copy(Path(data.tokenizer), path)
    saved = Tokenizer.from_file(str(path))
    if saved.id_to_token(tokenizer.separator) is None:
        saved.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
        saved.save(str(path))
    name = saved.id_to_token(tokenizer.separator)
    if name is None:
        raise ConfigError(
            ("data", "tokenizer"),
            f"found `{data.tokenizer}` with ids that have no token, expected none below {tokenizer.separator}",
        )
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name, "clean_up_tokenization_spaces": False}
    beginning = {} if config else {"bos_token": name}
    text = json.dumps({**defaults, **beginning, **config}, indent=2, ensure_ascii=False)
    write_whole(folder / "tokenizer_config.json", (text + "\n").encode())
    return tokenizer.separator


def byte_tokenizer() -> Tokenizer:
    """Return ByteTokenizer as a tokenizer.json: byte-level without merges, so that every id is the byte's value.

    Byte 0, which ByteTokenizer removes from text, is the separator. No character represents it, so it is removed from
    text here, too.
    """
    # Byte-level tokenizers (GPT-2) have a character for each byte: its own if it is printable, else one past 255.
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in shown]
    characters = [chr(byte) if byte in shown else chr(256 + others.index(byte)) for byte in range(256)]
    vocabulary = {END_OF_TEXT: 0} | {characters[byte]: byte for byte in range(1, 256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return tokenizer


def _copy(source: Path, path: Path) -> dict[str, Any]:
    """Copy a tokenizer.json, or a folder's, and its special_tokens_map.json; return its tokenizer_config.json."""
    source = source / "tokenizer.json" if source.is_dir() else source
    shutil.copyfile(source, path)
    beside = source.with_name("special_tokens_map.json")
    if beside.is_file():
        shutil.copyfile(beside, path.with_name(beside.name))
    config = source.with_name("tokenizer_config.json")
    return read_json_object(config) if config.is_file() else {}
