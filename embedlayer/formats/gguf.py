"""Record of the types of blocks in GGUF files, which the package `gguf` dequantises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import SuperBlocks
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, StoredRows
from embedlayer.io.gguf_files import can_quantise, dequantise, quantise, row_bytes

_BLOCK_TYPES = ("Q", "IQ", "TQ", "MXFP", "NVFP")
"""Starts of the names of types of blocks; no type of safetensors starts so."""

_CODE_BITS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
"""Bits of a code of the types that a kernel reads."""


@dataclass(frozen=True)
class GGUFRows(StoredFormat):
    """Rows in blocks of a GGUF type: 16 to 256 consecutive numbers of a row, which share scales."""

    library: ClassVar[str] = "GGUF"
    title: ClassVar[str] = "types of blocks"
    dtype = torch.float32

    block_type: str

    def __post_init__(self) -> None:
        super().__post_init__()
        row_bytes(self.block_type, self.embed_dim)

    @classmethod
    def recognise(cls, module: StoredModule) -> tuple[Self, int] | None:
        """Return the record of a matrix in blocks, and its number of rows; `None` for another module."""
        info = module.tensors.get("weight")
        if info is None or not info.dtype.startswith(_BLOCK_TYPES) or len(info.shape) != 2:
            return None
        return cls(info.shape[1], info.dtype), info.shape[0]

    @property
    def name(self) -> str:
        return self.block_type

    @property
    def row_parts(self) -> dict[str, Part]:
        return {"packed": Part(torch.uint8, (row_bytes(self.block_type, self.embed_dim),))}

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        return module.read("weight")

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> SuperBlocks | None:
        """Return blocks of `Q4_K`, `Q5_K` and `Q6_K` as a kernel reads them, and `None` for other types."""
        bits = _CODE_BITS.get(self.block_type)
        return None if bits is None else SuperBlocks(rows["packed"], bits, self.embed_dim)

    def dequantise(
        self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "N D"]:
        """Return the numbers of rows as the package `gguf` computes them, in float32 and then rounded to `dtype`."""
        packed = rows["packed"]
        if not len(packed):  # the package divides by the number of blocks
            return packed.new_empty(0, self.embed_dim, dtype=dtype)
        return dequantise(packed, self.block_type).to(packed.device, dtype)

    @property
    def can_quantise(self) -> bool:
        """Return whether the package `gguf` quantises to the type."""
        return can_quantise(self.block_type)

    def quantise(self, values: Float[Tensor, "N D"], shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows in blocks, as the package `gguf` quantises them."""
        packed = quantise(values, self.block_type)
        return super().quantise(values, shared) if packed is None else {"packed": packed.to(values.device)}

    def write(self, stored: StoredRows, module: StoredModule) -> dict[str, Tensor]:
        return {"weight": stored.rows["packed"]}
