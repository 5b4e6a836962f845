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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_norm": 1.0}, el.SizeError, "a look-up would write to the weight"),
        ({"scale_grad_by_freq": True}, el.SizeError, "scale_grad_by_freq=True is not supported"),
        ({"sparse": True}, el.SizeError, "row_sparse=True"),
        ({"num_embeddings": 10}, TypeError, r"vocab_size was passed twice, .*'num_embeddings': \[10, 10\]"),
        ({"padding": 3}, TypeError, "has no argument padding"),
        ({"padding_idx": -11}, el.SizeError, "padding_idx -11 is not one of the 10 tokens"),
    ],
)
def test_torchs_further_arguments_are_refused_by_one_sentence(arguments, error, message, unchecked) -> None:
    with pytest.raises(error, match=message):
        el.TokenEmbedding(10, 4, **arguments)


def test_a_missing_size_is_named(unchecked) -> None:
    with pytest.raises(TypeError, match=r"missing .*: 'embed_dim' \(in torch: 'embedding_dim'\)"):
        el.TokenEmbedding(10)
