"""Kernels over blocks of logits, compared with `terms` and `dlogits_` of each objective on finished logits.

Those of Triton run in its interpreter.
"""

import math

import pytest
import torch
from covering import cases, some
from logit_blocks import (
    OBJECTIVES,
    a_block,
    compiled_gradient,
    compiled_totals,
    copied,
    plain_gradient,
    plain_totals,
    running_on,
    some_grads,
)

from embedlayer.kernels.softmax import Finishing
from embedlayer.losses.compiled_blocks import add_bfloat16_
from embedlayer.losses.logit_statistics import LogitStatistics
from embedlayer.losses.objective import LogitBlock, Totals, Workspace, joined, stacked

pytestmark = pytest.mark.usefixtures("kernels")

SIZES: list[tuple[int, int]] = [(1, 1), (5, 3), (259, 17), (700, 300)]
NUMBA, TRITON = ("numba", torch.float32), ("triton", torch.float32)
BACKENDS = [NUMBA, ("numba", torch.bfloat16), TRITON, ("triton", torch.bfloat16), ("triton", torch.float16)]
objective_and_backend = cases("name, backend", OBJECTIVES, BACKENDS, pairs=[])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_float64_equals_the_definition(name, size, has_bias) -> None:
    objective, (rows, tokens) = OBJECTIVES[name], size
    block = a_block(rows, tokens, torch.float64, has_bias=has_bias)
    expected, found = plain_totals(objective, copied(block, torch.float64)), compiled_totals(objective, block)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-12, atol=1e-12)
    assert found.keys() == expected.keys()
    grads = some_grads(objective, found)
    right = plain_gradient(objective, copied(block, torch.float64), found, grads)
    by_logits, by_bias = compiled_gradient(objective, block, found, grads)
    torch.testing.assert_close(by_logits, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_bias, right.sum(1), rtol=1e-11, atol=1e-11)


def assert_no_worse_than_the_definition(objective, block) -> None:
    """Kernels may miss the float64 answer by what the definition in float32 misses it by, and by rounding."""
    dtype = block.student.dtype
    exact = plain_totals(objective, copied(block, torch.float64))
    plain, found = plain_totals(objective, copied(block, torch.float32)), compiled_totals(objective, block)
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        allowed = 1.5 * (plain[name].double() - right).abs().max() + 4 * 2.0**-23 * right.abs().max()
        assert (found[name].double() - right).abs().max() <= allowed, name
    grads = some_grads(objective, exact)
    narrow = {name: grad.float() for name, grad in grads.items()}
    right = plain_gradient(objective, copied(block, torch.float64), exact, grads)
    slow = plain_gradient(objective, copied(block, torch.float32), plain, narrow)
    by_logits, by_bias = compiled_gradient(objective, block, found, narrow)
    assert by_logits.dtype == dtype
    numbers = torch.finfo(dtype)
    rounding = numbers.eps * right.abs() + max(1e-37, numbers.smallest_normal * numbers.eps)
    allowed = 1.5 * (slow.double() - right).abs().max() + 2.0**-22 * right.abs().max() + rounding
    assert ((by_logits.double() - right).abs() <= allowed).all()
    torch.testing.assert_close(by_bias.double(), right.sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("size", [(3, 1), *SIZES[1:]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_no_worse_than_the_definition(name, size, dtype) -> None:
    assert_no_worse_than_the_definition(OBJECTIVES[name], a_block(*size, dtype))


@cases(
    "name, size, dtype, requests",
    OBJECTIVES,
    [(3, 1), (259, 17), (20, 264), (300, 24)],
    [torch.float32, torch.bfloat16, torch.float16],
    [1, 2],
)
def test_neither_are_the_kernels_of_triton(name, size, dtype, requests) -> None:
    with running_on("triton"):
        assert_no_worse_than_the_definition(OBJECTIVES[name], a_block(*size, dtype, requests=requests))


@cases("softcap, scale, masked, dtype", [None, 4.0], [1.0, 0.25], [None, -1, 11], [torch.float32, torch.bfloat16])
def test_kernels_of_triton_finish_stored_logits(softcap, scale, masked, dtype) -> None:
    objective = LogitStatistics(sum=masked is None or masked < 0, mean=True, squares=True, top_k=3)
    stored = a_block(40, 24, dtype)
    bound = None if softcap is None else 0.5 * softcap
    block = stored._replace(unfinished=Finishing(scale, softcap, bound, masked))
    raw = stored.student.double().requires_grad_()
    bias = stored.biases[0].double().requires_grad_()
    logits = raw * scale + bias.unsqueeze(1)
    if softcap is not None:
        logits = bound * (logits / softcap).tanh()
    if masked is not None and masked >= 0:
        logits = logits.masked_fill((torch.arange(40) == masked).unsqueeze(1), -math.inf)
        block.ids[block.ids == masked + block.start] = 7
    exact = plain_totals(objective, stored._replace(student=logits, ids=block.ids, biases=(None, None)))
    grads = {name: torch.randn_like(x) for name, x in exact.items() if name not in objective.constants}
    right = torch.autograd.grad(sum((grads[name] * exact[name]).sum() for name in grads), (raw, bias))
    with running_on("triton"):
        found = compiled_totals(objective, block)
        of_block = compiled_gradient(objective, block, found, {name: grad.float() for name, grad in grads.items()})
    found, exact = ({name: x.double() for name, x in totals.items()} for totals in (found, exact))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    error = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for ours, exact_grad in zip(of_block, right, strict=True):
        torch.testing.assert_close(ours.double(), exact_grad, rtol=error, atol=error)


@objective_and_backend
def test_logits_of_minus_infinity_count_as_in_the_definition(name, backend) -> None:
    objective, (backend, dtype) = OBJECTIVES[name], backend
    block = a_block(300, 5, dtype, has_bias=False)
    assert block.teacher is not None
    block.student[3, 2:] = block.teacher[3, 2:] = -math.inf
    block.student[:280, 1] = block.teacher[:280, 1] = -math.inf  # a whole part of the rows
    wide = torch.promote_types(dtype, torch.float32)
    expected = plain_totals(objective, copied(block, wide))
    finished = copied(block, wide)
    with running_on(backend):
        found = compiled_totals(objective, block)
        grads = some_grads(objective, found)
        by_logits, _ = compiled_gradient(objective, block, found, grads)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-5, atol=1e-5)
    right = plain_gradient(objective, finished, found, grads)
    torch.testing.assert_close(by_logits.to(wide), right, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-5)


@cases("name, backend", OBJECTIVES, [NUMBA, TRITON])
def test_rows_of_minus_infinity_only_have_no_probability(name, backend) -> None:
    objective, (backend, dtype) = OBJECTIVES[name], backend
    block = a_block(20, 3, dtype, has_bias=False)
    assert block.teacher is not None
    block.student[:] = block.teacher[:] = -math.inf
    with running_on(backend):
        kernel = objective.compiled_terms(block.ids, {})
        assert kernel is not None
        found = kernel(block)
    assert found is not None
    expected = stacked([objective.terms(copied(block, dtype), {})])
    torch.testing.assert_close(found, {name: expected[name] for name in found})


@cases("name, number, backend", OBJECTIVES, [math.nan, math.inf], [NUMBA, TRITON])
def test_a_logit_that_is_not_a_number_reaches_the_totals_of_its_token_alone(name, number, backend) -> None:
    objective, (backend, dtype) = OBJECTIVES[name], backend
    block = a_block(40, 4, dtype, has_bias=False)
    with running_on(backend):
        expected = compiled_totals(objective, block)
        block.student[11, 2] = number
        found = compiled_totals(objective, block)
    assert found["log_sum"][2].isnan()
    others = [0, 1, 3]
    torch.testing.assert_close(
        {name: x[..., others] for name, x in found.items()}, {name: x[..., others] for name, x in expected.items()}
    )


@cases("name, backend", OBJECTIVES, [("numba", torch.float64), TRITON])
def test_blocks_of_rows_merge_to_the_totals_of_all(name, backend) -> None:
    objective, (backend, dtype) = OBJECTIVES[name], backend
    block = a_block(600, 5, dtype, has_bias=False)
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

    with running_on(backend):
        found, expected = objective.in_sweeps(sweep), compiled_totals(objective, block)
    error = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=error, atol=error)


@pytest.mark.parametrize(
    "k, backend",
    some(
        [(1, "numba"), (4, "numba"), (40, "numba"), (4, "triton")],
        [(k, backend) for k in (1, 4, 40) for backend in ("numba", "triton")],
    ),
)
def test_of_equal_logits_those_with_the_lowest_ids_are_the_largest(k, backend) -> None:
    logits = torch.randint(-2, 3, (50, 130)).float()
    logits[3:, 5] = -math.inf
    logits[[7, 8, 30], 6] = math.nan
    logits[:, 7] = torch.tensor([0.0, -0.0]).repeat(25)
    objective = LogitStatistics(top_k=k)
    with running_on(backend):
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


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_tokens_have_no_totals(name) -> None:
    objective, block = OBJECTIVES[name], a_block(40, 0, torch.float32)
    expected = plain_totals(objective, copied(block, torch.float32))
    with running_on("triton"):
        found = compiled_totals(objective, block)
        by_logits, by_bias = compiled_gradient(objective, block, found, some_grads(objective, found))
    torch.testing.assert_close(found, {name: expected[name] for name in found})
    assert by_logits.shape == (40, 0)
    assert not by_bias.any()


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
