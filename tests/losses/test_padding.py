"""Rows of zeros behind those of tokens."""

import pytest
import torch

from embedlayer.losses.padding import own_tokens, padded_states, padded_tokens


@pytest.mark.parametrize("tokens", [1, 31, 32, 64, 65])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_padded_rows_are_contiguous_and_those_of_the_tokens_come_first(tokens, is_transposed) -> None:
    rows = torch.randn(3, tokens).T if is_transposed else torch.randn(tokens, 3)
    padded = padded_states(rows, 32)
    assert padded.is_contiguous()
    assert len(padded) % 32 == 0 <= len(padded) - tokens < 32
    assert torch.equal(padded[:tokens], rows)
    assert not padded[tokens:].any()
    assert padded_states(rows, 1) is rows


def test_results_of_padded_tokens_have_the_shape_of_the_tokens() -> None:
    hidden = torch.randn(2, 5, 3)
    assert torch.equal(own_tokens(padded_tokens(hidden) * 2, hidden), hidden * 2)
