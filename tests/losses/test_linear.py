"""The loss of an LM head, against torch and against hand-written NumPy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from embedlayer import SizeError, TokenEmbedding, TokenIdError, linear_cross_entropy
from embedlayer.lessons.scratch import ScratchEmbeddingWithGrad, ScratchTiedHead
from embedlayer.losses.finishing import finish_logits


@pytest.fixture
def sizes():
    hidden = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 8, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, 13, (2, 5))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_it_is_torch_cross_entropy_of_the_logits(sizes, reduction, label_smoothing) -> None:
    hidden, weight, targets = sizes
    targets[0, 1] = -100
    ours = linear_cross_entropy(hidden, weight, targets, reduction=reduction, label_smoothing=label_smoothing)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    theirs = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), **options)
    assert torch.allclose(ours.flatten(), theirs.flatten(), rtol=1e-14)


def test_options_are_applied_in_the_stated_order(sizes) -> None:
    hidden, weight, targets = sizes
    bias = torch.randn(13, dtype=torch.float64)
    logits = 2.0 * torch.tanh((0.5 * (hidden @ weight.T) + bias) / 2.0)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()
    ours = linear_cross_entropy(hidden, weight, targets, logit_scale=0.5, bias=bias, softcap=2.0, z_loss=1e-2)
    assert torch.allclose(ours, expected, rtol=1e-14)


def test_gradients_are_right_in_float64(sizes) -> None:
    hidden, weight, targets = sizes
    bias = torch.randn(13, dtype=torch.float64, requires_grad=True)
    targets[1, 2] = -100
    loss = lambda h, w, b: linear_cross_entropy(  # noqa: E731
        h, w, targets, bias=b, softcap=5.0, z_loss=0.1, label_smoothing=0.1
    )
    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("impl", ["plain", "chunked"])
def test_gradients_with_create_graph_are_right_if_the_hidden_states_follow_from_the_rows(impl, reduction) -> None:
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    ids, targets = torch.randint(0, 7, (2, 7))

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(weight[ids].sin(), weight, targets, impl=impl, reduction=reduction).cos().sum()

    (plain,) = torch.autograd.grad(F.cross_entropy(weight[ids].sin() @ weight.T, targets).cos(), weight)
    (first,) = torch.autograd.grad(loss(weight), weight, create_graph=True)
    if reduction == "mean":
        torch.testing.assert_close(first, plain)
    assert torch.autograd.gradgradcheck(loss, weight, nondet_tol=1e-12)


@pytest.mark.parametrize("padding_idx", [None, 4])
def test_a_tied_loss_and_its_gradients_equal_the_hand_written_ones(padding_idx) -> None:
    table = TokenEmbedding(13, 8, padding_idx=padding_idx, init_std=1.0, dtype=torch.float64)
    hidden = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (3, 4))
    targets[0, 0] = -100
    oracle = ScratchTiedHead(
        ScratchEmbeddingWithGrad(13, 8, padding_idx=padding_idx, W=table.weight.detach().numpy().copy())
    )
    loss = table.loss(hidden, targets)
    loss.backward()
    assert loss.item() == pytest.approx(oracle.loss(hidden.detach().numpy(), targets.numpy()), rel=1e-14)
    grad_hidden, grad_weight = oracle.backward()
    np.testing.assert_allclose(hidden.grad.numpy(), grad_hidden, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(table.weight.grad.numpy(), grad_weight, rtol=1e-12, atol=1e-15)


def test_when_all_targets_are_ignored_the_loss_is_zero_and_so_is_its_gradient(sizes) -> None:
    hidden, weight, targets = sizes
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0
    assert hidden.grad.eq(0).all()


@pytest.mark.parametrize("options", [{}, {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": "none", "softcap": 3.0}])
def test_triton_is_another_name_of_chunked(sizes, options) -> None:
    hidden, weight, targets = sizes
    found = [linear_cross_entropy(hidden, weight, targets, impl=impl, **options) for impl in ("triton", "chunked")]
    assert torch.equal(*found)
    grads = [torch.autograd.grad(each.sum(), (hidden, weight)) for each in found]
    assert all(map(torch.equal, *grads))


def test_an_empty_batch_costs_nothing() -> None:
    assert linear_cross_entropy(torch.zeros(0, 8), torch.zeros(13, 8), torch.zeros(0, dtype=torch.long)) == 0


def test_low_precision_is_summed_in_float32() -> None:
    hidden, weight = torch.randn(64, 8).bfloat16(), torch.randn(1000, 8).bfloat16()
    targets = torch.randint(0, 1000, (64,))
    ours = linear_cross_entropy(hidden, weight, targets)
    assert ours.dtype == torch.float32
    exact = linear_cross_entropy(hidden.double(), weight.double(), targets)
    assert ours.item() == pytest.approx(exact.item(), rel=2e-3)


def test_a_masked_padding_token_is_never_predicted(sizes) -> None:
    hidden, weight, _ = sizes
    logits = finish_logits(hidden @ weight.T, padding_idx=3, mask_padding=True)
    assert logits[..., 3].eq(float("-inf")).all()
    assert logits.softmax(-1)[..., 3].eq(0).all()
    with pytest.raises(SizeError, match="label_smoothing spreads"):
        linear_cross_entropy(
            hidden, weight, torch.zeros(2, 5).long(), label_smoothing=0.1, padding_idx=3, mask_padding=True
        )


def test_a_target_outside_the_vocabulary_is_named(sizes) -> None:
    hidden, weight, targets = sizes
    targets[1, 3] = 13
    with pytest.raises(TokenIdError, match="token id 13 at row 1, column 3"):
        linear_cross_entropy(hidden, weight, targets)


def test_it_compiles_to_one_graph(unchecked: None, sizes) -> None:
    hidden, weight, targets = (tensor.detach() for tensor in sizes)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets))
