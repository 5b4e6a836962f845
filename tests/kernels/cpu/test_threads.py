"""No result depends on the number of threads among which a kernel's work is divided."""

from collections.abc import Callable

import pytest
import torch
from covering import cases
from quantised_tables import KINDS, quantised
from torch import Tensor

from embedlayer import (
    RotaryEmbedding,
    RowAdamW,
    RowSparseEmbedding,
    TokenEmbedding,
    TransformerEmbedding,
    linear_cross_entropy,
)
from embedlayer.tables import GGUFEmbedding

pytestmark = pytest.mark.usefixtures("kernels")


def training(dtype: torch.dtype) -> list[Tensor]:
    """Return the rows of a row-sparse table after steps that left most rows pending."""
    table = RowSparseEmbedding(500, 257, dtype=dtype)
    optimizer = RowAdamW(table.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(12):
        table(torch.randint(0, 500, (700,))).backward(torch.randn(700, 257).to(dtype))
        optimizer.step()
        optimizer.zero_grad()
    return [table.weight.detach()]


def embedding(row_sparse: bool) -> list[Tensor]:
    """Return vectors and gradients of an input embedding."""
    table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(20, 40, scale=2.0)
    layer = TransformerEmbedding(20, 40, 90, 0.3, table=table)
    vectors = layer(torch.randint(0, 20, (50, 90)))
    vectors.backward(torch.randn(50, 90, 40))
    return [vectors.detach(), *(each.grad.to_dense() for each in layer.parameters())]


def rotation() -> list[Tensor]:
    """Return rotated queries and their gradient."""
    q = torch.randn(2, 3, 1400, 64, requires_grad=True)
    rotated, _ = RotaryEmbedding(64).rotate(q, q[:, :1], torch.arange(1400))
    return [rotated.detach(), *torch.autograd.grad(rotated, q, torch.randn_like(rotated))]


def loss() -> list[Tensor]:
    """Return a loss and the gradient of the rows. That of the hidden states is one product of torch with a long sum."""
    hidden, weight = torch.randn(300, 16, requires_grad=True), torch.randn(3000, 16, requires_grad=True)
    value = linear_cross_entropy(hidden, weight, torch.randint(0, 3000, (300,)), softcap=5.0, impl="chunked")
    return [value.detach(), *torch.autograd.grad(value, weight)]


def blocks() -> list[Tensor]:
    """Return looked-up vectors and logits of a table in blocks of GGUF."""
    table = GGUFEmbedding(300, 512, "Q4_K")
    table.packed.copy_(torch.randint(64, table.packed.shape))
    return [table(torch.randint(300, (500,))), table.logits(torch.randn(1, 512))]


def quantised_rows(kind: tuple) -> list[Tensor]:
    """Return looked-up vectors, and those of single tokens, of a quantised table."""
    table, ids = quantised(torch.randn(60, 384), *kind), torch.randint(0, 60, (500,))
    return [table(ids), torch.cat([table(each) for each in ids.split(1)]), table.logits(torch.randn(1, 384))]


WORK: dict[str, Callable[[], list[Tensor]]] = {
    **{f"training, {dtype}": lambda dtype=dtype: training(dtype) for dtype in (torch.float64, torch.bfloat16)},
    "input embedding": lambda: embedding(row_sparse=False),
    "row-sparse input embedding": lambda: embedding(row_sparse=True),
    "rotation": rotation,
    "loss": loss,
    "blocks": blocks,
    **{f"quantised {kind}": lambda kind=kind: quantised_rows(kind) for kind in KINDS},
}


@cases("name", WORK)
def test_no_result_depends_on_threads(name) -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        results.append(WORK[name]())
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))
    if name.startswith("quantised"):
        assert torch.equal(*results[0][:2])
