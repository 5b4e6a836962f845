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
    compiled_gradient,
    compiled_totals,
    copied,
    plain_totals,
    some_grads,
)

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


@objective_and_backend
def test_logits_of_minus_infinity_count_as_in_the_definition(name, backend) -> None:
    backend, dtype = backend
    with running_on(backend):
        assert_infinite_logits_count_as_in_the_definition(OBJECTIVES[name], dtype)


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
