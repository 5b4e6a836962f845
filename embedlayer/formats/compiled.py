"""Compiled kernels of stored rows: their numbers, which `StoredRows.dequantise` defines, and logits of few tokens."""

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from embedlayer.core.block_sizes import DECODED_NUMBERS, block_size
from embedlayer.core.devices import device_kind
from embedlayer.formats.codec import Codec, SuperBlocks
from embedlayer.formats.stored import StoredRows
from embedlayer.io.gguf_files import dequantise
from embedlayer.kernels.cpu import codec as codec_kernels
from embedlayer.kernels.kernel import EMPTY, NUMBER_TYPES, Argument, Array, as_array
from embedlayer.kernels.operation import Operation

FEW_TOKENS = 8
"""Most tokens that a compiled kernel multiplies by the stored rows; of more, dequantised blocks are multiplied."""

CLAIMED_NUMEL = 1 << 16  # numbers that a thread claims at once
READ_ROWS = Operation(
    "look-up, dequantisation, and logits of few tokens of rows in the formats of other libraries",
    Codec.decode,
    cpu=[codec_kernels.read_rows],
)
READ_SUPER_BLOCKS = Operation(
    "look-up, dequantisation and logits of few tokens of GGUF's `Q4_K`, `Q5_K` and `Q6_K`",
    dequantise,
    cpu=[codec_kernels.read_super_blocks],
)
_OPERATIONS = {Codec: READ_ROWS, SuperBlocks: READ_SUPER_BLOCKS}
_PAIRS = torch.stack([torch.arange(256, device="cpu") & 15, torch.arange(256, device="cpu") >> 4], dim=1)


def decoded(
    codec: Codec | SuperBlocks | None, dtype: torch.dtype, ids: Int[Tensor, " N"] | None = None
) -> Float[Tensor, "N D"] | None:
    """Return the numbers of the rows of some IDs, or of all rows, in `dtype` by a kernel on the CPU."""
    if codec is None or not _OPERATIONS[type(codec)].applies(ids, codec.codes):
        return None
    out_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    out = torch.empty(len(codec.codes if ids is None else ids), codec.embed_dim, dtype=out_dtype)
    places = EMPTY[torch.int64] if ids is None else ids.long().contiguous()
    no_tokens = torch.empty(0, codec.embed_dim)
    return out.to(dtype) if _run(codec, places, no_tokens, out) else None


def read_rows(stored: StoredRows, dtype: torch.dtype, ids: Int[Tensor, " N"] | None = None) -> Float[Tensor, "N D"]:
    """Return the numbers of the rows of some IDs, or of all rows, in `dtype`: by a kernel where one can run."""
    by_kernel = decoded(stored.codec(dtype), dtype, ids) if stored.device.type == "cpu" else None
    if by_kernel is not None:
        return by_kernel
    if ids is None:
        return stored.dequantise(dtype)
    step = max(1, block_size(DECODED_NUMBERS, device_kind(ids)) // stored.shape[1])
    if len(ids) <= step:
        return stored.take(ids).dequantise(dtype)
    out = torch.empty(len(ids), stored.shape[1], dtype=dtype, device=ids.device)
    for some, numbers in zip(ids.split(step), out.split(step), strict=True):
        numbers.copy_(stored.take(some).dequantise(dtype))
    return out


def logits_of_few_tokens(x: Float[Tensor, "N D"], stored: StoredRows) -> Float[Tensor, "N V"] | None:
    """Return `x @ rows.T` for few float32 tokens on the CPU by a kernel; `None` if there are more, or none can run."""
    # Only float32: the kernel sums in another order than products of blocks, and bfloat16 results would be rounded
    # differently.
    if len(x) > FEW_TOKENS or x.dtype != torch.float32 or stored.device.type != "cpu":
        return None
    codec = stored.codec(x.dtype)
    if codec is None or not _OPERATIONS[type(codec)].applies(x, codec.codes):
        return None
    out = torch.empty(len(codec.codes), len(x))
    return tokens_first(out) if _run(codec, EMPTY[torch.int64], x.contiguous(), out) else None


def tokens_first(products: Float[Tensor, "V N"]) -> Float[Tensor, "N V"]:
    """Return products with the tokens first, in memory of their own: operators return no views."""
    return products.T.clone(memory_format=torch.contiguous_format)


def _run(codec: Codec | SuperBlocks, ids: Array, x: Tensor, out: Tensor) -> bool:
    """Run the kernel of a codec, and return whether it could be compiled; a thread claims some rows at once."""
    arguments: tuple[Argument, ...]
    if isinstance(codec, SuperBlocks):
        arguments = codec.codes.contiguous(), codec.bits
    else:
        whole = codec.whole_numbers()
        levels = codec.levels if whole or codec.bits != 4 else codec.levels[_PAIRS].flatten()
        scale_levels = codec.levels if codec.scale_levels is None else codec.scale_levels
        (scale, scale_type), (zero, zero_type), (bias, _) = map(_bytes, (codec.scale, codec.zero, codec.bias))
        stored = codec.codes.contiguous(), levels, scale, scale_levels, zero, bias, torch.tensor([codec.factor])
        types = scale_type, zero_type, NUMBER_TYPES.index(codec.rounding)
        arguments = stored, (codec.bits, codec.group_size, codec.scale.shape[1], *(whole or (-1, 0)), *types)
    block = max(1, CLAIMED_NUMEL // codec.embed_dim)
    (kernel,) = _OPERATIONS[type(codec)].cpu
    return kernel.run(len(out), ids, x, *arguments, *_bytes(out), block=block)


def _bytes(numbers: Tensor | None) -> tuple[NDArray[np.uint8], int]:
    """Return the bytes of numbers, of one row if all rows share them, and the index of their type."""
    if numbers is None:
        return np.empty((0, 0), np.uint8), 0
    one = (numbers[:1] if numbers.stride(0) == 0 else numbers).contiguous()
    if one.dtype not in NUMBER_TYPES:
        one = one.to(torch.float32)
    return as_array(one).view(np.uint8), NUMBER_TYPES.index(one.dtype)
