"""The state of each rule: its bytes, its names, and states of other rules."""

import copy
import math

import pytest
import torch

import embedlayer as el
from embedlayer.analysis.embedding_plan import EmbeddingPlan
from embedlayer.optim import ElementwiseMoments, RowwiseSecondMoment
from embedlayer.optim.row_optimizer import RowOptimizer
from embedlayer.row_sparse import StochasticRounding

V, D = 40, 512
ADAM_BYTES = 4096
RULES = {
    "adamw": (lambda p: el.RowAdamW(p, state=ElementwiseMoments()), 1.002),
    "rowwise_fp32": (lambda p: el.RowAdamW(p, state=RowwiseSecondMoment()), 0.51),
    "rowwise_bf16": (lambda p: el.RowAdamW(p, state=RowwiseSecondMoment(torch.bfloat16)), 0.26),
    "rowwise": (lambda p: el.RowAdamW(p, state=RowwiseSecondMoment(None)), 1 / 300),
    "adagrad": (lambda p: el.RowAdagrad(p), 1 / 300),
}


def trained(name: str, *, vocab_size: int = V, dtype: torch.dtype = torch.float32) -> tuple:
    table = el.RowSparseEmbedding(vocab_size, D, dtype=dtype)
    optimizer = RULES[name][0](table.parameters())
    step(table, optimizer, 3)
    return table, optimizer


def step(table: el.TokenEmbedding, optimizer: RowOptimizer, token: int) -> None:
    optimizer.zero_grad()
    table(torch.tensor([1, 2, token])).square().sum().backward()
    optimizer.step()


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("name", RULES)
def test_the_state_takes_the_planned_bytes_a_row(name) -> None:
    _, optimizer = trained(name)
    kind = {"optimizer": "adagrad"} if name == "adagrad" else {"row_state": name}
    planned = EmbeddingPlan(V, D, tied=False, row_sparse=True, **kind).optimizer_bytes
    head = EmbeddingPlan(V, D, optimizer="adagrad" if name == "adagrad" else "adamw").optimizer_bytes
    assert optimizer.state_bytes() == planned - head + 4  # the step of the table
    assert (optimizer.state_bytes() - 4) / V <= RULES[name][1] * ADAM_BYTES


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("name", RULES)
def test_a_state_goes_round_and_one_of_another_rule_or_table_is_refused_by_name(name) -> None:
    table, optimizer = trained(name, dtype=torch.bfloat16)
    state = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(table)
    other = RULES[name][0](twin.parameters())
    other.load_state_dict(copy.deepcopy(state))
    for key, value in optimizer.state[table.weight].items():
        assert other.state[twin.weight][key].dtype == value.dtype
    for token in (5, 6):
        step(table, optimizer, token)
        step(twin, other, token)
    assert torch.equal(table.weight, twin.weight)
    for wrong in RULES.keys() - {name}:
        _, fresh = trained(wrong, dtype=torch.bfloat16)
        found = repr(optimizer.row_state).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(el.CheckpointError, match=f"is that of {found}.*this optimizer's rule is "):
            fresh.load_state_dict(state)
        with pytest.raises(el.CheckpointError, match=f"is that of {found}"):
            fresh.load_moments(fresh.param_groups[0]["params"][0], optimizer.moments(table.weight))
    with pytest.raises(el.CheckpointError, match="belongs to another table"):
        trained(name, vocab_size=V - 1, dtype=torch.bfloat16)[1].load_state_dict(state)


NO_STEPS = [math.nan, math.inf, -1.0, 2.5, 2.0**31, 1e30]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sparse", [True, False])
def test_a_step_that_is_none_is_one_error_and_nothing_changes(name: str, sparse: bool) -> None:
    table = (el.RowSparseEmbedding if sparse else el.TokenEmbedding)(V, D)
    optimizer = RULES[name][0](table.parameters())
    step(table, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    for value in (*map(torch.tensor, NO_STEPS), torch.tensor([1.0, 2.0]), torch.tensor(-1), True, "1", None):
        state = copy.deepcopy(before)
        state["state"][0]["step"] = value
        with pytest.raises(
            el.CheckpointError, match="state of parameter 0 has the step .*, where a whole number from 0"
        ):
            optimizer.load_state_dict(state)
        with pytest.raises(el.CheckpointError, match="has the step .*, where a whole number from 0"):
            optimizer.load_moments(table.weight, state["state"][0])
    assert all(torch.equal(value, before["state"][0][key]) for key, value in optimizer.state_dict()["state"][0].items())


@pytest.mark.parametrize("name", ["value_steps", "moment_steps"])
def test_steps_of_rows_outside_of_the_history_are_refused(name: str) -> None:
    table, optimizer = trained("adamw")
    tensors, rest = table.pending_updates.state()
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    for steps in (torch.full((V,), -1, dtype=torch.int32), torch.full((V,), 2**30, dtype=torch.int32), torch.ones(V)):
        with pytest.raises(el.CheckpointError, match=f"The {name} of a row-sparse table's pending updates"):
            optimizer.load_pending_updates(table.weight, tensors | {name: steps}, rest)


@pytest.mark.usefixtures("both_paths")
def test_a_seed_of_rounding_is_part_of_the_state_of_the_optimizer_and_of_pending_updates() -> None:
    table = el.RowSparseEmbedding(V, D, dtype=torch.bfloat16)
    optimizer = el.RowAdamW(table.parameters(), rounding=StochasticRounding(9))
    step(table, optimizer, 3)
    assert table.pending_updates.state()[1]["rounding_seed"] == 9
    other = el.RowAdamW(copy.deepcopy(table).parameters())
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["rounding_seed"] == 9
    optimizer.load_state_dict(trained("adamw", dtype=torch.bfloat16)[1].state_dict())
    assert optimizer.param_groups[0]["rounding_seed"] == 9


def test_options_that_no_rule_has_are_refused() -> None:
    half = el.RowSparseEmbedding(V, D, dtype=torch.float16)
    with pytest.raises(el.SizeError, match="first_moment torch.float16 is not offered"):
        RowwiseSecondMoment(torch.float16)
    with pytest.raises(el.SizeError, match="StochasticRounding is for bfloat16 tables"):
        el.RowAdagrad(half.parameters(), rounding=StochasticRounding(1))
    with pytest.raises(el.SizeError, match="RowwiseSquares.* is no state of AdamW"):
        el.RowAdamW(half.parameters(), state=el.RowAdagrad(half.parameters()).row_state)
