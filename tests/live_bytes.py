"""Bytes of live tensors, counted as operations make them, also those that only autograd holds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live storages that operations have made, and the maximum of the sum.

    A mode holds for the thread that enters it; several threads may count together.
    """

    def __init__(self, others: Iterable[Tensor] = ()) -> None:
        """Start to count. Storages of `others` are left out."""
        super().__init__()
        self.now, self.most = 0, 0
        self._lock = threading.RLock()
        self._known = {tensor.untyped_storage()._cdata for tensor in others}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor) and given.untyped_storage()._cdata not in self._known:
                self._add(given.untyped_storage(), 0)  # made by another thread, or before
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage()._cdata not in self._known:
                self._add(made.untyped_storage(), 0 if made.is_meta else made.untyped_storage().nbytes())
        return result

    def _add(self, storage: UntypedStorage, size: int) -> None:
        with self._lock:
            self._known.add(storage._cdata)
            self.now += size
            self.most = max(self.most, self.now)
        weakref.finalize(storage, self._remove, storage._cdata, size)

    def _remove(self, key: int, size: int) -> None:
        with self._lock:
            self._known.discard(key)
            self.now -= size
