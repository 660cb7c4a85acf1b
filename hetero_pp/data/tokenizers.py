"""Tokenizers: bytes, or any tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import base64
import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetero_pp.core.bounded import parse_json, read_bounded, read_json_object, require_shallow
from hetero_pp.core.control_characters import without_controls
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
_GROWTH_MAX = 10_000
"""Largest factor by which the rules together may lengthen a text. XLNet's may, by 2,000, at its worst letter."""
_GROWTH_UNMEASURED = 64
"""Factor up to which no text is measured before it is encoded. It is the limit if rules look around a match."""
_GROWTH_OF_TEXT = 16
"""Factor by which a text may in fact become longer. The longest words of published models' rules take 3."""
_MEASURED_CHARACTERS = 1_000
"""Length of the pieces in which a text is measured, so that a piece stays small whatever is made of it."""
_ADDED_BYTES_MAX = 64 << 20
"""Bytes of added tokens once the rules are applied to them, which the library does when it reads the file."""
_STRING_BYTES_MAX = 1_000
"""Bytes of a text in the rules, and of an added token. The model adds some of them to each letter."""
_GROWTH_OF_RULES = {
    "NFD": 4,
    "NFC": 3,
    "NFKD": 18,
    "NFKC": 18,
    "Lowercase": 2,
    "BertNormalizer": 6,
    "ByteLevel": 3,
    "Metaspace": 5,
    "CTC": 2,
}
"""Largest factor by which a rule without settings lengthens a text, in bytes of UTF-8."""
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[AGZzbBK]|[$^]")
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
        self._path, self._growth = path, _growth(rules)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None
        dropout = _without_dropout(path, self._tokenizer.model)
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        unused = max(ids.values(), default=-1) + 1
        names = [*_configured_ends(path.with_name(CONFIG)), *_ENDS_OF_TEXT]
        self.separator: int = next((ids[name] for name in names if name in ids), unused)
        self.vocabulary: int = max(unused, self.separator + 1)
        self.identity = hashlib.sha256(content).hexdigest()
        self.notes = (*_renumbered(path, rules, ids), *dropout)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text. Raises CannotEncode."""
        if self._growth > _GROWTH_UNMEASURED:
            for index, text in enumerate(texts):
                self._require_few(index, text)
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

    def _require_few(self, index: int, text: str) -> None:
        """Raise CannotEncode for a text of which the rules make one that is far longer."""
        longer = 0
        for start in range(0, len(text), _MEASURED_CHARACTERS):
            piece = text[start : start + _MEASURED_CHARACTERS]
            longer += len(self._tokenizer.normalizer.normalize_str(piece)) if self._tokenizer.normalizer else len(piece)
            end = start + len(piece)
            if longer > _GROWTH_OF_TEXT * end + _GROWTH_MAX:
                found = f"its normalizer makes {longer:,} characters of the first {end:,}"
                raise CannotEncode(self._path, index, f"{found}, expected at most {_GROWTH_OF_TEXT} times as many")

    def decode(self, ids: Sequence[int]) -> str:
        kept = [int(index) for index in ids if index != self.separator]
        with _panics_as_errors():
            return self._tokenizer.decode(kept, skip_special_tokens=False)


def _without_dropout(path: Path, model: Any) -> tuple[str, ...]:
    """Switch off the random omission of merges; return a line that says so. A text must always have the same ids."""
    dropout = getattr(model, "dropout", None)
    if not dropout:
        return ()
    model.dropout = None
    return (f"data.tokenizer: {path}: dropout {dropout:.3g} is switched off: a text must always have the same tokens",)


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
    growth = _growth(rules)
    most = growth * sum(len(one["content"]) for one in tokens)
    if most > _ADDED_BYTES_MAX and growth > _GROWTH_UNMEASURED:
        raise ValueError(
            f"added_tokens: rules may make {most:,.0f} bytes of them, expected at most {_ADDED_BYTES_MAX:,}"
        )


def _growth(rules: Mapping[str, Any]) -> float:
    """Return the largest factor by which the rules of a file lengthen a text. Raises ValueError if it is too large.

    Each rule may act on what the ones before have written, so the factors multiply. A text cannot be measured in pieces
    if a rule looks at what is around a match.
    """
    factors = dict[str, float]()
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        total, most, looks = factors.get("normalizer", 1.0) if name == "pre_tokenizer" else 1.0, _GROWTH_MAX, False
        for path, rule in _rules_in(rules.get(name), name):
            own, looks_around = _growth_of(rule)
            looks = looks or looks_around
            most = _GROWTH_UNMEASURED if looks or name == "decoder" else most
            total *= own
            if total > most:
                kind = rule.get("type")
                raise ValueError(f"{path}, {kind}: makes a text {total:,.0f} times as long, expected at most {most:,}")
        factors[name] = total
    return max(factors.values())


def _rules_in(found: object, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rules of a part of the file in their order, with their paths."""
    if isinstance(found, list):
        for index, one in enumerate(found):
            yield from _rules_in(one, f"{path}[{index}]")
    elif isinstance(found, dict) and found.get("type") == "Sequence":
        for name in ("normalizers", "pretokenizers", "decoders"):
            yield from _rules_in(found.get(name), f"{path}.{name}")
    elif isinstance(found, dict):
        yield path, found


def _growth_of(rule: Mapping[str, Any]) -> tuple[float, bool]:
    """Return the largest factor by which a rule lengthens a text, and whether it looks at what is around a match."""
    kind = str(rule.get("type"))
    texts = [rule.get(name) for name in ("content", "prepend", "prefix", "suffix", "pad_token")]
    added = max((len(text.encode(errors="replace")) for text in texts if isinstance(text, str)), default=0)
    pattern = rule.get("pattern")
    if kind == "Replace" and isinstance(pattern, dict):
        if isinstance(given := pattern.get("String"), str) and given:
            size = len(given.encode(errors="replace"))
            return max(1.0, added / size), size > _STRING_BYTES_MAX
        expression = str(pattern.get("Regex")).replace("[^", "[")
        return 1.0 + added, added > 0 and _LOOKS_AROUND.search(expression) is not None
    if kind == "Precompiled":  # SentencePiece: the length of a trie, the trie, and texts that end with NUL
        table = base64.b64decode(rule.get("precompiled_charsmap") or "")
        texts_at = 4 + int.from_bytes(table[:4], "little")
        return 1.0 + max(map(len, table[texts_at:].split(b"\0"))), False
    return _GROWTH_OF_RULES.get(kind, 1) * (1.0 + added), False


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
