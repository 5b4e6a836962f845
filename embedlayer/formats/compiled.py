"""Compiled kernels of stored rows: their numbers, which `StoredRows.dequantise` defines, and logits of few tokens."""

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.formats.codec import Codec
from embedlayer.formats.stored import StoredRows
from embedlayer.kernels.kernel import Argument, Kernel

FEW_TOKENS = 8
"""Most tokens that a compiled kernel multiplies by the stored rows; of more, dequantised blocks are multiplied."""

CLAIMED_NUMEL = 1 << 16  # numbers that a thread claims at once
_BLOCK_NUMEL = 1 << 23  # numbers of the rows whose codec is computed at once
_ROUNDINGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DECODE, _LOGITS = Kernel("codec", "decode"), Kernel("codec", "logits")


def decoded(codec: Codec | None, dtype: torch.dtype) -> Float[Tensor, "N D"] | None:
    """Return the numbers of all rows in `dtype` by a kernel on the CPU, with the bits of `codec.decode().to(dtype)`.

    The result is `None` if no kernel can run, or there is no codec.
    """
    if codec is None or not _DECODE.applies(codec.codes):
        return None
    computed = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    out = torch.empty(len(codec.codes), codec.embed_dim, dtype=computed)
    return out.to(dtype) if _DECODE.run(len(out), *_arguments(codec), out, block=_block(codec)) else None


def read_rows(stored: StoredRows, dtype: torch.dtype) -> Float[Tensor, "N D"]:
    """Return the numbers of all rows in `dtype`: by a kernel where one can run, else by the definition."""
    by_kernel = decoded(stored.codec(dtype), dtype) if stored.device.type == "cpu" else None
    return stored.dequantise(dtype) if by_kernel is None else by_kernel


def logits_of_few_tokens(x: Float[Tensor, "N D"], stored: StoredRows) -> Float[Tensor, "N V"] | None:
    """Return `x @ rows.T` for few float32 tokens on the CPU by a kernel; `None` if there are more, or none can run.

    Of bfloat16 tokens the result would not be that of products of blocks: sums in another order are rounded otherwise.
    """
    if len(x) > FEW_TOKENS or x.dtype != torch.float32 or stored.device.type != "cpu":
        return None
    (count, width), x = stored.shape, x.contiguous()
    out, step = torch.empty(count, len(x)), max(1, _BLOCK_NUMEL // width)
    for start in range(0, count, step):
        codec = stored.take(slice(start, start + step)).codec(x.dtype)
        if codec is None or not _LOGITS.applies(x, codec.codes):
            return None
        some = out[start : start + step]
        if not _LOGITS.run(len(some), x, *_arguments(codec), some, block=_block(codec)):
            return None
    return tokens_first(out)


def tokens_first(products: Float[Tensor, "V N"]) -> Float[Tensor, "N V"]:
    """Return products with the tokens first, in memory of their own: operators return no views."""
    return products.T.clone(memory_format=torch.contiguous_format)


def _block(codec: Codec) -> int:
    """Return the number of rows that a thread claims at once."""
    return max(1, CLAIMED_NUMEL // codec.embed_dim)


def _arguments(codec: Codec) -> tuple[Argument, ...]:
    """Return the arguments of a kernel after `start` and `stop` that describe the rows."""
    sizes = codec.bits, codec.group_size, _ROUNDINGS[codec.rounding], *(codec.whole_numbers() or (-1, 0))
    nothing = torch.empty(0, 0, dtype=codec.scale.dtype)
    levels = codec.levels if codec.scale_levels is None else codec.scale_levels
    zero = torch.empty(0, 0, dtype=torch.int8) if codec.zero is None else _one_row(codec.zero)
    zero = zero.to(torch.float32) if zero.is_floating_point() else zero
    groups = _bits(_one_row(codec.scale)), levels, zero, _bits(nothing if codec.bias is None else _one_row(codec.bias))
    return codec.codes.contiguous(), codec.levels, *groups, sizes


def _one_row(numbers: Tensor) -> Tensor:
    """Return numbers of groups, of one row if all rows share them."""
    return (numbers[:1] if numbers.stride(0) == 0 else numbers).contiguous()


def _bits(numbers: Tensor) -> Tensor:
    """Return float16 numbers as their bits, int16: NumPy's float16 fits no kernel."""
    return numbers.view(torch.int16) if numbers.dtype == torch.float16 else numbers
