"""What reads the stored rows of a quantised table on a CUDA device: look-up, and logits of few tokens.

`embedlayer.formats.quantized.dequantise` is the definition. `embedlayer.tables.quantized` runs the kernels of the CPU.
`row_format` is the numbers of an `embedlayer.formats.layouts.RowFormat`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embedlayer.core.torch_state import has_memory
from embedlayer.kernels.cpu import quantized as kernels
from embedlayer.kernels.gpu.launch import imported_launches, launch
from embedlayer.kernels.operation import Operation

quantized_launches = partial(imported_launches, "embedlayer.kernels.gpu.quantized")

DEQUANTISE = Operation(
    "look-up and dequantisation of int8 and int4 rows, of GGUF's q8_0 and q4_0 blocks",
    "formats.quantized:dequantise",
    cpu=[kernels.dequantise_8_bits, kernels.dequantise_4_bits, kernels.dequantise_blocks],
    gpu=quantized_launches,
    launches=["look_up"],
)
LOGITS = Operation(
    "logits of few tokens by quantised rows",
    "formats.quantized:dequantise",
    cpu=[kernels.logits_of_8_bits, kernels.logits_of_4_bits, kernels.logits_of_blocks],
    gpu=quantized_launches,
    launches=["logits"],
)


@DEQUANTISE.operator(mutates=("record",))
def read_quantized_rows(
    ids: Tensor | None,
    packed: Tensor,
    row_scale: Tensor | None,
    record: Tensor | None,
    length: int,
    row_format: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """Dequantise the stored rows of some IDs, `(N, D)`, in one launch on CUDA.

    - `ids`: IDs, int64, `(N,)`, contiguous; `None` for all rows in their order. A bad one gives zeros.
    - `packed`: stored rows, uint8, `(V, row bytes)`.
    - `row_scale`: scale of each row, `(V,)`, or `None` for 1.
    - `record`: `IndexCheck.first_bad_index`, where the first bad ID is recorded; `None` if the IDs were checked.
    - `length`: size of the last dimension of the IDs as the user passed them.
    """
    rows = _stored_rows(packed, row_scale, row_format)
    out = packed.new_empty(len(packed if ids is None else ids), row_format[1], dtype=dtype)
    launch(quantized_launches(), "look_up", ids=ids, out=out, record=record, length=length, **rows)
    return out


def logits_of_few_tokens(x: Tensor, packed: Tensor, row_scale: Tensor | None, row_format: Sequence[int]) -> Tensor:
    """Compute `x @ rows.T` from the stored rows, `(N, D)` to `(N, V)`, in one launch, on CUDA.

    Rows are not rounded to the dtype of `x`, and sums are in float32. The other arguments are those of
    `read_quantized_rows`.
    """
    rows = _stored_rows(packed, row_scale, row_format)
    is_odd, has_blocks = rows["UNIT"] == 1, rows["BLOCKS"]
    is_whole = rows["group_units"] == rows["width_units"] and not is_odd and not has_blocks
    words = {"WHOLE": is_whole, "WORD": 1 if is_odd else 2 if has_blocks else 4}
    out = x.new_empty(len(x), len(packed))
    launch(quantized_launches(), "logits", x=x.contiguous(), out=out, tokens=len(x), **rows, **words)
    return out


def _stored_rows(packed: Tensor, row_scale: Tensor | None, row_format: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a kernel that describe the stored rows; see `embedlayer.kernels.gpu.quantized`."""
    bits, embed_dim, group_size, layout_index = row_format
    columns = quantized_launches()["look_up"].blocks["COLUMNS"]
    packed = packed.contiguous()
    is_aligned = not has_memory(packed) or packed.data_ptr() % (2 if layout_index else 4) == 0
    unit = columns if is_aligned and group_size % columns == 0 and embed_dim % group_size == 0 else 1
    return {
        "packed": packed,
        "row_scale": None if row_scale is None else row_scale.contiguous(),
        "rows": len(packed),
        "width_units": embed_dim // unit,
        "group_units": group_size // unit,
        "BITS": bits,
        "BLOCKS": bool(layout_index),
        "UNIT": unit,
    }
