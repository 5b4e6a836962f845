"""Kernels over blocks of logits, compared with `terms` and `dlogits_` of each objective on finished logits."""

import math

import pytest
import torch
from logit_blocks import (
    OBJECTIVES,
    a_block,
    compiled_gradient,
    compiled_totals,
    copied,
    plain_gradient,
    plain_totals,
    some_grads,
)

from embedlayer.losses.compiled_blocks import add_bfloat16_
from embedlayer.losses.logit_statistics import LogitStatistics
from embedlayer.losses.objective import LogitBlock, Totals, Workspace, joined, stacked

pytestmark = pytest.mark.usefixtures("kernels")

SIZES: list[tuple[int, int]] = [(1, 1), (5, 3), (259, 17), (700, 300)]
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


@every_objective
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_float64_equals_the_definition(objective, size, has_bias) -> None:
    rows, tokens = size
    block = a_block(rows, tokens, torch.float64, has_bias=has_bias)
    expected, found = plain_totals(objective, copied(block, torch.float64)), compiled_totals(objective, block)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-12, atol=1e-12)
    assert found.keys() == expected.keys()
    grads = some_grads(objective, found)
    right = plain_gradient(objective, copied(block, torch.float64), found, grads)
    by_logits, by_bias = compiled_gradient(objective, block, found, grads)
    torch.testing.assert_close(by_logits, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_bias, right.sum(1), rtol=1e-11, atol=1e-11)


@every_objective
@pytest.mark.parametrize("size", [(3, 1), *SIZES[1:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_no_worse_than_the_definition(objective, size, dtype) -> None:
    rows, tokens = size
    block = a_block(rows, tokens, dtype)
    exact = plain_totals(objective, copied(block, torch.float64))
    plain, found = plain_totals(objective, copied(block, torch.float32)), compiled_totals(objective, block)
    for name, right in exact.items():
        allowed = 1.5 * (plain[name].double() - right).abs().max() + 4 * 2.0**-23 * right.abs().max()
        assert (found[name].double() - right).abs().max() <= allowed, name
    grads = some_grads(objective, exact)
    narrow = {name: grad.float() for name, grad in grads.items()}
    right = plain_gradient(objective, copied(block, torch.float64), exact, grads)
    slow = plain_gradient(objective, copied(block, torch.float32), plain, narrow)
    by_logits, by_bias = compiled_gradient(objective, block, found, narrow)
    assert by_logits.dtype == dtype
    rounding = torch.finfo(dtype).eps * right.abs() + 1e-37
    allowed = 1.5 * (slow.double() - right).abs().max() + 2.0**-22 * right.abs().max() + rounding
    assert ((by_logits.double() - right).abs() <= allowed).all()
    torch.testing.assert_close(by_bias.double(), right.sum(1), rtol=1e-4, atol=1e-4)


@every_objective
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_of_minus_infinity_count_as_in_the_definition(objective, dtype) -> None:
    block = a_block(300, 5, dtype, has_bias=False)
    assert block.teacher is not None
    block.student[3, 2:] = block.teacher[3, 2:] = -math.inf
    block.student[:280, 1] = block.teacher[:280, 1] = -math.inf  # a whole part of the rows
    wide = torch.promote_types(dtype, torch.float32)
    expected, found = plain_totals(objective, copied(block, wide)), compiled_totals(objective, block)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-5, atol=1e-5)
    grads = some_grads(objective, found)
    right = plain_gradient(objective, copied(block, wide), found, grads)
    by_logits, _ = compiled_gradient(objective, block, found, grads)
    torch.testing.assert_close(by_logits.to(wide), right, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@every_objective
def test_rows_of_minus_infinity_only_have_no_probability(objective) -> None:
    block = a_block(20, 3, torch.float64, has_bias=False)
    assert block.teacher is not None
    block.student[:] = block.teacher[:] = -math.inf
    kernel = objective.compiled_terms(block.ids, {})
    assert kernel is not None
    found = kernel(block)
    assert found is not None
    expected = stacked([objective.terms(copied(block, torch.float64), {})])
    torch.testing.assert_close(found, {name: expected[name] for name in found})


@every_objective
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_logit_that_is_not_a_number_reaches_the_totals_of_its_token_alone(objective, number) -> None:
    block = a_block(40, 4, torch.float32, has_bias=False)
    expected = compiled_totals(objective, block)
    block.student[11, 2] = number
    found = compiled_totals(objective, block)
    assert found["log_sum"][2].isnan()
    others = [0, 1, 3]
    torch.testing.assert_close(
        {name: x[..., others] for name, x in found.items()}, {name: x[..., others] for name, x in expected.items()}
    )


@every_objective
def test_blocks_of_rows_merge_to_the_totals_of_all(objective) -> None:
    block = a_block(600, 5, torch.float64, has_bias=False)
    assert block.teacher is not None

    def sweep(previous: Totals) -> Totals:
        kernel = objective.compiled_terms(block.ids, previous)
        assert kernel is not None
        parts = []
        for rows in (slice(0, 300), slice(300, 600)):
            assert block.teacher is not None
            part = kernel(
                block._replace(
                    student=block.student[rows],
                    teacher=block.teacher[rows],
                    start=block.start + rows.start,
                    is_last=rows.stop == 600,
                )
            )
            assert part is not None
            parts.append(part)
        return objective.merge(joined(parts))

    torch.testing.assert_close(objective.in_sweeps(sweep), compiled_totals(objective, block), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("k", [1, 4, 40])
def test_of_equal_logits_those_with_the_lowest_ids_are_the_largest(k) -> None:
    logits = torch.randint(-2, 3, (50, 130)).float()
    logits[3:, 5] = -math.inf
    logits[[7, 8, 30], 6] = math.nan
    objective = LogitStatistics(top_k=k)
    kernel = objective.compiled_terms(None, {})
    assert kernel is not None
    parts = []
    for start in (0, 20, 45):
        z = logits[start : start + (20 if start == 0 else 25 if start == 20 else 5)].contiguous()
        block = LogitBlock(z, None, None, start, may_be_infinite=True, work=Workspace(), is_last=start == 45)
        part = kernel(block)
        assert part is not None
        parts.append(part)
    found = objective.merge(joined(parts))
    values, ids = logits.sort(dim=0, descending=True, stable=True)
    torch.testing.assert_close(found["top_logits"], values[:k], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found["top_ids"], ids[:k])


@pytest.mark.parametrize("path", ["kernel", "torch operators"])
def test_a_sum_in_two_halves_is_the_float32_sum_rounded_once(path, monkeypatch) -> None:
    addends = [torch.randn(5, 37).bfloat16() for _ in range(6)]
    total, residual = addends[0].clone(), torch.zeros(5, 37, dtype=torch.uint16)
    if path != "kernel":
        monkeypatch.setattr("embedlayer.losses.compiled_blocks.ADD_BFLOAT16.run", lambda *_, **__: False)
    for number, addend in enumerate(addends[1:]):
        add_bfloat16_(total, residual, addend, last=number == 4)
    expected = addends[0].float()
    for addend in addends[1:]:
        expected = expected + addend.float()
    assert torch.equal(total, expected.bfloat16())
