"""Tables that are gated into the residual stream."""

import pytest
import torch
from decoders import small
from kinds import ngrams

from embedlayer import TokenEmbedding
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
