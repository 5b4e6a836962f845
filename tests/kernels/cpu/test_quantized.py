"""The kernels that dequantise rows: the numbers of `dequantise`, by either path, in every dtype and layout."""

import pytest
import torch
from covering import cases
from quantised_tables import KINDS, quantised

from embedlayer import QuantizedEmbedding
from embedlayer.formats.compiled import FEW_TOKENS
from embedlayer.formats.quantized import dequantise
from embedlayer.tables import quantized


@pytest.fixture
def path(both_paths, monkeypatch) -> None:
    """Compute by kernels, and check that no torch kernel is used instead; or without kernels."""
    if both_paths == "kernels":
        monkeypatch.setattr(quantized, "_with_torch_kernels", None)


@pytest.mark.usefixtures("path")
@cases(
    "kind, width, dtype",
    KINDS,
    (1, 7, 33, 96),
    (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    pairs=["kind, width", "kind, dtype"],
)
def test_rows_are_those_of_the_definition(kind, width, dtype) -> None:
    bits, group_size = kind
    rows = torch.randn(50, width) * torch.logspace(-30, 30, 50).unsqueeze(1)
    table = quantised(rows, bits, group_size, dtype=dtype)
    expected = dequantise(table.packed, table.row_scale, table.row_format)
    ids = torch.randint(0, 50, (3, 41), dtype=torch.int32).T
    largest = expected.abs().amax(1)[ids].unsqueeze(-1)
    found = table(ids)
    assert found.dtype == dtype
    if dtype == torch.float16:  # numbers beyond its range are infinite in both
        torch.testing.assert_close(found, expected[ids].half(), rtol=2e-3, atol=1e-3)
        return
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 4e-7
    assert ((found.double() - expected[ids].double()).abs() <= rounding * largest).all()


@pytest.mark.usefixtures("path")
def test_small_steps_and_numbers_that_are_not_finite_are_read_as_float16() -> None:
    """Each of the 65,536 float16 numbers, as the offset of a row of 4-bit codes."""
    table = QuantizedEmbedding(1 << 16, 2, 4)
    table.row_scale.fill_(1)
    table.packed[:, -2:] = torch.arange(1 << 16).to(torch.uint16).view(torch.uint8).view(-1, 2)
    expected = dequantise(table.packed, table.row_scale, table.row_format)
    torch.testing.assert_close(table.rows(0, 1 << 16), expected, rtol=0, atol=0, equal_nan=True)


@cases("kind, block", KINDS, [1, 1000, 1 << 20])
def test_numbers_depend_neither_on_blocks_nor_on_threads(kind, block, monkeypatch) -> None:
    table = quantised(torch.randn(60, 40), *kind)
    ids = torch.randint(0, 60, (70,))
    expected = table(ids)
    monkeypatch.setattr(quantized, "CLAIMED_NUMEL", block)
    torch.set_num_threads(3)
    assert torch.equal(table(ids), expected)
    assert torch.equal(torch.cat([table(each) for each in ids.split(1)]), expected)


@pytest.mark.usefixtures("kernels")
@cases("kind, width, tokens", KINDS, (1, 7, 33, 96), (1, 3, FEW_TOKENS), pairs=["kind, width", "kind, tokens"])
def test_logits_of_few_tokens_are_products_with_the_rows(kind, width, tokens, monkeypatch) -> None:
    bits, group_size = kind
    table = quantised(torch.randn(53, width), bits, group_size)
    hidden = torch.randn(tokens, width)
    rows = dequantise(table.packed, table.row_scale, table.row_format).double()[2:]
    monkeypatch.setattr(quantized, "dequantised_rows", None)  # no block is dequantised instead
    found = table.raw_logits(hidden, 2, 53)
    assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
    tolerance = 1e-6 * (hidden.double().abs() @ rows.abs().T)
    assert ((found.double() - hidden.double() @ rows.T).abs() <= tolerance).all()
