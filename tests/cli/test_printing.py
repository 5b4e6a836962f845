"""What commands print for people."""

import sys

import pytest

from embedlayer.cli.printing import count_of, make_console, print_facts, print_line, print_table, typed


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


def test_a_printed_command_names_the_program_as_it_was_started(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here/bin", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "embedlayer").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    for started, program in {
        "here/bin/embedlayer": "here/bin/embedlayer",
        tmp_path / "here/bin/embedlayer": "here/bin/embedlayer",
        tmp_path / "elsewhere/embedlayer": "embedlayer",
        "/site-packages/embedlayer/__main__.py": f"{sys.executable} -m embedlayer",
        "/usr/bin/pytest": "embedlayer",
    }.items():
        monkeypatch.setattr(sys, "argv", [str(started)])
        assert typed("embed", "a b", "...") == f"{program} embed 'a b' ..."
    monkeypatch.chdir("here")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "here/bin/embedlayer")])
    assert typed() == "bin/embedlayer"
