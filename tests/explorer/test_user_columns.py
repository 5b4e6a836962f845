"""Columns of the user's own: every value lands on its row, and a file that does not fit the table is refused."""

import numpy as np
import pytest
import torch

from embedlayer import TokenEmbedding
from embedlayer.analysis.atlas import write_atlas
from embedlayer.core.errors import FileError, SizeError
from embedlayer.explorer.routes import answer
from embedlayer.explorer.user_columns import UserColumns, add_user_columns, read_user_columns
from embedlayer.opening import OpenedModel

TOKENS = ["a", " the", "cat", 'say "hi"', "tab\there", "", "two", "two"]


@pytest.fixture
def named() -> OpenedModel:
    return OpenedModel("eight", TokenEmbedding(8, 4), tokens=TOKENS)


def read(tmp_path, content: str, source: OpenedModel, name: str = "columns.csv") -> UserColumns:
    (tmp_path / name).write_text(content)
    return read_user_columns(tmp_path / name, source)


def test_numbers_and_texts_land_on_the_rows_of_their_tokens(tmp_path, named) -> None:
    found = read(tmp_path, "token,topic,score\ncat,animal,1.5\n the,,-2\na,animal,\n", named)
    assert found.rows == 3
    topic, score = found.columns
    assert (topic.name, topic.groups, score.groups) == ("topic", ("animal",), None)
    nan = float("nan")
    torch.testing.assert_close(topic.values, torch.tensor([0, nan, 0, *[nan] * 5]), equal_nan=True)
    torch.testing.assert_close(score.values, torch.tensor([nan, -2, 1.5, *[nan] * 5]), equal_nan=True)


def test_a_column_with_one_text_that_is_no_number_holds_texts(tmp_path, named) -> None:
    found = read(tmp_path, "id\tx\ty\n7\t1\t1_000\n6\tone\t5\n0\t1\t5\n", named, "columns.tsv")
    assert [column.groups for column in found.columns] == [("1", "one"), ("5", "1_000")]


def test_tokens_are_entries_of_the_vocabulary_or_readable_texts(tmp_path, of_run) -> None:
    entries = {row: text for text, row in of_run.tokenizer.get_vocab().items()}
    rows = [row for row in range(200, 240) if of_run.token_texts.count(of_run.token_texts[row]) == 1]
    for texts in ([entries[row] for row in rows], [of_run.token_texts[row] for row in rows]):
        lines = ['"' + text.replace('"', '""') + f'",{row}' for text, row in zip(texts, rows, strict=True)]
        (column,) = read(tmp_path, "\n".join(["token,row", *lines]), of_run).columns
        assert column.values[rows].tolist() == rows
        assert int(column.values.isfinite().sum()) == len(rows)


def test_the_columns_of_a_parquet_file_of_the_same_table_are_read(tmp_path, of_run) -> None:
    write_atlas(tmp_path / "atlas.parquet", of_run.table, of_run.tokenizer)
    found = read_user_columns(tmp_path / "atlas.parquet", of_run)
    assert found.left_out == ("neighbors",)
    columns = {column.name: column for column in found.columns}
    norms = of_run.rows[list(range(of_run.table.vocab_size))].norm(dim=1)
    there = columns["norm"].values.isfinite()
    torch.testing.assert_close(columns["norm"].values[there], norms[there])
    assert columns["kind"].groups is not None


def test_lines_about_tokens_that_the_table_lacks_are_skipped(tmp_path, named) -> None:
    found = read(tmp_path, "token,x\ndog,1\ncat,5\nzebra,7\n", named)
    assert (found.rows, found.unknown) == (1, ("dog", "zebra"))
    (column,) = found.columns
    assert column.values[2] == 5
    assert int(column.values.isfinite().sum()) == 1


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("token,x\ndog,1\n", SizeError, "no token of eight is 'dog'"),
        ("token,x\ntwo,1\n", SizeError, "'two' is the text of rows 6 and 7"),
        ("token,x\ncat,1\ncat,2\n", SizeError, "two lines are about row 2, 'cat'"),
        ("id,x\n8,1\n", SizeError, r"id is a row of the table, 0\.\.7"),
        ("id,x\n1.5,1\n", SizeError, r"found 1\.5"),
        ("id,x\ncat,1\n", SizeError, "found 'cat'"),
        ("id,x\n,1\n", SizeError, "found None"),
        ("id,token,x\n2,a,1\n", SizeError, "row 2 of eight is the token 'cat', not 'a'. The file belongs to another"),
        ("word,x\ncat,1\n", FileError, "needs a column named id or token; found 'word', 'x'"),
        ("", FileError, "needs a column named id or token; found none"),
        ("id\n1\n", FileError, "no column beside id"),
        ("id,x,x\n1,2,3\n", FileError, "the column 'x' occurs twice"),
        ("id,x\n1,2\n\n1,2,3\n", FileError, "line 4: 3 values, and the header has 2"),
        ('id,x\n1,"2\n', FileError, "cannot be read: unexpected end of data"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path, named, content, error, message) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, content, named)


def test_a_file_of_another_kind_and_no_file_are_refused(tmp_path, named) -> None:
    with pytest.raises(FileError, match=r"columns are read from a \.csv, \.tsv or \.parquet file"):
        read(tmp_path, "id,x\n1,2\n", named, "columns.xlsx")
    for name in ("absent.csv", "absent.parquet"):
        with pytest.raises(FileError, match="Cannot read"):
            read_user_columns(tmp_path / name, named)


def test_the_page_is_told_names_and_values_and_an_export_holds_them(tmp_path, named) -> None:
    assert answer([named], "columns", {}) == []
    fresh = OpenedModel("eight", TokenEmbedding(8, 4), tokens=TOKENS)
    add_user_columns(fresh, read(tmp_path, "id,topic,score\n2,animal,1.5\n", fresh))
    assert answer([fresh], "columns", {}) == [
        {"name": "topic", "groups": ["animal"]},
        {"name": "score", "groups": None},
    ]
    assert np.frombuffer(answer([fresh], "column", {"name": "score"}), np.float32)[2] == 1.5
    with pytest.raises(SizeError, match="eight has no column 'norm'"):
        answer([fresh], "column", {"name": "norm"})
