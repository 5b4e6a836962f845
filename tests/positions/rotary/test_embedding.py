"""Rotary positions, against complex multiplication in float64."""

import pytest
import torch
from comparison import assert_no_worse
from hypothesis import given
from hypothesis import strategies as st

from embedlayer import RotaryEmbedding, SizeError
from embedlayer.positions import permute_qk


def turned_by_complex_numbers(x, places, base=10000.0, *, interleaved=False, rotary_dim=None):
    """The definition: pair i is a complex number times exp(1j * place * base^(-2i/rotary_dim)), in float64."""
    width = x.shape[-1] if rotary_dim is None else rotary_dim
    angles = places.double().unsqueeze(-1) * base ** (-torch.arange(0, width, 2).double() / width)
    factor = torch.polar(torch.ones_like(angles), angles).unsqueeze(-3)
    pairs = x[..., :width].double().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    turned = torch.complex(a, b) * factor
    parts = torch.stack([turned.real, turned.imag], dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat([parts, x[..., width:].double()], dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("places", [torch.arange(5), torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 0, 1]])])
def test_each_pair_is_turned_by_its_angle(interleaved, rotary_dim, places) -> None:
    position = RotaryEmbedding(8, interleaved=interleaved, rotary_dim=rotary_dim)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    for ours, x in zip(position.rotate(q, k, places), (q, k), strict=True):
        exact = turned_by_complex_numbers(x, places, interleaved=interleaved, rotary_dim=rotary_dim)
        assert ours.dtype == x.dtype
        assert torch.allclose(ours.double(), exact, atol=2e-6)


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


@given(shift=st.integers(0, 100_000), distance=st.integers(0, 500))
def test_a_score_depends_on_the_distance_only(shift, distance) -> None:
    position = RotaryEmbedding(16)
    torch.manual_seed(1)
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def score(start: int) -> float:
        turned_q, _ = position.rotate(q, q, torch.tensor([start + distance]))
        _, turned_k = position.rotate(k, k, torch.tensor([start]))
        return float((turned_q * turned_k).sum())

    assert score(shift) == pytest.approx(score(0), abs=2e-5)


def test_turning_keeps_lengths() -> None:
    q = torch.randn(2, 4, 30, 8)
    turned, _ = RotaryEmbedding(8).rotate(q, q, torch.arange(30))
    assert torch.allclose(turned.norm(dim=-1), q.norm(dim=-1), rtol=1e-5)


def test_position_zero_changes_nothing() -> None:
    q = torch.randn(2, 4, 1, 8)
    assert torch.equal(RotaryEmbedding(8).rotate(q, q, torch.tensor([0]))[0], q)


def test_in_bfloat16_it_is_no_worse_than_the_rounding_of_the_result() -> None:
    q = torch.randn(1, 2, 200, 16).bfloat16()
    ours, _ = RotaryEmbedding(16).to(torch.bfloat16).rotate(q, q, torch.arange(200))
    exact = turned_by_complex_numbers(q, torch.arange(200))
    assert_no_worse(ours, exact.bfloat16(), exact, slack=1e-7)


def test_a_single_sequence_needs_no_batch() -> None:
    position, q = RotaryEmbedding(8), torch.randn(4, 5, 8)
    assert torch.equal(
        position.rotate(q, q, torch.arange(5))[0], position.rotate(q[None], q[None], torch.arange(5))[0][0]
    )


def test_gradients_flow_back_through_the_inverse_turn() -> None:
    position = RotaryEmbedding(4, interleaved=True)
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q: position.rotate(q, q, torch.arange(3)), (q,), atol=1e-5)


@pytest.mark.long
def test_it_compiles_to_one_graph(unchecked: None) -> None:
    position, q = RotaryEmbedding(8), torch.randn(2, 4, 5, 8)
    compiled = torch.compile(position.rotate, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(q, q, torch.arange(5))[0], position.rotate(q, q, torch.arange(5))[0], atol=1e-6)


def test_sizes_and_bases_without_a_meaning_are_refused() -> None:
    for base in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SizeError, match="base must be positive and finite"):
            RotaryEmbedding(8, base=base)
    for sizes in ({"head_dim": 7}, {"head_dim": 8, "rotary_dim": 10}, {"head_dim": 8, "rotary_dim": 0}):
        with pytest.raises(SizeError, match="rotate pairs of channels"):
            RotaryEmbedding(**sizes)


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


def test_rows_that_are_no_heads_with_pairs_are_refused(unchecked) -> None:
    for heads, rotary_dim in ((5, None), (0, None), (32, None), (4, 3), (4, 10)):
        with pytest.raises(SizeError, match="32 rows cannot be"):
            permute_qk(torch.zeros(32, 4), heads, to="half_split", rotary_dim=rotary_dim)
    with pytest.raises(SizeError, match="'interleaved' or 'half_split', not 'neox'"):
        permute_qk(torch.zeros(32, 4), 4, to="neox")
