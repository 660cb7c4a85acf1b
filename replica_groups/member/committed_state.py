"""State to which a member commits: moments, error feedback and position in the data, in one file without pickle.

The digest depends on the names, shapes and bytes of the tensors and on the JSON of the rest, not on the file. Theta is
not part of it, because it follows from the run log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetero_pp.core.errors import DamagedFile
from hetero_pp.core.tensor_files import save_tensors

BEFORE, MESSAGES = "before.safetensors", "messages"
"""Files that a member shows: its state before the audited round, and the digests of its messages in that round."""

_REST = "rest"


@dataclass(frozen=True)
class CommittedState:
    """A member's state before a round, or after it."""

    tensors: Mapping[str, Tensor]
    """Moments, anchors and error feedback by name, as tensors that may still be in use."""
    rest: Mapping[str, Any]
    """Position in the data, and the number of steps if rounds have a fixed time; plain JSON."""

    @property
    def sha256(self) -> bytes:
        """The digest to which the member commits."""
        return _digest(self.rest, self.tensors, self.tensors.__getitem__)

    def save(self, path: Path) -> None:
        """Write the state to a safetensors file. Raises OSError."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_tensors(tensors, path, {_REST: _text(self.rest)})


def messages_sha256(digests: bytes) -> bytes:
    """Return what a member commits to of the digests of its messages; empty without any."""
    return hashlib.sha256(digests).digest() if digests else b""


def load_state(path: Path) -> CommittedState:
    """Return the state in a file. Raises DamagedFile for a file that is none; the tensors may still have any shape."""
    with _opened(path) as (file, rest):
        return CommittedState({name: file.get_tensor(name) for name in file.keys()}, rest)  # noqa: SIM118


def sha256_in(path: Path) -> bytes:
    """Return the digest of the state in a file, with one tensor in memory at a time. Raises DamagedFile."""
    with _opened(path) as (file, rest):
        return _digest(rest, file.keys(), file.get_tensor)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[safe_open, dict[str, Any]]]:
    try:
        with safe_open(path, framework="pt") as file:
            rest = json.loads((file.metadata() or {})[_REST])
            if not isinstance(rest, dict):
                raise ValueError("the rest is no object")
            yield file, rest
    except (SafetensorError, ValueError, KeyError, RecursionError, RuntimeError, TypeError) as error:
        raise DamagedFile(f"{path.name}: found no member checkpoint ({type(error).__name__})") from None


def _digest(rest: Mapping[str, Any], names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> bytes:
    digest = hashlib.sha256(_text(rest).encode())
    for name in sorted(names):
        tensor = tensor_of(name).detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _text(rest: Mapping[str, Any]) -> str:
    return json.dumps(rest, sort_keys=True)
