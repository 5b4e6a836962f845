"""The Triton kernels that read quantised rows: look-up with the check of IDs, and logits of few tokens."""

from itertools import product

import pytest
import torch
from covering import cases, some
from kernel_paths import GPU_BACKENDS, cpu_taken_for_cuda, launched_kernels, running_on
from quantised_tables import (
    KINDS,
    assert_logits_are_no_worse_than_the_products,
    assert_rows_are_those_of_the_definition,
    assert_the_first_bad_id_is_recorded,
    definition,
    quantised,
)
from torch import Tensor

from embedlayer import QuantizedEmbedding
from embedlayer.kernels.quantized import logits_of_few_tokens

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [33, 96]
"""A width that is a whole number of chunks, and one that is not."""

pytestmark = pytest.mark.usefixtures("triton")


@pytest.fixture(scope="module")
def triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("kind, width, dtype", KINDS, WIDTHS, DTYPES)
def test_rows_are_those_of_the_definition_bit_for_bit(backend, kind, width, dtype) -> None:
    assert_rows_are_those_of_the_definition(backend, kind, width, dtype)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("kind, width, dtype, tokens", KINDS, WIDTHS, DTYPES, (2, 3), pairs=["width, dtype"])
def test_logits_are_no_worse_than_products_of_dequantised_rows(backend, kind, width, dtype, tokens) -> None:
    assert_logits_are_no_worse_than_the_products(backend, kind, width, dtype, tokens)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("kind", "width"),
    some(
        [((8, None), 1088), ((4, 6), 320), ((4, None), 7), ((8, "gguf"), 1)],
        product(KINDS, (1, 7, 320, 1088)),
    ),
)
def test_so_are_those_of_narrow_and_wide_tables(backend, kind, width) -> None:
    assert_rows_are_those_of_the_definition(backend, kind, width, torch.float32)
    assert_logits_are_no_worse_than_the_products(backend, kind, min(width, 320), torch.float32)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(("bits", "group_size"), some([(4, 6), (8, "gguf")], KINDS))
def test_a_bad_id_gives_zeros_and_the_first_one_is_recorded(backend, bits, group_size) -> None:
    assert_the_first_bad_id_is_recorded(backend, (bits, group_size))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("group_size", [2, 32])
def test_small_steps_and_numbers_that_are_not_finite_are_read_as_float16(backend, group_size) -> None:
    bits = torch.tensor([0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E01, 0x8000, 0x8001, 0x83FF, 0xFC00, 0xFFFF])
    with running_on(backend):
        table = QuantizedEmbedding(len(bits), group_size, 4)
        table.row_scale.fill_(1)
        table.packed[:, -2:] = bits.to(torch.uint16).view(torch.uint8).view(-1, 2).to(table.packed.device)
        torch.testing.assert_close(table.rows(0, len(bits)), definition(table), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_many_tokens_are_multiplied_by_blocks_of_rows(backend) -> None:
    with running_on(backend):
        table = quantised(torch.randn(11, 64), 8, None)
        for tokens, expected in ((8, ["logits"]), (9, ["look_up"])):  # 72 tokens <= 72 + 512
            hidden = torch.randn(tokens, 64)
            with launched_kernels() as names:
                logits = table.logits(hidden)
            assert names == expected
            torch.testing.assert_close(logits, hidden @ definition(table).T)
            torch.testing.assert_close(table.raw_logits(hidden, 3, 10), logits[:, 3:10])


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_gradients_by_hidden_states_are_those_of_the_products(backend) -> None:
    with running_on(backend):
        table = quantised(torch.randn(20, 64), 4, 32)
        hidden, grad = torch.randn(1, 64, requires_grad=True), torch.randn(1, 20)
        table.logits(hidden).backward(grad)
        torch.testing.assert_close(hidden.grad, grad @ definition(table))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_no_ids_tokens_or_rows_launch_nothing(backend) -> None:
    with running_on(backend):
        table = quantised(torch.randn(20, 64), 4, 32)
        table(torch.zeros(1, 1, dtype=torch.int64))  # the first call for a device compiles a small kernel
        with launched_kernels() as names:
            assert table(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 64)
            assert table.logits(torch.empty(0, 64)).shape == (0, 20)
            assert table.raw_logits(torch.ones(1, 64), 5, 5).shape == (1, 0)
        assert not names


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_stored_rows_may_begin_at_any_address_of_a_storage(backend) -> None:
    with running_on(backend):
        table = quantised(torch.randn(20, 64), 4, 32, dtype=torch.float32)
        hidden = torch.randn(1, 64)
        expected = logits_of_few_tokens(hidden, table.packed, table.row_scale, table.row_format)
        for offset in (1, 2, 4):
            moved = torch.zeros(table.packed.numel() + offset, dtype=torch.uint8)[offset:].view_as(table.packed)
            moved.copy_(table.packed)
            logits = logits_of_few_tokens(hidden, moved, table.row_scale, table.row_format)
            torch.testing.assert_close(logits, expected)


class Doubled(QuantizedEmbedding):
    """A table of twice the numbers."""

    def dequantised(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return 2 * super().dequantised(ids, dtype)


def test_a_class_that_overrides_how_rows_are_dequantised_looks_these_up() -> None:
    with running_on("triton"):
        table, ids = Doubled(20, 64), torch.tensor([[3, 20]])
        table.packed[:, -8:] = torch.ones(2).view(torch.uint8)
        assert torch.equal(table(ids), torch.tensor([[2.0, 0.0]]).unsqueeze(-1).expand(1, 2, 64))


@pytest.mark.usefixtures("unchecked")
def test_a_compiled_graph_computes_logits_by_the_kernel() -> None:
    table, hidden = quantised(torch.randn(20, 64), 4, 32), torch.randn(1, 64)
    with cpu_taken_for_cuda(triton=True), launched_kernels() as names:
        compiled = torch.compile(table.logits, fullgraph=True, backend="aot_eager")(hidden)
        assert names == ["logits"]
        assert torch.equal(compiled, table.logits(hidden))
