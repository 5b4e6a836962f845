"""Parquet for embedding-atlas."""

import sys

import pytest
import torch
from covering import looped
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from embedlayer.analysis.atlas import write_atlas
from embedlayer.analysis.geometry import principal_components
from embedlayer.core.errors import MissingExtraError
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tokenization.train import train_tokenizer


@looped("make", [TokenEmbedding, lambda v, d: FactorizedEmbedding(v, d, rank=4)])
def test_the_file_holds_a_map_and_the_nearest_tokens(tmp_path, make) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tokenizer = train_tokenizer("the cats and the dogs sat on the mats", vocab_size=280)
    count = tokenizer.get_vocab_size()
    table = make(count + 5, 8)
    assert write_atlas(tmp_path / "map.parquet", table, tokenizer, num_neighbors=4) == count
    read = parquet.read_table(tmp_path / "map.parquet")
    assert read.column_names == ["id", "token", "kind", "norm", "under_trained", "x", "y", "neighbors"]
    assert [field.name for field in read.schema.field("neighbors").type] == ["ids", "distances"]
    columns = read.to_pydict()
    assert columns["id"] == list(range(count))
    assert columns["token"][tokenizer.token_to_id("Ġthe")] == " the"
    places = principal_components(table).coordinates[:count]
    torch.testing.assert_close(torch.tensor(columns["x"]), places[:, 0].float())
    torch.testing.assert_close(torch.tensor(columns["y"]), places[:, 1].float())
    units = torch.nn.functional.normalize(table.rows(0, count).detach(), dim=1)
    cosines = (units @ units.T).fill_diagonal_(-2)
    for row in (0, 7, count - 1):
        near = columns["neighbors"][row]
        expected = cosines[row].topk(4)
        assert near["distances"] == pytest.approx((1 - expected.values).tolist(), abs=1e-5)
        assert cosines[row][near["ids"]].tolist() == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_gaps_in_the_ids_are_left_out(tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tokenizer = Tokenizer(WordLevel(dict(zip("abcde", (2, 3, 5, 11, 19), strict=True)), "a"))
    rows = torch.randn(20, 3)
    write_atlas(tmp_path / "map.parquet", rows, tokenizer, num_neighbors=0)
    assert "neighbors" not in parquet.read_table(tmp_path / "map.parquet").column_names
    write_atlas(tmp_path / "map.parquet", rows, tokenizer, num_neighbors=9)
    near = parquet.read_table(tmp_path / "map.parquet").to_pydict()["neighbors"]
    units = torch.nn.functional.normalize(rows[[2, 3, 5, 11, 19]], dim=1)
    expected = (1 - units @ units.T).fill_diagonal_(9).sort(dim=1)
    assert [each["ids"] for each in near] == expected.indices[:, :4].tolist()
    distances = torch.tensor([each["distances"] for each in near])
    torch.testing.assert_close(distances, expected.values[:, :4], atol=1e-6, rtol=0)


def test_a_missing_pyarrow_names_the_line_that_installs_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'embedlayer\[parquet\]'"):
        write_atlas(tmp_path / "map.parquet", torch.randn(257, 4), train_tokenizer((), "byte"))
