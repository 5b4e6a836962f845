"""Sinusoidal positions: fixed sines and cosines of many wavelengths (the original Transformer)."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.errors import SizeError
from embedlayer.core.shapes import Positions
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import StoredRows, gather_rows, rows_on_cuda
from embedlayer.positions.position import AdditivePosition

Layout = Literal["interleaved", "concatenated", "cosines_first"]


def sinusoids(
    positions: Float[Tensor, " T"],
    embed_dim: int,
    base: float = 10000.0,
    *,
    layout: Layout = "interleaved",
    endpoint: bool = False,
) -> Float[Tensor, "T D"]:
    """Compute `PE(p, 2i) = sin(p / base^(2i/D))`, `PE(p, 2i+1) = cos(p / base^(2i/D))`, in the dtype of `positions`.

    For any offset k, `PE(p + k)` is one fixed linear map of `PE(p)`: each sin/cos pair rotates by the angle
    `k / base^(2i/D)`. An odd width has one cosine less than sines.

    Args:
        positions: Any real numbers.
        embed_dim: Width of a row, D; at least 4 with `endpoint`.
        base: The longest wavelength is `2 pi base^(1 - 2/D)` positions (for an even D), with `endpoint` `2 pi base`.
        layout: `"interleaved"` as above; `"concatenated"`: all sines, then all cosines; or `"cosines_first"`: all
            cosines, then all sines.
        endpoint: Use wavelengths `2 pi base^(i / (D/2 - 1))`, so that the last pair has exactly `2 pi base`, as with
            `numpy.linspace(endpoint=True)` (tensor2tensor, fairseq, M2M100). An odd width then ends with a zero.

    Example:
        >>> sinusoids(torch.arange(2.0), 4)
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

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
        waves = waves.roll(embed_dim // 2, -1) if layout == "cosines_first" else waves
    return F.pad(waves, (0, embed_dim - waves.shape[-1]))


class SinusoidalPositionalEmbedding(AdditivePosition, ComputedBuffers):
    """Fixed sinusoids: `add(x, positions) = x + scale * sinusoids(positions + offset)`.

    `scale` is a learned parameter if `init_scale` is passed; otherwise it is 1 and there are no parameters. The rows
    are computed in float64 and stored in float32, also in a bfloat16 model.

    | rows of | layout | endpoint | offset | padding_idx |
    |---|---|---|---|---|
    | the original Transformer | `"interleaved"` | `False` | 0 | `None` |
    | Marian, Pegasus, RoFormer | `"concatenated"` | `False` | 0 | `None` |
    | M2M100, XGLM, NLLB | `"concatenated"` | `True` | 2 | 1 |
    | MusicGen | `"cosines_first"` | `True` | 0 | `None` |
    | x-transformers, scaled (`init_scale=D**-0.5`) | `"concatenated"` | `False` | 0 | `None` |

    Args:
        max_seq_len: Longest sequence: the number of stored rows without the offset. Their values do not depend on it.
        embed_dim: Width of a row, D; it may be odd.
        base: Base of the wavelengths; see `sinusoids`.
        layout: Order of sines and cosines; see `sinusoids`.
        endpoint: Whether the last pair has exactly the longest wavelength; see `sinusoids`.
        offset: Row of position 0; rows before it are those of positions `-offset .. -1`.
        padding_idx: Row that is zero, or `None`. In M2M100 it is row 1, and padding has position -1.
        init_scale: Initial value of a learned factor, the parameter `scale` of shape `(1,)`; `None` for no factor.

    Example:
        >>> SinusoidalPositionalEmbedding(50, 4)(torch.tensor([0]))
        tensor([[0., 1., 0., 1.]])

    Reference: Vaswani et al., Attention is all you need, 2017, section 3.5; `*SinusoidalPositionalEmbedding` of
    transformers, which computes those of M2M100 in float32 (an error of 1e-3 at position 10,000) and extends
    them on demand; `ScaledSinusoidalEmbedding` of x-transformers, which computes its rows in each call.
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
        if layout not in get_args(Layout):
            raise SizeError(f"layout must be one of {', '.join(map(repr, get_args(Layout)))}, not {layout!r}.")
        if endpoint and embed_dim < 4:
            raise SizeError(f"endpoint needs two waves, an embed_dim of at least 4, not {embed_dim}.")
        if offset < 0 or not (padding_idx is None or 0 <= padding_idx < max_seq_len + offset):
            raise SizeError(f"offset {offset} is below 0, or padding_idx {padding_idx} is none of the rows.")
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
        self.index_check = IndexCheck(max_seq_len, "position", offset=offset)
        self.recompute_buffers()

    def reset_parameters(self) -> None:
        """Set the learned factor `scale` to `init_scale`, in place; without such a factor nothing changes."""
        if self.scale is not None:
            nn.init.constant_(self.scale, self.init_scale or 0.0)

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffer `waves`: the sinusoids of all rows, `(max_seq_len + offset, D)`, in float32."""
        numbers = torch.arange((self.max_seq_len or 0) + self.offset, dtype=torch.float64)
        waves = sinusoids(numbers, self.embed_dim, self.base, layout=self.layout, endpoint=self.endpoint)
        if self.padding_idx is not None:
            waves[self.padding_idx] = 0
        return {"waves": waves.float()}

    def stored(self, length: int) -> Float[Tensor, "T D"] | None:
        """Return the rows of positions `0 .. length - 1` as a view; `None` beyond `max_seq_len` or with a factor."""
        if self.scale is not None:
            return None
        return self.waves[self.offset : self.offset + length] if length <= (self.max_seq_len or 0) else None

    def stored_look_up(self, positions: Positions) -> StoredRows | None:
        """Return the look-up `waves[positions + offset]` where a kernel on CUDA makes it; `None` with a factor."""
        if self.scale is not None:
            return None
        return rows_on_cuda(positions, self.waves, self.index_check)

    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """Return the row of each position, `scale * sinusoids(positions + offset)`, with 1 for a missing `scale`.

        The row `padding_idx` is zero.

        Raises:
            PositionError: On the CPU, a position is outside `-offset .. max_seq_len - 1`. On an accelerator its vector
                is zero, and the next `index_check.check()` raises the error.
        """
        if (stored := self.stored_look_up(positions)) is not None:
            return gather_rows(stored)
        index, outside = self.index_check(positions)
        rows = F.embedding(index, self.waves)
        rows = rows if self.scale is None else self.scale * rows
        return rows if outside is None else rows.masked_fill(outside.unsqueeze(-1), 0)
