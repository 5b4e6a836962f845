"""Mixtures: each corpus has its share of the windows, of an epoch, of a step, and of the loss on held-out text."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import embedlayer as el
from embedlayer import TokenCorpus, train_tokenizer
from embedlayer.core.errors import SizeError, TokenizerError
from embedlayer.data.mixture import MixedSampler, TokenMixture
from embedlayer.data.windows import WindowSampler

BYTES = train_tokenizer((), "byte")


def mixture_of(weights: tuple[float, ...], batch_size: int, seed: int = 1) -> MixedSampler:
    """Corpus i has the tokens from 10,000 i on."""
    corpora = [np.arange(10_000 * number, 10_000 * number + 300 + number) for number in range(len(weights))]
    return MixedSampler(zip(corpora, weights, strict=True), max_length=7, batch_size=batch_size, seed=seed)


@pytest.mark.parametrize(("weights", "counts"), [((0.7, 0.2, 0.1), (721, 206, 103)), ((1,), (1024,))])
def test_each_corpus_has_exactly_its_share_of_an_epoch_and_its_own_windows_in_turn(weights, counts) -> None:
    sampler = mixture_of(weights, batch_size=100)
    size = sum(counts)
    assert sampler.counts == counts
    windows, targets = (torch.cat(parts) for parts in zip(*map(sampler.batch, range(size // 100 + 1)), strict=True))
    assert torch.equal(windows + 1, targets)
    corpora = windows[:, 0] // 10_000
    assert torch.bincount(corpora[:size], minlength=len(weights)).tolist() == list(counts)
    for number, own in enumerate(sampler.samplers):
        found = windows[:size][corpora[:size] == number]
        expected = own.windows(np.arange(counts[number]))[0]
        assert sorted(found[:, 0].tolist()) == sorted(expected[:, 0].tolist())
    if len(weights) > 1:  # in random order, another one in each epoch
        assert len(set(corpora[:40].tolist())) > 1
        later = torch.cat([sampler.batch(step)[0] for step in range(size // 100, 2 * size // 100)])[:, 0] // 10_000
        assert later[-40:].tolist() != corpora[:size][-40:].tolist()


def test_ranks_together_have_the_batch_of_one_process_and_a_step_needs_no_earlier_one() -> None:
    for step, ranks in ((0, 1), (5, 2), (204, 3), (205, 7), (4000, 2)):
        whole = mixture_of((0.7, 0.2, 0.1), batch_size=5).batch(step)
        parts = [mixture_of((0.7, 0.2, 0.1), batch_size=5).batch(step, rank=rank, ranks=ranks) for rank in range(ranks)]
        for index in (0, 1):
            assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
    assert not torch.equal(mixture_of((3, 1), 5, seed=2).batch(0)[0], mixture_of((3, 1), 5).batch(0)[0])


def test_what_is_no_mixture_is_refused() -> None:
    for weights in ((), (1, 0), (1, -2), (1, float("inf")), (1, float("nan")), (1, 1e-9)):
        with pytest.raises(SizeError):
            mixture_of(weights, batch_size=2)
    calls: list[tuple[Callable[[], Any], type[Exception]]] = [
        (lambda: mixture_of((1, 1), 2).batch(0, rank=2, ranks=2), SizeError),
        (lambda: TokenMixture([(np.arange(9), -1)]), SizeError),  # type: ignore[list-item]
    ]
    for call, error in calls:
        with pytest.raises(error):
            call()


def test_corpora_of_different_tokenizers_are_refused_by_name() -> None:
    own = TokenCorpus.from_text("I love dogs. " * 9, BYTES)
    other = TokenCorpus.from_text("I love dogs. " * 9, train_tokenizer("I love dogs. " * 9, "word"))
    for make in (TokenMixture, lambda pairs: MixedSampler(pairs, max_length=7, batch_size=2, seed=1)):
        with pytest.raises(TokenizerError):
            make([(own, 1), (own, 2), (other, 1)])
    sampler = MixedSampler([(own, 1), (np.arange(99), 1)], max_length=7, batch_size=2, seed=1)  # IDs state no tokenizer
    assert sampler.counts == (512, 512)


def test_a_mixture_is_split_and_counted_corpus_by_corpus() -> None:
    corpora = [TokenCorpus.from_text(text * 300, BYTES) for text in ("I love dogs. ", "Cats love naps; ")]
    mixture = TokenMixture(dict(zip(corpora, (3, 0.5), strict=True)))
    assert (len(mixture), mixture.num_bytes) == (sum(map(len, corpora)),) * 2
    assert np.array_equal(mixture.counts(257), corpora[0].counts(257) + corpora[1].counts(257))
    for part, expected in zip(mixture.split(0.2), zip(*(one.split(0.2) for one in corpora), strict=True), strict=True):
        assert part.weights == (3, 0.5)
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(part.corpora, expected, strict=True))
    of_numpy = TokenMixture(zip(corpora, np.array([3, 0.5], dtype=np.float32), strict=True))
    assert of_numpy.weights == (3.0, 0.5)
    assert {type(weight) for weight in of_numpy.weights} == {float}


def test_a_corpus_alone_keeps_the_order_of_training_that_it_had() -> None:
    corpus = TokenCorpus.from_text("I love dogs. " * 30, BYTES)
    options = el.TrainingOptions(steps=9, max_length=7, batch_size=4, seed=5)

    def sampler(data: Any) -> Any:
        model = el.DecoderLM(el.TokenEmbedding(257, 8), "rotary", num_layers=1, num_heads=2)
        return el.Trainer(model, data, data, options).sampler

    sizes: dict[str, int] = {"max_length": 7, "batch_size": 4, "seed": 5}
    pairs = [(corpus, 2), (corpus, 1)]
    for found, expected in (
        (sampler(corpus), WindowSampler(corpus, **sizes)),
        (sampler(TokenMixture(pairs)), MixedSampler(pairs, **sizes)),
    ):
        assert torch.equal(found.batch(9)[0], expected.batch(9)[0])
