"""How rotary frequencies are changed for sequences longer than those trained on.

A scheme is a frozen dataclass that gives the frequencies of all pairs, in float64, and the factor on their cosines and
sines. Most are the same at every length. Two are not: `DynamicNTK` and `LongRope` follow one rule, stated here once.

The length rule: let `n` be `length`, or where that is `None` the longest position of the call plus one. Frequencies
are a function of `n` alone, never of earlier calls; up to `original_max_seq_len` they are constant. Past it `LongRope`
has a second constant set and `DynamicNTK` another set for every `n`. Queries and keys must be turned by the same
frequencies, so a cache of turned keys is valid as long as `n` stays within one such regime. When it leaves, either turn
the cache by `RotaryEmbedding.rerotate`, or avoid the change beforehand: `RotaryEmbedding.at_length(prompt + new)`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.pretrained import Described

Length = int | Int[Tensor, ""]
"""Tokens in a sequence: a number, or a scalar on the device of the model."""


def rotary_frequencies(rotary_dim: int, base: float = 10000.0) -> Float[Tensor, " half"]:
    """Radians per position of each pair: `base^(-2i / rotary_dim)`, in float64."""
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


class RotaryScaling(Described, ABC):
    """Abstract: a rule that changes the frequencies of `RotaryEmbedding`."""

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @property
    def magnitude(self) -> float:
        """The attention factor: what cosines and sines are multiplied by, so that scores grow by its square."""
        return 1.0

    @property
    def limit(self) -> int | None:
        """Length up to which frequencies are constant; `None` where they are so at every length."""
        return None

    @abstractmethod
    def regimes(self, rotary_dim: int, base: float) -> Float[Tensor, "regimes half"]:
        """The sets of frequencies from which `choose` makes those of a length: radians per position, float64.

        Raises:
            SizeError: The scheme does not fit these sizes.
        """

    def choose(self, regimes: Float[Tensor, "regimes half"], length: Length) -> Float[Tensor, " half"]:
        """The frequencies of sequences of `length`."""
        return regimes[0]

    def frequencies(self, rotary_dim: int, base: float = 10000.0, length: Length = 0) -> Float[Tensor, " half"]:
        """Radians per position of each pair in sequences of `length`, in float64."""
        return self.choose(self.regimes(rotary_dim, base), length)


@dataclass(frozen=True)
class Linear(RotaryScaling):
    """Position interpolation: every frequency divided by `factor`.

    Args:
        factor: How many times longer than trained.

    Raises:
        SizeError: `factor` is not positive.

    Reference: Chen et al., Extending context window of large language models via positional interpolation, 2023;
    transformers/modeling_rope_utils.py (`linear`).
    """

    factor: float

    def __post_init__(self) -> None:
        _positive(self, "factor")

    def regimes(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """`base^(-2i / d) / factor`."""
        return rotary_frequencies(rotary_dim, base).unsqueeze(0) / self.factor


@dataclass(frozen=True)
class DynamicNTK(RotaryScaling):
    """Dynamic NTK: past the trained length L, the base grows with the length n.

    `base(n) = base * (factor * n / L - (factor - 1))^(d / (d - 2))` for n > L, and `base` up to L.

    Args:
        factor: How fast it grows, at least 1.
        original_max_seq_len: Trained length, L (`max_position_embeddings` of a configuration).
        length: Use the frequencies of this n whatever the positions of a call; `None` for the longest position of each
            call plus one (see the length rule at the head of this module).

    Raises:
        SizeError: A number is too small, or `rotary_dim` is 2, which the formula divides by zero.

    Reference: bloc97 and emozilla, r/LocalLLaMA, 2023; transformers/modeling_rope_utils.py (`dynamic`). We differ:
    transformers keeps the longest length of earlier calls until a short one comes; here nothing is remembered.
    """

    factor: float
    original_max_seq_len: int
    length: int | None = None

    def __post_init__(self) -> None:
        _at_least_one(self, "factor", "original_max_seq_len", "length")

    @property
    def limit(self) -> int | None:
        """The trained length."""
        return self.original_max_seq_len

    def regimes(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """The frequencies up to the trained length."""
        if rotary_dim == 2:
            raise SizeError(
                "DynamicNTK needs a rotary_dim of at least 4: its exponent is rotary_dim / (rotary_dim - 2)."
            )
        return rotary_frequencies(rotary_dim, base).unsqueeze(0)

    def choose(self, regimes: Float[Tensor, "1 half"], length: Length) -> Float[Tensor, " half"]:
        """`base(n)^(-2i / d)`, which is `base^(-2i / d) * growth^(-2i / (d - 2))`."""
        n = torch.as_tensor(length, device=regimes.device).clamp_min(self.original_max_seq_len).double()
        growth = self.factor * n / self.original_max_seq_len - (self.factor - 1)
        half = regimes.shape[-1]
        return regimes[0] * growth ** -(torch.arange(half, dtype=torch.float64, device=regimes.device) / (half - 1))


@dataclass(frozen=True)
class Yarn(RotaryScaling):
    """YaRN: fast pairs keep their frequency, slow ones are divided by `factor`, those between are blended.

    Pair i keeps the share `1 - clamp((i - low) / (high - low), 0, 1)` of its own frequency, where `low` and `high` are
    the (fractional) pairs that turn `beta_fast` and `beta_slow` times over the trained length L:
    `pair(beta) = d ln(L / (2 pi beta)) / (2 ln base)`.

    Args:
        factor: How many times longer than trained, at least 1.
        original_max_seq_len: Trained length, L.
        beta_fast: Turns over L above which a pair is left alone.
        beta_slow: Turns over L below which it is interpolated.
        mscale: With `mscale_all_dim`: the magnitude is `m(mscale) / m(mscale_all_dim)`, `m(s) = 0.1 s ln(factor) + 1`
            (DeepSeek). Without both it is `m(1)`.
        mscale_all_dim: See `mscale`.
        attention_factor: The magnitude itself, in place of these formulas.
        truncate: Round `low` down and `high` up to whole pairs.

    Raises:
        SizeError: A number is too small, `beta_fast` is below `beta_slow`, or the base is 1.

    Reference: Peng et al., YaRN, 2023; transformers/modeling_rope_utils.py (`yarn`). We differ: transformers reads
    `truncate` outside the dictionary of a layer type, and takes an explicit 0 for a beta as 32 or 1.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _at_least_one(self, "factor", "original_max_seq_len")
        _positive(self, "beta_fast", "beta_slow", "attention_factor")
        if self.beta_fast < self.beta_slow:
            raise SizeError(f"Yarn: beta_fast {self.beta_fast} must be at least beta_slow {self.beta_slow}.")

    @property
    def magnitude(self) -> float:
        """`0.1 ln(factor) + 1`, the ratio of two such numbers, or what was given."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def regimes(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Each pair's own frequency and the interpolated one, blended."""
        if base <= 1:
            raise SizeError(f"Yarn needs a base above 1, not {base}: it divides by its logarithm.")
        low, high = (
            rotary_dim * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        high = high + 0.001 if high == low else high
        own = rotary_frequencies(rotary_dim, base)
        share = ((torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return (own * (1 - share) + own / self.factor * share).unsqueeze(0)


@dataclass(frozen=True)
class LongRope(RotaryScaling):
    """LongRoPE: frequency i divided by `short_factor[i]` up to the trained length L, by `long_factor[i]` past it.

    The magnitude is `sqrt(1 + ln(factor) / ln(L))`, or 1 for a factor up to 1, on both sides of L.

    Args:
        short_factor: One divisor a pair, for sequences of at most L tokens.
        long_factor: One divisor a pair, for longer ones.
        original_max_seq_len: Trained length, L.
        factor: Longest sequence by L, for the magnitude.
        attention_factor: The magnitude itself, in place of the formula.
        length: Use the frequencies of this length whatever the positions of a call; `None` for the longest position of
            each call plus one (see the length rule at the head of this module).

    Raises:
        SizeError: A number is too small, or there is not one divisor for each pair.

    Reference: Ding et al., LongRoPE, 2024; transformers/modeling_rope_utils.py (`longrope`; Phi-3 called it `su`).
    """

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    original_max_seq_len: int
    factor: float
    attention_factor: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            divisors = tuple(getattr(self, name))
            object.__setattr__(self, name, divisors)  # from JSON they come as lists
            if not all(divisor > 0 for divisor in divisors):
                raise SizeError(f"LongRope: the divisors in {name} must be positive, not {divisors}.")
        _positive(self, "factor", "attention_factor")
        _at_least_one(self, "original_max_seq_len", "length")
        if self.attention_factor is None and self.factor > 1 and self.original_max_seq_len < 2:
            raise SizeError("LongRope: original_max_seq_len must be at least 2: the formula divides by its logarithm.")

    @property
    def magnitude(self) -> float:
        """`sqrt(1 + ln(factor) / ln(L))`, or what was given."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))

    @property
    def limit(self) -> int | None:
        """The trained length."""
        return self.original_max_seq_len

    def regimes(self, rotary_dim: int, base: float) -> Float[Tensor, "2 half"]:
        """The frequencies up to the trained length, and past it."""
        counts = (len(self.short_factor), len(self.long_factor))
        if counts != (rotary_dim // 2,) * 2:
            raise SizeError(
                f"LongRope: short_factor and long_factor have {counts[0]} and {counts[1]} divisors, "
                f"but rotary_dim {rotary_dim} has {rotary_dim // 2} pairs."
            )
        return rotary_frequencies(rotary_dim, base) / torch.tensor(
            [self.short_factor, self.long_factor], dtype=torch.float64
        )

    def choose(self, regimes: Float[Tensor, "2 half"], length: Length) -> Float[Tensor, " half"]:
        """The second set past the trained length."""
        is_long = torch.as_tensor(length, device=regimes.device) > self.original_max_seq_len
        return torch.where(is_long, regimes[1], regimes[0])


@dataclass(frozen=True)
class Llama3(RotaryScaling):
    """LLaMA 3.1: pairs with waves past `L / low_freq_factor` positions are divided by `factor`, short waves are left
    alone, and those between are blended by how often they turn over the trained length L.

    Args:
        factor: How many times longer than trained.
        original_max_seq_len: Trained length, L.
        low_freq_factor: Turns over L below which a pair is divided.
        high_freq_factor: Turns over L above which it is left alone.

    Raises:
        SizeError: A number is too small, or `high_freq_factor` is not above `low_freq_factor`.

    Reference: Grattafiori et al., The Llama 3 herd of models, 2024; transformers/modeling_rope_utils.py (`llama3`).
    """

    factor: float
    original_max_seq_len: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _positive(self, "factor", "low_freq_factor")
        _at_least_one(self, "original_max_seq_len")
        if self.high_freq_factor <= self.low_freq_factor:
            raise SizeError(
                f"Llama3: high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}."
            )

    def regimes(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """`own * s + own / factor * (1 - s)` with `s = clamp((turns - low) / (high - low), 0, 1)`."""
        own = rotary_frequencies(rotary_dim, base)
        turns = own * self.original_max_seq_len / (2 * math.pi)
        share = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (own * share + own / self.factor * (1 - share)).unsqueeze(0)


@dataclass(frozen=True)
class Proportional(RotaryScaling):
    """Proportional: the first `proportion` of the pairs turn by `base^(-2i / d) / factor`, the others not at all.

    Unlike a smaller `rotary_dim`, the exponents stay those of the whole head, and pairs span it: in the half-split
    layout pair i is channels `(i, i + d/2)`.

    Args:
        proportion: Share of the pairs that turn, from 0 to 1.
        factor: Divisor of their frequencies.

    Raises:
        SizeError: `proportion` is outside 0 to 1, or `factor` is not positive.

    Reference: transformers/modeling_rope_utils.py (`proportional`; Gemma 4).
    """

    proportion: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        _positive(self, "factor")
        if not 0 <= self.proportion <= 1:
            raise SizeError(f"Proportional: proportion must be from 0 to 1, not {self.proportion}.")

    def regimes(self, rotary_dim: int, base: float) -> Float[Tensor, "1 half"]:
        """Frequencies, then zeros."""
        turning = int(self.proportion * rotary_dim // 2)
        own = rotary_frequencies(rotary_dim, base) / self.factor
        return torch.where(torch.arange(rotary_dim // 2) < turning, own, 0.0).unsqueeze(0)


def _positive(scaling: RotaryScaling, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if value is not None and not (0 < value < math.inf):
            raise SizeError(f"{type(scaling).__name__}: {name} must be positive, not {value}.")


def _at_least_one(scaling: RotaryScaling, *names: str) -> None:
    for name in names:
        value = getattr(scaling, name)
        if value is not None and not (1 <= value < math.inf):
            raise SizeError(f"{type(scaling).__name__}: {name} must be at least 1, not {value}.")
