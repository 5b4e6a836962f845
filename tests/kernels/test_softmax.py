"""Kernels over blocks of logits, compared with `terms` and `dlogits_` of each objective on finished logits.

Those of Triton run in its interpreter, and on a GPU where there is one.
"""

import math

import pytest
import torch
from covering import cases
from kernel_paths import GPU_BACKENDS, running_on
from logit_blocks import (
    OBJECTIVES,
    a_block,
    assert_infinite_logits_count_as_in_the_definition,
    assert_largest_logits_are_in_order,
    assert_no_worse_than_the_definition,
    assert_stored_logits_are_finished,
    compiled_gradient,
    compiled_totals,
    copied,
    plain_gradient,
    plain_totals,
    some_grads,
)

from embedlayer.losses.compiled_blocks import add_bfloat16_
from embedlayer.losses.objective import Totals, joined, stacked

SIZES: list[tuple[int, int]] = [(1, 1), (5, 3), (259, 17), (700, 300)]


def on_cuda(*values):
    return pytest.param(("cuda", *values), marks=pytest.mark.gpu)


NUMBA, TRITON, CUDA = ("numba", torch.float32), ("triton", torch.float32), on_cuda(torch.float32)
BACKENDS = [
    *[NUMBA, ("numba", torch.bfloat16)],
    *[TRITON, ("triton", torch.bfloat16), ("triton", torch.float16)],
    *[CUDA, on_cuda(torch.bfloat16), on_cuda(torch.float16)],
]
objective_and_backend = cases("name, backend", OBJECTIVES, BACKENDS, pairs=[])


@cases("name, size, has_bias", OBJECTIVES, SIZES, [False, True], pairs=["name, has_bias"])
def test_float64_equals_the_definition(name, size, has_bias) -> None:
    objective, (rows, tokens) = OBJECTIVES[name], size
    block = a_block(rows, tokens, torch.float64, has_bias=has_bias)
    with running_on("numba"):
        expected, found = plain_totals(objective, copied(block, torch.float64)), compiled_totals(objective, block)
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-12, atol=1e-12)
        assert found.keys() == expected.keys()
        grads = some_grads(objective, found)
        right = plain_gradient(objective, copied(block, torch.float64), found, grads)
        by_logits, by_bias = compiled_gradient(objective, block, found, grads)
    torch.testing.assert_close(by_logits, right, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(by_bias, right.sum(1), rtol=1e-11, atol=1e-11)


@cases("name, size, dtype", OBJECTIVES, [(3, 1), *SIZES[1:]], [torch.float32, torch.bfloat16], pairs=["name, dtype"])
def test_lower_precision_is_no_worse_than_the_definition(name, size, dtype) -> None:
    with running_on("numba"):
        assert_no_worse_than_the_definition(OBJECTIVES[name], a_block(*size, dtype))


@cases(
    "name, backend, size, dtype, requests",
    OBJECTIVES,
    GPU_BACKENDS,
    [(3, 1), (259, 17), (20, 264), (300, 24)],
    [torch.float32, torch.bfloat16, torch.float16],
    [1, 2],
)
def test_neither_are_the_kernels_of_triton(name, backend, size, dtype, requests) -> None:
    with running_on(backend):
        assert_no_worse_than_the_definition(OBJECTIVES[name], a_block(*size, dtype, requests=requests))


@cases(
    "backend, softcap, scale, masked, dtype",
    GPU_BACKENDS,
    [None, 4.0],
    [1.0, 0.25],
    [None, -1, 11],
    [torch.float32, torch.bfloat16],
)
def test_kernels_of_triton_finish_stored_logits(backend, softcap, scale, masked, dtype) -> None:
    with running_on(backend):
        assert_stored_logits_are_finished(softcap, scale, masked, dtype)


@objective_and_backend
def test_logits_of_minus_infinity_count_as_in_the_definition(name, backend) -> None:
    backend, dtype = backend
    with running_on(backend):
        assert_infinite_logits_count_as_in_the_definition(OBJECTIVES[name], dtype)


@cases("name, backend", OBJECTIVES, [NUMBA, TRITON, CUDA])
def test_rows_of_minus_infinity_only_have_no_probability(name, backend) -> None:
    objective, (backend, dtype) = OBJECTIVES[name], backend
    with running_on(backend):
        block = a_block(20, 3, dtype, has_bias=False)
        assert block.teacher is not None
        block.student[:] = block.teacher[:] = -math.inf
        kernel = objective.compiled_terms(block.ids, {})
        assert kernel is not None
        found = kernel(block)
        assert found is not None
        expected = stacked([objective.terms(copied(block, dtype), {})])
        for totals in (found, expected):  # of no probability logsumexp is -inf, whichever of its parts is
            totals.update(
                {name: x + totals[name.replace("log_sum", "top")] for name, x in totals.items() if "log_sum" in name}
            )
        torch.testing.assert_close(found, {name: expected[name] for name in found})


@cases("name, number, backend", OBJECTIVES, [math.nan, math.inf], [NUMBA, TRITON, CUDA])
def test_a_logit_that_is_not_a_number_reaches_the_totals_of_its_token_alone(name, number, backend) -> None:
    objective, (backend, dtype) = OBJECTIVES[name], backend
    with running_on(backend):
        block = a_block(40, 4, dtype, has_bias=False)
        expected = compiled_totals(objective, block)
        block.student[11, 2] = number
        found = compiled_totals(objective, block)
    assert found["log_sum"][2].isnan()
    others = [0, 1, 3]
    torch.testing.assert_close(
        {name: x[..., others] for name, x in found.items()}, {name: x[..., others] for name, x in expected.items()}
    )


@cases("name, backend", OBJECTIVES, [("numba", torch.float64), TRITON, CUDA])
def test_blocks_of_rows_merge_to_the_totals_of_all(name, backend) -> None:
    objective, (backend, dtype) = OBJECTIVES[name], backend
    rows = 44 if backend == "triton" else 600

    def sweep(previous: Totals) -> Totals:
        kernel = objective.compiled_terms(block.ids, previous)
        assert kernel is not None
        parts = []
        for here in (slice(0, rows // 2), slice(rows // 2, rows)):
            assert block.teacher is not None
            part = kernel(
                block._replace(
                    student=block.student[here],
                    teacher=block.teacher[here],
                    start=block.start + here.start,
                    is_last=here.stop == rows,
                )
            )
            assert part is not None
            parts.append(part)
        return objective.merge(joined(parts))

    error = 1e-12 if dtype == torch.float64 else 1e-5
    with running_on(backend):
        block = a_block(rows, 5, dtype, has_bias=False)
        found, expected = objective.in_sweeps(sweep), compiled_totals(objective, block)
    torch.testing.assert_close(found, expected, rtol=error, atol=error)


@cases("k, backend", [4, 1, 40], ["numba", *GPU_BACKENDS])
def test_of_equal_logits_those_with_the_lowest_ids_are_the_largest(k, backend) -> None:
    with running_on(backend):
        assert_largest_logits_are_in_order(k)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_tokens_have_no_totals(name, backend) -> None:
    objective = OBJECTIVES[name]
    with running_on(backend):
        block = a_block(40, 0, torch.float32)
        expected = plain_totals(objective, copied(block, torch.float32))
        found = compiled_totals(objective, block)
        by_logits, by_bias = compiled_gradient(objective, block, found, some_grads(objective, found))
        torch.testing.assert_close(found, {name: expected[name] for name in found})
        assert by_logits.shape == (40, 0)
        assert not by_bias.any()


@pytest.mark.usefixtures("kernels")
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
