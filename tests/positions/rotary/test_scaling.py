"""Every rope type, against transformers' own cosines and sines over lengths 1 to twice the trained one."""

import json

import pytest
import torch
from comparison import assert_no_worse
from covering import cases, some

from embedlayer import RotaryEmbedding, ShapeError
from embedlayer.positions import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RotaryScaling,
    YarnScaling,
)

TRAINED, HEAD = 64, 16
SHORT, LONG = tuple(1 + i / 10 for i in range(8)), tuple(2.0 + i for i in range(8))
L = {"original_max_position_embeddings": TRAINED}
CASES: dict[str, tuple[dict, RotaryScaling | None]] = {
    "default": ({}, None),
    "linear": ({"factor": 4.0}, LinearScaling(4.0)),
    "dynamic": ({"factor": 4.0}, DynamicNTKScaling(4.0, TRAINED)),
    "yarn": ({"factor": 4.0, **L}, YarnScaling(4.0, TRAINED)),
    "yarn, whole": (
        {"factor": 8.0, **L, "truncate": False, "beta_fast": 8.0},
        YarnScaling(8.0, TRAINED, 8.0, truncate=False),
    ),
    "yarn, mscale": (
        {"factor": 40.0, **L, "mscale": 0.7, "mscale_all_dim": 0.3},
        YarnScaling(40.0, TRAINED, mscale=0.7, mscale_all_dim=0.3),
    ),
    "yarn, attention": ({"factor": 4.0, **L, "attention_factor": 1.5}, YarnScaling(4.0, TRAINED, attention_factor=1.5)),
    "longrope": (
        {"factor": 4.0, **L, "short_factor": list(SHORT), "long_factor": list(LONG)},
        LongRopeScaling(SHORT, LONG, TRAINED, 4.0),
    ),
    "llama3": (
        {"factor": 8.0, **L, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        Llama3Scaling(8.0, TRAINED, 1.0, 4.0),
    ),
    "proportional": ({"partial_rotary_factor": 0.5, "factor": 2.0}, ProportionalScaling(0.5, 2.0)),
}
CHANGING = [DynamicNTKScaling(4.0, TRAINED), LongRopeScaling(SHORT, LONG, TRAINED, 4.0)]


@cases("name, base", CASES, [10_000.0, 500_000.0])
def test_cosines_and_sines_equal_transformers_over_lengths_1_to_twice_the_trained(name, base) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, scaling = CASES[name]
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=4 * TRAINED if "original_max_position_embeddings" in parameters else TRAINED,
        rope_parameters={"rope_type": name.partition(",")[0], "rope_theta": base, **parameters},
    )
    theirs, ours = LlamaRotaryEmbedding(config), RotaryEmbedding(HEAD, base, scaling=scaling)
    assert ours.attention_scaling == pytest.approx(theirs.attention_scaling, rel=1e-12)
    assert RotaryEmbedding.from_config(json.loads(json.dumps(config.to_dict()))).config == ours.config
    for length in range(1, 2 * TRAINED + 1):
        places = torch.arange(length)
        cos, sin = (part[0, :, : HEAD // 2] for part in theirs(torch.zeros(1), places[None]))
        exact_frequencies = scaling.frequencies(HEAD, base, length) if scaling else None
        if exact_frequencies is None:
            exact_frequencies = base ** (-torch.arange(0, HEAD, 2).double() / HEAD)
        torch.testing.assert_close(theirs.inv_freq.double(), exact_frequencies, rtol=6e-7, atol=0)
        exact = places.double()[:, None] * exact_frequencies
        rounding = 1e-6 + places[:, None] * 2.0**-22  # theirs rounds each frequency, and each angle, to float32
        for mine, other, true in zip(ours.cos_sin(places), (cos, sin), (exact.cos(), exact.sin()), strict=True):
            assert ((mine - other).abs() <= rounding * ours.attention_scaling).all()
            assert_no_worse(mine, other, true * ours.attention_scaling, slack=2e-7)


@pytest.mark.parametrize("scaling", CHANGING, ids=["dynamic", "longrope"])
def test_up_to_the_limit_frequencies_are_one_set_and_past_it_another(scaling) -> None:
    position = RotaryEmbedding(HEAD, scaling=scaling)
    short = position.phase_increments_at(1)
    assert torch.equal(short, position.phase_increments)
    assert torch.equal(position.phase_increments_at(TRAINED), short)
    assert not torch.equal(position.phase_increments_at(TRAINED + 1), short)
    again = torch.equal(position.phase_increments_at(TRAINED + 2), position.phase_increments_at(TRAINED + 1))
    assert again == isinstance(scaling, LongRopeScaling)
    assert torch.equal(
        position.phase_increments_at(torch.tensor(TRAINED + 1)), position.phase_increments_at(TRAINED + 1)
    )


@pytest.mark.parametrize("scaling", CHANGING, ids=["dynamic", "longrope"])
def test_a_call_uses_the_longest_position_and_remembers_no_earlier_call(scaling) -> None:
    position = RotaryEmbedding(HEAD, scaling=scaling)
    q = torch.randn(2, 1, 3, HEAD)
    before = position.rotate(q, q, torch.arange(3))[0]
    long = torch.tensor([[0, 1, 2], [0, 1, TRAINED]])
    assert not torch.equal(position.rotate(q, q, long)[0][0], before[0])
    assert torch.equal(position.rotate(q, q, torch.arange(3))[0], before)
    cos, _ = position.cos_sin(long)
    assert torch.equal(cos, position.cos_sin(long, TRAINED + 1)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scaling", CHANGING, ids=["dynamic", "longrope"])
def test_a_cache_that_crosses_the_limit_is_right_after_turning_it_again(scaling, interleaved) -> None:
    """Decoding token by token: scores against the cache equal those of one pass over the whole sequence."""
    position = RotaryEmbedding(HEAD, scaling=scaling, interleaved=interleaved, rotary_dim=HEAD)
    torch.manual_seed(2)
    count = TRAINED + 3
    q, k = torch.randn(1, 4, count, HEAD), torch.randn(1, 2, count, HEAD)
    places = torch.arange(count)
    cache = position.rotate(q[:, :, :TRAINED], k[:, :, :TRAINED], places[:TRAINED])[1]
    for step in range(TRAINED, count):
        length, stale = step + 1, cache
        cache = position.rerotate(cache, places[:step], from_length=step, to_length=length)
        query, key = position.rotate(q[:, :, step:length], k[:, :, step:length], places[step:length])
        cache = torch.cat([cache, key], dim=2)
        whole_q, whole_k = position.rotate(q[:, :, :length], k[:, :, :length], places[:length])
        assert torch.allclose(cache, whole_k, atol=1e-5)
        assert torch.allclose(query, whole_q[:, :, -1:], atol=1e-6)
        if step == TRAINED:
            assert (stale - whole_k[:, :, :-1]).abs().max() > 0.1


@pytest.mark.parametrize("scaling", CHANGING, ids=["dynamic", "longrope"])
def test_within_one_regime_a_cache_stays_valid_and_turning_it_again_changes_no_bit(scaling) -> None:
    position = RotaryEmbedding(HEAD, scaling=scaling)
    k = torch.randn(1, 2, 5, HEAD)
    cache = position.rotate(k, k, torch.arange(5))[1]
    assert torch.equal(position.rerotate(cache, torch.arange(5), from_length=5, to_length=TRAINED), cache)
    pinned = position.at_length(4 * TRAINED)
    early = pinned.rotate(k, k, torch.arange(5))[1]
    late = pinned.rotate(k, k, torch.tensor([0, 1, 2, 3, 4 * TRAINED - 1]))[1]
    assert torch.equal(early[:, :, :4], late[:, :, :4])
    assert torch.equal(pinned.phase_increments_at(pinned.scaling.length), position.phase_increments_at(4 * TRAINED))


def test_turning_again_is_exact_far_away() -> None:
    """The angle of the difference is a whole number of turns: nothing rounds at position 10 million."""
    position = RotaryEmbedding(HEAD, scaling=LongRopeScaling(SHORT, LONG, TRAINED, 4.0))
    places = torch.arange(10_000_000, 10_000_020)
    k = torch.randn(1, 1, 20, HEAD, dtype=torch.float64)
    from_short = position.at_length(1).rotate(k, k, places)[1]
    again = position.rerotate(from_short, places, from_length=1, to_length=10_000_020)
    assert torch.allclose(again, position.rotate(k, k, places)[1], atol=1e-6)


def test_pinning_a_scheme_without_regimes_changes_nothing() -> None:
    position, k = RotaryEmbedding(HEAD, scaling=LinearScaling(2.0)), torch.randn(1, 1, 4, HEAD)
    assert position.at_length(1000).config == position.config
    assert torch.equal(position.rerotate(k, torch.arange(4), from_length=1, to_length=1000), k)
    with pytest.raises(ShapeError):
        position.rerotate(torch.cat([k, k], -1), torch.arange(4), from_length=1, to_length=1000)


@pytest.mark.parametrize("name", some(["longrope"], CASES))
def test_it_compiles_to_one_graph(name, unchecked: None) -> None:
    """The frequencies of the others are fixed numbers; `tests/laws/test_export.py` compiles dynamic ones."""
    torch.compiler.reset()
    position, q = RotaryEmbedding(HEAD, scaling=CASES[name][1]), torch.randn(2, 4, 5, HEAD)
    compiled = torch.compile(position.rotate, fullgraph=True, backend="aot_eager")
    for places in (torch.arange(5), torch.arange(TRAINED, TRAINED + 5)):
        torch.testing.assert_close(compiled(q, q, places)[0], position.rotate(q, q, places)[0])
