"""Heads of K streams: each kind of rows, beside all logits of each stream."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer import OutputHead, TokenEmbedding
from embedlayer.heads import StackedRows, StreamHead

D = 6

HEADS: dict[str, Callable[[], StreamHead]] = {
    "one weight": lambda: StreamHead(OutputHead(D, 24, bias=True, softcap=3.0, init_std=1.0), [7, 9, 8]),
    "tied to some rows": lambda: StreamHead(
        OutputHead(TokenEmbedding(40, D, dtype=torch.float64)), [7, 9, 8], first_rows=[20, 3, 32]
    ),
    "three weights": lambda: StreamHead([OutputHead(D, size, bias=True, init_std=1.0) for size in (7, 9, 8)]),
    "stacked": lambda: StreamHead(StackedRows(3, 7, D, init_std=1.0), hidden_per_stream=True),
    "transposed": lambda: StreamHead(StackedRows(3, 7, D, transposed=True, init_std=1.0), hidden_per_stream=True),
}


def batch(head: StreamHead) -> tuple[Tensor, Tensor]:
    states = (2, 5, head.num_streams, D) if head.hidden_per_stream else (2, 5, D)
    targets = torch.stack([torch.randint(0, size, (2, 5)) for size in head.sizes], -1)
    targets[0, 1, 0] = targets[1, 2:, 2] = -100
    return torch.randn(states, dtype=torch.float64, requires_grad=True), targets


def weights_of(head: StreamHead) -> list[Tensor]:
    """The trained tensors of a head, those of the table that it is tied to included."""
    return [*head.parameters(), *([head.output.weight] if head.tied else [])]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("impl", ["plain", "chunked"])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 0.0]])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_that_of_all_logits_of_each_stream(name, impl, weights, reduction) -> None:
    head = HEADS[name]().double()
    hidden, targets = batch(head)
    found = head.loss(hidden, targets, weights, reduction=reduction, impl=impl)
    each = [
        F.cross_entropy(logits.movedim(-1, 1), targets[..., stream], reduction="none")
        for stream, logits in enumerate(head(hidden))
    ]
    losses, kept = torch.stack(each, -1), targets != -100
    if reduction == "mean":
        means = losses.sum((0, 1)) / kept.sum((0, 1))
        expected = losses.sum() / kept.sum() if weights is None else means @ torch.tensor(weights).double()
        losses = means
    else:
        losses = losses if reduction == "none" else losses.sum((0, 1))
        expected = (losses if weights is None else losses * torch.tensor(weights).double()).sum(-1)
    losses = losses if weights is None else losses * torch.tensor([weight != 0 for weight in weights])
    torch.testing.assert_close(found.losses, losses.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.loss, expected, rtol=1e-10, atol=1e-10)
    leaves, grad_output = [hidden, *weights_of(head)], torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, leaves, grad_output, materialize_grads=True) for loss in (found.loss, expected)),
        rtol=1e-10,
        atol=1e-10,
    )
