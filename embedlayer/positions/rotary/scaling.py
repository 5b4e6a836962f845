"""Scalings of rotary frequencies for sequences longer than in training.

A scaling is a frozen dataclass that computes the frequencies of all pairs, in float64, and the factor on cosines and
sines. Most scalings have the same frequencies at every length; `DynamicNTKScaling` and `LongRopeScaling` do not.

The length rule: let `n` be `length`, or if that is `None` the longest position of the call plus one. Frequencies depend
on `n` alone, never on earlier calls. Up to `original_max_seq_len` they are constant. Beyond it, `LongRopeScaling` has a
second constant set, and `DynamicNTKScaling` has another set for every `n`. Queries and keys must be rotated by the same
frequencies, so cached keys are valid while the frequencies stay the same. When they change, either rotate the cached
keys with `RotaryEmbedding.rerotate`, or prevent the change with `RotaryEmbedding.at_length(prompt + new)`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.saving import Described

Length = int | Int[Tensor, ""]
"""Tokens in a sequence: a number, or a scalar on the device of the model."""


def rotary_frequencies(rotary_dim: int, base: float = 10000.0) -> Float[Tensor, " half"]:
    """Compute the frequency of each pair i, `base^(-2i / rotary_dim)` radians per position, in float64."""
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


POSITIVE = ("factor", "alpha", "original_max_seq_len", "length", "beta_fast", "beta_slow", "low_freq_factor")
"""Arguments of scalings that are positive numbers, as is `attention_factor`."""


class RotaryScaling(Described, ABC):
    """Abstract base class of the scalings, which change the frequencies of `RotaryEmbedding`.

    Attributes:
        length: Sequence length that selects the frequencies in every call; `None` for the length of each call.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            if name in (*POSITIVE, "attention_factor") and value is not None and not 0 < value < math.inf:
                raise SizeError(f"{type(self).__name__}: {name} must be positive and finite, not {value}.")

    @property
    def attention_scaling(self) -> float:
        """Return the factor by which cosines and sines are multiplied; 1 unless a subclass overrides it.

        Queries and keys both get it, so attention scores are multiplied by its square.
        """
        return 1.0

    @property
    def limit(self) -> int | None:
        """Return the sequence length up to which frequencies do not change; `None` if they never change."""
        return None

    @abstractmethod
    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "sets half"]:
        """Compute the sets of frequencies from which `select` computes those of a sequence length.

        Args:
            rotary_dim: Number of rotated channels of a head, d; it has d / 2 pairs.
            base: Base of the frequencies.

        Returns:
            One set per row, in radians per position, in float64.
        """

    def select(self, frequency_sets: Float[Tensor, "sets half"], length: Length) -> Float[Tensor, " half"]:
        """Return the frequencies for sequences of `length`; here the first set at every length.

        Args:
            frequency_sets: The result of the method `frequency_sets`.
            length: Sequence length.
        """
        return frequency_sets[0]

    def frequencies(self, rotary_dim: int, base: float = 10000.0, length: Length = 0) -> Float[Tensor, " half"]:
        """Compute the frequency of each pair for sequences of `length`, in radians per position, in float64."""
        return self.select(self.frequency_sets(rotary_dim, base), length)


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation: every frequency divided by `factor`.

    Args:
        factor: Length divided by the trained length.

    Reference: Chen et al., Extending context window of large language models via positional interpolation, 2023;
    transformers/modeling_rope_utils.py (`linear`).
    """

    factor: float

    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Compute `base^(-2i / rotary_dim) / factor` for each pair i, as the only set."""
        return rotary_frequencies(rotary_dim, base).unsqueeze(0) / self.factor


@dataclass(frozen=True)
class DynamicNTKScaling(RotaryScaling):
    """Dynamic NTK: beyond the trained length L, the base grows with the sequence length n.

    `base(n) = base * (factor * n / L - (factor - 1))^(d / (d - 2))` for n > L, and `base` up to L, with d =
    `rotary_dim`.

    Args:
        factor: How fast the base grows, at least 1.
        original_max_seq_len: Trained length, L (`max_position_embeddings` of a configuration).
        length: Fixed n for every call; `None` for the longest position of each call plus one (see the length rule in
            the docstring of this module).

    Reference: bloc97 and emozilla, r/LocalLLaMA, 2023; transformers/modeling_rope_utils.py (`dynamic`). We differ:
    transformers keeps the longest length of earlier calls until a short call; here calls do not depend on each other.
    """

    factor: float
    original_max_seq_len: int
    length: int | None = None

    @property
    def limit(self) -> int | None:
        """Return the trained length, up to which the frequencies are constant."""
        return self.original_max_seq_len

    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Compute `base^(-2i / d)` for each pair i as the only set: the frequencies up to the trained length."""
        if rotary_dim == 2:
            raise SizeError("DynamicNTKScaling divides by rotary_dim - 2: rotary_dim must be at least 4.")
        return rotary_frequencies(rotary_dim, base).unsqueeze(0)

    def select(self, frequency_sets: Float[Tensor, "1 half"], length: Length) -> Float[Tensor, " half"]:
        """Compute the frequencies for sequences of n tokens, with n = `length`, from those up to the trained length L.

        Pair i is multiplied by `growth^(-2i / (d - 2))` with `growth = max(1, factor * n / L - (factor - 1))` and d =
        `rotary_dim`. This is the same as replacing the base by the `base(n)` of the class.
        """
        n = _on_device(length, frequency_sets).clamp_min(self.original_max_seq_len).double()
        growth = self.factor * n / self.original_max_seq_len - (self.factor - 1)
        half = frequency_sets.shape[-1]
        exponents = torch.arange(half, dtype=torch.float64, device=frequency_sets.device) / (half - 1)
        return frequency_sets[0] * growth**-exponents


@dataclass(frozen=True)
class NTKAlphaScaling(RotaryScaling):
    """NTK-aware scaling by a fixed number: the base is multiplied by `alpha^(d / (d - 2))`, with d = `rotary_dim`.

    Unlike with `DynamicNTKScaling`, the frequencies are the same at every length.

    Args:
        alpha: Length divided by the trained length, about.

    Reference: bloc97, r/LocalLLaMA, 2023; transformers/models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py
    (`rope_type` `dynamic` with an `alpha`).
    """

    alpha: float

    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Compute `(base * alpha^(d / (d - 2)))^(-2i / d)` for each pair i, as the only set."""
        return rotary_frequencies(rotary_dim, base * self.alpha ** (rotary_dim / (rotary_dim - 2))).unsqueeze(0)


@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN: keep fast pairs, divide the frequency of slow pairs by `factor`, and blend the pairs between.

    Pair i keeps the share `1 - clamp((i - low) / (high - low), 0, 1)` of its own frequency. `low` and `high` are the
    (fractional) pairs that rotate `beta_fast` and `beta_slow` times over the trained length L:
    `pair(beta) = d ln(L / (2 pi beta)) / (2 ln base)`, with d = `rotary_dim`. Then `low` is raised to at least 0,
    `high` is lowered to at most d - 1, and 0.001 is added to `high` if both are equal.

    Args:
        factor: Length divided by the trained length, at least 1.
        original_max_seq_len: Trained length, L.
        beta_fast: Rotations over L above which a pair keeps its frequency.
        beta_slow: Rotations over L below which a frequency is divided by `factor`.
        mscale: If this and `mscale_all_dim` are both given and not 0, `attention_scaling` is
            `m(mscale) / m(mscale_all_dim)` with `m(s) = 0.1 s ln(factor) + 1` (DeepSeek). Otherwise it is `m(1)`; one
            of the two alone has no effect.
        mscale_all_dim: See `mscale`.
        attention_factor: `attention_scaling` itself, in place of these formulas.
        truncate: Round `low` down and `high` up to whole pairs, before they are limited.

    Reference: Peng et al., YaRN, 2023; transformers/modeling_rope_utils.py (`yarn`). We differ: transformers reads
    `truncate` outside the dictionary of a layer type, and reads an explicit 0 for a beta as 32 or 1.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def attention_scaling(self) -> float:
        """Return the factor on cosines and sines: `attention_factor`, or without one the formula under `mscale`."""
        if self.attention_factor is not None:
            return self.attention_factor
        per_unit = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (per_unit * self.mscale + 1.0) / (per_unit * self.mscale_all_dim + 1.0)
        return per_unit + 1.0

    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Compute for each pair the mean of its frequency and that frequency divided by `factor`, as the only set.

        The weight of the first is the share that the pair keeps, see the docstring of the class.
        """
        if base <= 1 or self.factor < 1 or self.beta_fast < self.beta_slow:
            raise SizeError(f"{self}, base {base}: base > 1, factor >= 1 and beta_fast >= beta_slow are needed.")
        low, high = (
            rotary_dim * math.log(self.original_max_seq_len / (rotations * 2 * math.pi)) / (2 * math.log(base))
            for rotations in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        high = high + 0.001 if high == low else high
        own = rotary_frequencies(rotary_dim, base)
        share = ((torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return (own * (1 - share) + own / self.factor * share).unsqueeze(0)


@dataclass(frozen=True)
class LongRopeScaling(RotaryScaling):
    """LongRoPE: divide frequency i by `short_factor[i]` up to the trained length L, by `long_factor[i]` beyond it.

    `attention_scaling` is `sqrt(1 + ln(factor) / ln(L))`, or 1 for a factor up to 1, at every length.

    Args:
        short_factor: One divisor for each pair, for sequences of at most L tokens.
        long_factor: One divisor for each pair, for longer sequences.
        original_max_seq_len: Trained length, L.
        factor: Longest sequence divided by L, for `attention_scaling`.
        attention_factor: `attention_scaling` itself, in place of the formula.
        length: Fixed length that selects the frequencies of every call; `None` for the longest position of each call
            plus one (see the length rule in the docstring of this module).

    Reference: Ding et al., LongRoPE, 2024; transformers/modeling_rope_utils.py (`longrope`; Phi-3 called it `su`).
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_seq_len: int
    factor: float
    attention_factor: float | None = None
    length: int | None = None

    @property
    def attention_scaling(self) -> float:
        """Return the factor on cosines and sines: `attention_factor`, or without one `sqrt(1 + ln(factor) / ln(L))`.

        L is the trained length. For a `factor` up to 1 it is 1 in place of the formula.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))

    @property
    def limit(self) -> int | None:
        """Return the trained length, up to which the short frequencies are used."""
        return self.original_max_seq_len

    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "2 half"]:
        """Compute two sets: the frequencies divided by `short_factor` (row 0) and by `long_factor` (row 1)."""
        divisors = torch.tensor([self.short_factor, self.long_factor], dtype=torch.float64)
        pairs = rotary_dim // 2
        if divisors.shape != (2, pairs) or not (divisors > 0).all():
            raise SizeError(f"LongRopeScaling: {pairs} pairs need as many positive divisors, not {divisors.tolist()}.")
        return rotary_frequencies(rotary_dim, base) / divisors

    def select(self, frequency_sets: Float[Tensor, "2 half"], length: Length) -> Float[Tensor, " half"]:
        """Return row 1, the long frequencies, if `length` exceeds the trained length; else row 0, the short ones."""
        is_long = _on_device(length, frequency_sets) > self.original_max_seq_len
        return torch.where(is_long, frequency_sets[1], frequency_sets[0])


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """LLaMA 3.1: divide the frequency of slow pairs by `factor`, keep fast pairs, and blend the pairs between.

    A pair is slow or fast by its number of rotations over the trained length L: below `low_freq_factor` or above
    `high_freq_factor`.

    Args:
        factor: Length divided by the trained length.
        original_max_seq_len: Trained length, L.
        low_freq_factor: Rotations over L below which a frequency is divided by `factor`.
        high_freq_factor: Rotations over L above which a pair keeps its frequency.

    Reference: Grattafiori et al., The Llama 3 herd of models, 2024; transformers/modeling_rope_utils.py (`llama3`).
    """

    factor: float
    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Compute for each pair `f * s + f / factor * (1 - s)`, as the only set; f is its frequency without scaling.

        With r, the rotations of the pair over the trained length, the share is `s = clamp((r - low_freq_factor) /
        (high_freq_factor - low_freq_factor), 0, 1)`.
        """
        if self.high_freq_factor <= self.low_freq_factor:
            raise SizeError(f"{self}: high_freq_factor must be above low_freq_factor.")
        own = rotary_frequencies(rotary_dim, base)
        rotations = own * self.original_max_seq_len / (2 * math.pi)
        share = ((rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (own * share + own / self.factor * (1 - share)).unsqueeze(0)


@dataclass(frozen=True)
class ProportionalScaling(RotaryScaling):
    """Partial rotation: the first `proportion` of the pairs rotate by `base^(-2i / d) / factor`, the others not at all.

    i is the pair, and d is `rotary_dim`. Unlike with a smaller `rotary_dim`, the exponents are those of the whole head,
    and pairs span the whole head: in the half-split layout pair i is channels `(i, i + d/2)`.

    Args:
        proportion: Share of the pairs that rotate, from 0 to 1.
        factor: Divisor of their frequencies.

    Reference: transformers/modeling_rope_utils.py (`proportional`; Gemma 4).
    """

    proportion: float = 1.0
    factor: float = 1.0

    def frequency_sets(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Compute the frequencies of the rotating pairs, and 0 for the pairs that do not rotate, as the only set."""
        if not 0 <= self.proportion <= 1:
            raise SizeError(f"ProportionalScaling: proportion must be from 0 to 1, not {self.proportion}.")
        rotating = int(self.proportion * rotary_dim // 2)
        own = rotary_frequencies(rotary_dim, base) / self.factor
        return torch.where(torch.arange(rotary_dim // 2) < rotating, own, 0.0).unsqueeze(0)


def _on_device(length: Length, beside: Tensor) -> Int[Tensor, ""]:
    """Return a length as a scalar on the device of a tensor; a number is filled in there, without a wait."""
    if isinstance(length, Tensor):
        return length.to(beside.device)
    return torch.full((), length, dtype=torch.int64, device=beside.device)
