"""The number of tokens in a chunk, and the memory of a chunk on CUDA."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product

import pytest
import torch
from covering import cases, covering, some
from torch import Tensor

import embedlayer as el
from benchmarks.operator_counter import OperatorCounter
from embedlayer.kernels import kernels_disabled
from embedlayer.losses import (
    BlockLogits,
    ForwardKL,
    JensenShannon,
    LinearLogits,
    ReverseKL,
    divergence,
    token_statistics,
)
from embedlayer.losses.chunk_size import WORK_BYTES, tokens_per_chunk


def test_chunks_are_small_where_the_vocabulary_is_large_and_even() -> None:
    assert tokens_per_chunk(2048, 50257, 768, "cpu", 4) == 304
    assert tokens_per_chunk(2048, 512_000, 64, "cpu", 4) == 32
    assert tokens_per_chunk(513, 100, 64, "cpu", 4) == 272
    assert tokens_per_chunk(0, 100, 64, "cpu", 4) == 0
    assert tokens_per_chunk(10_000, 50257, 768, "cuda", 4) > tokens_per_chunk(10_000, 50257, 768, "mps", 4)


def test_on_cuda_all_tokens_are_one_chunk_up_to_twice_the_width_and_the_buffer() -> None:
    assert tokens_per_chunk(8192, 151_936, 4096, "cuda", 2) == 8192
    assert tokens_per_chunk(8193, 128_256, 4096, "cuda", 2) == 4112  # two even chunks
    assert tokens_per_chunk(16_384, 248_320, 2048, "cuda", 2) == 4096
    assert tokens_per_chunk(16_384, 32_000, 256, "cuda", 2) == 1024
    assert tokens_per_chunk(16_384, 262_144, 8192, "cuda", 2) == 8192  # 4 GiB of logits
    assert tokens_per_chunk(8192, 128_256, 4096, "cuda", 2, is_frozen=True) == 2048
    assert tokens_per_chunk(65_536, 4000, 16_384, "cuda", 2, is_gathered=True) == 8192
    assert tokens_per_chunk(8192, 128_256, 4096, "cuda", 4, work_bytes=4 * 128_256) == 1024


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("max_bytes", [1, 10_000, 2**20, 2**30])
def test_a_byte_budget_is_an_upper_bound_of_what_more_than_one_token_need(device, max_bytes) -> None:
    tokens = tokens_per_chunk(5000, 1000, 512, device, 2, max_bytes=max_bytes)
    assert tokens == 1 or tokens * 1000 * 2 <= max_bytes
    assert tokens_per_chunk(5000, 1000, 512, device, 2, max_bytes=2**40) >= tokens


def test_torch_is_not_needed() -> None:
    code = "import embedlayer.losses.chunk_size, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


V, D = 128_256, 4096
TOKENS = {True: 5000, False: 1100}
"""With kernels the logits of all tokens take more than 1 GiB, in 2 bytes too; without, in float32 with gradients."""
Output = Callable[..., Tensor]


def statistics(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor, **options) -> Tensor:
    wanted = ("log_probs", "entropy", "sum_squared_probs", "is_argmax")
    found = token_statistics(hidden, weight, targets, statistics=wanted, top_k=64, bias=bias, **options)
    assert found.log_probs is not None
    assert found.entropy is not None
    assert found.sum_squared_probs is not None
    return torch.stack([found.log_probs, found.entropy, found.sum_squared_probs, found.top_logits[..., 3]])


def of_teacher(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor, kind=None, **options) -> Tensor:
    student = LinearLogits(hidden, weight, bias=bias, softcap=30.0)
    return divergence(student, LinearLogits(hidden.detach(), weight.detach()), kind, labels=targets, **options)


def loss(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, **options) -> Tensor:
    return el.linear_cross_entropy(hidden, weight, targets, bias=bias, **options)


OUTPUTS: dict[str, Output] = {
    "loss": lambda *inputs, **options: loss(*inputs[:3], **options),
    "loss, bias, soft cap": lambda *inputs, **options: loss(*inputs, softcap=30.0, z_loss=1e-4, **options),
    "loss, label smoothing": lambda *inputs, **options: loss(*inputs, label_smoothing=0.1, **options),
    "loss, none": lambda *inputs, **options: loss(*inputs, reduction="none", **options),
    "statistics": statistics,
    **{
        f"{type(kind).__name__}, {reduction}": lambda *inputs, kind=kind, reduction=reduction, **options: of_teacher(
            *inputs, kind=kind, reduction=reduction, **options
        )
        for kind in (ForwardKL(), ReverseKL(), JensenShannon(0.3))
        for reduction in ("mean", "none")
    },
}


@cache
def peak_bytes(name: str, dtype: torch.dtype, *, kernels: bool, **options: object) -> int:
    """The most bytes at once in forward and backward, without the gradients of hidden states, which are float32 first.

    Rows need no gradient: the sums of it would hide the memory of a chunk.
    """
    tokens = TOKENS[kernels]
    shapes = {"hidden": (tokens, D), "weight": (V, D), "bias": (V,)}
    inputs = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    hidden, weight, bias = inputs["hidden"].requires_grad_(), inputs["weight"], inputs["bias"].requires_grad_()
    targets = torch.empty(tokens, dtype=torch.long, device="meta")
    with OperatorCounter() as count, nullcontext() if kernels else kernels_disabled():
        OUTPUTS[name](hidden, weight, targets, bias, **{"drop_ignored": True, **options}).sum().backward()
    return count.memory.peak - 4 * hidden.numel()


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OF_OTHER_LINES = ["loss, bias, soft cap", "loss, none", "statistics", "ReverseKL, mean", "JensenShannon, none"]
ALWAYS = covering(product(OF_OTHER_LINES, DTYPES, [True, False]))


@pytest.mark.parametrize(("name", "dtype", "kernels"), some(ALWAYS, product(OUTPUTS, DTYPES, [True, False])))
def test_blocks_and_work_space_stay_within_1_gib(name, dtype, kernels) -> None:
    assert peak_bytes(name, dtype, kernels=kernels) <= WORK_BYTES + 2**23


@pytest.mark.parametrize(("name", "dtype", "kernels"), some(ALWAYS, product(OUTPUTS, DTYPES, [True, False])))
def test_where_ignored_targets_are_not_dropped_hidden_states_are_copied_once_more(name, dtype, kernels) -> None:
    dropped = peak_bytes(name, dtype, kernels=kernels)
    computed = peak_bytes(name, dtype, kernels=kernels, drop_ignored=False)
    heads = 1 if name.startswith(("loss", "statistics")) else 2
    assert computed <= dropped + heads * TOKENS[kernels] * D * dtype.itemsize + 2**23


@pytest.mark.parametrize(
    ("name", "kernels"), some(covering(product(OF_OTHER_LINES, [True, False])), product(OUTPUTS, [True, False]))
)
def test_a_byte_budget_bounds_what_a_pass_allocates(name, kernels) -> None:
    assert peak_bytes(name, torch.bfloat16, kernels=kernels, chunk_bytes=2**29) <= 2**29 + 2**25


@cases("name, options", ["statistics", "of_teacher"], [{}, {"chunk_bytes": 2**29}])
def test_blocks_that_a_function_computes_stay_within_it_too(name, options) -> None:
    rows = 16_384
    hidden = torch.empty(4000, 64, device="meta").requires_grad_()
    targets = torch.empty(4000, dtype=torch.long, device="meta")
    weight, bias = torch.empty(rows, 64, device="meta"), torch.empty(rows, device="meta")
    with OperatorCounter() as count:
        student, teacher = (
            BlockLogits(each, lambda states, a, b: states @ weight[a:b].T, rows, 8192, softcap=30.0, bias=bias)
            for each in (hidden, hidden.detach())
        )
        if name == "statistics":
            found = token_statistics(student, targets, top_k=5, drop_ignored=True, **options)
            assert found.log_probs is not None
            assert found.entropy is not None
            result = found.entropy + found.log_probs + found.top_logits.sum(-1)
        else:
            result = divergence(student, teacher, JensenShannon(0.3), labels=targets, drop_ignored=True, **options)
        result.sum().backward()
    assert count.memory.peak <= options.get("chunk_bytes", WORK_BYTES) + 4 * 2 * hidden.numel() + 2**25


def test_one_chunk_of_bfloat16_logits_is_all_that_the_loss_needs_beside_its_gradients() -> None:
    tokens = 2 * D
    hidden, weight = (torch.empty(n, D, dtype=torch.bfloat16, device="meta").requires_grad_() for n in (tokens, V))
    targets = torch.empty(tokens, dtype=torch.long, device="meta")
    with OperatorCounter() as count:
        el.linear_cross_entropy(hidden, weight, targets, drop_ignored=True)
    assert count.memory.peak <= 2 * tokens * V + 2 * weight.numel() + 4 * hidden.numel() + 2**25
