"""What a member commits to: moments, error feedback and position in the data, as one file without pickle.

The digest depends on the names, shapes and bytes of the tensors and on the JSON of the rest, not on the file. Theta is
not part of it, because it follows from the run log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
        digest = hashlib.sha256(_text(self.rest).encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    def save(self, path: Path) -> None:
        """Write the state to a safetensors file. Raises OSError."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        save_tensors(tensors, path, {_REST: _text(self.rest)})


def messages_sha256(digests: bytes) -> bytes:
    """Return what a member commits to of the digests of its messages; empty without any."""
    return hashlib.sha256(digests).digest() if digests else b""


def load_state(path: Path) -> CommittedState:
    """Return the state in a file. Raises DamagedFile for a file that is none; the tensors may still have any shape."""
    try:
        with safe_open(path, framework="pt") as file:
            rest = json.loads((file.metadata() or {})[_REST])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{path.name}: found no member checkpoint ({type(error).__name__})") from None
    if not isinstance(rest, dict):
        raise DamagedFile(f"{path.name}: found a {type(rest).__name__} beside the tensors, expected an object")
    return CommittedState(tensors, rest)


def _text(rest: Mapping[str, Any]) -> str:
    return json.dumps(rest, sort_keys=True)
