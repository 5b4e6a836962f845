"""In lower precision no path is less exact than plain PyTorch, and nothing overflows or vanishes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparison import assert_no_worse
from covering import cases, some
from kernel_paths import bfloat16_instructions, cpu_taken_for_cuda, running_on, without_numba
from small_blocks import small_blocks
from torch import Tensor

from embedlayer import linear_cross_entropy
from embedlayer.losses import ForwardKL, JensenShannon, LinearLogits, ReverseKL, divergence, token_statistics

TARGETS = torch.arange(18).view(2, 9).mul(16).masked_fill(torch.arange(9) == 3, -100)
STATISTICS = ("log_probs", "entropy", "logsumexp", "sum_squared_probs", "mean_logits")
ALL = {"softcap": 5.0, "logit_scale": 1.5, "label_smoothing": 0.2, "z_loss": 0.05, "padding_idx": 0, "vocab_size": 290}
MASKED = {"softcap": 4.0, "logit_scale": 0.5, "padding_idx": 1, "mask_padding": True}
Work = Callable[..., tuple[Tensor, ...]]


def loss(**options: Any) -> Work:
    def compute(h: Tensor, w: Tensor, b: Tensor, **of_path: Any) -> tuple[Tensor, ...]:
        bias = b[: options.get("vocab_size")]
        return (linear_cross_entropy(h, w, TARGETS, bias=bias, **options, **of_path),)

    return compute


def statistics(**options: Any) -> Work:
    def compute(h: Tensor, w: Tensor, b: Tensor, **of_path: Any) -> tuple[Tensor, ...]:
        wanted = STATISTICS if "mask_padding" not in options else STATISTICS[:4]
        found = token_statistics(h, w, TARGETS, statistics=wanted, top_k=5, bias=b, **options, **of_path)
        return tuple(x for x in found if isinstance(x, Tensor) and x.is_floating_point())

    return compute


def of_teacher(kind: Any, **options: Any) -> Work:
    def compute(h: Tensor, w: Tensor, b: Tensor, impl: str, **of_path: Any) -> tuple[Tensor, ...]:
        teacher = LinearLogits(h.detach().roll(1, -1), w.detach().roll(3, 0), bias=b.detach(), **options)
        student = LinearLogits(h, w, bias=b, impl=impl, **options)
        return (divergence(student, teacher, kind, labels=TARGETS, reduction="none", **of_path),)

    return compute


WORK: dict[str, Work] = {
    "loss": loss(),
    "loss, all": loss(**ALL, reduction="none"),
    "loss, masked padding": loss(padding_idx=4, mask_padding=True, reduction="none"),
    "statistics": statistics(),
    "statistics, options": statistics(**MASKED),
    "forward KL": of_teacher(ForwardKL()),
    "reverse KL": of_teacher(ReverseKL(), softcap=4.0, temperature=2.0),
    "Jensen-Shannon": of_teacher(JensenShannon(0.3), softcap=4.0, temperature=2.0),
}
PATHS = ("kernels", "torch operators", "CUDA", "Triton")


@contextmanager
def computed_by(path: str) -> Iterator[Any]:
    """Compute on a path, on the CPU in several blocks of rows and chunks of few tokens."""
    ways: dict[str, Callable[[], Any]] = {
        "kernels": lambda: running_on("numba"),
        "torch operators": without_numba,
        "CUDA": cpu_taken_for_cuda,
        "Triton": lambda: cpu_taken_for_cuda(triton=True),
    }
    if path == "Triton":
        pytest.importorskip("triton")
    with small_blocks(tokens=5, rows=64), ways[path]() as run:
        yield run


@cases(
    "name, path, dtype",
    WORK,
    PATHS,
    [torch.float32, torch.bfloat16, torch.float16],
    pairs=["name, path, dtype"],
)
def test_no_path_is_less_exact_than_plain(name, path, dtype) -> None:
    parts = [torch.randn(2, 9, 16).to(dtype), torch.randn(300, 16).to(dtype), torch.randn(300).to(dtype)]

    def run(dtype: torch.dtype, **options: Any) -> list[Tensor]:
        leaves = [part.to(dtype).requires_grad_() for part in parts]
        results = WORK[name](*leaves, **options)
        factors = [torch.linspace(0.5, 1.5, each.numel()).view(each.shape) for each in results]
        total = sum((each * factor).sum() for each, factor in zip(results, factors, strict=True))
        return [*results, *torch.autograd.grad(total, leaves)]

    exact, plain = run(torch.float64, impl="plain"), run(dtype, impl="plain")
    # on CUDA two chunks, of which the second has fewer tokens; of float16, room for its float32 products and a copy
    budget = {"chunk_bytes": 16 * 300 * {4: 4, 2: 6}[dtype.itemsize]} if path == "Triton" else {}
    with computed_by(path) as kernels:
        fast = run(dtype, impl="chunked", **budget)
    assert path != "Triton" or kernels.launches
    assert fast[0].dtype == torch.float32
    slack = 2 if name.startswith("loss") else 4
    for ours, slow, right in zip(fast, plain, exact, strict=True):
        assert ours.dtype == slow.dtype
        assert_no_worse(ours, slow, right, slack=slack * torch.finfo(dtype).eps * right.abs().max().item())


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    some([(torch.bfloat16, 600), (torch.float16, 40)], product((torch.bfloat16, torch.float16), [40, 600])),
)
def test_a_loss_of_many_rows_is_no_less_exact_with_or_without_instructions(dtype, tokens, has_instructions) -> None:
    hidden, weight = torch.randn(tokens, 32).to(dtype), torch.randn(3000, 32).to(dtype)
    targets = torch.randint(0, 3000, (tokens,))

    def results(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        x, w = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
        value = loss(x, w)
        return [each.detach().double() for each in (value, *torch.autograd.grad(value, (x, w)))]

    def plain(x: Tensor, w: Tensor) -> Tensor:
        logits = x @ w.T
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets)

    exact = results(plain, torch.float64)
    with bfloat16_instructions(has_instructions):
        ours = results(lambda x, w: linear_cross_entropy(x, w, targets, impl="chunked"), dtype)
    for own, theirs, right in zip(ours, results(plain, dtype), exact, strict=True):
        assert (own - right).norm() <= 1.5 * (theirs - right).norm() + 1e-6


@pytest.mark.parametrize("path", PATHS[:3])
def test_a_small_gradient_in_float16_survives_until_a_grad_scaler_has_raised_it(path) -> None:
    leaves = [torch.randn(512, 8).half().requires_grad_(), torch.randn(40, 8).half().requires_grad_()]
    targets = torch.randint(0, 40, (512,))
    with computed_by(path), small_blocks(tokens=64):
        loss = linear_cross_entropy(*leaves, targets, impl="chunked") * 2.0**14
        found = torch.autograd.grad(loss, leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = torch.autograd.grad(linear_cross_entropy(*exact, targets, impl="plain") * 2.0**14, exact)
    torch.testing.assert_close(found[0].double(), right[0], rtol=1e-2, atol=0.1)
    torch.testing.assert_close(found[1].double(), right[1], rtol=1e-2, atol=1.0)


@pytest.mark.usefixtures("both_paths")
def test_large_logits_neither_overflow_nor_lose_the_loss() -> None:
    hidden, weight, targets = torch.randn(6, 8), torch.randn(40, 8), torch.randint(0, 40, (6,))
    exact = linear_cross_entropy(hidden.double(), weight.double(), targets, logit_scale=1e4, impl="plain")
    plain, ours = (
        linear_cross_entropy(hidden, weight, targets, logit_scale=1e4, impl=impl) for impl in ("plain", "chunked")
    )
    assert_no_worse(ours, plain, exact, slack=1e-6 * exact.item())


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("name", ["loss", "statistics"])
def test_under_autocast_it_behaves_as_plain_does(name) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for shape in ((2, 9, 16), (300, 16), (300,))]
    results = []
    for impl in ("plain", "chunked"):
        with torch.autocast("cpu", torch.bfloat16), small_blocks(tokens=5, rows=64):
            found = WORK[name](*leaves, impl=impl)
        results.append([*found, *torch.autograd.grad(sum(x.mean() for x in found), leaves)])
    for ours, plain in zip(*reversed(results), strict=True):
        assert ours.dtype == plain.dtype == torch.float32
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=5e-2)


@cases("impl, compiled", ["plain", "chunked"], [False, True])
def test_under_autocast_weights_of_tokens_count_in_float32(unchecked: None, impl, compiled) -> None:
    hidden, weight = torch.randn(2, 6, 6, requires_grad=True), torch.randn(40, 6, requires_grad=True)
    targets, weights = torch.randint(0, 40, (2, 6)), torch.randn(2, 6)
    targets[0, 1], weights[0, 1] = -100, torch.nan

    def call(token_weights: Tensor | None) -> Tensor:
        reduction = "none" if token_weights is None else "mean"
        options = {"token_weights": token_weights, "reduction": reduction, "impl": impl}
        return linear_cross_entropy(hidden, weight, targets, **options)

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with torch.autocast("cpu", torch.bfloat16):
        found, losses = run(weights.half()), call(None)
    expected = (losses * weights.half().nan_to_num(0.0)).sum() / 11
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(each, [hidden, weight]) for each in (found, expected)]
    torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-3)
