"""ALiBi: a bias on attention scores that falls linearly with the distance (BLOOM, MPT)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.errors import SizeError
from embedlayer.positions.position import Position, ScoreMod, score_mod_of


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> Float[Tensor, " H"]:
    """Compute the slope of each head, `2^(-max_bias i / H)` for i = 1 .. H, in float64.

    If H is no power of two, the slopes are those of the next smaller power of two, then the 1st, 3rd, 5th and
    so on of the next larger one. BLOOM and MPT compute them in other ways, with the same result if `max_bias`
    is 8. Only MPT's configuration has a `max_bias` (`alibi_bias_max`), which transformers ignores: it always
    computes with 8.

    Reference: Press et al., Train short, test long, 2022; transformers/models/bloom/modeling_bloom.py and
    transformers/models/mpt/modeling_mpt.py.
    """
    above = 2 ** (num_heads - 1).bit_length()
    slopes = [2 ** (-max_bias * i / above) for i in range(1, above + 1)]
    if above != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    return torch.tensor(slopes, dtype=torch.float64)


class AlibiBias(Position, ComputedBuffers):
    """Linear biases: `bias[h, i, j] = -slope_h * |i - j|`, without parameters and without a longest sequence.

    Under a causal mask this is the published `-slope_h * (i - j)`; without a mask it is the symmetric form of encoders.

    Args:
        num_heads: Query heads, H; any number.
        max_bias: Negative exponent of the smallest slope if H is a power of two (`alibi_bias_max` of MPT).
        scale: Factor on the bias; Falcon multiplies it by `head_dim ** -0.5`, as it does the scores.

    Example:
        >>> AlibiBias(2, max_bias=2.0).bias(torch.tensor([2]), torch.arange(3))
        tensor([[[[-1.0000, -0.5000, -0.0000]],
        <BLANKLINE>
                 [[-0.5000, -0.2500, -0.0000]]]])

    Reference: Press et al., Train short, test long, 2022.
    """

    slopes: Float[Tensor, " H"]

    def __init__(self, num_heads: int, *, max_bias: float = 8.0, scale: float = 1.0) -> None:
        super().__init__()
        if not 0 < max_bias < math.inf:
            raise SizeError(f"max_bias must be positive and finite, not {max_bias}.")
        self.num_heads = num_heads
        self.max_bias = max_bias
        self.scale = scale
        self.recompute_buffers()

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffer `slopes`: the slope of each head, `alibi_slopes(num_heads, max_bias)`, times `scale`."""
        return {"slopes": (alibi_slopes(self.num_heads, self.max_bias) * self.scale).float()}

    def bias(
        self, query_positions: Int[Tensor, "*rows Tq"], key_positions: Int[Tensor, "*rows Tk"]
    ) -> Float[Tensor, "rows H Tq Tk"]:
        """Return `-slope_h * |query position - key position|` in float32, `(1 or B, H, Tq, Tk)`."""
        self.check_positions(query_positions)
        self.check_positions(key_positions)
        query, key = torch.atleast_2d(query_positions.long()), torch.atleast_2d(key_positions.long())
        distance: Tensor = (query.unsqueeze(-1) - key.unsqueeze(-2)).abs().unsqueeze(1)
        return distance * -self.slopes.view(-1, 1, 1)

    def score_mod(
        self,
        query_positions: Int[Tensor, "*rows Tq"] | None = None,
        key_positions: Int[Tensor, "*rows Tk"] | None = None,
    ) -> ScoreMod:
        """Return the same bias as a function for `torch.nn.attention.flex_attention`, which builds no bias matrix.

        Args:
            query_positions: Position of each query, `(Tq,)`, `(1, Tq)` or `(B, Tq)`; its index if `None`.
            key_positions: Position of each key, likewise; its index if `None`.

        Example:
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> mod = AlibiBias(8).score_mod()  # flex_attention(q, k, v, score_mod=mod)
        """
        slopes = self.slopes
        return score_mod_of(
            self, lambda head, query, key: -slopes[head] * (query - key).abs(), query_positions, key_positions
        )
