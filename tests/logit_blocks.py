"""Blocks of logits for tests of kernels, with what each objective computes of them: by kernels, and by definition."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from interpreted import interpreted
from torch import Tensor

from embedlayer.losses.divergence_kinds import ForwardKL, JensenShannon, ReverseKL
from embedlayer.losses.logit_statistics import LogitStatistics
from embedlayer.losses.objective import LogitBlock, Objective, Totals, Workspace, stacked

OBJECTIVES: dict[str, Objective] = {
    "statistics": LogitStatistics(),
    "all statistics": LogitStatistics(sum=True, mean=True, squares=True),
    "largest logits": LogitStatistics(top_k=3),
    "forward KL": ForwardKL(),
    "reverse KL": ReverseKL(),
    "Jensen-Shannon": JensenShannon(0.3),
}


@contextmanager
def running_on(backend: str) -> Iterator[None]:
    """Run kernels by numba, or Triton's in its interpreter; skip without numba or Triton."""
    pytest.importorskip(backend)
    if backend == "triton":
        with interpreted():
            yield
    else:
        yield


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
    finished = block.finished(torch.promote_types(block.student.dtype, torch.float32))
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
    assert kernel(block, bias_grad)
    return block.student, bias_grad
