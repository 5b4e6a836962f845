"""The loss of several depths: edges and bad input; values and gradients are in `tests/laws/test_head_outputs.py`."""

import pytest
import torch
import torch.nn.functional as F

from embedlayer import OutputHead, ShapeError, SizeError, TokenIdError


def test_a_depth_beyond_the_text_has_loss_zero() -> None:
    head, labels = OutputHead(4, 9), torch.randint(0, 9, (2, 2))
    hidden = [torch.randn(2, 2, 4, requires_grad=True) for _ in range(3)]
    found = head.multi_token_loss(hidden, labels)
    assert found.losses[1:].eq(0).all()
    torch.testing.assert_close(found.loss, head.loss(hidden[0][:, :1], labels[:, 1:]))
    found.loss.backward()
    assert hidden[2].grad is None or hidden[2].grad.eq(0).all()


@pytest.mark.parametrize("impl", ["plain", "chunked"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_each_depth_has_the_loss_that_the_head_has_for_it_with_all_its_options(reduction, impl) -> None:
    head, labels = OutputHead(4, 9, softcap=2.0, init_std=1.0), torch.randint(0, 9, (2, 6))
    labels[0, 3] = -1
    hidden, weights = [torch.randn(2, 6, 4, requires_grad=True) for _ in range(3)], [1.0, 0.3, 2.0]
    of_labels = torch.randn(2, 6, dtype=torch.float64)
    options = {"z_loss": 0.1, "label_smoothing": 0.2, "temperature": 0.7, "ignore_index": -1, "impl": impl}
    found = head.multi_token_loss(hidden, labels, weights, reduction=reduction, token_weights=of_labels, **options)
    shape, expected = (2, 6) if reduction == "none" else (), []
    for depth, states in enumerate(hidden):
        shifted = {"token_weights": of_labels[:, 1 + depth :], "reduction": reduction}
        each = head.loss(states[:, : 5 - depth], labels[:, 1 + depth :], **shifted, **options)
        expected.append(F.pad(each, (0, 1 + depth)) if reduction == "none" else each)
    assert found.losses.shape == (3, *shape)
    torch.testing.assert_close(found.losses, torch.stack(expected).detach())
    total = sum(weight * each for weight, each in zip(weights, expected, strict=True))
    torch.testing.assert_close(found.loss, total)
    leaves, grad_output = [*hidden, head.weight], torch.randn(shape)
    torch.testing.assert_close(
        torch.autograd.grad(found.loss, leaves, grad_output), torch.autograd.grad(total, leaves, grad_output)
    )


def test_what_does_not_fit_is_refused(unchecked: None) -> None:
    head, hidden = OutputHead(4, 9), torch.randn(2, 5, 4)
    labels = torch.randint(0, 9, (2, 5))
    with pytest.raises(SizeError, match="2 depths and 1 weights: pass one weight for each depth"):
        head.multi_token_loss([hidden, hidden], labels, weights=[1.0])
    with pytest.raises(SizeError, match="0 depths"):
        head.multi_token_loss([], labels)
    with pytest.raises(ShapeError, match=r"hidden states of depth 1 \(2, 4, 4\)"):
        head.multi_token_loss([hidden, hidden[:, 1:]], labels)
    with pytest.raises(
        ShapeError, match=r"token_weights must be floats of shape \(2, 5\) .* one for each of the labels"
    ):
        head.multi_token_loss([hidden], labels, token_weights=torch.ones(2, 4))
    labels[1, 3] = 9
    with pytest.raises(TokenIdError, match="token id 9"):
        head.multi_token_loss([hidden], labels)
