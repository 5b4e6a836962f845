"""What commands print for people."""

import pytest

from embedlayer.cli.printing import make_console, print_facts, print_line, print_table
from embedlayer.core.formatting import count_of


@pytest.mark.parametrize("width", [40, 120])
def test_a_table_fits_its_terminal_and_cuts_its_last_column(monkeypatch, capsys, width) -> None:
    monkeypatch.setattr("embedlayer.cli.printing.WIDTH_IN_FILES", width)
    console = make_console()
    print_line(console, "Title")
    print_facts(console, [("norm", "1.5", "of the mean row")])
    print_table(console, ["id", "token", "examples"], [["1", "cat", "word " * 60]], left=(1,), long="examples")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "Title"
    assert lines[-1].split()[:2] == ["1", "cat"]
    assert "…" in lines[-1]


def test_numbers_have_their_noun() -> None:
    assert [count_of(number, "shard") for number in (0, 1, 2000)] == ["0 shards", "1 shard", "2,000 shards"]
