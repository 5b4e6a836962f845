"""Record of the types of blocks in GGUF files, which the package `gguf` dequantises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from embedlayer.formats.codec import Codec, unsigned
from embedlayer.formats.layouts import floats
from embedlayer.formats.stored import Part, StoredFormat, StoredModule, StoredRows
from embedlayer.io.gguf_files import can_quantise, dequantise, quantise, row_bytes
from embedlayer.kernels.kernel import Kernel

_BLOCK_TYPES = ("Q", "IQ", "TQ", "MXFP", "NVFP")
"""Starts of the names of types of blocks; no type of safetensors starts so."""


_SUPER_BLOCK = 256
"""Columns of a block of the types `Q4_K`, `Q5_K` and `Q6_K`."""

_CLAIMED_NUMEL = 1 << 16  # numbers that a thread claims at once
_UNPACK = Kernel("codec", "unpack_super_blocks")


@dataclass(frozen=True)
class GGUFRows(StoredFormat):
    """Rows in blocks of a GGUF type: 16 to 256 consecutive numbers of a row, which share scales.

    Attributes:
        embed_dim: Columns of a row, D.
        block_type: Name of the type of the blocks, such as `"Q4_K"`.

    Raises:
        CheckpointError: The type is unknown, or a row is no whole number of blocks.
        MissingExtraError: The `gguf` extra is not installed.

    Reference: ggml/docs/gguf.md, ggml-common.h of llama.cpp.
    """

    library: ClassVar[str] = "GGUF"
    title: ClassVar[str] = "types of blocks"

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
        """Return `block_type`."""
        return self.block_type

    @property
    def dtype(self) -> torch.dtype:
        """Return float32."""
        return torch.float32

    @property
    def row_parts(self) -> dict[str, Part]:
        """Return the bytes of a row, `packed`."""
        return {"packed": Part(torch.uint8, (row_bytes(self.block_type, self.embed_dim),))}

    def read_part(self, module: StoredModule, part: str, vocab_size: int) -> Tensor:
        """Read the bytes of all rows."""
        return module.read("weight")

    def codec(self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype) -> Codec | None:
        """Return blocks of `Q4_K`, `Q5_K` and `Q6_K` as a kernel reads them, and `None` for other types.

        Their codes are copied to bytes of their own, and scales of groups are computed, so take some rows at a time.
        """
        if self.block_type not in ("Q4_K", "Q5_K", "Q6_K"):
            return None
        codes, scale, bias = _unpacked(rows["packed"], int(self.block_type[1]), self.embed_dim)
        middle = torch.full((1, 1), 32, dtype=torch.int8, device=scale.device).expand(scale.shape)
        return Codec(
            codes,
            8,
            unsigned(8),
            scale,
            self.embed_dim // scale.shape[1],
            self.embed_dim,
            torch.float32,
            zero=middle if bias is None else None,
            bias=bias,
        )

    def dequantise(
        self, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "N D"]:
        """Return the numbers of rows as the package `gguf` computes them, in float32 and then rounded to `dtype`.

        A `CheckpointError` says that it cannot dequantise the type.
        """
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
        """Return the bytes of all rows as `weight`."""
        return {"weight": stored.rows["packed"]}


def _unpacked(packed: UInt8[Tensor, "N bytes"], bits: int, embed_dim: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes `(N, D)`, scales and biases `(N, G)` of rows of `Q4_K`, `Q5_K` or `Q6_K`, which has no biases."""
    groups = embed_dim // (16 if bits == 6 else 32)
    if _UNPACK.applies(packed):
        codes, packed = torch.empty(len(packed), embed_dim, dtype=torch.uint8), packed.contiguous()
        scale, bias = torch.empty(2, len(packed), groups)
        if _UNPACK.run(len(packed), packed, bits, codes, scale, bias, block=max(1, _CLAIMED_NUMEL // embed_dim)):
            return codes, scale, None if bits == 6 else bias
    blocks = packed.unflatten(1, (embed_dim // _SUPER_BLOCK, packed.shape[1] * _SUPER_BLOCK // embed_dim))
    codes, scale, biases = (_codes_of_6_bits if bits == 6 else _codes_of_4_bits)(blocks)
    return codes.flatten(1), scale.flatten(1), None if biases is None else biases.flatten(1)


def _codes_of_4_bits(blocks: UInt8[Tensor, "N B bytes"]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes `(N, B, 256)`, scales and biases `(N, B, 8)` of blocks of `Q4_K`, or with a fifth bit of `Q5_K`.

    The scales and minima of 8 groups are 6 bits each: four bytes have the low bits of four scales, four those of
    minima, with the high bits of the others; four bytes have the low bits of these.
    """
    super_scales = floats(blocks[..., :4].flatten(0, 1), torch.float16).view(*blocks.shape[:2], 2, 1)
    scales, minima, lows = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([scales & 63, lows & 15 | scales >> 2 & 48], dim=-1)
    minima = torch.cat([minima & 63, lows >> 4 | minima >> 2 & 48], dim=-1)
    low = blocks[..., -128:].unflatten(-1, (4, 32))
    codes = torch.stack([low & 15, low >> 4], dim=-2).flatten(-3)
    if blocks.shape[-1] == 176:
        places = torch.arange(8, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
        codes |= ((blocks[..., None, 16:48] >> places & 1) << 4).flatten(-2)
    return codes, super_scales[..., 0, :] * scales, -(super_scales[..., 1, :] * minima)


def _codes_of_6_bits(blocks: UInt8[Tensor, "N B bytes"]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes `(N, B, 256)` to which 32 was added, scales `(N, B, 16)` and no biases of blocks of `Q6_K`."""
    low, high = blocks[..., :128].unflatten(-1, (2, 1, 64)), blocks[..., 128:192].unflatten(-1, (2, 1, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(-1)
    codes = torch.cat([low & 15, low >> 4], dim=-2).flatten(-2)
    codes |= ((high >> places & 3) << 4).flatten(-2)
    super_scale = floats(blocks[..., 208:].flatten(0, 1), torch.float16).view(*blocks.shape[:2], 1)
    return codes.flatten(-2), super_scale * blocks[..., 192:208].contiguous().view(torch.int8), None
