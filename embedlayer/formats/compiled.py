"""Compiled kernels of stored rows: their numbers, which `StoredRows.dequantise` defines, and logits of few tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.formats.codec import Codec, SuperBlocks
from embedlayer.formats.stored import StoredRows
from embedlayer.kernels.kernel import NUMBER_TYPES, Argument, Kernel

FEW_TOKENS = 8
"""Most tokens that a compiled kernel multiplies by the stored rows; of more, dequantised blocks are multiplied."""

CLAIMED_NUMEL = 1 << 16  # numbers that a thread claims at once
_NUMBERS_AT_ONCE = 1 << 20  # numbers that are dequantised at once by torch operators
_DECODE, _LOGITS = (
    {Codec: Kernel("codec", name), SuperBlocks: Kernel("codec", of_blocks)}
    for name, of_blocks in (("decode", "decode_super_blocks"), ("logits", "logits_of_super_blocks"))
)
_PAIRS = torch.stack([torch.arange(256, device="cpu") & 15, torch.arange(256, device="cpu") >> 4], dim=1)


def decoded(
    codec: Codec | SuperBlocks | None, dtype: torch.dtype, ids: Int[Tensor, " N"] | None = None
) -> Float[Tensor, "N D"] | None:
    """Return the numbers of the rows of some IDs, or of all rows, in `dtype` by a kernel on the CPU.

    They have the bits of `codec.decode()[ids].to(dtype)`; the bytes of these rows only are read. The result is `None`
    if no kernel can run, or there is no codec.
    """
    if codec is None or not (kernel := _DECODE[type(codec)]).applies(ids, codec.codes):
        return None
    out_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    out = torch.empty(len(codec.codes if ids is None else ids), codec.embed_dim, dtype=out_dtype)
    places = torch.empty(0, dtype=torch.int64) if ids is None else ids.long().contiguous()
    result = out.view(torch.uint8), NUMBER_TYPES.index(out_dtype)
    is_run = kernel.run(len(out), places, *_arguments(codec), *result, block=_block(codec))
    return out.to(dtype) if is_run else None


def read_rows(stored: StoredRows, dtype: torch.dtype, ids: Int[Tensor, " N"] | None = None) -> Float[Tensor, "N D"]:
    """Return the numbers of the rows of some IDs, or of all rows, in `dtype`: by a kernel where one can run.

    Else the definition computes them, those of IDs a few rows at a time.
    """
    by_kernel = decoded(stored.codec(dtype), dtype, ids) if stored.device.type == "cpu" else None
    if by_kernel is not None:
        return by_kernel
    step = max(1, _NUMBERS_AT_ONCE // stored.shape[1])
    if ids is None or len(ids) <= step:
        return (stored if ids is None else stored.take(ids)).dequantise(dtype)
    out = torch.empty(len(ids), stored.shape[1], dtype=dtype, device=ids.device)
    for some, numbers in zip(ids.split(step), out.split(step), strict=True):
        numbers.copy_(stored.take(some).dequantise(dtype))
    return out


def logits_of_few_tokens(x: Float[Tensor, "N D"], stored: StoredRows) -> Float[Tensor, "N V"] | None:
    """Return `x @ rows.T` for few float32 tokens on the CPU by a kernel; `None` if there are more, or none can run.

    Of bfloat16 tokens the result would not be that of products of blocks: sums in another order are rounded otherwise.
    """
    if len(x) > FEW_TOKENS or x.dtype != torch.float32 or stored.device.type != "cpu":
        return None
    codec = stored.codec(x.dtype)
    if codec is None or not _LOGITS[type(codec)].applies(x, codec.codes):
        return None
    out = torch.empty(len(codec.codes), len(x))
    is_run = _LOGITS[type(codec)].run(len(out), x.contiguous(), *_arguments(codec), out, block=_block(codec))
    return tokens_first(out) if is_run else None


def tokens_first(products: Float[Tensor, "V N"]) -> Float[Tensor, "N V"]:
    """Return products with the tokens first, in memory of their own: operators return no views."""
    return products.T.clone(memory_format=torch.contiguous_format)


def _block(codec: Codec | SuperBlocks) -> int:
    """Return the number of rows that a thread claims at once."""
    return max(1, CLAIMED_NUMEL // codec.embed_dim)


def _arguments(codec: Codec | SuperBlocks) -> tuple[Argument, ...]:
    """Return the arguments of a kernel that describe the rows."""
    if isinstance(codec, SuperBlocks):
        return codec.codes.contiguous(), codec.bits
    whole = codec.whole_numbers()
    levels = codec.levels if whole or codec.bits != 4 else codec.levels[_PAIRS].flatten()
    scale_levels = codec.levels if codec.scale_levels is None else codec.scale_levels
    (scale, scale_type), (zero, zero_type), (bias, _) = map(_bytes, (codec.scale, codec.zero, codec.bias))
    stored = codec.codes.contiguous(), levels, scale, scale_levels, zero, bias, torch.tensor([codec.factor])
    types = scale_type, zero_type, NUMBER_TYPES.index(codec.rounding)
    return stored, (codec.bits, codec.group_size, codec.scale.shape[1], *(whole or (-1, 0)), *types)


def _bytes(numbers: Tensor | None) -> tuple[Tensor, int]:
    """Return the bytes of numbers of groups, of one row if all rows share them, and the index of their type."""
    if numbers is None:
        return torch.empty(0, 0, dtype=torch.uint8), 0
    if numbers.dtype not in NUMBER_TYPES:
        numbers = numbers.to(torch.float32)
    one = (numbers[:1] if numbers.stride(0) == 0 else numbers).contiguous()
    number_bytes = one.flatten().view(torch.uint8).view(len(one), one.shape[1] * one.itemsize)
    return number_bytes, NUMBER_TYPES.index(one.dtype)
