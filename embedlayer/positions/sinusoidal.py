"""Sinusoidal positions: fixed waves of many lengths (the original Transformer), and at most one learned factor."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.bounds import Bounds
from embedlayer.derived import Derived
from embedlayer.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.positions.position import AdditivePosition
from embedlayer.shapes import Positions

Layout = Literal["interleaved", "concatenated"]


def sinusoids(
    positions: Float[Tensor, " T"],
    embed_dim: int,
    base: float = 10000.0,
    *,
    layout: Layout = "interleaved",
    endpoint: bool = False,
) -> Float[Tensor, "T D"]:
    """`PE(p, 2i) = sin(p / base^(2i/D))`, `PE(p, 2i+1) = cos(p / base^(2i/D))`, in the dtype of `positions`.

    For any offset k, `PE(p + k)` is one fixed linear map of `PE(p)`: each sin/cos pair turns by the angle
    `k / base^(2i/D)`. An odd width ends on a sine.

    Args:
        positions: Any real numbers.
        embed_dim: Width of a row, D.
        base: The longest wave has 2 pi base positions, or somewhat less without `endpoint`.
        layout: `"interleaved"` as above, or `"concatenated"`: all sines, then all cosines.
        endpoint: Divide pair i by `base^(i / (D/2 - 1))`, so that the last pair has the longest wave itself, as
            `numpy.linspace` means the word (tensor2tensor, fairseq, M2M100). An odd width then ends on a zero.

    Reference: Vaswani et al., Attention is all you need, 2017, section 3.5;
    transformers/models/m2m_100/modeling_m2m_100.py.
    """
    pairs = embed_dim // 2 if endpoint else (embed_dim + 1) // 2
    exponents = torch.arange(pairs, dtype=positions.dtype) / ((pairs - 1) if endpoint else embed_dim / 2)
    angles = positions.unsqueeze(-1) * base**-exponents
    if layout == "interleaved":
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :embed_dim]
    else:
        waves = torch.cat([angles.sin(), angles[..., : embed_dim // 2].cos()], dim=-1)
    return F.pad(waves, (0, embed_dim - waves.shape[-1]))


class SinusoidalPositionalEmbedding(AdditivePosition, Derived):
    """Fixed sinusoids: `add(x, positions) = x + sinusoids(positions + offset)`, times `scale` where that is learned.

    The rows are computed in float64 and kept in float32, also in a model of bfloat16. Without `init_scale` there are no
    parameters.

    | rows of | layout | endpoint | offset | padding_idx |
    |---|---|---|---|---|
    | the original Transformer | `"interleaved"` | `False` | 0 | `None` |
    | Marian, Pegasus, RoFormer | `"concatenated"` | `False` | 0 | `None` |
    | M2M100, XGLM, NLLB | `"concatenated"` | `True` | 2 | 1 |
    | x-transformers, scaled (`init_scale=D**-0.5`) | `"concatenated"` | `False` | 0 | `None` |

    Args:
        max_seq_len: Longest sequence. A larger number changes no row.
        embed_dim: Width of a row, D; it may be odd.
        base: The longest wave has 2 pi base positions.
        layout: Sine beside cosine, or all sines and then all cosines; see `sinusoids`.
        endpoint: Whether the last pair has the longest wave itself; see `sinusoids`.
        offset: Position 0 gets the row of this number; positions down to `-offset` reach those in front of it.
        padding_idx: Row that is zero: in M2M100 row 1, which padding reaches as position -1.
        init_scale: Learn one factor on all rows, the parameter `scale` of shape `(1,)`, which starts here; `None` for
            none.

    Raises:
        SizeError: A size is below 1, the offset below 0, the padding row outside, or the width below 4 with `endpoint`.

    Example:
        >>> SinusoidalPositionalEmbedding(50, 4)(torch.tensor([0]))
        tensor([[0., 1., 0., 1.]])

    Reference: Vaswani et al., Attention is all you need, 2017, section 3.5; `*SinusoidalPositionalEmbedding` of
    transformers, which computes M2M100's in float32 (an error of 1e-3 at position 10,000) and grows without end;
    `ScaledSinusoidalEmbedding` of x-transformers, which computes its rows anew on each call.
    """

    waves: Float[Tensor, "rows D"]
    scale: nn.Parameter | None

    def __init__(
        self,
        max_seq_len: int,
        embed_dim: int,
        *,
        base: float = 10000.0,
        layout: Layout = "interleaved",
        endpoint: bool = False,
        offset: int = 0,
        padding_idx: int | None = None,
        init_scale: float | None = None,
    ) -> None:
        super().__init__()
        if max_seq_len < 1 or embed_dim < 1:
            raise SizeError(f"max_seq_len and embed_dim must be at least 1, not {max_seq_len} and {embed_dim}.")
        if layout not in ("interleaved", "concatenated"):
            raise SizeError(f"layout must be 'interleaved' or 'concatenated', not {layout!r}.")
        if endpoint and embed_dim < 4:
            raise SizeError(f"endpoint needs two waves, an embed_dim of at least 4, not {embed_dim}.")
        if offset < 0 or not (padding_idx is None or 0 <= padding_idx < max_seq_len + offset):
            raise SizeError(
                f"offset must be at least 0 and padding_idx one of the {max_seq_len + max(offset, 0)} rows, "
                f"not {offset} and {padding_idx}."
            )
        self.max_seq_len = max_seq_len
        self.embed_dim = embed_dim
        self.base = base
        self.layout: Layout = layout
        self.endpoint = endpoint
        self.offset = offset
        self.padding_idx = padding_idx
        self.init_scale = init_scale
        self.register_parameter("scale", None if init_scale is None else nn.Parameter(torch.empty(1)))
        self.reset_parameters()
        self.bounds = Bounds(max_seq_len, "position", offset=offset)
        self.derive()

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "max_seq_len": self.max_seq_len,
            "embed_dim": self.embed_dim,
            "base": self.base,
            "layout": self.layout,
            "endpoint": self.endpoint,
            "offset": self.offset,
            "padding_idx": self.padding_idx,
            "init_scale": self.init_scale,
        }

    def reset_parameters(self) -> None:
        """Set a learned factor to its start."""
        if self.scale is not None:
            nn.init.constant_(self.scale, self.init_scale or 0.0)

    def derived(self) -> dict[str, Tensor]:
        """The rows of all positions."""
        numbers = torch.arange((self.max_seq_len or 0) + self.offset, dtype=torch.float64)
        waves = sinusoids(numbers, self.embed_dim, self.base, layout=self.layout, endpoint=self.endpoint)
        if self.padding_idx is not None:
            waves[self.padding_idx] = 0
        return {"waves": waves.float()}

    def stored(self, length: int) -> Float[Tensor, "T D"] | None:
        """Rows of `waves`; they lie nowhere if a learned factor is on them."""
        if self.scale is not None:
            return None
        return self.waves[self.offset : self.offset + length] if length <= (self.max_seq_len or 0) else None

    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """`sinusoids(positions + offset)`, times `scale` where that is learned."""
        places, outside = self.bounds(positions)
        rows = F.embedding(places, self.waves)
        rows = rows if self.scale is None else self.scale * rows
        return rows if outside is None else rows.masked_fill(outside.unsqueeze(-1), 0)

    def check(self) -> None:
        """Wait for the device and raise the error of a position past `max_seq_len` since the last check."""
        self.bounds.check()
