"""Statistics of tokens: edges, dtypes, derivatives, compiled graphs and bad input; values are in `tests/laws`."""

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from covering import cases
from small_blocks import small_blocks

from embedlayer import ShapeError, SizeError, TokenIdError
from embedlayer.losses import BlockLogits, LinearLogits, UncomputedLogits, finish_logits, token_statistics
from embedlayer.losses.statistics import Statistic

ALL = get_args(Statistic)


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks(tokens=3, rows=8):
        yield


@pytest.fixture
def sizes():
    hidden = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(23, 5, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, 23, (2, 4))


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_the_mean_of_the_logits_is_of_finished_ones_and_minus_infinity_with_a_masked_padding(sizes, impl) -> None:
    hidden, weight, tokens = sizes
    options = {"bias": torch.randn(23, dtype=torch.float64), "softcap": 2.0, "logit_scale": 0.5, "temperature": 0.7}
    expected = finish_logits(hidden @ weight.T, **options).mean(-1)
    found = token_statistics(hidden, weight, tokens, statistics=("mean_logits",), impl=impl, **options)
    torch.testing.assert_close(found.mean_logits, expected)
    assert found[:5] == (None,) * 5
    options |= {"padding_idx": 3, "mask_padding": True}
    found = token_statistics(hidden, weight, statistics=("mean_logits", "entropy"), impl=impl, **options)
    assert found.mean_logits.eq(-torch.inf).all()
    assert found.entropy.isfinite().all()


@pytest.mark.usefixtures("both_paths")
@cases("impl, shape", ["plain", "chunked"], [(), (0,), (2, 0), (2, 3)])
def test_any_shape_of_a_batch(impl, shape) -> None:
    hidden, weight = torch.randn(*shape, 5), torch.randn(23, 5)
    tokens = torch.randint(0, 23, shape)
    found = token_statistics(hidden, weight, tokens, statistics=ALL, top_k=4, impl=impl)
    assert all(value.shape == shape for value in found[:5])
    assert found.top_logits.shape == found.top_ids.shape == (*shape, 4)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_logits_of_minus_infinity_have_probability_zero(sizes, impl) -> None:
    hidden, weight, _ = sizes
    bias = torch.zeros(23, dtype=torch.float64)
    bias[8:16] = -torch.inf  # a whole block, and a part of another
    bias[3] = -torch.inf
    found = token_statistics(hidden, weight, statistics=("entropy", "logsumexp", "sum_squared_probs"), top_k=16,
                             bias=bias, impl=impl)  # fmt: skip
    log_p = F.log_softmax((hidden @ weight.T + bias)[..., bias == 0], dim=-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(found.entropy, expected)
    torch.testing.assert_close(found.sum_squared_probs, log_p.exp().square().sum(-1))
    assert found.top_logits[..., 14:].eq(-torch.inf).all()
    assert found.top_ids[..., 14:].eq(torch.tensor([3, 8])).all()
    for ours, plain in (
        (found.entropy, expected),
        (found.logsumexp, (hidden @ weight.T)[..., bias == 0].logsumexp(-1)),
    ):
        both = [torch.autograd.grad(each.sum(), (hidden, weight), retain_graph=True) for each in (ours, plain)]
        torch.testing.assert_close(*both)


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_when_all_logits_are_minus_infinity_so_is_logsumexp(impl) -> None:
    hidden, weight = torch.randn(3, 5), torch.randn(23, 5)
    found = token_statistics(hidden, weight, statistics=("logsumexp",), bias=torch.full((23,), -torch.inf), impl=impl)
    assert found.logsumexp.eq(-torch.inf).all()


@pytest.mark.usefixtures("both_paths")
@pytest.mark.parametrize("of_function", [False, True])
def test_derivatives_are_right_twice(sizes, of_function) -> None:
    hidden, weight, tokens = sizes

    def value(hidden, weight):
        logits: UncomputedLogits = LinearLogits(hidden, weight, impl="chunked")
        if of_function:
            logits = BlockLogits(hidden, lambda x, start, stop: x @ weight[start:stop].T, 23, 8)
        found = token_statistics(logits, tokens[0], statistics=ALL, top_k=2)
        return tuple(x for x in found if x is not None and x.requires_grad)

    leaves = (hidden[0].detach().requires_grad_(), weight)
    assert torch.autograd.gradcheck(value, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, leaves, fast_mode=True)


def test_it_compiles_to_one_graph(unchecked: None, sizes) -> None:
    hidden, weight, tokens = sizes
    # a list: graphs of torch 2.9 take a slice of a named tuple for another of its class
    value = lambda h, w: [*token_statistics(h, w, tokens, statistics=ALL, top_k=3)][:3]  # noqa: E731
    compiled = torch.compile(value, fullgraph=True, backend="aot_eager")(hidden, weight)
    expected = value(hidden, weight)
    torch.testing.assert_close(compiled, expected)
    grads = [torch.autograd.grad([x.sum() for x in each], (hidden, weight)) for each in (compiled, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.usefixtures("both_paths")
def test_a_second_backward_and_a_change_of_the_weights(sizes) -> None:
    hidden, weight, tokens = sizes
    entropy = token_statistics(hidden, weight, tokens, impl="chunked").entropy.sum()
    first = torch.autograd.grad(entropy, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(entropy, (hidden, weight), retain_graph=True), first)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entropy.backward()


def test_what_does_not_fit_is_refused(unchecked: None, sizes) -> None:
    hidden, weight, tokens = sizes
    with pytest.raises(SizeError, match="statistics must be among log_probs, entropy.* not 'perplexity'"):
        token_statistics(hidden, weight, tokens, statistics=("perplexity",))
    with pytest.raises(SizeError, match="log_probs and is_argmax are statistics of tokens: pass tokens"):
        token_statistics(hidden, weight)
    for k in (-1, 24):
        with pytest.raises(SizeError, match=f"top_k must be from 1 to the 23 tokens of the vocabulary, not {k}"):
            token_statistics(hidden, weight, tokens, top_k=k)
    with pytest.raises(ShapeError, match=r"tokens must be int64 or int32 \(2, 4\)"):
        token_statistics(hidden, weight, tokens[0])
    with pytest.raises(ShapeError, match=r"must be \(\.\.\., D\)"):
        token_statistics(hidden[..., :4], weight, tokens)
    tokens[1, 2] = 23
    with pytest.raises(TokenIdError, match="token id 23 at row 1, column 2 is outside this table of 23 rows"):
        token_statistics(hidden, weight, tokens)


@pytest.mark.usefixtures("both_paths")
def test_spare_rows_are_no_tokens(sizes) -> None:
    hidden, weight, _ = sizes
    found = token_statistics(hidden, weight, statistics=("entropy",), top_k=20, vocab_size=20, impl="chunked")
    expected = token_statistics(hidden, weight[:20], statistics=("entropy",), top_k=20, impl="plain")
    torch.testing.assert_close(found.entropy, expected.entropy)
    assert torch.equal(found.top_ids, expected.top_ids)
    grads = [torch.autograd.grad(each.entropy.sum(), weight)[0] for each in (found, expected)]
    torch.testing.assert_close(*grads)
