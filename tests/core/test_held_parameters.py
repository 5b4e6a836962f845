"""A parameter that is assigned in the place of one that an optimizer trains."""

import gc

import pytest
import torch
from torch import nn

import embedlayer as el

PARTS = {"table": lambda: el.TokenEmbedding(20, 4), "untied head": lambda: el.OutputHead(4, 20)}


def backward(part: nn.Module) -> None:
    (part(torch.tensor([1, 2])) if isinstance(part, el.TokenEmbedding) else part(torch.ones(2, 4))).sum().backward()


@pytest.mark.parametrize("name", PARTS)
def test_a_step_that_leaves_the_new_weight_untrained_is_refused_and_the_advice_works(name) -> None:
    part = PARTS[name]()
    optimizer = torch.optim.AdamW(part.parameters())
    part.weight = nn.Parameter(torch.randn(20, 4))
    backward(part)
    with pytest.raises(
        el.core.errors.StaleRowsError, match=r"weight of an? .* was replaced.*this AdamW has the former one"
    ):
        optimizer.step()
    again, before = torch.optim.AdamW(part.parameters()), part.weight.detach().clone()
    again.step()
    assert not torch.equal(part.weight, before)
    optimizer.step()  # it trains nothing, and another one trains the new weight

    part = PARTS[name]()
    optimizer = torch.optim.AdamW(part.parameters())
    part.weight.data.copy_(torch.randn(20, 4))
    backward(part)
    optimizer.step()


def test_weights_that_are_assigned_and_put_back_are_no_error() -> None:
    table = el.TokenEmbedding(20, 4)
    optimizer, own = torch.optim.AdamW(table.parameters()), table.weight
    table.weight = nn.Parameter(torch.randn(20, 4))  # such as an average, for an evaluation
    table([1, 2])
    table.weight = own
    backward(table)
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_a_former_weight_that_another_module_trains_is_no_error() -> None:
    table, linear = el.TokenEmbedding(20, 4), nn.Linear(4, 20, bias=False)
    linear.weight = table.weight
    optimizer = torch.optim.AdamW(linear.parameters())
    table.weight = nn.Parameter(torch.randn(20, 4))
    backward(table)
    linear(torch.ones(4)).sum().backward()
    optimizer.step()


def test_nothing_is_searched_where_no_optimizer_has_the_weight(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(gc, "get_referrers", lambda *kinds: pytest.fail("searched"))
    table = el.TokenEmbedding(20, 4)
    table.weight = nn.Parameter(torch.randn(20, 4))
    table.save_pretrained(tmp_path)
    el.TokenEmbedding.from_pretrained(tmp_path)
