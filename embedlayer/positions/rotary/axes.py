"""Division of rotary pairs over several position axes, such as time, row and column of an image patch.

A division is a frozen dataclass that states for each pair the axis whose position rotates it. `RotaryEmbedding` takes
it as `axes`. Positions then have shape `(A, B, T)`: axis, sequence, token. Text has one position for all axes and is
passed as `(T,)` or `(B, T)`, as without `axes`.

| class | pairs of axis 0, 1, 2 in order | models of transformers |
|---|---|---|
| `ChunkedAxes` | 0 0 0 1 1 1 2 2 | Qwen2-VL, Qwen2.5-VL, GLM-4V, PaddleOCR-VL |
| `InterleavedAxes` | 0 1 2 0 1 2 0 1 | Qwen3-VL, Qwen3.5, Cohere Compass, NeoMME |
| `AlternatingAxes` | 1 2 1 2 1 2 0 0 | ERNIE 4.5 VL |
| `ChannelAxes` | by channels, see the class | HunYuan-VL |
| `AxialAxes` | 0 0 0 0 1 1 1 1 | vision towers |

The first four divide the frequencies of one head. In `AxialAxes`, each axis has all frequencies of a narrower head,
unless `shared_frequencies` is set.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import SizeError
from embedlayer.positions.rotary.scaling import rotary_frequencies
from embedlayer.saving import Described


class RotaryAxes(Described, ABC):
    """Abstract base class of the divisions of rotary pairs over position axes.

    Attributes:
        has_own_frequencies: Whether `frequencies` differ from those of a single axis. They then have no scaling.
        divides_channels: Whether `index` has an entry for each channel, and not one for each pair.
        pairs_within_axis: Whether the channels of an axis are adjacent, with the pairs inside them: `(i, i + n / 2)`
            among the n channels of the axis.
    """

    has_own_frequencies: bool = False
    divides_channels: bool = False
    pairs_within_axis: bool = False

    @property
    @abstractmethod
    def num_axes(self) -> int:
        """Return the number of axes, A."""

    @abstractmethod
    def index(self, rotary_dim: int) -> Int[Tensor, " angles"]:
        """Return the axis of each pair, or of each channel if `divides_channels`.

        Args:
            rotary_dim: Number of rotated channels of a head; it has half as many pairs.
        """

    @abstractmethod
    def frequencies(self, rotary_dim: int, base: float) -> Float[Tensor, " half"]:
        """Return the frequency of each pair in radians per position, in float64."""


@dataclass(frozen=True)
class SectionedAxes(RotaryAxes, ABC):
    """Abstract: axes that divide the pairs of one head; `sections` states the size of each axis's share."""

    sections: Sequence[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(self.sections))  # JSON has lists

    @property
    def num_axes(self) -> int:
        """Return the number of sections."""
        return len(self.sections)

    def frequencies(self, rotary_dim: int, base: float) -> Float[Tensor, " half"]:
        """Return the frequencies of a single axis, `base^(-2i / rotary_dim)`."""
        return rotary_frequencies(rotary_dim, base)

    def _require(self, rotary_dim: int) -> int:
        """Return the number of pairs, to which the sections must add up."""
        pairs, total = rotary_dim // 2, sum(self.sections)
        if total != pairs or min(self.sections) < 1:
            raise SizeError(f"{type(self).__name__}: positive sections must add up to {pairs} pairs: {self.sections}.")
        return pairs


@dataclass(frozen=True)
class ChunkedAxes(SectionedAxes):
    """Adjacent pairs for each axis: the first `sections[0]` pairs for axis 0, the next `sections[1]` for axis 1, ...

    Args:
        sections: Number of pairs of each axis.

    Reference: Wang et al., Qwen2-VL, 2024; transformers/models/qwen2_vl/modeling_qwen2_vl.py (`mrope_section`, there of
    three axes: time, row and column).
    """

    def index(self, rotary_dim: int) -> Int[Tensor, " half"]:
        """Return the axis of each pair: 0 for the first section, 1 for the second, ..."""
        self._require(rotary_dim)
        return torch.arange(self.num_axes).repeat_interleave(torch.tensor(self.sections))


@dataclass(frozen=True)
class InterleavedAxes(SectionedAxes):
    """Axes in turn: pair p belongs to axis `p % A`, or to axis 0 where that axis has its number of pairs already.

    Precisely, axis a > 0 has the pairs p with `p % A = a` and `p < A * sections[a]`; axis 0 has all others.

    Args:
        sections: Number of pairs of each axis, A numbers.

    Reference: transformers/models/qwen3_vl/modeling_qwen3_vl.py (`mrope_section`).
    """

    def index(self, rotary_dim: int) -> Int[Tensor, " half"]:
        """Return the axis of each pair."""
        pairs = torch.arange(self._require(rotary_dim))
        axis = pairs % self.num_axes
        return torch.where(pairs < self.num_axes * torch.tensor(self.sections)[axis], axis, 0)


@dataclass(frozen=True)
class AlternatingAxes(SectionedAxes):
    """Fast pairs in turn for all axes but 0, then the slow pairs for axis 0.

    With time as axis 0, row as 1 and column as 2, the pairs are row, column, row, column, ..., time, time.

    Args:
        sections: Number of pairs of each axis, that of axis 0 first; all others are equal.

    Reference: transformers/models/ernie4_5_vl_moe/modeling_ernie4_5_vl_moe.py; its `mrope_section` has axis 0 last.
    """

    def index(self, rotary_dim: int) -> Int[Tensor, " half"]:
        """Return the axis of each pair."""
        if len(set(self.sections[1:])) > 1:
            raise SizeError(f"AlternatingAxes: sections after the first must be equal, not {self.sections}.")
        pairs, others = torch.arange(self._require(rotary_dim)), self.num_axes - 1
        return torch.where(pairs < others * self.sections[1], pairs % others + 1, 0)


@dataclass(frozen=True)
class ChannelAxes(SectionedAxes):
    """Adjacent channels for each axis: the first `2 * sections[0]` channels for axis 0, the next for axis 1, ...

    In the half-split layout the two channels of a pair then have angles of different axes: with `a` at channel i, `b`
    at channel i + half and the angles s and t, the result is `(a cos s - b sin s, b cos t + a sin t)`. This is a
    rotation only where both positions are equal, as in text.

    Args:
        sections: Half the number of channels of each axis.

    Reference: transformers/models/hunyuan_vl/modeling_hunyuan_vl.py (`mrope_section`, before that `xdrope_section`).
    """

    divides_channels = True

    def index(self, rotary_dim: int) -> Int[Tensor, " channels"]:
        """Return the axis of each channel: 0 for the first `2 * sections[0]`, 1 for the next, ..."""
        self._require(rotary_dim)
        return torch.arange(self.num_axes).repeat_interleave(2 * torch.tensor(self.sections))


@dataclass(frozen=True)
class AxialAxes(RotaryAxes):
    """Equal shares of the pairs for each axis, in general with the frequencies of a head that has only this share.

    With n = `rotary_dim / num_axes` channels, pair j of each axis then rotates by `position * base^(-2j / n)` radians.

    Args:
        num_axes: Number of axes, A: 2 for rows and columns, in this order.
        alternating: Whether the axes take turns, 0 1 0 1 ..., and not 0 0 ... 1 1 ... (Kimi K2.5).
        shared_frequencies: Whether the axes share the frequencies of the whole head: share a has those of the pairs a,
            a + A, a + 2A, ... (Pixtral).
        pairs_within_axis: Whether the rotated channels of an axis are adjacent: n channels of axis 0, then n of axis 1,
            and so on. Otherwise pairs span the head, as without axes (Gemma 4's vision tower).
        last_axis_first: Whether the shares are those of the axes in reverse order: columns, then rows (Kimi K2.5).

    Reference: transformers/models/qwen2_vl/modeling_qwen2_vl.py (`Qwen2VLVisionRotaryEmbedding`), and the models named
    above. Their tables have positions in float32; here they are integers, without rounding.
    """

    num_axes: int = 2
    alternating: bool = False
    shared_frequencies: bool = False
    pairs_within_axis: bool = False
    last_axis_first: bool = False
    has_own_frequencies = True

    def __post_init__(self) -> None:
        if self.alternating and self.pairs_within_axis:
            raise SizeError("AxialAxes: axes either alternate, or have their pairs within each axis.")

    def index(self, rotary_dim: int) -> Int[Tensor, " half"]:
        """Return the axis of each pair."""
        shares = torch.arange(self.num_axes)
        order = (shares.flip(0) if self.last_axis_first else shares).unsqueeze(-1).expand(-1, self._pairs(rotary_dim))
        return (order.T if self.alternating else order).flatten()

    def frequencies(self, rotary_dim: int, base: float) -> Float[Tensor, " half"]:
        """Return the frequency of each pair in radians per position, in float64."""
        pairs = self._pairs(rotary_dim)
        if self.shared_frequencies:
            order = rotary_frequencies(rotary_dim, base).view(pairs, self.num_axes).T
        else:
            order = rotary_frequencies(2 * pairs, base).expand(self.num_axes, -1)
        return (order.T if self.alternating else order).flatten()

    def _pairs(self, rotary_dim: int) -> int:
        """Return the number of pairs of one axis."""
        if rotary_dim % (2 * self.num_axes):
            raise SizeError(f"AxialAxes: {self.num_axes} axes cannot share {rotary_dim // 2} pairs evenly.")
        return rotary_dim // 2 // self.num_axes
