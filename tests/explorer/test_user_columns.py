"""Columns of the user's own: every value lands on its row, and a file that does not fit the table is refused."""

import pytest
import torch
from explorer_requests import Refused, numbers

from embedlayer.analysis import write_atlas
from embedlayer.checkpoints import write_vectors

TOKENS = ["a", " the", "cat", 'say "hi"', "tab\there", "", "two", "two"]


@pytest.fixture
def read(by_command, tmp_path, capsys):
    """Open a source with columns, as the command does: the source, and what is printed."""

    def open_(content, *, name="columns.csv", source=None):
        if source is None:
            source = tmp_path / "eight.npy"
            write_vectors(source, TOKENS, torch.randn(8, 4), format="npy")
        if content is not None:
            (tmp_path / name).write_text(content)
        code, sources = by_command(source, "--columns", tmp_path / name)
        shown = capsys.readouterr()
        assert (code == 0) == bool(sources), shown.err
        return (sources[0], shown.out) if sources else (None, shown.err)

    return open_


def values(ask, source, name):
    return numbers(ask(source, "column", name=name))


def test_numbers_and_texts_land_on_the_rows_of_their_tokens(ask, read) -> None:
    source, said = read("token,topic,score\ncat,animal,1.5\n the,,-2\na,animal,\n")
    assert "Columns for 3 of 8 rows: topic (1 values), score (numbers)." in said
    assert ask(source, "columns") == [{"name": "topic", "groups": ["animal"]}, {"name": "score", "groups": None}]
    nan = float("nan")
    for name, first in (("topic", [0, nan, 0]), ("score", [nan, -2, 1.5])):
        expected = torch.tensor([*first, *[nan] * 5])
        torch.testing.assert_close(values(ask, source, name), expected, equal_nan=True)
    with pytest.raises(Refused, match=r"eight.npy has no column 'norm'"):
        ask(source, "column", name="norm")


def test_a_column_with_one_text_that_is_no_number_holds_texts(ask, read) -> None:
    source, _ = read("id\tx\ty\n7\t1\t1_000\n6\tone\t5\n0\t1\t5\n", name="columns.tsv")
    assert [column["groups"] for column in ask(source, "columns")] == [["1", "one"], ["5", "1_000"]]


def test_tokens_are_entries_of_the_vocabulary_or_readable_texts(ask, read, of_run) -> None:
    entries = {row: text for text, row in of_run.tokenizer.get_vocab().items()}
    rows = [row for row in range(200, 240) if of_run.token_texts.count(of_run.token_texts[row]) == 1]
    for texts in ([entries[row] for row in rows], [of_run.token_texts[row] for row in rows]):
        lines = ['"' + text.replace('"', '""') + f'",{row}' for text, row in zip(texts, rows, strict=True)]
        column = values(ask, read("\n".join(["token,row", *lines]), source=of_run.source)[0], "row")
        assert column[rows].tolist() == rows
        assert int(column.isfinite().sum()) == len(rows)


def test_the_columns_of_a_parquet_file_of_the_same_table_are_read(ask, read, tmp_path, of_run) -> None:
    write_atlas(tmp_path / "atlas.parquet", of_run.table, of_run.tokenizer)
    source, said = read(None, name="atlas.parquet", source=of_run.source)
    assert "Left out, since they hold neither numbers nor texts: neighbors." in said
    norms, column = of_run.rows.norm(dim=1), values(ask, source, "norm")
    there = column.isfinite()
    torch.testing.assert_close(column[there], norms[there])
    assert {"name": "norm", "groups": None} in ask(source, "columns")
    assert all(column["groups"] for column in ask(source, "columns") if column["name"] == "kind")


def test_lines_about_tokens_that_the_table_lacks_are_skipped(ask, read) -> None:
    source, said = read("token,x\ndog,1\ncat,5\nzebra,7\n")
    assert "2 lines are skipped, since no token has the text: 'dog', 'zebra'." in said
    assert values(ask, source, "x").nan_to_num(-1).tolist() == [-1, -1, 5, *[-1] * 5]


def test_a_file_that_does_not_fit_is_refused_by_name(read) -> None:
    for content, message in (
        ("token,x\ndog,1\n", "no token of eight.npy is 'dog'"),
        ("token,x\ntwo,1\n", "'two' is the text of rows 6 and 7"),
        ("token,x\ncat,1\ncat,2\n", "two lines are about row 2, 'cat'"),
        ("id,x\n8,1\n", "id is a row of the table, 0..7"),
        ("id,x\n1.5,1\n", "found 1.5"),
        ("id,x\n,1\n", "found None"),
        ("id,token,x\n2,a,1\n", "is the token 'cat', not 'a'."),
        ("word,x\ncat,1\n", "needs a column named id or token; found 'word', 'x'"),
        ("", "needs a column named id or token; found none"),
        ("id\n1\n", "no column beside id"),
        ("id,x,x\n1,2,3\n", "the column 'x' occurs twice"),
        ("id,x\n1,2\n\n1,2,3\n", "line 4: 3 values, and the header has 2"),
        ('id,x\n1,"2\n', "cannot be read: unexpected end of data"),
    ):
        _, said = read(content)
        assert message in " ".join(said.split()), content
    for name in ("columns.xlsx", "absent.csv", "absent.parquet"):
        _, said = read("id,x\n1,2\n" if "columns" in name else None, name=name)
        assert name in said
