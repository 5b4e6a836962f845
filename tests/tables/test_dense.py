"""The dense table."""

import copy
import math

import numpy as np
import pytest
import torch
from covering import looped
from torch import nn

from embedlayer import CheckpointError, ShapeError, SizeError, TokenEmbedding
from embedlayer.lessons.scratch import ScratchEmbeddingWithGrad

SEED_000 = (
    torch.tensor(  # printed in "Understanding the difference between embedding layers and linear layers", Raschka
        [
            [0.3374, -0.1778, -0.3035, -0.5880, 1.5810],
            [1.3010, 1.2753, -0.2010, -0.1606, -0.4015],
            [0.6957, -1.8061, -1.1589, 0.3255, -0.6315],
            [-2.8400, -0.7849, -1.4096, -0.4076, 0.7953],
        ]
    )
)


def test_a_seed_gives_the_table_that_people_expect() -> None:
    torch.manual_seed(123)
    table = TokenEmbedding(4, 5, init_std=1.0)
    torch.manual_seed(123)
    assert torch.equal(table.weight, nn.Embedding(4, 5).weight)
    assert torch.allclose(table.weight, SEED_000, atol=5e-5)


@pytest.mark.parametrize(
    "array",
    [
        np.flip(np.arange(12.0).reshape(4, 3)),
        np.arange(12.0, dtype=">f4").reshape(4, 3),
        np.arange(12.0, dtype=np.longdouble).reshape(4, 3),
        np.broadcast_to(np.arange(3.0), (4, 3)),
        np.zeros((4, 3), [("x", "f4"), ("y", "u1")])["x"],
    ],
    ids=["reversed", "big-endian", "long double", "read-only", "of records"],
)
def test_an_array_whose_memory_torch_cannot_use_is_copied(array) -> None:
    table = TokenEmbedding.from_pretrained(array)
    np.testing.assert_array_equal(table.weight.numpy(), array.astype(np.float64))
    assert not np.shares_memory(table.weight.numpy(), array)


def test_any_other_array_is_the_weight() -> None:
    for array in (np.ones((4, 3), np.float32), np.asfortranarray(np.ones((4, 3))), np.ones((4, 6), np.float16)[:, ::2]):
        assert np.shares_memory(TokenEmbedding.from_pretrained(array).weight.numpy(), array)


@looped("kind", [complex, object, str])
def test_an_array_without_real_numbers_is_refused(kind, unchecked) -> None:
    with pytest.raises(ShapeError):
        TokenEmbedding.from_pretrained(np.ones((4, 3)).astype(kind))


@pytest.mark.parametrize("padding_idx", [None, 0, 7])
@pytest.mark.parametrize("scale", [None, 0.5, "sqrt_dim"])
def test_values_and_gradients_equal_the_one_hot_oracle(padding_idx, scale) -> None:
    table = TokenEmbedding(11, 6, padding_idx=padding_idx, scale=scale, dtype=torch.float64)
    factor = math.sqrt(6) if scale == "sqrt_dim" else scale
    oracle = ScratchEmbeddingWithGrad(
        11, 6, padding_idx=padding_idx, scale=factor, W=table.weight.detach().numpy().copy()
    )
    ids = torch.tensor([[3, 7, 1, 0], [3, 3, 10, 7]])
    upstream = torch.randn(2, 4, 6, dtype=torch.float64)
    vectors = table(ids)
    vectors.backward(upstream)
    np.testing.assert_allclose(vectors.detach().numpy(), oracle.forward(ids.numpy()), rtol=1e-15)
    np.testing.assert_allclose(table.weight.grad.numpy(), oracle.backward(upstream.numpy()), rtol=1e-14, atol=1e-14)


def test_it_is_an_embedding_with_one_key() -> None:
    table = TokenEmbedding(10, 4)
    assert isinstance(table, nn.Embedding)
    assert (table.num_embeddings, table.embedding_dim) == (10, 4)
    assert list(table.state_dict()) == ["weight"]


def test_spare_rows_are_stored_and_stay_out_of_everything() -> None:
    table = TokenEmbedding(10, 4, pad_to_multiple_of=8)
    assert (table.num_rows, table.vocab_size, tuple(table.weight.shape)) == (16, 10, (16, 4))
    assert table.weight[10:].eq(0).all()
    assert table.logits(torch.randn(2, 4)).shape == (2, 10)
    table.loss(torch.randn(3, 4), torch.tensor([1, 2, 9])).backward()
    assert table.weight.grad[10:].eq(0).all()
    with pytest.raises(IndexError, match="token id 10 .* 10 rows"):
        table(torch.tensor([10]))


def test_from_a_tensor_it_is_frozen_and_shares_the_numbers(unchecked: None) -> None:
    numbers = torch.randn(5, 3)
    table = TokenEmbedding.from_pretrained(numbers)
    assert not table.weight.requires_grad
    assert table.weight.data_ptr() == numbers.data_ptr()
    assert torch.equal(table(torch.tensor([4])), numbers[[4]])
    assert TokenEmbedding.from_pretrained(numbers, freeze=False).weight.requires_grad
    assert torch.equal(TokenEmbedding.from_pretrained(numbers, padding_idx=2).weight, numbers)
    assert TokenEmbedding.from_pretrained(numbers.bfloat16()).weight.dtype == torch.bfloat16


def test_sizes_that_cannot_be_are_refused(unchecked) -> None:
    for name, size in {"vocab_size": 0, "embed_dim": 0, "padding_idx": 4, "pad_to_multiple_of": 0}.items():
        with pytest.raises(SizeError):
            TokenEmbedding(**{"vocab_size": 4, "embed_dim": 4, name: size})


def test_a_folder_that_holds_another_kind_is_refused(tmp_path) -> None:
    TokenEmbedding(10, 4).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("token_embedding", "os.system"))
    with pytest.raises(CheckpointError):
        TokenEmbedding.from_pretrained(tmp_path)


def test_a_rounded_scale_follows_the_type_of_the_rows() -> None:
    table = TokenEmbedding(7, 3072, scale="sqrt_dim", round_scale=True)
    ids = torch.tensor([[1, 2]])
    assert table.embed_scale == torch.tensor(3072.0).sqrt()
    half = copy.deepcopy(table).bfloat16()
    assert half.embed_scale.dtype == torch.bfloat16
    assert half.embed_scale.item() == 55.5
    assert torch.equal(half(ids), half.weight[ids] * 55.5)
    assert half.float().embed_scale == table.embed_scale
    assert TokenEmbedding(7, 3072, scale="sqrt_dim", round_scale=True, dtype=torch.bfloat16).embed_scale.item() == 55.5
    assert set(table.state_dict()) == {"weight"}
    assert TokenEmbedding(7, 3072, scale="sqrt_dim").embed_scale == 3072**0.5
