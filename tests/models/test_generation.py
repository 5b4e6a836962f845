"""What a model says next."""

import math
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from covering import cases, covering, some
from decoders import small
from kernel_paths import cpu_taken_for_cuda
from kinds import POSITIONS
from torch import Tensor

from embedlayer import (
    CheckpointError,
    DecoderLM,
    OutputHead,
    PositionError,
    RotaryEmbedding,
    ShapeError,
    SizeError,
    TokenEmbedding,
    TokenIdError,
    generate,
)
from embedlayer.models.generation import GeneratedTokens, next_tokens
from embedlayer.models.sampling import Sampler, sample


def read_anew(model, ids, count):
    """Greedy decoding without a cache: the definition."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=-1)
    return ids


BY_HOOK = ["learned", "rotary", "rotary, query scaling", "dynamic", "alibi", "relative", "none"]
"""Schemes of each form; tests/models/test_cache.py caches tokens, also behind padding, with all of them always."""


@pytest.mark.parametrize("position", some(BY_HOOK, POSITIONS))
def test_greedy_decoding_equals_reading_everything_anew(position) -> None:
    model = small(position, num_kv_heads=2, head=OutputHead(vocab_size=50, embed_dim=24, init_std=1.0))
    ids = torch.randint(1, 50, (3, 4))
    expected = read_anew(model, ids, 12)
    assert torch.equal(generate(model, ids, max_new_tokens=12), expected)
    assert torch.equal(generate(model, ids[0], max_new_tokens=3), expected[0, :7])


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_where_positions_run_out_the_scheme_says_so(position) -> None:
    model = small(position)
    ids = torch.randint(1, 50, (1, 4))
    assert generate(model, ids, max_new_tokens=13).shape == (1, 17)  # the last token is not read
    with pytest.raises(PositionError):
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


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.5}, {"repetition_penalty": 1.1, "temperature": 1e-6}])
def test_the_end_of_a_text_changes_no_other_text_of_its_batch(options) -> None:
    model = small(head=OutputHead(vocab_size=50, embed_dim=24, init_std=1.0))
    ids = torch.randint(1, 50, (3, 4))
    alone = [generate(model, row, max_new_tokens=12, **options) for row in ids]
    others = torch.stack(alone[1:])
    end, stop = next((i, token) for i, token in enumerate(alone[0].tolist()) if i > 4 and token not in others[:, 4:])
    together = generate(model, ids, max_new_tokens=12, stop_id=stop, **options)
    assert together[0].tolist() == [*alone[0][:end].tolist(), *[stop] * (16 - end)]
    assert torch.equal(together[1:], others)


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


def test_dropout_is_off_and_the_mode_comes_back() -> None:
    model = small(dropout=0.5).train()
    ids = torch.randint(1, 50, (1, 3))
    assert torch.equal(generate(model, ids, max_new_tokens=8), generate(model, ids, max_new_tokens=8))
    assert model.training
    assert not any(parameter.grad is not None for parameter in model.parameters())


OUT_OF_RANGE: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-1.0, math.nan)),
    {"temperature": 1.0, "top_k": 0},
    *({"temperature": 1.0, "top_p": value} for value in (0.0, 1.1)),
    *({"min_p": value} for value in (-0.1, 1.1, math.nan)),
    *({"repetition_penalty": value} for value in (0.0, -1.0, math.inf, math.nan)),
    {"logprobs_mode": "raw_logits", "return_log_probs": True},
    {"logprobs_mode": "raw_logprobs"},
    {"head_dtype": torch.float64},
    {"max_new_tokens": -1},
]


def test_options_out_of_range_are_refused() -> None:
    for options in OUT_OF_RANGE:
        with pytest.raises(SizeError):
            generate(small(), torch.tensor([1]), **{"max_new_tokens": 2, **options})


def test_unknown_options_are_refused_before_a_token_is_computed() -> None:
    with pytest.raises(TypeError, match="typical_p"):
        generate(small(), torch.tensor([1]), max_new_tokens=0, typical_p=0.5)  # type: ignore[call-overload]


SIDES = ("left", "right", "documents")


@pytest.mark.parametrize(("position", "side"), some(covering(product(BY_HOOK, SIDES)), product(POSITIONS, SIDES)))
def test_padding_and_earlier_documents_change_no_new_token(position, side) -> None:
    model = small(position, num_kv_heads=2, head=OutputHead(vocab_size=50, embed_dim=24, init_std=1.0))
    texts = [torch.randint(1, 50, (length,)) for length in (2, 5, 3)]
    ids, mask = torch.full((3, 6), 7), torch.zeros(3, 6, dtype=torch.long)
    for row, text in enumerate(texts):
        place = slice(0, len(text)) if side == "right" else slice(6 - len(text), 6)
        ids[row, place], mask[row, place] = text, 1
    mask = mask + 1 if side == "documents" else mask
    options = {"max_new_tokens": 5, "repetition_penalty": 1.2} if side != "documents" else {"max_new_tokens": 5}
    found = generate(model, ids, attention_mask=mask, **options)
    assert torch.equal(found[:, :6], ids)
    for row, text in zip(found, texts, strict=True):
        assert torch.equal(row[6:], generate(model, text, **options)[len(text) :])
    assert torch.equal(generate(model, ids[1], attention_mask=mask[1], **options), found[1])


def test_a_mask_without_a_text_and_of_another_shape_is_refused(unchecked) -> None:
    model, ids = small(), torch.randint(1, 50, (2, 4))
    with pytest.raises(ShapeError):
        generate(model, ids, max_new_tokens=1, attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    with pytest.raises(ShapeError):
        generate(model, ids, max_new_tokens=1, attention_mask=torch.ones(2, 3, dtype=torch.long))


OPTIONS: dict[str, dict[str, Any]] = {
    "no end": {},
    "a token that ends": {"stop_id": [3, 17, 20]},
    "repetition penalty": {"repetition_penalty": 1.3, "stop_id": 3},
    "samples": {"temperature": 2.0, "top_k": 5},
}


CALLS = [*product(POSITIONS, [False, True], OPTIONS)]


@pytest.mark.parametrize(
    ("position", "padding", "options"), some(covering(call for call in CALLS if call[0] in BY_HOOK), CALLS)
)
def test_an_accelerator_generates_the_same_tokens(position, padding, options) -> None:
    """There keys and values are in a cache of a fixed size, and IDs are checked later."""
    model = small(position, num_kv_heads=2, head=OutputHead(vocab_size=50, embed_dim=24, init_std=1.0))
    ids, mask = torch.randint(1, 50, (3, 4)), torch.ones(3, 4, dtype=torch.long)
    mask[0, :2] = 0
    call = {"max_new_tokens": 7, "attention_mask": mask if padding else None, **OPTIONS[options]}
    torch.manual_seed(0)
    expected = generate(model, ids, **call)
    torch.manual_seed(0)
    with cpu_taken_for_cuda():
        assert torch.equal(generate(model, ids, **call), expected)


@pytest.mark.parametrize(
    ("error", "ids", "mask", "tokens"),
    [
        (TokenIdError, [[5, 50], [5, 5]], None, 1),
        (ShapeError, [[5, 5], [5, 5]], [[1, 1], [0, 0]], 1),
        (PositionError, [[5, 5], [5, 5]], None, 16),
    ],
)
def test_an_accelerator_raises_the_errors_of_a_cpu(error, ids, mask, tokens) -> None:
    model, mask = small("learned"), None if mask is None else torch.tensor(mask)
    with pytest.raises(error) as of_cpu:
        generate(model, torch.tensor(ids), max_new_tokens=tokens, attention_mask=mask)
    with cpu_taken_for_cuda():
        new = next_tokens(model, torch.tensor(ids), max_new_tokens=tokens, attention_mask=mask)
        for _ in range(tokens - 1):
            next(new)
        with pytest.raises(error) as of_accelerator:
            next(new)
    assert str(of_accelerator.value) == str(of_cpu.value)


def generated(model: DecoderLM, ids: Tensor, **options: Any) -> tuple[GeneratedTokens, Tensor]:
    """Tokens with their log-probabilities, and the hidden state from which each was computed, `(B, N, D)`."""
    states: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda module, inputs, hidden: states.append(hidden[:, -1]))
    found = generate(model, ids, return_log_probs=True, **options)
    hook.remove()
    return found, torch.stack(states, 1)


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition penalty": {"repetition_penalty": 1.4},
    "temperature": {"temperature": 0.7},
    "filters": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
}


@cases("sampling, mode, tied", SAMPLING, ["raw_logprobs", "processed_logprobs"], [False, True])
def test_log_probabilities_are_those_of_the_new_tokens_after_the_same_hidden_states(sampling, mode, tied) -> None:
    head = None if tied else OutputHead(24, 50, init_std=1.0, softcap=5.0, bias=True)
    model, ids, options = small(head=head), torch.randint(1, 50, (3, 4)), SAMPLING[sampling]
    found, hidden = generated(model, ids, max_new_tokens=9, logprobs_mode=mode, **options)
    torch.manual_seed(0)
    tokens = found.ids[:, 4:]
    if mode == "raw_logprobs":
        expected = model.head.token_log_probs(hidden, tokens)
    else:
        sampler = Sampler(**options)
        processed = [
            sampler.processed_logits(model.head(hidden[:, step]), found.ids[:, : 4 + step]) for step in range(9)
        ]
        expected = torch.stack(processed, 1).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-5, atol=1e-5)
    assert found.mask.all()
    assert found.log_probs.dtype == torch.float32


@cases(
    "sampling, mode, dtype, head_dtype, tied",
    SAMPLING,
    ["raw_logprobs", "processed_logprobs"],
    [torch.float32, torch.bfloat16],
    [None, torch.float32],
    [False, True],
)
def test_a_cached_step_has_the_bits_of_the_pass_over_the_finished_text(sampling, mode, dtype, head_dtype, tied) -> None:
    head = None if tied else OutputHead(24, 50, init_std=1.0, softcap=5.0)
    model, ids, options = small(head=head).to(dtype), torch.randint(1, 50, (3, 4)), SAMPLING[sampling]
    products = {"batch_invariant": True, "head_dtype": None if head_dtype is None else "float32"}
    found, hidden = generated(model, ids, max_new_tokens=9, logprobs_mode=mode, **products, **options)
    tokens, logits = found.ids[:, 4:], model.head.uncomputed_logits(hidden, **products).head_logits()
    steps = [model.head.uncomputed_logits(hidden[:, step], **products).head_logits() for step in range(9)]
    assert torch.equal(torch.stack(steps, 1), logits)
    sampler = Sampler(**options)
    if mode == "raw_logprobs" or sampler.only_divides:
        temperature = options.get("temperature", 1.0) if mode == "processed_logprobs" else 1.0
        expected = model.head.token_log_probs(hidden, tokens, temperature=temperature, **products)
    else:
        processed = [sampler.processed_logits(logits[:, step], found.ids[:, : 4 + step]) for step in range(9)]
        expected = torch.stack(processed, 1).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(found.log_probs, expected)
    model.head.head_dtype, model.head.batch_invariant = head_dtype, True
    again = generate(model, ids, max_new_tokens=9, return_log_probs=True, logprobs_mode=mode, **options)
    if not options.get("temperature"):
        assert torch.equal(again.ids, found.ids)
        assert torch.equal(again.log_probs, found.log_probs)


def test_the_last_token_that_fills_up_an_ended_text_has_no_log_probability() -> None:
    model = small(head=OutputHead(vocab_size=50, embed_dim=24, init_std=1.0))
    ids = torch.randint(1, 50, (3, 4))
    plain = generate(model, ids, max_new_tokens=10)
    stop = int(plain[0, 7])
    found, hidden = generated(model, ids, max_new_tokens=10, stop_id=stop)
    assert torch.equal(found.ids, generate(model, ids, max_new_tokens=10, stop_id=stop))
    new = found.ids[:, 4:]
    before = (new == stop).cumsum(1) - (new == stop).long()
    assert torch.equal(found.mask, before == 0)
    assert not found.mask.all()
    expected = model.head.token_log_probs(hidden, new.masked_fill(~found.mask, -100))
    torch.testing.assert_close(found.log_probs, expected, rtol=1e-5, atol=1e-5)
    assert found.log_probs[~found.mask].eq(0).all()
    steps = list(next_tokens(model, ids, max_new_tokens=10, stop_id=stop, return_log_probs=True))
    assert torch.equal(torch.stack([each.log_probs for each in steps], 1), found.log_probs)
    assert torch.equal(torch.stack([each.mask for each in steps], 1), found.mask)


def test_log_probabilities_have_the_shape_of_the_new_tokens() -> None:
    model = small()
    found = generate(model, torch.tensor([3, 4], dtype=torch.int32), max_new_tokens=5, return_log_probs=True)
    assert (found.ids.shape, found.log_probs.shape, found.mask.shape) == ((7,), (5,), (5,))
    assert found.ids.dtype == torch.int32
    none = generate(model, torch.tensor([[3, 4]]), max_new_tokens=0, return_log_probs=True)
    assert (none.ids.shape, none.log_probs.shape, none.mask.shape) == ((1, 2), (1, 0), (1, 0))


BAD_ROWS = {"NaN": math.nan, "infinity": math.inf}
SAMPLINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1},
]


@pytest.mark.parametrize("options", [*SAMPLINGS, {"repetition_penalty": 2.0}], ids=str)
@pytest.mark.parametrize("bad", BAD_ROWS)
@pytest.mark.parametrize("device", [nullcontext, cpu_taken_for_cuda], ids=["cpu", "cuda"])
def test_a_logit_that_is_not_finite_is_an_error_that_says_where(bad, options, device) -> None:
    """On an accelerator at the next wait; no sample is drawn from NaN, which would stop the device."""
    torch.manual_seed(0)
    model = DecoderLM(TokenEmbedding(20, 8), RotaryEmbedding(4), num_layers=1, num_heads=2)
    hook = model.head.register_forward_hook(lambda head, args, logits: logits.index_fill(0, torch.tensor(1), math.nan))
    ids = torch.tensor([[1, 2], [3, 4]])
    for stop in (None, 7):
        with device(), pytest.raises(CheckpointError):
            generate(model, ids, max_new_tokens=3, stop_id=stop, **options)
    hook.remove()
    model.head.register_forward_hook(lambda head, args, logits: logits.index_fill(1, torch.tensor(5), BAD_ROWS[bad]))
    with device(), pytest.raises(CheckpointError):
        generate(model, ids[0], max_new_tokens=3, **options)
    logits = torch.zeros(2, 20).index_fill(1, torch.tensor(5), BAD_ROWS[bad])
    with pytest.raises(SizeError):
        sample(logits, torch.zeros(2, 1, dtype=torch.long), **options)


def test_logits_of_a_text_that_has_ended_need_not_be_finite() -> None:
    torch.manual_seed(0)
    model = DecoderLM(TokenEmbedding(20, 8), RotaryEmbedding(4), num_layers=1, num_heads=2)
    first = generate(model, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=1)[:, -1].tolist()
    assert first[0] != first[1]
    steps = iter(range(10))

    def spoil(head, args, logits):
        return logits if next(steps) == 0 else logits.index_fill(0, torch.tensor(0), math.nan)

    model.head.register_forward_hook(spoil)
    texts = generate(model, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=4, stop_id=first[0])
    assert texts[0, 2:].tolist() == [first[0]] * (texts.shape[1] - 2)
