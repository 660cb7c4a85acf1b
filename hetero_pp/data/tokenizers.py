"""Tokenizers: bytes, or any tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetero_pp.core.bounded import parse_json, read_bounded, read_json_object, require_shallow
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.text import without_controls
from hetero_pp.core.units import format_count, format_names
from hetero_pp.data.settings import DataSettings

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
"""Names of the files of a tokenizer. The second file names its special tokens and is optional."""

_KEY = ("data", "tokenizer")
_BYTES_MAX = 256 * 2**20
_RULE_DEPTH_MAX = 16  # Largest allowed nesting depth of rules. Published models have at most 6 levels.
_GROUPS_MAX = 100  # Largest number of brackets of one kind in a rule. Published models have at most 20.
_STRING_BYTES_MAX = 1_000
"""Bytes of a text in the model, and of an added token. The model adds some of them to each letter."""
_SHOWN_AROUND = 20
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


class CannotEncode(ConfigError):
    """A tokenizer cannot encode one of the texts that it was given."""

    def __init__(self, path: Path, index: int, problem: str) -> None:
        """`index`: number of the text in the batch, from 0."""
        self.path, self.index, self.problem = path, index, problem
        super().__init__(_KEY, f"{path} cannot encode document {index + 1} of a batch: {problem}")

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.index, self.problem)

    def of(self, document: str) -> ConfigError:
        """Return the error for users, which names the document."""
        return ConfigError(_KEY, f"found `{self.path}`, which cannot encode {document}: {self.problem}")


class FileTokenizer:
    """Tokenizer from a tokenizer.json.

    The separator is the token for the end of a text. It is named by the tokenizer_config.json in the same folder, or
    else it is the first of the usual names in the vocabulary. Without such a token, one id is appended, so that no id
    of the text has two meanings. Truncation, padding, template and dropout are disabled. Text that spells a special
    token is encoded as plain text.
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
        self._path = path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None
        notes = list[str]()
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
            why = "is switched off: a text must always have the same tokens"
            notes.append(f"data.tokenizer: {path}: dropout {dropout:.3g} {why}")
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        unused = max(ids.values(), default=-1) + 1
        names = [*_ENDS_OF_TEXT]
        if (beside := path.with_name(CONFIG)).is_file():  # its end of a text, or else its beginning of one
            try:
                config = read_json_object(beside, _BYTES_MAX)
                tokens = [config.get(key) for key in ("eos_token", "bos_token")]
            except (ValueError, OSError) as error:
                raise ConfigError(_KEY, f"found `{beside}`, expected a JSON object ({error})") from None
            ends = [token.get("content") if isinstance(token, dict) else token for token in tokens]
            names = [name for name in ends if isinstance(name, str)][:1] + names
        self.separator: int = next((ids[name] for name in names if name in ids), unused)
        self.vocabulary: int = max(unused, self.separator + 1)
        self.identity = hashlib.sha256(content).hexdigest()
        # The library assigns its own ids to added tokens whose ids in the file are not in the order of its vocabulary.
        given = {token["content"]: token["id"] for token in rules.get("added_tokens") or ()}
        if changed := [f"{name} {at} -> {ids[name]}" for name, at in given.items() if ids.get(name, at) != at]:
            count = f"{len(changed):,} of {format_count(len(ids), 'token')}"
            why = "because the ids in the file are not in the order of its vocabulary"
            shown = format_names(changed, _RENUMBERED_SHOWN)
            notes.insert(0, f"data.tokenizer: {path}: {count} have other ids than in the file, {why}: {shown}")
        self.notes = tuple(notes)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text. Raises CannotEncode."""
        try:
            encodings = self._encoded(texts)
        except ValueError:
            for index, text in enumerate(texts):
                if problem := self._problem(text):
                    raise CannotEncode(self._path, index, problem) from None
            raise
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _encoded(self, texts: list[str]) -> Any:
        """Encode texts. Raises ValueError for any failure of the library."""
        with _panics_as_errors():
            try:
                return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            except Exception as error:  # noqa: BLE001 (the library raises nothing more precise)
                raise ValueError(" ".join(str(error).split())) from None

    def _problem(self, text: str) -> str:
        """Return why a text cannot be encoded, and where: the end of its shortest beginning that cannot be."""

        def why(length: int) -> str:
            try:
                self._encoded([text[:length]])
            except ValueError as error:
                return str(error)
            return ""

        if not why(len(text)):
            return ""
        end = bisect_left(range(len(text) + 1), True, key=lambda length: bool(why(length)))
        where = f"up to character {end:,} (`{without_controls(text[max(0, end - _SHOWN_AROUND) : end])}`)"
        return f"{why(end)}, {where}; expected an unknown token, or other rules, in the file"

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
    model = rules.get("model")
    settings = {key: value for key, value in model.items() if isinstance(value, str)} if isinstance(model, dict) else {}
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
    for name, text in (*settings.items(), *(("added_tokens", one["content"]) for one in tokens)):
        if (size := len(text.encode(errors="replace"))) > _STRING_BYTES_MAX:
            raise ValueError(f"{name}: found a text of {size:,} bytes, expected at most {_STRING_BYTES_MAX:,}")


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
