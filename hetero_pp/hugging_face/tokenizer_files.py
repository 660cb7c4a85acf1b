"""The tokenizer of a run as files that `transformers` and others load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokenizers import ByteTokenizer, load_tokenizer

END_OF_TEXT = "<|endoftext|>"
"""Name of the separator if the tokenizer has none for it."""


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
    characters = _characters_of_bytes()
    vocabulary = {END_OF_TEXT: 0} | {characters[byte]: byte for byte in range(1, 256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return tokenizer


def _characters_of_bytes() -> list[str]:
    """Return the characters of byte-level tokenizers (GPT-2) for each byte: its own if printable, else one past 255."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + others.index(byte)) for byte in range(256)]


def _copy(source: Path, path: Path) -> dict[str, Any]:
    """Copy a tokenizer.json, or a folder's, and its special_tokens_map.json; return its tokenizer_config.json."""
    source = source / "tokenizer.json" if source.is_dir() else source
    shutil.copyfile(source, path)
    beside = source.with_name("special_tokens_map.json")
    if beside.is_file():
        shutil.copyfile(beside, path.with_name(beside.name))
    config = source.with_name("tokenizer_config.json")
    return read_json_object(config) if config.is_file() else {}
