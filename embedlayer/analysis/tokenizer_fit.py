"""Check that a tokenizer belongs to a table: spelling variants of a word have similar rows in trained tables.

The mean cosine of the pairs can hide that they are of two sorts. Let `F` be the distribution of the cosines of the
pairs, and `F0` that of unrelated tokens: the same tokens, paired at random. If a share `p` of the pairs is unrelated
and the others are clearly similar, then `F(m) = p / 2` at the median `m` of `F0`. So `p` is measured as

    p = 2 F(m).

By chance it is 1; it is near 0 for a trained table and its own tokenizer. If a share `r` of the rows was exchanged, a
pair is spoiled unless both of its rows were left alone: `p = 1 - (1 - r)^2`. In a table that was trained little, the
similarity of variants falls without a gap to that of unrelated tokens. Pairs are of two sorts only if their density
rises again between unrelated cosines and the median of the similar pairs.

Spelling variants are tokens with the same letters that differ in case, in a leading space or in a marker:

| convention | spelling variants |
|---|---|
| byte-level BPE (`Ġ` is a space) | `class`, `Ġclass`, `Class`, `ĠClass`, `CLASS` |
| SentencePiece (`▁` is a space) | `class`, `▁class`, `Class`; a byte token `<0x61>` and `a` |
| WordPiece (`##` continues a word) | `class`, `##class` |
| end-of-word suffix (CLIP) | `class`, `class</w>` |
"""

import math
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.row_reader import RowReader

FEWEST_PAIRS = 30
MOST_PAIRS = 4096

SHIFTS = 3  # largest number of rows by which the tokens may be shifted to be found
ERRORS = 5.0  # a difference of two mean cosines counts from so many standard errors on


MIXED, MOST_MIXED = 0.15, 0.95  # pairs are of two sorts if `p` is between these, and above 0.1 by three standard errors

APART = 3.0
"""Cosines above the median of unrelated tokens by more standard deviations than this are no longer unrelated."""

RISE = 2.0  # standard errors by which more pairs must be in the upper half of the range between both sorts


@dataclass(frozen=True)
class TokenizerFit:
    """How similar the rows of spelling variants are: `" dog"`, `"dog"`, `"Dog"`, `"dogs"`.

    The mean row is subtracted first. The chance level is 0.

    Attributes:
        pairs: Number of pairs of tokens.
        cosine: Mean cosine of the rows of a pair; 0 if fewer than `FEWEST_PAIRS` pairs have rows without NaN.
        error: Standard error of `cosine`; infinity in that case.
        shift: Number of rows by which the table is shifted against the tokenizer, if the pairs are clearly more similar
            in rows `ID + shift`; else 0.
        shifted_cosine: Mean cosine of the rows `ID + shift` of a pair.
        example: Texts of one pair.
        unlike: Share of the pairs of trained rows that are as unlike as unrelated tokens, `p` in this module's
            docstring; by chance 1; 0 if there are too few such pairs to tell.
        alike_cosine: Mean cosine of the other pairs; NaN if all are unlike, or there are too few.
        is_mixed: Whether part of the pairs are clearly similar, and part as unlike as unrelated tokens.
        unlike_example: Texts of one pair that is as unlike as unrelated tokens, or `example` without one.
        odd_rows: IDs of tokens that are unlike all their variants although these, two or more, are similar; only
            searched if `is_mixed`.
    """

    pairs: int
    cosine: float
    error: float
    shift: int
    shifted_cosine: float
    example: tuple[str, str]
    unlike: float
    alike_cosine: float
    is_mixed: bool
    unlike_example: tuple[str, str]
    odd_rows: tuple[int, ...] = ()

    @property
    def misplaced(self) -> float:
        """Return the share `r` of the rows that were exchanged, if that is why pairs are unlike."""
        return 1 - math.sqrt(1 - self.unlike)

    @property
    def least_misplaced(self) -> float:
        """Return the share `r` of exchanged rows from which on pairs are of two sorts."""
        error = 2 * math.sqrt(MIXED / 2 * (1 - MIXED / 2) / self.pairs)
        return 1 - math.sqrt(1 - max(MIXED, 0.1 + 3 * error))


@torch.no_grad()
def tokenizer_fit(rows: RowReader, texts: Sequence[str], *, usable: Bool[Tensor, " V"]) -> TokenizerFit | None:
    """Measure how similar the rows of spelling variants are; `None` with fewer than `FEWEST_PAIRS` pairs.

    Pairs with one of the first or last `SHIFTS` rows of the table do not count. `texts` are the readable texts of the
    rows, `""` for a row without a token. `usable` are the rows that are searched for pairs of two sorts: those that
    were learned.
    """
    every = _variants(texts)
    pairs = every[(every.amin(1) >= SHIFTS) & (every.amax(1) < len(rows) - SHIFTS)]
    if len(pairs) < FEWEST_PAIRS:
        return None
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))[:MOST_PAIRS]
    pairs = pairs[order]
    sample = rows.take(pairs.flatten()).double()
    mean = sample[sample.isfinite().all(1)].mean(0)
    fits = {}  # the mean cosine of the pairs at each shift, and its standard error
    for shift in range(-SHIFTS, SHIFTS + 1):
        cosines = _cosines(rows, pairs + shift, mean)
        cosines = cosines[cosines.isfinite()]
        fits[shift] = 0.0, math.inf
        if len(cosines) >= FEWEST_PAIRS:
            fits[shift] = float(cosines.mean()), float(cosines.std() / len(cosines) ** 0.5)
    own, error = fits[0]
    best = max(fits, key=lambda shift: fits[shift][0])
    gain, noise = fits[best][0] - own, math.hypot(error, fits[best][1])
    is_shifted = gain > ERRORS * noise and own < fits[best][0] / 2
    shift = best if is_shifted else 0
    one, other = pairs[0].tolist()
    example = (texts[one], texts[other])
    pairs = pairs[usable[pairs].all(1)]
    unlike, alike_cosine, are_two, between, unlike_pair = _sorts(rows, pairs, mean)
    one, other = unlike_pair or (one, other)
    is_mixed = are_two and not shift
    return TokenizerFit(
        pairs=len(order),
        cosine=own,
        error=error,
        shift=shift,
        shifted_cosine=fits[shift][0],
        example=example,
        unlike=unlike,
        alike_cosine=alike_cosine,
        is_mixed=is_mixed,
        unlike_example=(texts[one], texts[other]),
        odd_rows=_odd_rows(rows, every, mean, *between) if is_mixed else (),
    )


def _sorts(
    rows: RowReader, pairs: Int[Tensor, "N 2"], mean: Tensor
) -> tuple[float, float, bool, tuple[float, float], Sequence[int] | None]:
    """Measure which share of some pairs is as unlike as unrelated tokens, and how alike the others are.

    The order of the pairs must be random: tokens of neighbouring pairs count as unrelated. `mean` is subtracted from
    all rows.
    """
    # The share, the mean cosine of the others, whether there are two sorts, the cosines around which they divide, and
    # an unlike pair.
    shuffled = torch.stack([pairs[:, 0], pairs[:, 1].roll(1)], 1)  # the order of the pairs is random
    cosines, chance = _cosines(rows, pairs, mean), _cosines(rows, shuffled, mean)
    pairs, cosines, chance = pairs[cosines.isfinite()], cosines[cosines.isfinite()], chance[chance.isfinite()]
    if len(cosines) < FEWEST_PAIRS or len(chance) < FEWEST_PAIRS:
        return 0.0, math.nan, False, (math.nan, math.nan), None
    least, median, most = chance.quantile(torch.tensor([0.16, 0.5, 0.84], dtype=torch.float64)).tolist()
    below = cosines < median
    share = float(below.double().mean())
    unlike, error = min(1.0, 2 * share), 2 * math.sqrt(share * (1 - share) / len(cosines))
    unlike_pair = pairs[below][0].tolist() if below.any() else None
    alike = (float(cosines.mean()) - unlike * median) / (1 - unlike) if unlike < 1 else math.nan
    low, high = median + APART * (most - least) / 2, float(cosines.quantile((1 + unlike) / 2))
    halves = ((low, (low + high) / 2), ((low + high) / 2, high))
    lower, upper = (int(((cosines > start) & (cosines <= stop)).sum()) for start, stop in halves)
    is_part = max(MIXED, 0.1 + 3 * error) <= unlike <= MOST_MIXED
    are_two = is_part and high > low and upper - lower > RISE * math.sqrt(upper + lower)
    return unlike, alike, are_two, (low, high), unlike_pair


def _odd_rows(rows: RowReader, pairs: Int[Tensor, "N 2"], mean: Tensor, low: float, high: float) -> tuple[int, ...]:
    """Return the IDs of tokens that are unlike all their variants although two of these are similar."""
    family: dict[int, set[int]] = {}
    for one, other in pairs.tolist():
        joined = family.get(one, {one}) | family.get(other, {other})
        family.update(dict.fromkeys(joined, joined))
    odd = []
    for members in {min(each): each for each in family.values() if len(each) > 2}.values():
        ids = torch.tensor(sorted(members))
        units = F.normalize(rows.take(ids).double() - mean, dim=1)
        cosines = (units @ units.T).fill_diagonal_(-1.0)
        nearest = cosines.amax(1)
        if nearest.max() >= (low + high) / 2:
            odd += ids[nearest < low].tolist()
    return tuple(sorted(odd))


def _cosines(rows: RowReader, pairs: Int[Tensor, "N 2"], mean: Tensor) -> Float[Tensor, " N"]:
    """Return the cosine of the two rows of each pair after `mean` is subtracted; NaN where one holds NaN."""
    one, other = (F.normalize(rows.take(ids).double() - mean, dim=1) for ids in pairs.T)
    cosines: Tensor = (one * other).sum(1)
    return cosines


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


RAW_MARKERS = (" ", "▁", "##")
"""Markers that are removed if there is no tokenizer that says which ones its entries have."""


def spelling_variants(
    texts: Sequence[str], tokenizer: Tokenizer | None = None, *, special: Collection[int] = ()
) -> dict[int, list[int]]:
    """Return for each token that has spelling variants the IDs of these variants, in ascending order."""
    model = None if tokenizer is None else tokenizer.model
    prefix = getattr(model, "continuing_subword_prefix", None)
    markers = RAW_MARKERS if tokenizer is None else (" ", *([prefix] if prefix else []))
    suffix = getattr(model, "end_of_word_suffix", None) or ""
    groups: dict[str, list[int]] = {}
    left_out = set(special)
    for token, text in enumerate(texts):
        key = "" if token in left_out else spelling_key(text, markers, suffix)
        if key:
            groups.setdefault(key, []).append(token)
    shared = [group for group in groups.values() if len(group) > 1]
    return dict(sorted((token, [other for other in group if other != token]) for group in shared for token in group))


def spelling_key(text: str, markers: Sequence[str] = RAW_MARKERS, suffix: str = "") -> str:
    """Return what spelling variants share: the text without its marker and suffix, in NFKC, its case folded.

    The result is `""` for a text that is all white space. A text that is nothing but the marker keeps it.
    """
    marker = ""
    if text.startswith(tuple(markers)):
        marker = next((each for each in markers if text.startswith(each) and text != each), "")
    bare = text[len(marker) :]
    bare = bare.removesuffix(suffix) or bare
    if bare.isascii():
        key = bare.lower()
    else:
        key = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", bare).casefold())
    return key if key.strip() else ""
