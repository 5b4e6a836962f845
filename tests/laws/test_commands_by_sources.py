"""Every command on every kind of source: it works, or refuses the source with one sentence."""

import socket
import sys
from pathlib import Path

import pytest
from commands import run
from covering import covering, looped, some

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))
from commands_by_sources import COMMANDS, KINDS, make_sources, markdown, offline, read_results, result_of  # noqa: E402

FILES = ("safetensors file", "word2vec", "GloVe", ".npy", "hub name, offline")
REFUSED = {
    "generate": {
        "saved table": "is a saved TokenEmbedding, which has no transformer blocks",
        "saved layer": "is a saved TransformerEmbedding, which has no transformer blocks",
        **dict.fromkeys(("GPT-2 folder", "BERT folder"), "is no LLaMA-type checkpoint"),
        "unknown family": "Only the table of SOURCE can be read. SOURCE/config.json: model_type",
        **dict.fromkeys(("word2vec", "GloVe", ".npy"), "is a file of vectors, which has no transformer blocks"),
        "hub name, offline": "Only the embedding layer of SOURCE is read from the hub",
    },
    "evaluate": {
        "saved table": "is a saved TokenEmbedding, which has no transformer blocks",
        "saved layer": "is a saved TransformerEmbedding, which has no transformer blocks",
        "GPT-2 folder": "lacks 14 tensors of a whole GPT2LMHeadModel",
        "BERT folder": "is no causal language model: BertModel",
        "unknown family": "transformers cannot load SOURCE as a causal language model",
        **dict.fromkeys(("word2vec", "GloVe", ".npy"), "is a file of vectors, which has no transformer blocks"),
        "hub name, offline": "Only the embedding layer of SOURCE is read from the hub",
    },
    "embed": {"unknown family": "Only the table of SOURCE can be read. SOURCE/config.json: model_type"},
    "report": dict.fromkeys(set(KINDS) - {"run"}, "takes the folder of a run"),
    **{
        command: dict.fromkeys(FILES, "takes a folder on this machine")
        for command in COMMANDS
        if command.startswith("vocab")
    },
    "positions extend": dict.fromkeys(FILES, "takes the folder of a checkpoint"),
}
REFUSED["positions extend"] |= {
    **dict.fromkeys(("run", "saved table", "saved layer", "saved model"), "set model.position"),
    **dict.fromkeys(("GPT-2 folder", "BERT folder"), "has a table of learned positions"),
    "GGUF file": "convert a GGUF file again",
    "Meta's layout": "SOURCE/config.json",
    "unknown family": "unknown model_type",
}
REFUSED["vocab transplant"]["GGUF file"] = "cannot describe a WordLevel model"
"""The reason of each cell that is refused, by command and kind of source; all other cells work."""

CELLS = [(command, kind) for command in COMMANDS for kind in KINDS]
EACH_ANSWER = {(command, REFUSED.get(command, {}).get(kind)): (command, kind) for command, kind in CELLS}
ALWAYS = {*EACH_ANSWER.values()} | covering([cell for cell in CELLS if cell[0] != "explore"])
"""Each command with each of its answers, and on as many kinds as there are others; each kind with some commands."""


@pytest.fixture(scope="module")
def page() -> str:
    return (DOCS / "commands-by-sources.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def sources(folder):
    pytest.importorskip("huggingface_hub", reason="the hf extra is not installed")
    return make_sources(folder)


@looped("command, kind", some(ALWAYS, CELLS))
def test_a_command_works_on_a_source_or_says_why_not(sources, folder, tmp_path, page, command, kind) -> None:
    with offline(folder):
        found = result_of(command, sources[kind], folder, tmp_path / "out")
    assert read_results(page)[command, kind] == found, "run python docs/commands_by_sources.py --write"
    expected = REFUSED.get(command, {}).get(kind)
    if expected is None:
        assert not found
    else:
        assert expected in found
        assert found.endswith(".")


def test_the_table_in_the_documentation_has_every_cell_and_no_other_reason(page) -> None:
    assert markdown(read_results(page)) in page, "run python docs/commands_by_sources.py --write"


@pytest.mark.parametrize("path", ["out/demoo", "demoo.vec", "./demoo/model"])
@looped("command", COMMANDS)
def test_a_mistyped_path_is_an_error_at_once_without_asking_the_hub(
    tmp_path, monkeypatch, capsys, command, path
) -> None:
    def connect(*arguments: object, **options: object) -> None:
        raise AssertionError("the network was used")

    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, connect)
    (tmp_path / "text.txt").write_text("text")
    places = {"SOURCE": path, "TOKEN": "cat", "OUT": "new", "OUT.vec": "new.vec", "TEXT": "text.txt", "OTHER": "."}
    assert run(*(places.get(word, word) for word in COMMANDS[command].split())) == 1
    assert f"{Path(path)} does not exist" in capsys.readouterr().err
