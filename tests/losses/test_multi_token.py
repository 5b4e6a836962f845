"""The loss of several depths: edges and bad input; values and gradients are in `tests/laws/test_head_outputs.py`."""

import pytest
import torch

from embedlayer import OutputHead, ShapeError, SizeError, TokenIdError


def test_a_depth_beyond_the_text_has_loss_zero() -> None:
    head, labels = OutputHead(4, 9), torch.randint(0, 9, (2, 2))
    hidden = [torch.randn(2, 2, 4, requires_grad=True) for _ in range(3)]
    found = head.multi_token_loss(hidden, labels)
    assert found.losses[1:].eq(0).all()
    torch.testing.assert_close(found.loss, head.loss(hidden[0][:, :1], labels[:, 1:]))
    found.loss.backward()
    assert hidden[2].grad is None or hidden[2].grad.eq(0).all()


def test_what_does_not_fit_is_refused(unchecked: None) -> None:
    head, hidden = OutputHead(4, 9), torch.randn(2, 5, 4)
    labels = torch.randint(0, 9, (2, 5))
    with pytest.raises(SizeError, match="2 depths and 1 weights: pass one weight for each depth"):
        head.multi_token_loss([hidden, hidden], labels, weights=[1.0])
    with pytest.raises(SizeError, match="0 depths"):
        head.multi_token_loss([], labels)
    with pytest.raises(ShapeError, match=r"hidden states of depth 1 \(2, 4, 4\)"):
        head.multi_token_loss([hidden, hidden[:, 1:]], labels)
    with pytest.raises(ShapeError, match=r"token_weights must be floats \(2, 5\)"):
        head.multi_token_loss([hidden], labels, token_weights=torch.ones(2, 4))
    labels[1, 3] = 9
    with pytest.raises(TokenIdError, match="token id 9"):
        head.multi_token_loss([hidden], labels)
