"""Arguments by the names of `torch.nn.Embedding`."""

import pytest
import torch

import embedlayer as el


def test_torchs_names_and_order_of_arguments_are_understood() -> None:
    named = el.TokenEmbedding(num_embeddings=10, embedding_dim=4, padding_idx=2, max_norm=None, sparse=False)
    placed = el.TokenEmbedding(10, 4, 2)
    assert named.config == placed.config
    assert (placed.vocab_size, placed.embed_dim, placed.padding_idx) == (10, 4, 2)
    assert el.TokenEmbedding.from_pretrained(torch.ones(3, 2), freeze=False, sparse=False).weight.requires_grad


def test_arguments_of_torch_that_mean_something_else_are_refused(unchecked) -> None:
    for arguments in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}, {"padding_idx": -11}):
        with pytest.raises(el.SizeError):
            el.TokenEmbedding(10, 4, **arguments)
    twice: list[dict[str, int]] = [{"vocab_size": 10, "num_embeddings": 10}, {"embed_dim": 4, "embedding_dim": 4}]
    for sizes in (*twice, {"vocab_size": 10}, {"vocab_size": 10, "embed_dim": 4, "padding": 3}):
        with pytest.raises(TypeError):
            el.TokenEmbedding(**sizes)
