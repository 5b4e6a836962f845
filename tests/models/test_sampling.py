"""The tokens that are sampled from, and their probabilities, beside transformers' `generate`."""

import math
import random
from typing import Any

import pytest
import torch
from covering import cases, some

from embedlayer import ShapeError, SizeError, generate, load_llama
from embedlayer.models.sampling import Sampler, sample

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")

SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
VALUES = {
    "temperature": [1e-20, 1e-3, 0.5, 1.0, 3.0, 1e20],
    "top_k": [None, 1, 2, 12, 39, 40, 1000],
    "top_p": [None, 1e-9, 0.25, 0.5, 0.9, 1.0],
    "min_p": [None, 0.0, 1e-3, 0.1, 0.5, 1.0],
    "repetition_penalty": [None, 1.0, 0.3, 1.2, 50.0],
}
LOGITS = {
    "normal": lambda rows: 3 * torch.randn(rows, 40),
    "whole numbers": lambda rows: torch.randint(-2, 3, (rows, 40)).float(),
    "equal": lambda rows: torch.ones(rows, 40),
    "zero": lambda rows: torch.zeros(rows, 40),
    "some -inf": lambda rows: (
        torch.randn(rows, 40).where(torch.rand(rows, 40) < 0.3, -math.inf).index_fill(-1, torch.tensor([7]), 1.0)
    ),
    "all but one -inf": lambda rows: torch.full((rows, 40), -math.inf).index_fill(-1, torch.tensor([7]), 1.0),
    "bfloat16": lambda rows: (3 * torch.randn(rows, 40)).bfloat16(),
    "float64": lambda rows: torch.randn(rows, 40, dtype=torch.float64),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A small LLaMA of transformers, and the same weights in a `DecoderLM`."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, initializer_range=0.5)).eval()
    theirs.save_pretrained(folder)
    return load_llama(folder), theirs


def processed_by_transformers(model, ids, logits, options):
    """What transformers' `generate` samples from: its processors, in its order."""
    config = transformers.GenerationConfig(do_sample=True, num_beams=1, **options)
    mask = {"attention_mask": torch.ones_like(ids)}
    processors = model._get_logits_processor(config, ids.shape[-1], device="cpu", model_kwargs=mask)
    return processors(ids, logits.to(torch.float32))


@pytest.mark.parametrize("count", some([50], [50, 150]))
@pytest.mark.parametrize("kind", LOGITS)
def test_the_logits_that_are_sampled_from_are_those_of_transformers(models, kind, count) -> None:
    choose = random.Random(kind)
    for _ in range(count):
        options: dict[str, Any] = {name: choose.choice(values) for name, values in VALUES.items()}
        rows, length = choose.choice([1, 2, 5]), choose.choice([1, 3, 60])
        logits, ids = LOGITS[kind](rows), torch.randint(0, 40, (rows, length))
        expected = processed_by_transformers(models[1], ids, logits, options)
        found = Sampler(**options).processed_logits(logits, ids)
        assert torch.equal(found == -math.inf, expected == -math.inf), options
        torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))


SAMPLING: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02})


@cases("sampling, penalty, length, rows", SAMPLING, (None, 0.6, 4.0, 1.3), (1, 5), (1, 3))
def test_whole_texts_are_those_of_transformers(models, rows, length, penalty, sampling) -> None:
    ours, theirs = models
    ids = torch.randint(0, 40, (rows, length))
    mask = torch.ones_like(ids)
    with torch.no_grad():
        free = theirs.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0)
    for stop in (None, int(free[0, length + 3])):
        torch.manual_seed(3)
        expected = theirs.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=30,
            do_sample=bool(sampling),
            eos_token_id=stop,
            pad_token_id=40 if stop is None else stop,
            repetition_penalty=penalty,
            **sampling,
        )
        torch.manual_seed(3)
        found = generate(ours, ids, max_new_tokens=30, stop_id=stop, repetition_penalty=penalty, **sampling)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-30, 1e-10])
def test_the_smallest_temperatures_sample_the_largest_logits(temperature) -> None:
    logits = torch.tensor([[-40.0, 40.0, 39.999, 40.0, -math.inf]])
    processed = Sampler(temperature=temperature, top_p=0.9, min_p=0.1).processed_logits(logits, torch.tensor([[0]]))
    assert processed.softmax(-1).tolist() == [[0.0, 0.5, 0.0, 0.5, 0.0]]


def test_a_token_is_penalized_once_however_often_it_is_in_the_text() -> None:
    logits, sampler = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]]), Sampler(repetition_penalty=2.0)
    assert sampler.processed_logits(logits, torch.tensor([[0, 1, 0, 0, 1]])).tolist() == [[1.0, -4.0, 2.0, -2.0, 0.0]]
    assert logits.tolist() == [[2.0, -2.0, 2.0, -2.0, 0.0]]


def test_tokens_are_sampled_by_their_probabilities() -> None:
    logits, ids = torch.tensor([1.0, 3.0, 2.0, -math.inf]).expand(20_000, 4), torch.zeros(20_000, 1, dtype=torch.int32)
    for options in ({}, {"temperature": 0.5}, {"top_k": 2}, {"min_p": 0.3}, {"repetition_penalty": 0.5}):
        sampler = Sampler(**{"temperature": 1.0, **options})
        shares = sampler.sampled(sampler.processed_logits(logits, ids))[0].bincount(minlength=4) / 20_000
        assert torch.allclose(shares, sampler.processed_logits(logits, ids)[0].softmax(-1), atol=0.015)


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    for top_p, kept in ((0.3, 1), (0.6, 2), (0.95, 4)):
        processed = Sampler(temperature=1.0, top_p=top_p).processed_logits(logits, torch.tensor([[0]]))
        assert int(processed.isfinite().sum()) == kept


def test_sample_takes_the_logits_of_any_model() -> None:
    logits, ids = torch.randn(3, 40), torch.randint(0, 40, (3, 5))
    assert torch.equal(sample(logits), logits.argmax(-1))
    assert sample(logits[0]).shape == ()
    options = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3}
    sampler = Sampler(**options, generator=torch.Generator().manual_seed(1))
    expected, _ = sampler.sampled(sampler.processed_logits(logits, ids))
    assert torch.equal(sample(logits, ids, **options, generator=torch.Generator().manual_seed(1)), expected)
    with pytest.raises(SizeError):
        sample(logits, repetition_penalty=1.3)
    with pytest.raises(TypeError, match="top_q"):
        sample(logits, top_q=0.5)  # type: ignore[call-arg]


def test_other_numbers_of_texts_and_rows_of_logits_are_refused(unchecked) -> None:
    with pytest.raises(ShapeError):
        sample(torch.randn(2, 9), torch.tensor([[1, 2]]), repetition_penalty=1.3)
