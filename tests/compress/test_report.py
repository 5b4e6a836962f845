"""What a smaller table costs."""

import pytest
import torch

from embedlayer import DecoderLM, FactorizedEmbedding, QuantizedEmbedding, RotaryEmbedding, SizeError, TokenEmbedding
from embedlayer.compress import compare_compression, compress_table, loss_on_text
from embedlayer.compress.report import row_error


def test_each_choice_stands_beside_the_table_itself(tmp_path) -> None:
    table = TokenEmbedding(300, 32, padding_idx=0)
    rows = compare_compression(table, ["int8", "int4", "int4-g8", "rank=8"])
    assert [row.to for row in rows] == ["as it is", "int8", "int4", "int4-g8", "rank=8"]
    assert (rows[0].bytes, rows[0].row_error, rows[0].neighbors, rows[0].loss) == (300 * 32 * 4, 0.0, 1.0, None)
    for row in rows[1:]:
        other = compress_table(table, row.to)
        missed = other.rows(0, 300) - table.weight
        assert row.row_error == pytest.approx((missed.norm() / table.weight.norm()).item(), rel=1e-4)
        assert row.bytes == sum(tensor.nbytes for tensor in other.state_dict().values())
        assert row.share == row.bytes / rows[0].bytes
        assert row.loss_change is None
    assert rows[1].neighbors > rows[3].neighbors > rows[4].neighbors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_the_file_is_that_of_the_file(dtype, tmp_path) -> None:
    table = TokenEmbedding(300, 32, dtype=dtype)
    rows = compare_compression(table, ["int8", "int4-g8", "rank=8"])
    for row, kind in zip(rows, (table, *(compress_table(table, row.to) for row in rows[1:])), strict=True):
        kind.save_pretrained(tmp_path)
        assert row.file_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_a_table_of_one_row_has_no_neighbours() -> None:
    assert compare_compression(TokenEmbedding(1, 8), ["int8"])[1].neighbors is None


def test_the_loss_is_that_of_the_model_around_each_table() -> None:
    table = TokenEmbedding(40, 16, scale="sqrt_dim", init_std=1.0)
    model = DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=2, dropout=0.5)
    ids = torch.randint(0, 40, (23,))
    rows = compare_compression(table, ["int4"], loss=loss_on_text(model, ids, window=5, stride=5))
    assert model.training
    model.eval()
    windows = [ids[start : start + 6] for start in range(0, 20, 5)]
    losses = [model.loss(window[:-1], window[1:], reduction="none") for window in windows]
    total = sum(each.sum().item() for each in [*losses, model.loss(ids[17:22], ids[18:], reduction="none")[3:]])
    assert rows[0].loss == pytest.approx(total / 22, rel=1e-5)
    assert rows[1].loss_change == pytest.approx(rows[1].loss - rows[0].loss)
    assert rows[1].loss_change != 0
    with pytest.raises(SizeError, match="at least 2 tokens"):
        loss_on_text(model, ids[:1])


def test_counts_weigh_low_ranks_choose_the_queries_and_show_what_trimming_leaves() -> None:
    table = TokenEmbedding(100, 16)
    counts = torch.zeros(100, dtype=torch.int64)
    counts[10:20] = 3
    rows = compare_compression(table, ["rank=10"], counts=counts)
    weighted = FactorizedEmbedding.from_table(table, 10, counts)
    assert torch.allclose(weighted.rows(10, 20), table.rows(10, 20), atol=1e-6)  # ten rows fit into rank ten
    assert rows[1].row_error == pytest.approx(row_error(table, weighted))
    assert row_error(table, FactorizedEmbedding.from_table(table, 10)) < rows[1].row_error
    assert (rows[2].to, rows[2].bytes, rows[2].row_error) == ("trim", 10 * 16 * 4, 0.0)


def test_tables_already_made_are_compared_by_the_names_given() -> None:
    table = TokenEmbedding(100, 16)
    rows = compare_compression(table, {"mine": QuantizedEmbedding.from_table(table, symmetric=True)})
    assert rows[1].to == "mine"
    assert 0 < rows[1].row_error < 0.01
    with pytest.raises(SizeError, match="cannot be compared"):
        compare_compression(table, {"other": TokenEmbedding(99, 16)})
    with pytest.raises(SizeError, match="rank 17 exceeds embed_dim 16"):
        compare_compression(table, ["rank=17"])
