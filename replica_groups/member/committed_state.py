"""State to which a member commits: moments, error feedback and position in the data, in one file without pickle.

The digest depends on the names, shapes and bytes of the tensors and on the JSON of the rest, not on the file. Theta is
not part of it, because it follows from the run log. Tensors that are all zero are left out, so that everybody knows the
digest of a state without moments and error feedback, whatever its size.
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
from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hetero_pp.core.errors import DamagedFile
from hetero_pp.core.tensor_files import save_tensors
from hetero_pp.messages.messages_pb2 import StageMessages

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
        return state_sha256(self.rest_sha256, tensors_sha256(self.tensors, self.tensors.__getitem__))

    @property
    def rest_sha256(self) -> bytes:
        return hashlib.sha256(_text(self.rest).encode()).digest()

    def save(self, path: Path) -> None:
        """Write the state to a safetensors file. Raises OSError."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_tensors(tensors, path, {_REST: _text(self.rest)})


def messages_sha256(digests: bytes) -> bytes:
    """Return what a member commits to of the digests of its messages (StageMessages); empty without any.

    Signatures are left out. They differ each time, and a group may train a round twice in one generation, if a link
    breaks. Raises DamagedFile for other bytes.
    """
    try:
        return hashlib.sha256(StageMessages.FromString(digests).records).digest() if digests else b""
    except DecodeError:
        raise DamagedFile(f"{MESSAGES}: found {len(digests)} bytes that are no digests of messages") from None


def load_state(path: Path) -> CommittedState:
    """Return the state in a file. Raises DamagedFile for a file that is none; the tensors may still have any shape."""
    with _opened(path) as (file, rest):
        return CommittedState({name: file.get_tensor(name) for name in file.keys()}, rest)  # noqa: SIM118


def sha256_in(path: Path) -> bytes:
    """Return the digest of the state in a file, with one tensor in memory at a time. Raises DamagedFile."""
    with _opened(path) as (file, rest):
        return state_sha256(CommittedState({}, rest).rest_sha256, tensors_sha256(file.keys(), file.get_tensor))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[safe_open, dict[str, Any]]]:
    try:
        with safe_open(path, framework="pt") as file:
            rest = json.loads((file.metadata() or {})[_REST])
            if not isinstance(rest, dict):
                raise ValueError("the rest is no object")
            yield file, rest
    except (SafetensorError, ValueError, KeyError, RecursionError, RuntimeError, TypeError) as error:
        raise DamagedFile(f"{path.name}: found no saved state ({type(error).__name__})") from None


def state_sha256(rest: bytes, tensors: bytes) -> bytes:
    """Return the digest of a state from those of its two parts."""
    return hashlib.sha256(rest + tensors).digest()


def tensors_sha256(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> bytes:
    """Return the digest of the tensors that are not all zero."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = tensor_of(name).detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8)
        if data.any():
            digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(data.numpy().data)
    return digest.digest()


def _text(rest: Mapping[str, Any]) -> str:
    return json.dumps(rest, sort_keys=True)
