"""Tables that are gated into the residual stream."""

import pytest
import torch
from decoders import small
from kinds import ngrams

from embedlayer import SizeError, TokenEmbedding
from embedlayer.inputs import GatedEmbedding


def test_the_gated_vectors_of_the_batch_enter_before_one_block() -> None:
    injection = GatedEmbedding(ngrams(), 24, block=1)
    model, ids = small(injections=[injection]), torch.randint(1, 50, (2, 10))
    states = list(model.hidden_states(ids))
    plain = small()
    plain.load_state_dict(model.state_dict(), strict=False)
    before = list(plain.hidden_states(ids))
    torch.testing.assert_close(states[0], before[0])
    torch.testing.assert_close(states[1], before[1] + injection.gate(before[1], injection.table(ids)))


@pytest.mark.parametrize(("kernel_size", "names"), [(0, 0), (3, 1)])
def test_the_convolution_reaches_over_the_longest_n_gram(kernel_size, names) -> None:
    injection = GatedEmbedding(ngrams(), 24, block=0, kernel_size=kernel_size)
    assert sum("conv" in name for name, _ in injection.named_parameters()) >= names
    assert injection.dilation == 3
    assert GatedEmbedding(TokenEmbedding(50, 8), 24, block=0).dilation == 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SizeError, match="There is no block 2"):
        small(injections=[GatedEmbedding(ngrams(), 24, block=2)])
    with pytest.raises(SizeError, match="has width 16, the decoder has 24"):
        small(injections=[GatedEmbedding(ngrams(), 16, block=1)])
    with pytest.raises(SizeError, match="kernel_size must be at least 0, not -1"):
        GatedEmbedding(ngrams(), 24, block=1, kernel_size=-1)
