"""The command that shows the page."""

import http.client
import re
import signal
from pathlib import Path

import pytest
import torch
from commands import leaf_commands, printed, run
from processes import Program

import embedlayer
from embedlayer import TokenEmbedding
from embedlayer.checkpoints import write_vectors


@pytest.fixture
def table(tmp_path):
    write_vectors(tmp_path / "cats.txt", ["cat", "dog", "fish"], torch.randn(3, 4), format="word2vec")
    return tmp_path / "cats.txt"


def test_the_page_is_served_until_ctrl_c(table):
    with Program("-m", "embedlayer", "explore", table, "--no-browser", "--view", "learn") as program:
        said = program.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/#learn ", said)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/data/tokens")
        assert b'"fish"' in connection.getresponse().read()
        connection.close()
        program.send_signal(signal.SIGINT)
        assert (program.wait(60), program.stderr.read()) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "hash", "titles"),
    [
        ([], "#learn", ["4,000 words of MiniLM"]),
        (["--words"], "#learn", ["4,000 words of MiniLM"]),
        (["{table}"], "", ["cats.txt"]),
        (["{table}", "--words"], "", ["cats.txt", "4,000 words of MiniLM"]),
        (["{table}", "--words", "--view", "health"], "#health", ["cats.txt", "4,000 words of MiniLM"]),
    ],
)
def test_what_opens_and_where_by_the_sources(table, monkeypatch, capsys, arguments, hash, titles):
    def serve(sources, *, port, on_start):
        assert [source.title for source in sources] == titles
        on_start("http://127.0.0.1:1/")

    monkeypatch.setattr("embedlayer.explorer.server.serve", serve)
    assert run("explore", "--no-browser", *(argument.format(table=table) for argument in arguments)) == 0
    assert f"http://127.0.0.1:1/{hash} " in capsys.readouterr().out


def test_the_views_are_those_of_the_page():
    folder = Path(embedlayer.__file__).parent / "explorer" / "page" / "views"
    names = [re.search(r'^  id: "(\w+)",$', file.read_text(), flags=re.M)[1] for file in folder.glob("*.js")]
    (view,) = [param for param in dict(leaf_commands())["explore"].params if param.name == "view"]
    assert [*view.type.choices] == sorted(names)


def test_export_writes_one_file_and_serves_nothing(table, tmp_path):
    assert "opens without a server" in printed("explore", table, "--export", tmp_path / "page.html")
    assert '"fish"' in (tmp_path / "page.html").read_text()


def test_export_shows_progress_and_ctrl_c_leaves_no_file(tmp_path):
    TokenEmbedding(40_000, 160).save_pretrained(tmp_path / "table")
    arguments = ["-m", "embedlayer", "explore", tmp_path / "table", "--export", tmp_path / "page.html"]
    with Program(*arguments, EMBEDLAYER_CACHE=str(tmp_path / "cache")) as program:
        assert "map" in program.stdout.readline()
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130
        assert program.stderr.read().endswith("Stopped.\n")
    assert [path.name for path in tmp_path.iterdir() if "page" in path.name] == []
