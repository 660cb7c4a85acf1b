"""Tokenizers: bytes, or any tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetero_pp.core.bounded import parse_json, read_bounded, read_json_object, require_shallow
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_count, format_names
from hetero_pp.data.settings import DataSettings

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
"""Names of the files of a tokenizer. The second file names its special tokens and is optional."""

_KEY = ("data", "tokenizer")
_BYTES_MAX = 256 * 2**20
_RULE_DEPTH_MAX = 16
"""Largest allowed nesting depth of rules. Published models have at most 6 levels."""
_GROUPS_MAX = 100
"""Largest number of brackets of one kind in a rule. Published models have at most 20."""
_RENUMBERED_SHOWN = 3
_ENDS_OF_TEXT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")


_CONVERT = (
    "found `{found}` of SentencePiece, expected a tokenizer.json; `pip install transformers sentencepiece` and "
    '`python -P -c "from transformers import LlamaTokenizer as T; '
    "T.from_pretrained('{folder}').save_pretrained('{folder}')\"` write one"
)


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids, including the separator."""

    @property
    def separator(self) -> int:
        """Id after each document. No text encodes to it."""

    @property
    def identity(self) -> str:
        """Digest of the tokenizer's behaviour: tokenizers with equal identities encode equally."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines to show to the user before a run uses the tokenizer."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, without separators."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, with replacement characters for invalid bytes."""


class ByteTokenizer:
    """Tokenizer for UTF-8 bytes. NUL is the separator and is removed from text."""

    vocabulary = 256
    separator = 0
    notes: tuple[str, ...] = ()
    identity = hashlib.sha256(b"utf-8 bytes, NUL separates").hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.replace("\0", "").encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if 0 < index < 256).decode(errors="replace")


class FileTokenizer:
    """Tokenizer from a tokenizer.json.

    The separator is the token for the end of a text. It is named by the tokenizer_config.json in the same folder, or
    else it is the first of the usual names in the vocabulary. Without such a token, one id is appended, so that no id
    of the text has two meanings. Truncation, padding and template are disabled. Text that spells a special token is
    encoded as plain text.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            content = read_bounded(path, _BYTES_MAX)
            rules = parse_json(content)
            _require_simple(rules)
            with _panics_as_errors():
                self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises a bare Exception for any invalid file
            reason = " ".join(str(error).split())
            raise ConfigError(_KEY, f"found `{path}`, expected a readable tokenizer.json ({reason})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        unused = max(ids.values(), default=-1) + 1
        names = [*_configured_ends(path.with_name(CONFIG)), *_ENDS_OF_TEXT]
        self.separator: int = next((ids[name] for name in names if name in ids), unused)
        self.vocabulary: int = max(unused, self.separator + 1)
        self.identity = hashlib.sha256(content).hexdigest()
        self.notes = _renumbered(path, rules, ids)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        try:
            with _panics_as_errors():
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except ValueError as error:
            raise ConfigError(
                _KEY, f"cannot encode the text ({error}); expected other rules in the tokenizer's file"
            ) from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        kept = [int(index) for index in ids if index != self.separator]
        with _panics_as_errors():
            return self._tokenizer.decode(kept, skip_special_tokens=False)


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise ValueError for a panic of the library, which `except Exception` does not catch."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizers library failed: {' '.join(str(error).split())}") from None


def _require_simple(rules: object) -> None:
    """Raise ValueError for rules that would recurse too deeply in the library or its regular expressions.

    The recursion uses the stack of the process. An overflow ends the process without an exception.
    """
    if not isinstance(rules, dict):
        raise ValueError(f"found a JSON {type(rules).__name__}, expected an object")
    parts: list[object] = [value for key, value in rules.items() if key not in ("model", "added_tokens")]
    require_shallow(parts, _RULE_DEPTH_MAX)
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, str) and max(part.count("("), part.count("["), part.count("{")) > _GROUPS_MAX:
            raise ValueError(f"found a rule with more than {_GROUPS_MAX} groups")
    tokens = rules.get("added_tokens") or []
    if not isinstance(tokens, list) or not all(
        isinstance(one, dict) and isinstance(one.get("content"), str) and isinstance(one.get("id"), int)
        for one in tokens
    ):
        raise ValueError("added_tokens: found another type than a list of tokens with `content` and `id`")


def _renumbered(path: Path, content: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[str, ...]:
    """Return a line about added tokens whose ids differ from the file, because the library assigns its own."""
    given = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    changed = [f"{name} {given[name]} -> {ids[name]}" for name in given if ids.get(name, given[name]) != given[name]]
    if not changed:
        return ()
    count = f"{len(changed):,} of {format_count(len(ids), 'token')}"
    why = "because the ids in the file are not in the order of its vocabulary"
    shown = format_names(changed, _RENUMBERED_SHOWN)
    return (f"data.tokenizer: {path}: {count} have other ids than in the file, {why}: {shown}",)


def _configured_ends(path: Path) -> list[str]:
    """Return the end-of-text token from a tokenizer_config.json, or else its beginning-of-text token, if any."""
    if not path.is_file():
        return []
    try:
        config = read_json_object(path, _BYTES_MAX)
        tokens = [config.get(key) for key in ("eos_token", "bos_token")]
    except (ValueError, OSError) as error:
        raise ConfigError(_KEY, f"found `{path}`, expected a JSON object ({error})") from None
    names = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    return [name for name in names if isinstance(name, str)][:1]


def load_tokenizer(settings: DataSettings) -> Tokenizer:
    return ByteTokenizer() if settings.tokenizer == "bytes" else FileTokenizer(tokenizer_path(settings))


def tokenizer_path(settings: DataSettings) -> Path:
    """Return the path of the tokenizer.json of `data.tokenizer`. Raises ConfigError if there is none."""
    path = Path(settings.tokenizer).expanduser()
    if path.is_dir():
        names = (FILE, "tokenizer.model")
        path = next((path / name for name in names if (path / name).is_file()), path)
    if path.is_file() and path.suffix == ".model":
        raise ConfigError(_KEY, _CONVERT.format(found=path, folder=path.parent))
    if not path.is_file():
        expected = "`bytes` or a path to a tokenizer.json or to a folder that holds one"
        raise ConfigError(_KEY, f"found `{settings.tokenizer}`, expected {expected}")
    return path
