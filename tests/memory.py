"""How tests measure memory: by watching every operation take and free it."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Bytes that operations have taken since the start and not freed, `now`, and the most there ever were, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in map(storage_of, tree_leaves((args, kwargs))) if storage is not None}
        for storage in map(storage_of, tree_leaves(made)):
            if storage is None or storage._cdata in given or storage._cdata in self.live:
                continue
            self.live.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return made

    def _freed(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.now -= size


def storage_of(thing: object) -> torch.UntypedStorage | None:
    """The memory behind a dense tensor, if there is any."""
    if not isinstance(thing, Tensor) or thing.layout != torch.strided or thing.is_meta:
        return None
    return thing.untyped_storage()


class Shapes(TorchDispatchMode):
    """Record the number of elements of all storages that operators allocate, with the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numels.append((func.__name__, tensor.untyped_storage().nbytes() // tensor.itemsize))
        return out

    def largest(self, size: int) -> set[str]:
        """Names of the operators that allocated at least `size` elements."""
        return {name for name, numel in self.numels if numel >= size}
