"""A position is called with numbers, and what it returns depends on these numbers alone."""

import pytest
import torch
from covering import looped
from kinds import EMBED_DIM, MAX_SEQ_LEN, NUM_HEADS, POSITIONS
from torch import nn

from embedlayer import ShapeError
from embedlayer.positions.position import AdditivePosition

ADDITIVE = [name for name, build in POSITIONS.items() if isinstance(build(), AdditivePosition)]
IN_ATTENTION = [name for name in POSITIONS if name not in ADDITIVE]


def as_plain_embedding(position: AdditivePosition) -> nn.Embedding:
    return nn.Embedding.from_pretrained(position.vectors(torch.arange(MAX_SEQ_LEN)).detach())


@pytest.mark.parametrize(
    "positions",
    [
        torch.arange(5, 8),
        torch.tensor(7),
        torch.tensor([[3, 1], [0, 15]]),
        torch.tensor([[[2]], [[9]]], dtype=torch.int32),
        torch.arange(MAX_SEQ_LEN).view(4, 4)[:, ::2],
        torch.tensor([4]).expand(2, 3),
    ],
    ids=["from the middle", "scalar", "batch", "int32", "strided", "expanded"],
)
@looped("name", ADDITIVE)
def test_a_call_returns_the_rows_at_these_positions_as_an_embedding_does(name, positions) -> None:
    position = POSITIONS[name]()
    assert torch.equal(position(positions), as_plain_embedding(position)(positions))


@looped("name", ADDITIVE)
def test_hidden_states_of_another_width_are_refused_and_never_broadcast(name, unchecked) -> None:
    position = POSITIONS[name]()
    for width in (1, EMBED_DIM + 1):
        with pytest.raises(ShapeError, match=f"width {width} cannot take positions of width {EMBED_DIM}"):
            position.add(torch.randn(2, 3, width), torch.arange(3))


@looped("name", IN_ATTENTION)
def test_positions_of_32_bits_are_as_far_apart_as_those_of_64(name) -> None:
    position, (q, k) = POSITIONS[name](), torch.randn(2, 1, NUM_HEADS, 3, EMBED_DIM // NUM_HEADS)
    if position.max_seq_len is not None:
        pytest.skip("it has no positions so far apart")
    places = torch.tensor([0 if "query" in name else -(2**31), 0, 2**31 - 1])  # the scale of queries counts from 0
    for wide, narrow in zip(position.rotate(q, k, places), position.rotate(q, k, places.int()), strict=True):
        assert torch.equal(wide, narrow)
    biases = [position.bias(each, each) for each in (places, places.int())]
    assert all(bias is None for bias in biases) or torch.equal(*biases)


@looped("name", IN_ATTENTION)
def test_a_scheme_without_rows_says_where_it_is_applied(name) -> None:
    with pytest.raises(ShapeError):
        POSITIONS[name]()(torch.arange(3))
