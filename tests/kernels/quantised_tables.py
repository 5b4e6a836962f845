"""Quantised tables for tests of kernels, and what kernels that read their stored rows must satisfy."""

from itertools import product
from pathlib import Path
from typing import Any

import torch
from interpreted import interpreted
from kernel_paths import running_on
from kernel_records import launch_kernel
from torch import Tensor

from embedlayer import QuantizedEmbedding
from embedlayer.formats import GGUFBlocks
from embedlayer.formats.quantized import dequantise
from embedlayer.kernels.gpu.launch import launches_observed
from embedlayer.kernels.quantized import logits_of_few_tokens, read_quantized_rows

Kind = tuple[int, int | str | None]

KINDS: list[Kind] = [(8, None), (8, 5), (8, 32), (4, None), (4, 6), (4, 32), (8, "gguf"), (4, "gguf")]
"""Bits and group size; `"gguf"` for the blocks of GGUF."""


def quantised(rows: Tensor, bits: int, group_size: int | str | None, **options: object) -> QuantizedEmbedding:
    """A table of these rows; of GGUF's blocks, whose scales are float16, rows of 0.001 to 1000."""
    if group_size == "gguf":
        rows = rows / rows.abs().amax(1, keepdim=True) * torch.logspace(-3, 3, len(rows)).unsqueeze(1)
        return QuantizedEmbedding.from_table(rows, bits, layout=GGUFBlocks(), **options)
    group_size = None if group_size is None or group_size > rows.shape[1] else group_size
    return QuantizedEmbedding.from_table(rows, bits, group_size=group_size, **options)


def definition(table: QuantizedEmbedding) -> Tensor:
    """Return the rows of a table in float32 by the definition."""
    return dequantise(table.packed, table.row_scale, table.row_format)


def exact(table: QuantizedEmbedding) -> Tensor:
    """Return the rows of a table in float64."""
    codes, step, offset = table.row_format.decode(table.packed)
    rows = (step.double() * codes + offset.double()).view(len(table.packed), -1)[:, : table.embed_dim]
    return rows if table.row_scale is None else table.row_scale.double().unsqueeze(1) * rows


def assert_rows_are_those_of_the_definition(backend: str, kind: Kind, width: int, dtype: torch.dtype) -> None:
    """Triton kernels look up the numbers of the definition, bit for bit; the interpreter does not round to bfloat16."""
    with running_on(backend):
        table = quantised(torch.randn(20, width) * torch.logspace(-30, 30, 20).unsqueeze(1), *kind, dtype=dtype)
        ids = torch.randint(0, 20, (2, 4), dtype=torch.int32).T
        names: list[str] = []
        with launches_observed(lambda each: names.append(f"{each.module}.{each.name}")):
            vectors, rows = table(ids), table.rows(16, 18)
        expected = definition(table).to(dtype)
        assert names.count("quantized.look_up") == 2
        error = 2.0**-7 if backend == "triton" and dtype == torch.bfloat16 else 0.0
        torch.testing.assert_close(vectors, expected[ids.long()], rtol=error, atol=0)
        torch.testing.assert_close(rows, expected[16:18], rtol=error, atol=0)


def assert_logits_are_no_worse_than_the_products(
    backend: str, kind: Kind, width: int, dtype: torch.dtype, tokens: int = 2
) -> None:
    """Kernels may miss the float64 answer by what products of rows in the dtype miss it by, and by rounding."""
    with running_on(backend):
        table = quantised(torch.randn(11, width) + 0.3, *kind, dtype=dtype)
        hidden = torch.randn(tokens, width).add(0.2).to(dtype)
        stored = table.packed, table.row_scale, table.row_format
        logits = logits_of_few_tokens(hidden, *stored)
        assert logits.dtype == dtype
        right = hidden.double() @ exact(table).T
        plain = hidden @ definition(table).to(dtype).T
        rounding = torch.finfo(dtype).eps + 2.0**-21
        allowed = 1.5 * (plain.double() - right).abs().max() + rounding * right.abs().max()
        assert (logits.double() - right).abs().max() <= allowed
        assert torch.equal(logits_of_few_tokens(hidden[-1:], *stored), logits[-1:])  # independent of the other tokens


def assert_the_first_bad_id_is_recorded(backend: str, kind: Kind) -> None:
    """A bad ID gives zeros, and the first one of the first call that has one is recorded."""
    with running_on(backend):
        table = quantised(torch.randn(10, 40), *kind)
        ids = torch.randint(0, 10, (2, 2, 4))
        bad = {(1, 0, 2): 10, (1, 1, 0): -1, (1, 1, 3): 2**40}
        for place, value in bad.items():
            ids[place] = value
        expected = definition(table)[ids.clamp(0, 9)]
        for place in bad:
            expected[place] = 0
        for call in (ids, ids.flip(0)):
            record = table.index_check.first_bad_index
            assert torch.equal(table(call), expected if call is ids else expected.flip(0))
            assert record.tolist() == [10, 10, 4]


def assert_stored_bytes_are_read_once(kind: Kind) -> None:
    """Kernels read each stored byte of a row once, and move what the launch table says."""
    table = quantised(torch.randn(24, 1024), *kind, dtype=torch.bfloat16)
    row_format, packed, row_scale = table.row_format, table.packed, table.row_scale
    ids, hidden = torch.tensor([3, 23, 3]), torch.randn(1, 1024).bfloat16()
    stated: list[int] = []
    with interpreted() as run, launches_observed(lambda each: stated.append(each.bytes)):
        read_quantized_rows(ids, packed, row_scale, None, 3, row_format, torch.bfloat16)
        logits_of_few_tokens(hidden, packed, row_scale, row_format)
    looked_up, logits = run.launches
    assert looked_up.read["packed"] == 3 * packed.shape[1]
    assert logits.read["packed"] == packed.nbytes
    assert (looked_up.written["out"], logits.written["out"]) == (3 * 2048, 2 * 24)
    assert stated[0] == sum((looked_up.read + looked_up.written).values())
    assert stated[1] == sum((logits.read + logits.written).values()) - 2 * hidden.nbytes  # three programs read them


FAR = 2_100_000
"""Rows of int8 of width 1,024: more than 2^31 bytes, and numbers."""


def assert_rows_beyond_2_to_31_are_those_of_a_small_table(folder: Path) -> None:
    """The last programs read the last rows of a large table, and write where these belong."""
    small = quantised(torch.randn(16, 1024), 8, None, dtype=torch.float16)
    row_bytes = small.packed.shape[1]
    assert FAR * 1024 > 2**31
    packed = torch.from_file(str(folder / "packed"), shared=True, size=FAR * row_bytes, dtype=torch.uint8)
    out = torch.from_file(str(folder / "out"), shared=True, size=FAR * 1024, dtype=torch.float16).view(FAR, 1024)
    packed = packed.view(FAR, row_bytes)
    packed[-16:] = small.packed
    hidden, right = torch.randn(1, 1024).half(), definition(small).half()
    sizes: dict[str, Any] = {"rows": FAR, "width_units": 32, "group_units": 32}
    sizes |= {"row_scale": None, "BITS": 8, "BLOCKS": False, "UNIT": 32}
    with interpreted() as run:
        ids = torch.tensor([FAR - 1, FAR - 9])
        looked_up = read_quantized_rows(ids, packed, None, None, 2, small.row_format, torch.float16)
        near = logits_of_few_tokens(hidden, small.packed, None, small.row_format)
        run.programs = lambda grid: [(grid[0] - 1, *others) for others in product(*map(range, grid[1:]))]
        launch_kernel("look_up", ids=None, packed=packed, out=out, record=None, length=1, **sizes)
        far = logits_of_few_tokens(hidden, packed, None, small.row_format)
    assert torch.equal(looked_up, right[[-1, -9]])
    assert torch.equal(out[-1], right[-1])
    assert torch.equal(far[:, -8:], near[:, -8:])
