"""Mixtures: several corpora with a weight each, and windows of them in exactly these shares."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from embedlayer.core.errors import SizeError, TokenizerError
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.permutation import RandomPermutation
from embedlayer.data.windows import Batch, TokenIds, WindowSampler, derive_seed, windows_of_step

Ids = TypeVar("Ids", bound=TokenIds)
Weights = Mapping[Ids, float] | Iterable[tuple[Ids, float]]
"""Weight of each corpus: pairs of a corpus and its weight, or a dictionary from corpora to weights."""

EPOCH = 1024
"""Smallest number of windows in an epoch of a `MixedSampler`."""

DENOMINATOR = 10_000
"""Largest denominator of a fraction that a weight of a mixture is rounded to."""


class TokenMixture:
    """Corpora of one tokenizer with a weight each; a `Trainer` takes a mixture where it takes a `TokenCorpus`.

    Of the windows of training, each corpus has the fraction `weight / sum(weights)`; see `MixedSampler`. The loss on
    the validation parts is the mean of the losses of the corpora, weighted in the same way.

    Args:
        weights: Weight of each corpus, above 0: pairs of a `TokenCorpus` and its weight, or a dictionary from corpora
            to weights.

    Attributes:
        corpora: The corpora.
        weights: The weight of each.

    Raises:
        TokenizerError: The corpora have different tokenizers.

    Example:
        >>> mixture = TokenMixture([(corpus, 3), (TokenCorpus.from_text("I love dogs.", tokenizer), 1)])
        >>> mixture.weights, len(mixture) == len(corpus) + 12
        ((3, 1), True)
    """

    def __init__(self, weights: Weights[TokenCorpus]) -> None:
        self.corpora, self.weights = _split_pairs(weights)
        windows_of_an_epoch(self.weights)  # refuses what is no weight

    @property
    def num_bytes(self) -> int:
        """Number of UTF-8 bytes of all texts."""
        return sum(corpus.num_bytes for corpus in self.corpora)

    def __len__(self) -> int:
        return sum(len(corpus) for corpus in self.corpora)

    def __repr__(self) -> str:
        return f"TokenMixture({', '.join(map(repr, self.corpora))}, weights={list(self.weights)})"

    def counts(self, size: int) -> npt.NDArray[np.int64]:
        """Count how often each ID from 0 to `size - 1` occurs in all corpora; see `TokenCorpus.counts`."""
        return np.sum([corpus.counts(size) for corpus in self.corpora], axis=0)  # type: ignore[no-any-return]

    def split(self, validation_fraction: float) -> tuple["TokenMixture", "TokenMixture"]:
        """Split each corpus as `TokenCorpus.split` does, and return the mixtures of the first and the last parts.

        Args:
            validation_fraction: Requested share of each corpus in the validation part, above 0 and below 1.

        Raises:
            TextError: A corpus is too small: it is a single text chunk.
        """
        first, last = zip(*(corpus.split(validation_fraction) for corpus in self.corpora), strict=True)
        return (TokenMixture(zip(first, self.weights, strict=True)), TokenMixture(zip(last, self.weights, strict=True)))


class MixedSampler:
    """Sampler of training windows of several corpora in given shares; a pure function of the step, as `WindowSampler`.

    An epoch of the mixture has at least `EPOCH` windows in random order, of which each corpus has exactly its share:
    with the weights 3 and 1, three of four. Of each corpus they are the next windows of a `WindowSampler`, which takes
    each window of its text once before it takes one again.

    Args:
        weights: Weight of each corpus, above 0: pairs of a `TokenCorpus`, or of token IDs as `TokenWindows` takes them,
            and its weight; or a dictionary from corpora to weights. They are rounded to fractions with denominators up
            to 10,000.
        max_length: Tokens in a window, T.
        batch_size: Windows in a batch, B.
        seed: Any integer.
        documents: Whether windows know the documents of the corpora, of `TokenCorpus` each; see `TokenWindows`.

    Attributes:
        counts: Windows of each corpus in an epoch of the mixture.

    Raises:
        TokenizerError: Two corpora have different tokenizers.
        ShapeError, TextError: As for `WindowSampler`.

    Example:
        >>> sampler = MixedSampler([(np.zeros(99, int), 3), (np.ones(50, int), 1)], max_length=8, batch_size=4, seed=1)
        >>> inputs, targets = sampler.batch(step=3)
        >>> inputs.shape, sampler.counts
        (torch.Size([4, 8]), (768, 256))
    """

    def __init__(
        self, weights: Weights[TokenIds], *, max_length: int, batch_size: int, seed: int, documents: bool = False
    ) -> None:
        corpora, numbers = _split_pairs(weights)
        self.counts = windows_of_an_epoch(numbers)
        self.samplers = [
            WindowSampler(
                ids,
                max_length=max_length,
                batch_size=batch_size,
                seed=derive_seed(seed, number),
                documents=documents,
            )
            for number, ids in enumerate(corpora)
        ]
        self.max_length, self.batch_size, self.seed, self.documents = max_length, batch_size, seed, documents

    def batch(self, step: int, *, rank: int = 0, ranks: int = 1) -> Batch:
        """Return the inputs and the targets of a step, `(B, T)` int64 each, or one rank's windows of them.

        See `WindowSampler.batch` for the other tensors, the arguments and the errors. If one of the corpora has token
        weights, those of the targets of other corpora are 1.
        """
        epochs, places = np.divmod(windows_of_step(step, self.batch_size, rank, ranks), sum(self.counts))
        slots = np.empty_like(places)
        for epoch in np.unique(epochs):
            generator = torch.Generator().manual_seed(derive_seed(self.seed, len(self.counts), int(epoch)))
            slots[epochs == epoch] = RandomPermutation(sum(self.counts), generator)(places[epochs == epoch])
        ends = np.cumsum(self.counts)
        corpora = np.searchsorted(ends, slots, side="right")
        shape = len(slots), self.max_length
        batch = [*torch.empty(2 + self.documents, *shape, dtype=torch.int64)]
        if any(sampler.at_token.token_weights is not None for sampler in self.samplers):
            batch.append(torch.ones(shape))
        for number, sampler in enumerate(self.samplers):
            here = corpora == number
            windows = epochs[here] * self.counts[number] + slots[here] - (ends[number] - self.counts[number])
            for rows, own in zip(batch, sampler.windows(windows), strict=False):
                rows[here] = own
        return tuple(batch)


def corpora_of(text: TokenCorpus | TokenMixture) -> tuple[TokenCorpus, ...]:
    """Return the corpora of a mixture, or the one corpus that was passed in its place."""
    return text.corpora if isinstance(text, TokenMixture) else (text,)


def windows_of_an_epoch(weights: Sequence[float]) -> tuple[int, ...]:
    """Return how many windows of each corpus an epoch of a mixture has: multiples of the weights, `EPOCH` or more."""
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise SizeError(f"A mixture has a weight above 0 for each corpus, not {list(weights)}.")
    shares = [Fraction(weight).limit_denominator(DENOMINATOR) for weight in weights]
    if 0 in shares:
        raise SizeError(f"A weight below {1 / DENOMINATOR:g} is too small: multiply all weights by a number.")
    whole = math.lcm(*(share.denominator for share in shares))
    parts = [int(share * whole) for share in shares]
    parts = [part // math.gcd(*parts) for part in parts]
    times = math.ceil(EPOCH / sum(parts))
    return tuple(part * times for part in parts)


def _split_pairs(weights: Weights[Ids]) -> tuple[tuple[Ids, ...], tuple[float, ...]]:
    """Return the corpora and the weights of a mixture; the weights are not checked."""
    pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
    known = {n: ids.tokenizer_fingerprint for n, (ids, _) in enumerate(pairs) if isinstance(ids, TokenCorpus)}
    if len(set(known.values())) > 1:
        raise TokenizerError(f"The corpora of the mixture were built with several tokenizers: {known}.")
    numbers = (weight.item() if isinstance(weight, np.number) else weight for _, weight in pairs)  # a run stores JSON
    return tuple(ids for ids, _ in pairs), tuple(numbers)
