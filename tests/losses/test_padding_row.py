"""A padding row is multiplied with the hidden states as it is, and only its own gradient is left out."""

import pytest
import torch
import torch.nn.functional as F

import embedlayer as el
from embedlayer.losses import token_statistics

V, D, PAD = 23, 6, 4
WAYS = {
    "for each token": lambda x, w, y: el.linear_cross_entropy(
        x, w, y, padding_idx=PAD, impl="chunked", reduction="none"
    ).mean(),
    "statistics": lambda x, w, y: -token_statistics(x, w, y, padding_idx=PAD, impl="chunked").log_probs.mean(),
    "logits": lambda x, w, y: F.cross_entropy(el.OutputHead(tied(w))(x), y),
    "table": lambda x, w, y: tied(w).loss(x, y, impl="chunked"),
    "untied head": lambda x, w, y: F.cross_entropy(torch.func.functional_call(HEAD, {"weight": w}, x), y),
}
HEAD = el.OutputHead(D, V, padding_idx=PAD, dtype=torch.float64)


def tied(weight: torch.Tensor) -> el.TokenEmbedding:
    """A table with padding whose `weight` is a tensor of the graph."""
    table = el.TokenEmbedding(V, D, PAD, dtype=torch.float64)
    del table._parameters["weight"]
    table.weight = weight
    return table


@pytest.fixture
def inputs():
    hidden = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.tensor([0, PAD, 3, 22, 1])


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("way", WAYS)
def test_only_the_gradient_of_the_row_is_left_out(way, inputs) -> None:
    hidden, weight, targets = inputs
    loss = WAYS[way](hidden, weight, targets)
    expected = F.cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(loss, expected)
    by_hidden, by_weight = torch.autograd.grad(expected, (hidden, weight))
    by_weight[PAD] = 0
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), (by_hidden, by_weight))


@pytest.mark.parametrize("way", ["logits", "table"])
def test_second_derivatives_leave_it_out_too(way, inputs) -> None:
    hidden, weight, targets = inputs
    (first,) = torch.autograd.grad(WAYS[way](hidden, weight, targets), weight, create_graph=True)
    assert first[PAD].eq(0).all()
    (second,) = torch.autograd.grad(first.square().sum(), hidden)
    exact = F.cross_entropy(hidden @ weight.T, targets)
    (first,) = torch.autograd.grad(exact, weight, create_graph=True)
    kept = torch.arange(V) != PAD
    torch.testing.assert_close(second, torch.autograd.grad(first[kept].square().sum(), hidden)[0])


@pytest.mark.parametrize("way", ["logits", "table", "untied head"])
def test_transforms_leave_it_out_too(way, inputs) -> None:
    hidden, weight, targets = (each.detach() for each in inputs)
    by_weight = torch.func.grad(lambda w: WAYS[way](hidden, w, targets))(weight)
    exact = torch.func.grad(lambda w: F.cross_entropy(hidden @ w.T, targets))(weight)
    exact[PAD] = 0
    torch.testing.assert_close(by_weight, exact)
    moved = torch.zeros_like(weight).index_fill(0, torch.tensor(PAD), 1.0)
    _, change = torch.func.jvp(lambda w: WAYS[way](hidden, w, targets), (weight,), (moved,))
    assert change == 0
