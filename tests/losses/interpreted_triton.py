"""The Triton kernels against the plain definition in float64, through Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported, so `test_triton_kernels.py` runs this file in a process of its
own; its name keeps it from being collected otherwise.
"""

import pytest
import torch
from comparison import assert_no_worse
from covering import cases

from embedlayer import TokenIdError, linear_cross_entropy, token_log_probs


def results(hidden, weight, targets, impl, bias=None, **options):
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, impl=impl, **options)
    grad_output = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return loss, *torch.autograd.grad(loss, leaves, grad_output)


DTYPES = (torch.float32, torch.float16)  # the interpreter multiplies bfloat16 as integers
OPTIONS = [
    {},
    {"reduction": "none", "logit_scale": 0.5, "padding_idx": 3},
    {"bias": True, "softcap": 2.0, "reduction": "sum", "padding_idx": 3, "mask_padding": True, "vocab_size": 130},
]


@cases("options, dtype", OPTIONS, DTYPES)
def test_it_is_no_worse_than_plain(options, dtype) -> None:
    hidden, weight = torch.randn(7, 11, 70, dtype=dtype), torch.randn(150, 70, dtype=dtype)
    targets = torch.randint(4, options.get("vocab_size", 150), (7, 11))
    targets[2, 3:7] = -100
    parts = {"hidden": hidden, "weight": weight}
    if options.get("bias"):
        parts["bias"] = torch.randn(130, dtype=dtype)
    options = {name: value for name, value in options.items() if name != "bias"}

    def run(impl, dtype):
        cast = {name: part.detach().to(dtype).requires_grad_() for name, part in parts.items()}
        return results(**cast, targets=targets, impl=impl, **options)

    for fast, plain, exact in zip(run("triton", dtype), run("plain", dtype), run("plain", torch.float64), strict=True):
        assert fast.dtype == plain.dtype
        assert_no_worse(fast, plain, exact, slack=2 * torch.finfo(dtype).eps * exact.abs().max().item())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_ignored_targets_have_no_effect_and_others_show_what_is_not_finite(value) -> None:
    hidden, weight, targets = torch.randn(5, 8), torch.randn(20, 8), torch.tensor([3, -100, 0, 19, -100])
    dirty = hidden.masked_fill((targets == -100).unsqueeze(-1), value)
    found = [
        results(x.clone().requires_grad_(), weight.clone().requires_grad_(), targets, "triton") for x in (hidden, dirty)
    ]
    torch.testing.assert_close(found[1], found[0])
    weight[7] = torch.nan  # the row of no target
    for impl in ("plain", "triton"):
        loss = linear_cross_entropy(hidden, weight, targets, impl=impl, reduction="none")
        assert loss.isnan().tolist() == [True, False, True, True, False]


def test_logits_of_float16_may_exceed_its_range() -> None:
    hidden, weight, targets = torch.randn(5, 8) * 200, torch.randn(20, 8) * 200, torch.tensor([3, 7, 0, 19, 1])
    weight, hidden = weight.half().requires_grad_(), hidden.half().requires_grad_()
    exact = results(hidden.double(), weight.double(), targets, "plain", logit_scale=1e-4)
    for impl in ("plain", "triton"):
        found = results(hidden, weight, targets, impl, logit_scale=1e-4)
        for ours, right in zip(found, exact, strict=True):
            torch.testing.assert_close(ours.double(), right, rtol=1e-2, atol=2e-3 * right.abs().max().item())


def test_log_probs_and_nothing_that_counts_and_only_what_is_needed() -> None:
    hidden, weight, tokens = torch.randn(3, 8), torch.randn(20, 8, requires_grad=True), torch.tensor([1, 19, 0])
    plain = token_log_probs(hidden, weight, tokens, impl="plain")
    torch.testing.assert_close(token_log_probs(hidden, weight, tokens, impl="triton"), plain)
    loss = linear_cross_entropy(hidden, weight, torch.full((3,), -100), impl="triton")
    loss.backward()
    assert loss == 0
    assert weight.grad.eq(0).all()


def test_a_target_outside_is_named() -> None:
    with pytest.raises(TokenIdError, match="token id 20 at row 0, column 1"):
        linear_cross_entropy(torch.randn(2, 8), torch.randn(20, 8), torch.tensor([1, 20]), impl="triton")


def test_options_that_it_does_not_know_are_computed_in_chunks() -> None:
    hidden, weight, targets = torch.randn(3, 8), torch.randn(20, 8), torch.tensor([1, 2, 3])
    result = linear_cross_entropy(hidden, weight, targets, impl="triton", z_loss=0.1, label_smoothing=0.1)
    chunked = linear_cross_entropy(hidden, weight, targets, impl="chunked", z_loss=0.1, label_smoothing=0.1)
    assert torch.equal(result, chunked)
