"""What a model says next."""

import math

import pytest
import torch
from decoders import small
from kinds import POSITIONS

from embedlayer import OutputHead, PositionError, ShapeError, SizeError, TokenIdError, generate
from embedlayer.models.generate import sample_tokens, sampling_probabilities


def read_anew(model, ids, count):
    """Greedy decoding without a cache: the definition."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=-1)
    return ids


@pytest.mark.parametrize("position", POSITIONS)
def test_greedy_decoding_equals_reading_everything_anew(position) -> None:
    model = small(position, num_kv_heads=2, head=OutputHead(vocab_size=50, embed_dim=24, init_std=1.0))
    ids = torch.randint(1, 50, (3, 4))
    assert torch.equal(generate(model, ids, max_new_tokens=12), read_anew(model, ids, 12))
    assert torch.equal(generate(model, ids[0], max_new_tokens=12), read_anew(model, ids[:1], 12)[0])


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_where_positions_run_out_the_scheme_says_so(position) -> None:
    model = small(position)
    ids = torch.randint(1, 50, (1, 4))
    assert generate(model, ids, max_new_tokens=13).shape == (1, 17)  # the last token is not read
    with pytest.raises(PositionError, match="a sequence of 17 exceeds the 16 positions"):
        generate(model, ids, max_new_tokens=14)


def test_it_stops_after_the_stop_token_and_fills_up_what_ended_before() -> None:
    model = small(head=OutputHead(vocab_size=50, embed_dim=24, init_std=1.0))
    ids = torch.randint(1, 50, (1, 4))
    free = generate(model, ids, max_new_tokens=10)[0, 4:]
    stop = int(free[5])
    first = free.tolist().index(stop)
    stopped = generate(model, ids, max_new_tokens=10, stop_id=stop)
    assert stopped[0, 4:].tolist() == free[: first + 1].tolist()
    assert torch.equal(generate(model, ids, max_new_tokens=10, stop_id=[stop, 49]), stopped)
    other = torch.randint(1, 50, (1, 4))
    both = generate(model, torch.cat([ids, other]), max_new_tokens=10, stop_id=stop)
    assert both[0, 4 + first :].eq(stop).all()
    assert torch.equal(generate(model, ids, max_new_tokens=0), ids)


def test_a_seed_fixes_what_is_drawn() -> None:
    model = small()
    ids = torch.randint(1, 50, (2, 3))
    torch.manual_seed(5)
    drawn = generate(model, ids, max_new_tokens=8, temperature=1.0)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(generate(model, ids, max_new_tokens=8, temperature=1.0, generator=generator), drawn)
    assert not torch.equal(generate(model, ids, max_new_tokens=8, temperature=1.0, generator=generator), drawn)
    assert torch.equal(
        generate(model, ids, max_new_tokens=8, temperature=9.0, top_k=1), generate(model, ids, max_new_tokens=8)
    )


def test_tokens_are_drawn_by_their_probabilities() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -math.inf]).expand(20_000, 4)
    for temperature, top_k, kept in ((1.0, None, 4), (0.5, None, 4), (1.0, 2, 2)):
        cut = logits[0].clone()
        cut[cut < cut.sort(descending=True).values[kept - 1]] = -math.inf
        shares = sample_tokens(logits, temperature=temperature, top_k=top_k).bincount(minlength=4) / 20_000
        assert torch.allclose(shares, (cut / temperature).softmax(-1), atol=0.015)


@pytest.mark.parametrize("top_k", [None, 1, 12])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_tokens_sampled_from_and_their_probabilities_are_those_of_transformers(temperature, top_k, top_p) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process", reason="the dev extra is not installed")
    logits = 3 * torch.randn(5, 50)
    theirs = warpers.TemperatureLogitsWarper(temperature)(None, logits)
    theirs = theirs if top_k is None else warpers.TopKLogitsWarper(top_k)(None, theirs)
    theirs = theirs if top_p is None else warpers.TopPLogitsWarper(top_p)(None, theirs)
    ours, tokens = sampling_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    spread = torch.zeros_like(logits).scatter_(-1, tokens, ours)
    assert torch.equal(spread > 0, theirs > -math.inf)
    torch.testing.assert_close(spread, theirs.softmax(-1))


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    for top_p, kept in ((0.3, 1), (0.6, 2), (0.95, 4)):
        assert int(sampling_probabilities(logits, temperature=1.0, top_p=top_p)[0].count_nonzero()) == kept
        drawn = sample_tokens(logits.expand(2000, 4), temperature=1.0, top_p=top_p)
        assert drawn.unique().tolist() == list(range(kept))


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    model = small(dropout=0.5).train()
    ids = torch.randint(1, 50, (1, 3))
    assert torch.equal(generate(model, ids, max_new_tokens=8), generate(model, ids, max_new_tokens=8))
    assert model.training
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0 or a positive number, not -1.0"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be at least 1, not 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be above 0 and at most 1, not 1.1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, not -1"),
    ],
)
def test_options_out_of_range_are_refused(options, message) -> None:
    with pytest.raises(SizeError, match=message):
        generate(small(), torch.tensor([1]), **{"max_new_tokens": 2, **options})


def test_bad_beginnings_are_refused() -> None:
    with pytest.raises(TokenIdError):
        generate(small(), torch.tensor([50]), max_new_tokens=1)
    with pytest.raises(ShapeError):
        generate(small(), torch.tensor([], dtype=torch.long), max_new_tokens=1)
