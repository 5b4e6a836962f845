"""Blocks of logits for tests of kernels, with what each objective computes of them: by kernels, and by definition."""

import math

import torch
from interpreted import interpreted
from torch import Tensor

from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.losses.divergences import ForwardKL, JensenShannon, ReverseKL
from embedlayer.losses.objective import LogitBlock, Objective, Totals, Workspace, joined, stacked
from embedlayer.losses.statistics import LogitStatistics

OBJECTIVES: dict[str, Objective] = {
    "statistics": LogitStatistics(),
    "all statistics": LogitStatistics(sum=True, mean=True, squares=True),
    "largest logits": LogitStatistics(top_k=3),
    "forward KL": ForwardKL(),
    "reverse KL": ReverseKL(),
    "Jensen-Shannon": JensenShannon(0.3),
}


def a_block(rows: int, tokens: int, dtype: torch.dtype, *, has_bias: bool = True, requests: int = 2) -> LogitBlock:
    """Return a block of random logits with a few requested IDs for each token, of which some are other rows."""
    start = 7
    ids = torch.randint(start - 2, start + rows + 2, (requests, tokens))
    ids[-1, ::2] = ids[0, ::2]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    student, teacher = (torch.randn(rows, tokens, dtype=torch.float64).mul_(5).to(dtype) for _ in range(2))
    biases = (torch.randn(rows, dtype=wide), torch.randn(rows, dtype=wide)) if has_bias else (None, None)
    return LogitBlock(student, teacher, ids, start, may_be_infinite=True, work=Workspace(), biases=biases)


def copied(block: LogitBlock, dtype: torch.dtype) -> LogitBlock:
    """Return a copy of the block with finished logits."""
    finished = block.with_bias(torch.promote_types(block.student.dtype, torch.float32))
    teacher = None if finished.teacher is None else finished.teacher.to(dtype, copy=True)
    return finished._replace(student=finished.student.to(dtype, copy=True), teacher=teacher)


def compiled_totals(objective: Objective, block: LogitBlock) -> Totals:
    """Return the totals of a block by kernels."""

    def sweep(previous: Totals) -> Totals:
        kernel = objective.compiled_terms(block.ids, previous)
        assert kernel is not None
        found = kernel(block)
        assert found is not None
        return objective.merge(found)

    return objective.in_sweeps(sweep)


def plain_totals(objective: Objective, block: LogitBlock) -> Totals:
    """Return the totals of a finished block by torch operators."""
    return objective.in_sweeps(lambda previous: objective.merge(stacked([objective.terms(block, previous)])))


def some_grads(objective: Objective, totals: Totals) -> Totals:
    """Return a gradient of each total that has one."""
    return {name: torch.randn_like(x) for name, x in totals.items() if name not in objective.constants}


def plain_gradient(objective: Objective, block: LogitBlock, totals: Totals, grads: Totals) -> Tensor:
    """Return the gradient by the logits of a finished block, by torch operators."""
    objective.dlogits_(block, totals, grads)
    return block.student


def compiled_gradient(objective: Objective, block: LogitBlock, totals: Totals, grads: Totals) -> tuple[Tensor, Tensor]:
    """Return the gradients by the logits and by the bias, by kernels."""
    bias_grad = torch.zeros(len(block.student), dtype=totals["top"].dtype)
    kernel = objective.compiled_dlogits(block.ids, totals, grads)
    assert kernel is not None
    assert kernel(block, bias_grad, True)
    return block.student, bias_grad


def assert_no_worse_than_the_definition(objective: Objective, block: LogitBlock) -> None:
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


BLOCKS_MOVED = {
    "statistics": 3,
    "all statistics": 3,
    "largest logits": 3,
    "forward KL": 5,
    "reverse KL": 5,
    "Jensen-Shannon": 7,
}
"""How many blocks of logits are read and written at least: each head once in a sweep and for the gradient, which is
written over the student's."""


def assert_little_more_than_the_logits_is_moved(name: str) -> None:
    """Triton kernels read and write at most 1.3 times of what the logits alone take, and what the launch tables say."""
    is_largest = name == "largest logits"
    objective = LogitStatistics(top_k=1) if is_largest else OBJECTIVES[name]
    block = a_block(2048 if is_largest else 512, 64, torch.bfloat16, has_bias=False, requests=1)  # as 64 of 131,072
    stated: list[int] = []
    with interpreted() as run, launches_observed(lambda each: stated.append(each.bytes)):
        totals = compiled_totals(objective, block)
        kernel = objective.compiled_dlogits(block.ids, totals, some_grads(objective, totals))
        assert kernel is not None
        assert kernel(block, None, True)
    moved = sum(each.read.total() + each.written.total() for each in run.launches)
    assert moved <= 1.3 * BLOCKS_MOVED[name] * block.student.nbytes
    assert 0.9 * sum(stated) <= moved <= 1.1 * sum(stated)


def assert_infinite_logits_count_as_in_the_definition(objective: Objective, dtype: torch.dtype) -> None:
    """Logits of -inf have no probability: a few, and those of a whole part of the rows."""
    block = a_block(300, 5, dtype, has_bias=False)
    assert block.teacher is not None
    block.student[3, 2:] = block.teacher[3, 2:] = -math.inf
    block.student[:280, 1] = block.teacher[:280, 1] = -math.inf  # a whole part of the rows
    wide = torch.promote_types(dtype, torch.float32)
    expected = plain_totals(objective, copied(block, wide))
    finished = copied(block, wide)
    found = compiled_totals(objective, block)
    grads = some_grads(objective, found)
    by_logits, _ = compiled_gradient(objective, block, found, grads)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-5, atol=1e-5)
    right = plain_gradient(objective, finished, found, grads)
    torch.testing.assert_close(by_logits.to(wide), right, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-5)


def assert_largest_logits_are_in_order(k: int) -> None:
    """Of equal logits in several blocks, those with the lowest IDs are the largest, and NaN is larger than all."""
    logits = torch.randint(-2, 3, (50, 130)).float()
    logits[3:, 5] = -math.inf
    logits[[7, 8, 30], 6] = math.nan
    logits[:, 7] = torch.tensor([0.0, -0.0]).repeat(25)
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
