"""Check that a tokenizer belongs to a table: spelling variants of a word have similar rows in trained tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader
from embedlayer.analysis.spelling import spelling_key

FEWEST_PAIRS = 30
MOST_PAIRS = 4096

SHIFTS = 3
"""Largest number of rows by which the tokens may be shifted to be found."""

ERRORS = 5.0
"""A difference of two mean cosines counts from so many standard errors on."""


@dataclass(frozen=True)
class TokenizerFit:
    """How similar the rows of spelling variants are: `" dog"`, `"dog"`, `"Dog"`, `"dogs"`.

    The mean row is subtracted first. The chance level is 0.

    Attributes:
        pairs: Number of pairs of tokens.
        cosine: Mean cosine of the rows of a pair.
        error: Standard error of `cosine`.
        shift: Number of rows by which the table is shifted against the tokenizer, if the pairs are clearly more similar
            in rows `ID + shift`; else 0.
        shifted_cosine: Mean cosine of the rows `ID + shift` of a pair.
        example: Texts of one pair.
    """

    pairs: int
    cosine: float
    error: float
    shift: int
    shifted_cosine: float
    example: tuple[str, str]


@torch.no_grad()
def tokenizer_fit(rows: RowReader, texts: Sequence[str]) -> TokenizerFit | None:
    """Measure how similar the rows of spelling variants are; `None` with fewer than `FEWEST_PAIRS` pairs.

    Args:
        rows: The table.
        texts: Readable text of each row's token, V of them; `""` for a row without a token.
    """
    pairs = _variants(texts)
    pairs = pairs[(pairs.amin(1) >= SHIFTS) & (pairs.amax(1) < len(rows) - SHIFTS)]
    if len(pairs) < FEWEST_PAIRS:
        return None
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:MOST_PAIRS]
    pairs = pairs[order]
    sample = rows.take(pairs.flatten()).double()
    mean = sample[sample.isfinite().all(1)].mean(0)
    found = {shift: _similarity(rows, pairs + shift, mean) for shift in range(-SHIFTS, SHIFTS + 1)}
    own, error = found[0]
    best = max(found, key=lambda shift: found[shift][0])
    gain, noise = found[best][0] - own, math.hypot(error, found[best][1])
    is_shifted = gain > ERRORS * noise and own < found[best][0] / 2
    shift = best if is_shifted else 0
    one, other = pairs[0].tolist()
    return TokenizerFit(len(pairs), own, error, shift, found[shift][0], (texts[one], texts[other]))


def _similarity(rows: RowReader, pairs: Int[Tensor, "N 2"], mean: Tensor) -> tuple[float, float]:
    """Return the mean cosine of the two rows of each pair after `mean` is subtracted, and its standard error."""
    one, other = (F.normalize(rows.take(ids).double() - mean, dim=1) for ids in pairs.T)
    cosines = (one * other).sum(1)
    cosines = cosines[cosines.isfinite()]
    if len(cosines) < FEWEST_PAIRS:
        return 0.0, math.inf
    return float(cosines.mean()), float(cosines.std() / len(cosines) ** 0.5)


def _variants(texts: Sequence[str]) -> Int[Tensor, "N 2"]:
    """Return pairs of IDs of words that are spelling variants, or differ by a final "s" alone; see `spelling_key`."""
    first: dict[str, int] = {}
    pairs: list[tuple[int, int]] = []
    for token, text in enumerate(texts):
        word = spelling_key(text)
        if len(word) < 3 or not word.isalpha():
            continue
        if word in first:
            pairs.append((first[word], token))
        first.setdefault(word, token)
    pairs += [(token, first[word + "s"]) for word, token in first.items() if word + "s" in first]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
