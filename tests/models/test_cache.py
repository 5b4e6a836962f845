"""Cached decoding: what was read is not read again, and the logits are those of reading it all."""

import pytest
import torch
from covering import cases
from decoders import small
from kinds import POSITIONS

from embedlayer import (
    DecoderLM,
    KeyValueCache,
    PositionError,
    RotaryEmbedding,
    ShapeError,
    TokenEmbedding,
    TokenIdError,
)
from embedlayer.positions import DynamicNTKScaling, LongRopeScaling


@cases("position, steps", POSITIONS, ([5, 1, 1, 1, 2], [1] * 10, [10], [3, 4, 3]))
def test_logits_are_those_of_reading_everything_at_once(position, steps) -> None:
    model = small(position, num_kv_heads=2)
    ids = torch.randint(1, 50, (2, 10))
    cache = KeyValueCache()
    parts = [model(part, cache=cache) for part in ids.split(steps, dim=-1)]
    assert len(cache) == 10
    assert torch.allclose(torch.cat(parts, dim=1), model(ids), atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_left_padding_is_remembered(position) -> None:
    model = small(position)
    texts = torch.randint(1, 50, (3, 8))
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, :3] = mask[1, :1] = 0
    cache = KeyValueCache()
    first = model(texts[:, :5], attention_mask=mask[:, :5], cache=cache)
    rest = [model(texts[:, t : t + 1], cache=cache) for t in range(5, 8)]
    assert torch.isfinite(first).all()
    for row, start in enumerate((3, 1, 0)):
        expected = model(texts[row, start:])
        cached = torch.cat([first, *rest], dim=1)[row, start:]
        assert torch.allclose(cached, expected, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_further_document_can_be_appended_with_its_own_positions(position) -> None:
    model = small(position)
    ids = torch.randint(1, 50, (1, 7))
    cache = KeyValueCache()
    model(ids[:, :4], cache=cache)
    second = model(
        ids[:, 4:], positions=torch.arange(3), attention_mask=torch.full((1, 3), 2, dtype=torch.long), cache=cache
    )
    assert torch.allclose(second, model(ids[:, 4:]), atol=1e-5)


@pytest.mark.parametrize(
    "scaling",
    [DynamicNTKScaling(2.0, 6), LongRopeScaling([1.0, 1.5, 2.0], [2.0, 3.0, 4.0], 6, factor=2.0)],
    ids=["dynamic", "long"],
)
def test_remembered_keys_are_turned_on_when_the_length_asks_for_other_angles(scaling) -> None:
    """With one block, whose keys follow from the tokens alone, this is exact."""
    table = TokenEmbedding(50, 24, init_std=1.0)
    model = DecoderLM(table, RotaryEmbedding(6, scaling=scaling), num_layers=1, num_heads=4).eval()
    ids, cache = torch.randint(1, 50, (2, 10)), KeyValueCache()
    for start, stop in ((0, 4), (4, 7), (7, 8), (8, 10)):
        logits = model(ids[:, start:stop], cache=cache)
        assert torch.allclose(logits, model(ids[:, :stop])[:, start:], atol=1e-5)


def test_a_single_sequence_needs_no_batch() -> None:
    model = small()
    ids = torch.randint(1, 50, (6,))
    cache = KeyValueCache()
    parts = [model(part, cache=cache) for part in ids.split([4, 1, 1])]
    assert torch.allclose(torch.cat(parts), model(ids), atol=1e-5)


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    model = small("learned")
    ids = torch.randint(1, 50, (1, 17))
    cache = KeyValueCache()
    model(ids[:, :16], cache=cache)
    with pytest.raises(PositionError, match="a sequence of 17 exceeds the 16 positions"):
        model(ids[:, 16:], cache=cache)
    with pytest.raises(TokenIdError):
        model(torch.tensor([[50]]), positions=torch.tensor([3]), cache=cache)
    assert len(cache) == 16


def test_another_batch_and_a_mask_without_positions_are_refused() -> None:
    model, cache = small(), KeyValueCache()
    model(torch.randint(1, 50, (2, 4)), cache=cache)
    with pytest.raises(ShapeError, match="has 2 sequences and the new tokens have 3"):
        model(torch.randint(1, 50, (3, 1)), cache=cache)
    with pytest.raises(ShapeError, match="pass their positions too"):
        model(torch.randint(1, 50, (2, 1)), attention_mask=torch.ones(2, 1, dtype=torch.long), cache=cache)


def test_gradients_reach_what_was_cached() -> None:
    model, cache = small(), KeyValueCache()
    ids = torch.randint(1, 50, (2, 6))
    model(ids[:, :3], cache=cache)
    model(ids[:, 3:], cache=cache).sum().backward()
    assert model.blocks[0].attention.key.weight.grad.abs().sum() > 0
