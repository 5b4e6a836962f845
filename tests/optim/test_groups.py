"""What decays, which rate a group has, and what a resumed optimizer expects of its groups."""

import copy
import math

import pytest
import torch

import embedlayer as el
from embedlayer import (
    DecoderLM,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    OutputHead,
    RowSparseEmbedding,
)
from embedlayer.optim import param_groups

IDS = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(*, untied: bool = True) -> DecoderLM:
    torch.manual_seed(0)
    head = OutputHead(vocab_size=50, embed_dim=24, bias=True) if untied else None
    return DecoderLM(FactorizedEmbedding(50, 24, 6), LearnedPositionalEmbedding(16, 24), head, num_layers=1)


def step(model: DecoderLM, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    optimizer.step()


def test_heads_and_matrices_decay_and_each_group_has_its_rate() -> None:
    rates = {"tables": 0.2, "heads": 0.004}
    groups = param_groups(model_of(), weight_decay=0.3, rates=rates)
    assert {group["name"]: (group["weight_decay"], group.get("lr")) for group in groups} == {
        "tables": (0.0, 0.2),
        "heads": (0.3, 0.004),
        "positions": (0.0, None),
        "norms": (0.0, None),
        "matrices": (0.3, None),
    }
    for kind in (el.RowAdamW, torch.optim.AdamW):
        optimizer = kind(param_groups(model_of(), rates=rates), lr=1e-3)
        assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.004, 1e-3, 1e-3, 1e-3]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    model = model_of(untied=False)
    model.table.requires_grad_(False)
    assert [group["name"] for group in param_groups(model)] == ["positions", "norms", "matrices"]
    torch.optim.AdamW(param_groups(model))


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"head": 0.1}, "rates has head, and the roles of parameters are tables, heads, positions, norms, matrices"),
        ({"heads": 0.1}, "rates has heads, of which this model trains no parameter"),
        ({"tables": -0.1}, "must be a finite number of at least 0, not {'tables': -0.1}"),
        ({"tables": "1e-3"}, "not {'tables': '1e-3'}"),  # as PyYAML reads 1e-3
        ({"tables": math.nan}, "must be a finite number"),
        ({"tables": math.inf}, "must be a finite number"),
    ],
)
def test_a_rate_of_no_role_or_no_number_is_refused(rates, message) -> None:
    with pytest.raises(el.SizeError, match=message):
        param_groups(model_of(untied=False), rates=rates)


def without_heads_group(model: DecoderLM) -> list[dict]:
    """Groups with an untied head among the matrices, as earlier versions built them."""
    groups = {group["name"]: group for group in param_groups(model)}
    matrices = {*groups.pop("heads")["params"], *groups["matrices"]["params"]}
    groups["matrices"]["params"] = [parameter for parameter in model.parameters() if parameter in matrices]
    return list(groups.values())


@pytest.mark.parametrize("untied", [False, True])
def test_a_state_continues_with_equal_groups_and_is_refused_by_the_names_of_others(untied) -> None:
    model = model_of(untied=untied)
    build = without_heads_group if untied else param_groups
    optimizer = el.RowAdamW(build(model))
    step(model, optimizer)
    state, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    resumed = el.RowAdamW(param_groups(other))
    if untied:
        with pytest.raises(
            el.CheckpointError, match=r"groups tables, positions, norms, matrices, .* tables, heads, pos"
        ):
            resumed.load_state_dict(state)
        assert not resumed.state
        resumed = el.RowAdamW(without_heads_group(other))  # what the error advises
    resumed.load_state_dict(state)
    step(model, optimizer)
    step(other, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_group_that_is_refused_is_not_added() -> None:
    model, more = model_of(), RowSparseEmbedding(5, 4)
    optimizer = el.RowAdamW(param_groups(model))
    with pytest.raises(el.SizeError, match="lr and weight_decay must be at least 0"):
        optimizer.add_param_group({"params": more.parameters(), "lr": -1.0})
    assert len(optimizer.param_groups) == 5
    optimizer.add_param_group({"params": more.parameters(), "lr": 1.0})
    assert optimizer.param_groups[-1]["params"] == [more.weight]
