"""The LM head."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from embedlayer import FactorizedEmbedding, OutputHead, SizeError, TokenEmbedding


@pytest.mark.parametrize(
    ("name", "value"),
    [("head_dtype", torch.bfloat16), ("softcap", -1.0), ("logit_scale", torch.nan), ("padding_idx", 99)],
)
def test_an_option_that_is_assigned_is_checked_as_in_the_constructor(name, value) -> None:
    head = OutputHead(8, 50, init_std=1.0)
    before = getattr(head, name)
    with pytest.raises(SizeError, match=name):
        setattr(head, name, value)
    assert getattr(head, name) == before
    head.head_dtype = "float32"  # type: ignore[assignment]
    assert head.head_dtype is torch.float32
    assert head(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_tied_it_owns_nothing_and_its_weight_is_the_tables() -> None:
    table = TokenEmbedding(10, 4)
    model = nn.ModuleDict({"table": table, "head": OutputHead(table)})
    assert model["head"].tied
    assert model["head"].weight is table.weight
    assert list(model.state_dict()) == ["table.weight"]
    assert len(list(model.parameters())) == 1
    twin = copy.deepcopy(model)
    assert twin["head"].weight is twin["table"].weight
    assert twin["head"].weight is not table.weight


def test_free_it_is_a_linear_layer() -> None:
    head = OutputHead(vocab_size=10, embed_dim=4)
    assert isinstance(head, nn.Linear)
    assert not head.tied
    assert list(head.state_dict()) == ["weight"]
    hidden = torch.randn(2, 3, 4)
    assert torch.equal(head(hidden), hidden @ head.weight.T)


@pytest.mark.parametrize(
    "make_table", [lambda: TokenEmbedding(10, 4, padding_idx=3), lambda: FactorizedEmbedding(10, 4, 2)]
)
def test_options_act_alike_tied_and_free_in_logits_and_loss(make_table) -> None:
    table = make_table().double()
    options = {"bias": True, "softcap": 3.0, "logit_scale": 0.5, "mask_padding": True}
    tied = OutputHead(table, **options).double()
    free = OutputHead(vocab_size=10, embed_dim=4, padding_idx=table.padding_idx, **options).double()
    bias = torch.randn(10, dtype=torch.float64)
    with torch.no_grad():
        free.weight.copy_(table.rows(0, 10))
        tied.bias.copy_(bias)
        free.bias.copy_(bias)
    hidden = torch.randn(5, 4, dtype=torch.float64)
    expected = 3.0 * torch.tanh((0.5 * hidden @ table.rows(0, 10).T + bias) / 3.0)
    if table.padding_idx is not None:
        expected[:, 3] = -math.inf
    targets = torch.tensor([0, 1, 2, -100, 9])
    for head in (tied, free):
        assert torch.allclose(head(hidden), expected, rtol=1e-12)
        assert torch.allclose(head.loss(hidden, targets), F.cross_entropy(expected, targets), rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "OutputHead needs a table"),
        ({"vocab_size": 4}, "OutputHead needs a table"),
        ({"table": TokenEmbedding(4, 4), "vocab_size": 4}, "takes its sizes and padding from the table"),
        (
            {"vocab_size": 4, "embed_dim": 4, "softcap": 0.0},
            "OutputHead: softcap must be a number above 0 or None, not 0.0",
        ),
    ],
)
def test_what_is_neither_tied_nor_free_is_refused(arguments, message) -> None:
    with pytest.raises(SizeError, match=message):
        OutputHead(**arguments)
