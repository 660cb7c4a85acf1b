"""Tokenizers: bytes, or any tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hetero_pp.data.settings import DataSettings
from hetero_pp.errors import ConfigError

_KEY = ("data", "tokenizer")
_ENDS_OF_TEXT = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocabulary(self) -> int:
        """The number of ids, the separator among them."""

    @property
    def separator(self) -> int:
        """The id put after each document; no text encodes to it."""

    @property
    def identity(self) -> str:
        """A digest of what the tokenizer does: equal identities encode equally."""

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without a separator."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; broken characters are replaced."""


class ByteTokenizer:
    """UTF-8 bytes; NUL is the separator and is removed from text."""

    vocabulary = 256
    separator = 0
    identity = hashlib.sha256(b"utf-8 bytes, NUL separates").hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.replace("\0", "").encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if 0 < index < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json.

    The separator is its token for the end of a text; where none of the usual names exists, one id is added
    after its last, so that no id of the text has two meanings. Its truncation, padding and template are
    switched off, and text that spells a special token is encoded as plain text.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        try:
            content = path.read_bytes()
            self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises a bare Exception for whatever it cannot parse
            reason = " ".join(str(error).split())
            raise ConfigError(_KEY, f"found `{path}`, expected a readable tokenizer.json ({reason})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        unused = max(ids.values(), default=-1) + 1
        self.separator: int = next((ids[name] for name in _ENDS_OF_TEXT if name in ids), unused)
        self.vocabulary: int = max(unused, self.separator + 1)
        self.identity = hashlib.sha256(content).hexdigest()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        kept = [int(index) for index in ids if index != self.separator]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def load_tokenizer(settings: DataSettings) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    if settings.tokenizer == "bytes":
        return ByteTokenizer()
    path = Path(settings.tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        expected = "`bytes` or a path to a tokenizer.json or to a folder that holds one"
        raise ConfigError(_KEY, f"found `{settings.tokenizer}`, expected {expected}")
    return FileTokenizer(path)
