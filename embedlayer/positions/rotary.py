"""Rotary positions: queries and keys are turned by angles that grow with the position (RoPE)."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.derived import Derived
from embedlayer.errors import SizeError
from embedlayer.files import JsonObject
from embedlayer.positions.position import Position
from embedlayer.shapes import Positions

TURN = 2**53


def rotary_frequencies(rotary_dim: int, base: float = 10000.0) -> Float[Tensor, " half"]:
    """Radians per position of each pair: `base^(-2i / rotary_dim)`, in float64."""
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def turns(frequencies: Float[Tensor, " half"]) -> Int[Tensor, " half"]:
    """Frequencies as whole numbers of 2^-53 turns per position.

    A position times such a number, modulo one turn, is an exact angle: integers neither round at position 100,000 nor
    change under `.to(torch.bfloat16)`, and every device has them.
    """
    return (frequencies.double() / (2 * math.pi) * TURN).round().long()


def rotary_angles(positions: Positions, turns_per_position: Int[Tensor, " half"]) -> Float[Tensor, "*rows T half"]:
    """`positions * frequencies` in radians, modulo one turn, in float32."""
    phase = (positions.long().unsqueeze(-1) * turns_per_position) & (TURN - 1)
    return phase.float() * (2 * math.pi / TURN)


def apply_rotary(
    x: Float[Tensor, "*batch T K"],
    cos: Float[Tensor, "*#batch T half"],
    sin: Float[Tensor, "*#batch T half"],
    *,
    interleaved: bool = False,
) -> Float[Tensor, "*batch T K"]:
    """Turn each pair of the first `2 * half` channels: `(a, b) -> (a cos - b sin, b cos + a sin)`.

    Pair i is channels `(i, i + half)`, or `(2i, 2i + 1)` when interleaved. Further channels pass through.
    """
    rotary_dim = 2 * cos.shape[-1]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pair = -1 if interleaved else -2
    a, b = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(pair)
    result = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=pair).flatten(-2).to(x.dtype)
    return torch.cat([result, rest], dim=-1) if rest.shape[-1] else result


class RotaryEmbedding(Position, Derived):
    """Rotary positions: `rotate(q, k)` turns pair i of both by `positions * base^(-2i / rotary_dim)` radians.

    The score of a query and a key then depends on their distance only. There is no longest sequence.

    Args:
        head_dim: Width of a head, K.
        base: The slowest pair needs 2 pi base^(1 - 2 / rotary_dim) positions for a turn.
        interleaved: Pairs are channels (2i, 2i + 1) as in GPT-J and Meta's LLaMA, not (i, i + K/2) as in GPT-NeoX and
            transformers' LLaMA.
        rotary_dim: How many channels of a head turn, all if `None`; the rest pass through (GPT-NeoX, Phi).

    Raises:
        SizeError: `rotary_dim` is odd or exceeds the head, or the base is not positive.

    Reference: Su et al., RoFormer, 2021. We differ: angles are taken modulo one turn in integers, so they are exact at
    any position and in any dtype of the model.
    """

    turns_per_position: Int[Tensor, " half"]

    def __init__(
        self, head_dim: int, base: float = 10000.0, *, interleaved: bool = False, rotary_dim: int | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.interleaved = interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > head_dim:
            raise SizeError(
                f"Rotary positions turn pairs of channels: {self.rotary_dim} of {head_dim} is not possible. "
                f"Choose an even head_dim (embed_dim / num_heads), or an even rotary_dim up to it."
            )
        if base <= 0:
            raise SizeError(f"base must be positive, not {base}.")
        self.derive()

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "head_dim": self.head_dim,
            "base": self.base,
            "interleaved": self.interleaved,
            "rotary_dim": self.rotary_dim,
        }

    def derived(self) -> dict[str, Tensor]:
        """The frequencies, as turns."""
        return {"turns_per_position": turns(rotary_frequencies(self.rotary_dim, self.base))}

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: Positions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Queries and keys, each pair turned by its angle."""
        angles = rotary_angles(positions, self.turns_per_position).unsqueeze(-3)
        cos, sin = angles.cos(), angles.sin()
        return (
            apply_rotary(q, cos, sin, interleaved=self.interleaved),
            apply_rotary(k, cos, sin, interleaved=self.interleaved),
        )

    def extra_repr(self) -> str:
        """Sizes and options, for `print`."""
        layout = "interleaved" if self.interleaved else "half-split"
        return f"{self.head_dim}, base={self.base:g}, rotary_dim={self.rotary_dim}, {layout}"
