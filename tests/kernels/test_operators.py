"""The operators that calls of the package dispatch keep torch's rules of custom operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import interpreted
from quantised_tables import quantised
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from embedlayer import RotaryEmbedding, linear_cross_entropy
from embedlayer.kernels import kernels_disabled


class Calls(TorchDispatchMode):
    """Record the calls of operators of this package, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "embedlayer":
            self.seen[func] = tree_map_only(Tensor, lambda x: x.detach().clone(), args)
        return func(*args, **(kwargs or {}))


def loss() -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.randint(0, 9, (6,)), impl="chunked", softcap=3.0).backward()


def rotation() -> None:
    q, k = torch.randn(2, 5, 3, 8).transpose(1, 2), torch.randn(2, 1, 5, 8)
    RotaryEmbedding(8).rotate(q, k, torch.arange(5))


def look_up() -> None:
    table = quantised(torch.randn(20, 64), 4, 32)
    table(torch.tensor([3, 3, 1]))
    table.rows(0, 20)


CALLS: dict[str, Callable[[], None]] = {"softmax_statistics": loss, "rotate_together": rotation,
                                        "read_quantized_rows": look_up}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_of_a_call_keep_torchs_rules(name) -> None:
    pytest.importorskip("triton")
    with interpreted():
        with Calls() as calls:
            CALLS[name]()
        assert name in [func._opname for func in calls.seen]
        for func, arguments in calls.seen.items():
            torch.library.opcheck(func, arguments, test_utils=("test_schema", "test_faketensor"))


def test_without_kernels_no_operator_of_the_package_computes_a_loss() -> None:
    with interpreted(), kernels_disabled(), Calls() as calls:
        loss()
    assert not [func for func in calls.seen if "softmax" in func._opname]
