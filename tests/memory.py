"""How tests measure memory: by watching every operation take and free it."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.operator_counter import Allocations


class Memory(TorchDispatchMode, Allocations):
    """Bytes that operations have taken since the start and not freed, `now`, and the most there ever were, `peak`."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        Allocations.__init__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(storages_of(result), older=storages_of((args, kwargs)))
        return result


def storages_of(tree: object) -> list[torch.UntypedStorage]:
    """The memory behind the dense tensors of a tree."""
    return [
        each.untyped_storage()
        for each in tree_leaves(tree)
        if isinstance(each, Tensor) and each.layout == torch.strided and not each.is_meta
    ]


class Shapes(TorchDispatchMode):
    """Record the number of elements of all storages that operators allocate, with the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                self.numels.append((func.__name__, tensor.untyped_storage().nbytes() // tensor.itemsize))
        return out

    def largest(self, size: int) -> set[str]:
        """Names of the operators that allocated at least `size` elements."""
        return {name for name, numel in self.numels if numel >= size}


class Products(TorchDispatchMode):
    """Count matrix products by their names, and the numbers that those with a dimension of `size` multiply."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.calls, self.numbers = size, Counter[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if "mm" in name:
            left, right = args[-2:]
            self.numbers += left.numel() * right.shape[-1] * (self.size in (*left.shape, *right.shape))
        if "mm" in name or name in ("times_quantized_rows", "times_stored_rows"):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))
