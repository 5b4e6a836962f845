"""A position is called with numbers, and what it returns depends on these numbers alone."""

from typing import Any

import pytest
import torch
from covering import looped
from kinds import EMBED_DIM, MAX_SEQ_LEN, NUM_HEADS, POSITIONS
from torch import nn

from embedlayer import LearnedPositionalEmbedding, PositionError, ShapeError, SinusoidalPositionalEmbedding
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
def test_hidden_states_are_refused_with_the_call_that_adds_positions(name, unchecked) -> None:
    position = POSITIONS[name]()
    with pytest.raises(ShapeError, match=r"float32 values of shape \(2, 3, 24\).\n.*add\(x, positions\)"):
        position(torch.randn(2, 3, EMBED_DIM))
    if position.max_seq_len is not None:
        with pytest.raises(PositionError, match="exceeds the 16 positions"):
            position(torch.tensor([MAX_SEQ_LEN]))


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
    with pytest.raises(ShapeError, match=r"adds nothing to the input.*\n.*rotate\(q, k, positions\)"):
        POSITIONS[name]()(torch.arange(3))


class CachedAttention(nn.Module):
    """Causal self-attention that keeps keys and values between calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width)
        self.past: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, use_cache: bool) -> torch.Tensor:
        query, new = self.query_key_value(x).tensor_split([x.shape[-1]], dim=-1)
        seen = new if self.past is None or not use_cache else torch.cat([self.past, new], dim=1)
        self.past = seen if use_cache else None
        key, value = seen.chunk(2, dim=-1)
        hidden = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(key.shape[1] - query.shape[1] + 1)
        scores = (query @ key.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value


class CourseGPT(nn.Module):
    """A GPT as courses write it: `tok_emb` and `pos_emb` are called with numbers, a cached step with later ones."""

    def __init__(self, pos_emb: nn.Module) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(40, EMBED_DIM), pos_emb
        self.layers = nn.ModuleList(CachedAttention(EMBED_DIM) for _ in range(2))
        self.out_head = nn.Linear(EMBED_DIM, 40, bias=False)
        self.current_pos = 0

    def forward(self, in_idx: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        start = self.current_pos if use_cache else 0
        pos_ids = torch.arange(start, start + in_idx.shape[1])
        self.current_pos = start + in_idx.shape[1] if use_cache else 0
        x = self.tok_emb(in_idx) + self.pos_emb(pos_ids).unsqueeze(0)
        for layer in self.layers:
            x = x + layer(x, use_cache)
        return self.out_head(x)


@torch.no_grad()
def text_of(model: CourseGPT, use_cache: bool) -> list[int]:
    ids = torch.tensor([[1, 2, 3]])
    logits = model(ids, use_cache)
    for _ in range(12):
        next_id = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, next_id], dim=1)
        logits = model(next_id if use_cache else ids, use_cache)
    return ids[0].tolist()


@pytest.mark.parametrize("kind", [LearnedPositionalEmbedding, SinusoidalPositionalEmbedding])
def test_a_gpt_with_a_cache_writes_the_same_text_with_a_plain_embedding_and_with_ours(kind) -> None:
    position = kind(MAX_SEQ_LEN, EMBED_DIM)
    model: Any = CourseGPT(as_plain_embedding(position))
    expected = text_of(model, use_cache=True)
    assert len(set(expected)) > 4
    model.pos_emb, model.current_pos = position, 0
    for layer in model.layers:
        layer.past = None
    assert text_of(model, use_cache=True) == text_of(model, use_cache=False) == expected
