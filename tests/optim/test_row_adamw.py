"""RowAdamW: where dense AdamW ends, touching only the rows of a batch. The oracle is torch.optim.AdamW in float64."""

import copy
import math
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from comparison import assert_no_worse
from covering import some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from embedlayer import CheckpointError, RowAdamW, RowSparseEmbedding, ShapeError, SizeError, TokenEmbedding

V, D, TOKENS = 64, 4, 6
ZIPF = 1 / torch.arange(1, V + 1, dtype=torch.float64)


def table_of(*, row_sparse, dtype=torch.float64, seed=1, **options) -> Any:
    table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(V, D, dtype=dtype, **options)
    start = torch.randn(V, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.02
    with torch.no_grad():
        table.weight.copy_(start)
        if table.padding_idx is not None:
            table.weight[table.padding_idx] = 0
    return table


def pair(**options):
    """A row-sparse table with RowAdamW, and the dense one with torch's AdamW."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, **options}
    row, dense = table_of(row_sparse=True), table_of(row_sparse=False)
    return (row, RowAdamW(row.parameters(), **settings)), (dense, torch.optim.AdamW(dense.parameters(), **settings))


@lru_cache(maxsize=2000)
def seeded(seed, tokens=TOKENS):
    """Zipf token IDs and an upstream gradient."""
    return batch(torch.Generator().manual_seed(seed), tokens=tokens)


def batch(generator, dtype=torch.float64, *, scale=1.0, tokens=TOKENS):
    ids = torch.multinomial(ZIPF, tokens, replacement=True, generator=generator)
    return ids, (torch.randn(tokens, D, generator=generator, dtype=torch.float64) * scale).to(dtype)


def backward(table, ids, upstream) -> None:
    (table(ids) * upstream).sum().backward()


def train(table, optimizer, steps, *, first=0, lr=None, scale=1.0) -> None:
    for t in range(first, first + steps):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(t)
        optimizer.zero_grad()
        ids, upstream = seeded(t)
        backward(table, ids, (upstream * scale).to(table.weight.dtype))
        optimizer.step()


def whole(table) -> torch.Tensor:
    return table.rows(0, table.num_rows).detach().double()


def assert_same(a, b, tolerance=1e-12) -> None:
    assert (whole(a) - whole(b)).abs().max() <= tolerance


def warm_up_and_cosine(t: int, steps: int = 1000, peak: float = 3e-3) -> float:
    if t < 100:
        return peak * (t + 1) / 100
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (t - 100) / (steps - 100))))


ALWAYS = [("kernels", (0.9, 0.999), 1e-3, 120), ("kernels", (0.9, 0.95), 1e-7, 120)]
ALWAYS += [("torch operators", (0.9, 0.999), 1e-3, 120)]
RUNS = [
    pytest.param(
        *(path, betas, scale, steps),
        marks=[] if (path, betas, scale, steps) in ALWAYS else pytest.mark.long,
    )
    for path in ("kernels", "torch operators")
    for betas in ((0.9, 0.999), (0.9, 0.95))
    for scale in (1.0, 1e-3, 1e-7)
    for steps in (120, 400, 1000)
]


@pytest.mark.parametrize(("both_paths", "betas", "scale", "steps"), RUNS, indirect=["both_paths"])
def test_after_many_steps_it_is_where_dense_adamw_is(both_paths, betas, scale, steps) -> None:
    kinds = [(False, torch.float64), (True, torch.float64)]
    kinds += [(True, torch.float32), (False, torch.float32)] if scale == 1e-3 else []
    results = []
    for row_sparse, dtype in kinds:
        table = table_of(row_sparse=row_sparse, dtype=dtype)
        kind = RowAdamW if row_sparse else torch.optim.AdamW
        optimizer = kind(table.parameters(), lr=1e-3, betas=betas, weight_decay=0.1)
        train(table, optimizer, steps, lr=lambda t: warm_up_and_cosine(t, steps), scale=scale)
        results.append(whole(table))
    exact, ours, *single = results
    assert (ours - exact).abs().max() <= 1e-9
    if single:
        ours_32, dense_32 = single
        assert (ours_32 - exact).abs().max() <= 1.5 * (dense_32 - exact).abs().max()


@pytest.mark.parametrize(
    ("both_paths", "betas"),
    some(
        [("kernels", (0.9, 0.999)), ("torch operators", (0.9, 0.95))],
        product(("kernels", "torch operators"), ((0.9, 0.999), (0.9, 0.95))),
    ),
    indirect=["both_paths"],
)
def test_in_bfloat16_it_is_no_further_off_than_dense_adamw(both_paths, betas) -> None:
    results = []
    for row_sparse, dtype in ((True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float64)):
        table = table_of(row_sparse=row_sparse, dtype=dtype)
        kind = RowAdamW if row_sparse else torch.optim.AdamW
        optimizer = kind(table.parameters(), lr=1e-3, betas=betas, weight_decay=0.1)
        train(table, optimizer, 150, lr=lambda t: warm_up_and_cosine(t, 150))
        results.append(whole(table))
    assert_no_worse(*results, slack=0.0)


@pytest.mark.usefixtures("both_paths")
@settings(max_examples=8, deadline=None)
@given(
    rates=st.lists(st.sampled_from([0.0, 1e-5, 1e-3, 1e-2, 0.5]), min_size=2, max_size=30),
    gap=st.integers(0, 100),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.9), (0.5, 0.99)]),
)
def test_any_gaps_and_any_learning_rates_give_the_dense_result(rates, gap, decay, betas) -> None:
    sides = pair(betas=betas, weight_decay=decay)
    for table, optimizer in sides:
        train(table, optimizer, 3)
        for t, lr in enumerate(rates + [1e-3] * gap):
            optimizer.param_groups[0]["lr"] = lr
            table.weight.grad = None
            ids = torch.tensor([t % 2])
            backward(table, ids, torch.full((1, D), 1e-3, dtype=torch.float64))
            optimizer.step()
    assert_same(sides[0][0], sides[1][0], 1e-11)


@pytest.mark.usefixtures("both_paths")
def test_several_tables_groups_and_dense_parameters_in_one_optimizer() -> None:
    def build(row_sparse):
        torch.manual_seed(3)
        tables = [table_of(row_sparse=row_sparse, seed=seed, padding_idx=0) for seed in (1, 2)]
        linear = nn.Linear(D, 5).double()
        groups = [
            {"params": tables[0].parameters(), "lr": 1e-2, "weight_decay": 0.0},
            {"params": [*tables[1].parameters(), linear.weight], "betas": (0.8, 0.99), "eps": 1e-6},
            {"params": [linear.bias]},
        ]
        kind = RowAdamW if row_sparse else torch.optim.AdamW
        return tables, linear, kind(groups, lr=3e-3, weight_decay=0.1, **({} if row_sparse else {"fused": True}))

    sides = [build(True), build(False)]
    for tables, linear, optimizer in sides:
        for t in range(30):
            optimizer.zero_grad()
            ids, _ = batch(torch.Generator().manual_seed(t))
            hidden = tables[0](ids) + (tables[1](ids.flip(0)) if t % 3 else 0)
            linear(hidden).square().sum().backward()
            optimizer.step()
    for a, b in zip(sides[0][0], sides[1][0], strict=True):
        assert_same(a, b)
        assert whole(a)[0].eq(0).all()
    assert torch.allclose(sides[0][1].weight, sides[1][1].weight, atol=1e-13, rtol=0)


@pytest.mark.usefixtures("both_paths")
def test_betas_and_eps_may_change_on_the_way() -> None:
    (row, optimizer), (dense, reference) = pair()
    for part, betas in enumerate([(0.9, 0.999), (0.8, 0.99), (0.8, 0.95)]):
        for table, its in ((row, optimizer), (dense, reference)):
            its.param_groups[0]["betas"] = betas
            train(table, its, 20, first=20 * part)
    assert_same(row, dense)


@pytest.mark.usefixtures("both_paths")
def test_the_state_goes_to_dense_adamw_and_back() -> None:
    (row, optimizer), (dense, reference) = pair()
    train(row, optimizer, 25)
    train(dense, reference, 25)
    other, back = table_of(row_sparse=False), table_of(row_sparse=True)
    other.load_state_dict(row.state_dict())
    adamw = torch.optim.AdamW(other.parameters(), lr=1.0)
    adamw.load_state_dict(optimizer.state_dict())
    train(other, adamw, 25, first=25)
    back.load_state_dict(other.state_dict())
    again = RowAdamW(back.parameters())
    again.load_state_dict(adamw.state_dict())
    train(back, again, 25, first=50)
    train(dense, reference, 50, first=25)
    assert_same(back, dense)
    for key in ("exp_avg", "exp_avg_sq"):
        ours, theirs = again.state_dict()["state"][0][key], reference.state_dict()["state"][0][key]
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-300)
    assert again.state_dict()["state"][0]["step"] == 75


@pytest.mark.usefixtures("both_paths")
def test_a_copy_of_model_and_optimizer_goes_on_alike() -> None:
    (row, optimizer), (dense, reference) = pair()
    train(row, optimizer, 20)
    train(dense, reference, 20)
    for pieces in (copy.deepcopy((row, optimizer)), copy.deepcopy((optimizer, row))[::-1]):
        table, its = pieces
        assert table.weight is its.param_groups[0]["params"][0]
        train(table, its, 1, first=20)
        train(table, its, 19, first=21)
        if pieces[0] is not row:
            fresh = copy.deepcopy((dense, reference))
            train(*fresh, 20, first=20)
            assert_same(table, fresh[0])
    alone = copy.deepcopy(row)
    assert torch.equal(alone.weight, row.weight)
    assert alone.pending_updates is not row.pending_updates


@pytest.mark.usefixtures("both_paths")
def test_a_step_allocates_nothing_of_the_size_of_the_table() -> None:
    table = RowSparseEmbedding(20_000, 64)
    optimizer = RowAdamW(table.parameters())
    ids = torch.randint(0, 20_000, (128,))
    for _ in range(2):
        table(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        table(ids.flip(0)).sum().backward()
        optimizer.step()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < table.weight.numel() * table.weight.element_size() / 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amsgrad": True}, "amsgrad keeps a maximum"),
        ({"maximize": True}, "minimise the negative loss"),
        ({"decoupled_weight_decay": False}, "decoupled weight decay"),
        ({"betas": (0.99, 0.95)}, r"beta1 0.99 is not below sqrt\(beta2\)"),
        ({"betas": (0.9, 1.0)}, "betas must be between 0 and 1"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"lr": -1.0}, "lr and weight_decay must be at least 0"),
    ],
)
def test_options_that_no_row_can_be_caught_up_with_are_refused(options, message) -> None:
    with pytest.raises(SizeError, match=message):
        RowAdamW([{"params": table_of(row_sparse=True).parameters(), **options}])


@pytest.mark.usefixtures("both_paths")
def test_a_dense_gradient_that_somebody_assigned_gives_the_dense_result() -> None:
    (row, optimizer), (dense, reference) = pair()
    for table, its in ((row, optimizer), (dense, reference)):
        train(table, its, 5)
        for rows in ([], [3], [3, 60]):
            table.weight.grad = torch.zeros_like(table.weight)
            table.weight.grad[rows] = 0.5
            its.step()
    assert_same(row, dense)


@pytest.mark.usefixtures("both_paths")
def test_gradients_of_the_wrong_layout_are_refused_with_the_remedy() -> None:
    row = table_of(row_sparse=True)
    with pytest.raises(ShapeError, match=r"dense gradient \(64, 4\) arrived .* under torch.no_grad"):
        row.logits(torch.randn(2, D, dtype=torch.float64)).sum().backward()
    other = nn.Embedding(5, 3, sparse=True)
    other(torch.tensor([1])).sum().backward()
    with pytest.raises(ShapeError, match="RowSparseEmbedding"):
        RowAdamW(other.parameters()).step()
    backward_of = table_of(row_sparse=True)
    backward(backward_of, *batch(torch.Generator().manual_seed(0)))
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        torch.optim.AdamW(backward_of.parameters()).step()


@pytest.mark.usefixtures("both_paths")
def test_a_table_resized_behind_the_optimizers_back_is_refused() -> None:
    (row, optimizer), _ = pair()
    train(row, optimizer, 2)
    row.weight = nn.Parameter(torch.zeros(V + 1, D, dtype=torch.float64))
    with pytest.raises(ShapeError, match="was replaced after the optimizer was built"):
        train(row, optimizer, 1)
    (row, optimizer), _ = pair()
    train(row, optimizer, 2)
    row.weight.data = torch.zeros(V + 1, D, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"table is \(65, 4\) and the optimizer's state for it \(64, 4\)"):
        row(torch.tensor([1]))


def test_moments_are_put_where_torch_wants_them() -> None:
    """torch's fused kernel reads the number of the step on the parameter's device, the others on the CPU."""
    dense, rows = nn.Parameter(torch.zeros(3, 2, device="meta")), RowSparseEmbedding(3, 2, device="meta")
    moments = {"step": torch.tensor(7.0), "exp_avg": torch.ones(3, 2), "exp_avg_sq": torch.ones(3, 2)}
    for parameter, fused, place in ((dense, True, "meta"), (dense, False, "cpu"), (rows.weight, True, "cpu")):
        optimizer = RowAdamW([parameter], fused=fused)
        optimizer.load_moments(parameter, moments)
        loaded = optimizer.state[parameter]
        made = RowAdamW([parameter], fused=fused).moments(parameter)
        assert {key: str(tensor.device) for key, tensor in loaded.items()} == {
            key: str(tensor.device) for key, tensor in made.items()
        }
        assert loaded["step"].device.type == place


@pytest.mark.usefixtures("both_paths")
def test_the_state_of_another_size_is_refused() -> None:
    (row, optimizer), _ = pair()
    train(row, optimizer, 2)
    smaller = RowSparseEmbedding(V - 1, D, dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"state of parameter 0 is \(64, 4\), the parameter \(63, 4\)"):
        RowAdamW(smaller.parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.usefixtures("both_paths")
def test_two_optimizers_in_turn_end_where_two_dense_ones_do() -> None:
    row, dense = table_of(row_sparse=True), table_of(row_sparse=False)
    for table, kind in ((row, RowAdamW), (dense, torch.optim.AdamW)):
        both = [kind(table.parameters(), lr=1e-2), kind(table.parameters(), lr=3e-3, weight_decay=0.2)]
        for t in range(6):
            train(table, both[t % 2], 4, first=4 * t)
    assert_same(row, dense)
