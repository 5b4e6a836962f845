"""Rotary positions: exact angles, and projections of both layouts; `test_axes` has the formula of all schemes."""

import pytest
import torch
from comparison import assert_no_worse

from embedlayer import RotaryEmbedding
from embedlayer.positions import apply_rotary, permute_qk


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_angles_are_exact_at_any_position(base) -> None:
    """A product in float32 is off by whole radians at position 16 million; integers are not."""
    frequencies = base ** (-torch.arange(0, 64, 2).double() / 64)
    for place in (10, 10_000, 1_000_000, 16_000_000):
        places = torch.arange(place, place + 50)
        exact = places.double()[:, None] * frequencies
        cos, sin = RotaryEmbedding(64, base).cos_sin(places)
        assert (cos.double() - exact.cos()).abs().max() < 1e-6
        assert (sin.double() - exact.sin()).abs().max() < 1e-6
        naive = (places.float()[:, None] * frequencies.float()).cos()
        assert place < 1_000_000 or (naive.double() - exact.cos()).abs().max() > 1e-3


def test_in_bfloat16_it_is_no_worse_than_the_rounding_of_the_result() -> None:
    q = torch.randn(1, 2, 200, 16).bfloat16()
    ours, _ = RotaryEmbedding(16).to(torch.bfloat16).rotate(q, q, torch.arange(200))
    cos, sin = RotaryEmbedding(16).cos_sin(torch.arange(200), dtype=torch.float64)
    exact = apply_rotary(q.double(), cos, sin)
    assert_no_worse(ours, exact.bfloat16(), exact, slack=1e-7)


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize(("to", "start"), [("half_split", True), ("interleaved", False)])
def test_permuted_projections_give_the_same_scores_in_the_other_layout(to, start, rotary_dim) -> None:
    query, key = torch.randn(4 * 8, 20, dtype=torch.float64), torch.randn(2 * 8, 20, dtype=torch.float64)
    query_bias, key_bias = torch.randn(4 * 8).double(), torch.randn(2 * 8).double()
    x = torch.randn(7, 20, dtype=torch.float64)

    def scores(interleaved: bool, *parameters):
        wq, wk, bq, bk = parameters
        position = RotaryEmbedding(8, interleaved=interleaved, rotary_dim=rotary_dim)
        q, k = ((x @ w.T + b).unflatten(-1, (-1, 8)).transpose(0, 1) for w, b in ((wq, bq), (wk, bk)))
        q, k = position.rotate(q, k, torch.arange(7))
        return q @ k.repeat_interleave(2, 0).mT

    heads = (4, 2, 4, 2)
    before = (query, key, query_bias, key_bias)
    after = [permute_qk(w, h, to=to, rotary_dim=rotary_dim) for w, h in zip(before, heads, strict=True)]
    torch.testing.assert_close(scores(start, *before), scores(not start, *after))
    assert not torch.equal(after[0], query)
    back = "interleaved" if to == "half_split" else "half_split"
    for w, moved, h in zip(before, after, heads, strict=True):
        assert torch.equal(permute_qk(moved, h, to=back, rotary_dim=rotary_dim), w)


def test_the_way_to_half_split_is_that_of_transformers_conversion_of_llama() -> None:
    weight, heads = torch.randn(4 * 8, 5), 4
    theirs = weight.view(heads, 8 // 2, 2, 5).transpose(1, 2).reshape(4 * 8, 5)
    assert torch.equal(permute_qk(weight, heads, to="half_split"), theirs)
