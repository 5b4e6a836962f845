"""GGUF's blocks: the numbers that gguf-py reads, and a smaller error than its own. Fused rows: `test_quantized.py`."""

import pytest
import torch
from torch import Tensor

from embedlayer import EmbedLayerError, QuantizedEmbedding, TokenEmbedding
from embedlayer.formats import GGUFBlocks
from embedlayer.tables import gguf_blocks


def in_blocks(rows: Tensor, bits: int, **options: object) -> QuantizedEmbedding:
    return QuantizedEmbedding.from_table(rows, bits, layout=GGUFBlocks(), **options)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-6, 1.0, 60_000.0])
def test_gguf_py_reads_the_rows_bit_for_bit_and_its_own_blocks_have_a_larger_error(bits, size) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[f"Q{bits}_0"]
    rows = size * torch.randn(60, 96)
    rows[3] = 0
    table = in_blocks(rows, bits)
    found = torch.from_numpy(gguf.quants.dequantize(gguf_blocks(table).numpy(), kind))
    assert torch.equal(found, table.rows(0, 60))
    assert found[3].eq(0).all()
    theirs = torch.from_numpy(gguf.quants.quantize(rows.numpy(), kind))
    assert theirs.shape == table.packed.shape
    assert (found - rows).norm() < (torch.from_numpy(gguf.quants.dequantize(theirs.numpy(), kind)) - rows).norm()
    table.packed.copy_(theirs)  # and their bytes are a table of ours
    assert torch.equal(table.rows(0, 60), torch.from_numpy(gguf.quants.dequantize(theirs.numpy(), kind)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [1, 33, 64])
def test_unclipped_numbers_are_off_by_half_a_step_and_both_ends_are_a_dense_tables(bits, width) -> None:
    rows = torch.randn(20, width)
    table = in_blocks(rows, bits, clip=False)
    step = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((table.rows(0, 20) - rows).abs() <= 0.502 * step).all()
    hidden, dense = torch.randn(3, width), TokenEmbedding.from_pretrained(table.rows(0, 20))
    torch.testing.assert_close(table.logits(hidden), dense.logits(hidden))
    ids = torch.tensor([[3, 19], [0, 3]])
    assert torch.equal(table(ids), dense(ids))
    assert table.nbytes == 20 * -(-width // 32) * (2 + 4 * bits)
    assert table.state_dict().keys() == {"packed"}


def test_it_is_saved_with_its_layout(tmp_path) -> None:
    table = in_blocks(torch.randn(9, 40), 4, scale="sqrt_dim", padding_idx=2)
    table.save_pretrained(tmp_path)
    again = QuantizedEmbedding.from_pretrained(tmp_path)
    assert again.layout.config == {}
    assert torch.equal(again(torch.arange(9)), table(torch.arange(9)))
    assert "bits=4, layout=GGUFBlocks(), padding_idx=2" in repr(again)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantizedEmbedding(9, 64, 4, group_size=16, layout=GGUFBlocks()), "groups of 32 columns, not of 16"),
        (lambda: in_blocks(torch.full((2, 32), 5e5), 4), "Row 0 holds .* above 4.59e\\+05"),
        (lambda: gguf_blocks(in_blocks(torch.randn(2, 40), 4)), "Width 40 must be a multiple of GGUF's 32"),
        (lambda: gguf_blocks(QuantizedEmbedding(9, 64, 4)), "layout=GGUFBlocks"),
    ],
)
def test_what_cannot_be_is_refused(make, message) -> None:
    with pytest.raises(EmbedLayerError, match=message):
        make()
