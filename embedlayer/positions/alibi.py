"""ALiBi: attention scores fall linearly with the distance (BLOOM)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.derived import Derived
from embedlayer.errors import SizeError
from embedlayer.files import JsonObject
from embedlayer.positions.position import Position


def alibi_slopes(num_heads: int) -> Float[Tensor, " H"]:
    """How fast each head forgets: `2^(-8i / H)` for i = 1 .. H, in float64.

    Where H is no power of two: the slopes of the power of two below it, then every other slope of twice that power.

    Reference: Press et al., Train short, test long, 2022; transformers/models/bloom/modeling_bloom.py.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float64)


class AlibiBias(Position, Derived):
    """Linear biases: `bias[h, i, j] = -slope_h * |i - j|`, no parameters, no longest sequence.

    Under a causal mask only keys at or before the query remain, where this is the published `-slope_h * (i - j)`;
    without one it is the symmetric form of encoders.

    Args:
        num_heads: Query heads, H; any number.

    Raises:
        SizeError: `num_heads` is below 1.

    Reference: Press et al., Train short, test long, 2022.
    """

    slopes: Float[Tensor, " H"]

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1:
            raise SizeError(f"num_heads must be at least 1, not {num_heads}.")
        self.num_heads = num_heads
        self.derive()

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {"num_heads": self.num_heads}

    def derived(self) -> dict[str, Tensor]:
        """The slopes."""
        return {"slopes": alibi_slopes(self.num_heads).float()}

    def bias(
        self, query_positions: Int[Tensor, "*rows Tq"], key_positions: Int[Tensor, "*rows Tk"]
    ) -> Float[Tensor, "rows H Tq Tk"]:
        """`-slope_h * |query position - key position|`, in float32."""
        query, key = torch.atleast_2d(query_positions), torch.atleast_2d(key_positions)
        distance: Tensor = (query.unsqueeze(-1) - key.unsqueeze(-2)).abs().unsqueeze(1)
        return distance * -self.slopes.view(-1, 1, 1)

    def extra_repr(self) -> str:
        """Size, for `print`."""
        return f"{self.num_heads}"
