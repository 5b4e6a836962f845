"""Matrix products of narrow dtypes: with and without a CPU's instructions the same but for rounding, none overflows."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from covering import some
from torch import Tensor

import embedlayer as el
from embedlayer.losses import products

NARROW = (torch.bfloat16, torch.float16)
DTYPES = (*NARROW, torch.float32, torch.float64)


@pytest.fixture(params=[True, False], ids=["instructions", "no instructions"])
def has_instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_of_a_product(dtype: torch.dtype, has_instructions: bool) -> None:
    is_slow = dtype == torch.bfloat16 and not has_instructions
    expected = torch.float32 if is_slow or dtype == torch.float16 else dtype
    assert products.product_dtype(dtype, "cpu") == expected
    assert products.product_dtype(dtype, "cuda") == (torch.float32 if dtype == torch.float16 else dtype)
    assert products.matrix_product(torch.ones(2, 3, dtype=dtype), torch.ones(3, 4, dtype=dtype)).dtype == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_written_products(dtype: torch.dtype, out_dtype: torch.dtype, has_instructions: bool) -> None:
    a, b = torch.randn(5, 7).to(dtype), torch.randn(6, 7).to(dtype).T
    out, earlier = torch.full((5, 6), torch.nan, dtype=out_dtype), torch.randn(5, 6).to(out_dtype)
    exact = a.double() @ b.double()
    tolerance = 4 * max(torch.finfo(dtype).eps, torch.finfo(out_dtype).eps)
    products.write_product(out, a, b)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    total = earlier.clone()
    products.write_product(total, a, b, add=True)
    torch.testing.assert_close(total.double(), earlier.double() + exact, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize(
    ("dtype", "tokens"), some([(torch.bfloat16, 600), (torch.float16, 40)], product(NARROW, [40, 600]))
)
def test_loss_is_no_less_exact_than_plain(dtype: torch.dtype, tokens: int, has_instructions: bool) -> None:
    torch.manual_seed(0)
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
    ours = results(lambda x, w: el.linear_cross_entropy(x, w, targets, impl="chunked"), dtype)
    for own, theirs, right in zip(ours, results(plain, dtype), exact, strict=True):
        assert (own - right).norm() <= 1.5 * (theirs - right).norm() + 1e-6


def test_what_torch_does_not_say_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert products._cpu_multiplies_bfloat16.__wrapped__()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64], ids=str)
def test_a_product_of_float16_may_exceed_its_range(out_dtype: torch.dtype, has_instructions: bool) -> None:
    a, b = torch.full((2, 4), 300.0).half(), torch.full((4, 3), 300.0).half()
    out = torch.empty(2, 3, dtype=out_dtype)
    products.write_product(out, a, b)
    assert out.eq(360_000).all()
