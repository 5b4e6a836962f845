"""Record of our own quantised rows: codes of 8 or 4 bits, in one of the layouts of `embedlayer.formats.layouts`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from embedlayer.formats.codec import Codec
from embedlayer.formats.layouts import LAYOUTS, RowFormat
from embedlayer.formats.rounding import CovarianceRounding, fit_levels
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, whole_groups


@dataclass(frozen=True)
class QuantizedRows(StoredFormat):
    """Rows of a `QuantizedEmbedding`; the attributes are those of `RowFormat`."""

    library: ClassVar[str] = "embedlayer"
    title: ClassVar[str] = "int8, int4"
    dtype = torch.float32

    bits: int
    group_size: int
    layout_index: int = 0

    @property
    def choices(self) -> dict[str, Collection[int | str]]:
        """Return the bits and layouts that there are; the codes of a group are whole bytes."""
        sizes = whole_groups(2 if self.bits == 4 else 1)
        return {"embed_dim": whole_groups(1), "bits": (4, 8), "group_size": sizes, "layout_index": range(len(LAYOUTS))}

    @classmethod
    def of(cls, row_format: RowFormat) -> Self:
        """Return the record of rows of these sizes."""
        return cls(row_format.embed_dim, row_format.bits, row_format.group_size, row_format.layout_index)

    @property
    def row_format(self) -> RowFormat:
        return RowFormat(self.bits, self.embed_dim, self.group_size, self.layout_index)

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return `None`: a saved table has a description of its own."""
        return None

    @property
    def name(self) -> str:
        """Return the name of the type, such as `"int8"`; for blocks of GGUF its name, such as `"q8_0"`."""
        return self.row_format.layout().type_name(self.bits)

    @property
    def row_parts(self) -> dict[str, Part]:
        """Return the bytes of a row, `packed`, and where the layout has one its scale, `row_scale`."""
        parts = {"packed": Part(torch.uint8, (self.row_format.row_bytes(),))}
        return parts | (
            {"row_scale": Part(torch.float32, ())} if self.row_format.layout().has_row_scale(self.bits) else {}
        )

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec | None:
        """Return `None`: codes and headers of groups alternate in a row, and kernels of their own read them."""
        return None

    def dequantise(
        self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "N D"]:
        return dequantise(rows["packed"], rows.get("row_scale"), self.row_format).to(dtype)

    def value_range(self, shared: Mapping[str, Tensor]) -> tuple[float, float] | None:
        """Return the range of numbers of blocks, whose scales are float16; `None` for layouts of any float32 number."""
        largest = self.row_format.layout().largest(self.bits)
        return None if largest == torch.finfo(torch.float32).max else (-largest, largest)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of rows, as `QuantizedEmbedding.from_table` quantises them without options."""
        packed, row_scale = quantise(values.to(torch.float32), self.row_format)
        return {"packed": packed} | ({} if row_scale is None else {"row_scale": row_scale})


def dequantise(
    packed: UInt8[Tensor, "N bytes"], row_scale: Float[Tensor, " N"] | None, row_format: RowFormat
) -> Float[Tensor, "N D"]:
    """Dequantise N stored rows to float32: `row_scale * (step * code + offset)` for each number, `(N, D)`."""
    codes, step, offset = row_format.decode(packed)
    numbers: Tensor = (step * codes + offset).view(packed.shape[0], row_format.groups() * row_format.group_size)
    numbers = numbers[:, : row_format.embed_dim]
    return numbers if row_scale is None else row_scale.unsqueeze(1) * numbers


def quantise(
    rows: Float[Tensor, "N D"],
    row_format: RowFormat,
    *,
    symmetric: bool = False,
    clip: bool = True,
    rounding: CovarianceRounding | None = None,
    weights: Float[Tensor, "D D"] | None = None,
) -> tuple[UInt8[Tensor, "N bytes"], Float[Tensor, " N"] | None]:
    """Quantise float32 rows, and return `(packed, row_scale)`, the buffers of a `QuantizedEmbedding`."""
    bits, embed_dim, group_size, _ = row_format
    layout, row_scale = row_format.layout(), None
    if layout.has_row_scale(bits):
        row_scale = rows.abs().amax(dim=1)
        rows = rows / row_scale.where(row_scale > 0, 1.0).unsqueeze(1)
    missing = row_format.groups() * group_size - embed_dim
    groups = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1).view(-1, group_size)
    dtype, count = layout.header(bits)
    levels = fit_levels(groups, bits, dtype, symmetric=symmetric or count == 1, signed=count == 1, clip=clip)
    codes = levels.codes(groups)
    if rounding is not None and weights is not None:
        step, offset = (
            part.expand_as(codes).reshape(len(rows), -1)[:, :embed_dim] for part in (levels.step, levels.offset)
        )
        whole = codes.view(len(rows), -1)
        whole[:, :embed_dim] = rounding.codes(rows, whole[:, :embed_dim], step, offset, weights, 2**bits - 1)
    stored = layout.encode(codes.to(torch.uint8), levels.step.to(dtype), levels.offset.to(dtype), bits)
    return stored.view(len(rows), row_format.row_bytes()), row_scale
