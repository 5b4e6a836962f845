"""The kernels that dequantise rows: the numbers of torch operators, in every dtype and layout."""

import pytest
import torch
from covering import cases
from quantised_tables import KINDS, quantised

from embedlayer import QuantizedEmbedding
from embedlayer.kernels import kernels_disabled

pytestmark = pytest.mark.usefixtures("kernels")


@cases(
    "kind, width, dtype",
    KINDS,
    (1, 7, 33, 96),
    (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    pairs=["kind, width", "kind, dtype"],
)
def test_rows_are_those_of_the_definition(kind, width, dtype) -> None:
    rows = torch.randn(50, width) * torch.logspace(-30, 30, 50).unsqueeze(1)
    table = quantised(rows, *kind, dtype=dtype)
    ids = torch.randint(0, 50, (3, 41), dtype=torch.int32).T
    found = table(ids)
    with kernels_disabled():
        expected = table.float().rows(0, 50)
    assert found.dtype == dtype
    if dtype == torch.float16:  # numbers beyond its range are infinite in both
        torch.testing.assert_close(found, expected[ids].half(), rtol=2e-3, atol=1e-3)
        return
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 4e-7
    largest = expected.abs().amax(1)[ids].unsqueeze(-1)
    assert ((found.double() - expected[ids].double()).abs() <= rounding * largest).all()


def test_small_steps_and_numbers_that_are_not_finite_are_read_as_float16() -> None:
    """Each of the 65,536 float16 numbers, as the offset of a row of 4-bit codes."""
    table = QuantizedEmbedding(1 << 16, 2, 4)
    table.row_scale.fill_(1)
    offsets = torch.arange(1 << 16).to(torch.uint16)
    table.packed[:, -2:] = offsets.view(torch.uint8).view(-1, 2)
    expected = offsets.view(torch.float16).float().unsqueeze(1).expand(-1, 2)
    torch.testing.assert_close(table.rows(0, 1 << 16), expected, rtol=0, atol=0, equal_nan=True)


@cases("kind, width, tokens", KINDS, (1, 7, 33, 96), (1, 3, 8), pairs=["kind, width", "kind, tokens"])
def test_logits_of_few_tokens_are_products_with_the_rows(kind, width, tokens) -> None:
    table, hidden = quantised(torch.randn(53, width), *kind), torch.randn(tokens, width)
    rows = table.rows(2, 53).double()
    found = table.raw_logits(hidden, 2, 53)
    assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
    tolerance = 1e-6 * (hidden.double().abs() @ rows.abs().T)
    assert ((found.double() - hidden.double() @ rows.T).abs() <= tolerance).all()
