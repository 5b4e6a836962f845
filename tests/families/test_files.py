"""The files of a folder that an edit leaves out: each kind by name, at any depth, and nothing else."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.families.left_out_files import LEFT_OUT, WITHOUT_ROWS
from embedlayer.vocab import last_receipt


def name_of(pattern: str) -> str:
    """A name that fits a pattern."""
    return pattern.replace("[0-9]", "5").replace("*", "7")


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    save_file({"wte.weight": torch.randn(20, 4), "wpe.weight": torch.randn(8, 4)}, folder / "model.safetensors")
    config = {"model_type": "gpt2", "vocab_size": 20, "hidden_size": 4, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def saved_layer(folder: Path) -> Path:
    el.EmbeddingLayer(el.TokenEmbedding(20, 4)).save_pretrained(folder)
    return folder


FOLDERS = {"checkpoint": checkpoint, "saved layer": saved_layer}


def write(folder: Path, pattern: str) -> str:
    """Write a file or folder that fits a pattern, and return its path as an edit names it."""
    name = name_of(pattern)
    file = folder / name / "part" if name.endswith("/") else folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"PK\3\4 of the old vocabulary")
    return name


def files_in(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_cannot_be_edited_is_left_out_by_name(kind: str, tmp_path: Path) -> None:
    for number, rule in enumerate(LEFT_OUT):
        check_rule(rule, FOLDERS[kind](tmp_path / f"old {number}"), tmp_path / f"new {number}")


def check_rule(rule: Any, folder: Path, new: Path) -> None:
    before = files_in(folder)
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text("{}")
    (folder / "sub").mkdir()
    kept = {write(folder / "2_Dense", pattern) for pattern in rule.patterns}
    for pattern in WITHOUT_ROWS:
        write(folder, pattern)
    (folder / "notes.bin").write_bytes(b"unknown")
    expected = sorted([*(write(folder, pattern) for pattern in rule.patterns), *rule.needless])
    expected += [f"sub/{write(folder / 'sub', rule.patterns[0])}"]
    for name in rule.needless:
        (folder / name).write_text("{}")
    with pytest.warns(el.EmbedLayerWarning, match="Left out of the new folder") as caught:
        receipt = el.vocab.remove_tokens(folder, [3], out=new)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert rule.consequence in message
    assert rule.what in message
    assert receipt.left_out == tuple(sorted(expected)) == last_receipt(new).left_out
    after = files_in(new)
    rest = {"notes.bin", *map(name_of, WITHOUT_ROWS)}
    assert after.keys() - before.keys() - {"vocabulary-1.receipt"} == {
        *rest,
        "2_Dense/config.json",
        *(f"2_Dense/{name}part" if name.endswith("/") else f"2_Dense/{name}" for name in kept),
    }


def test_a_folder_without_such_files_is_edited_without_a_warning(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "old")
    for pattern in WITHOUT_ROWS:
        write(folder, pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert el.vocab.remove_tokens(folder, [3], out=tmp_path / "new").left_out == ()


def test_the_documentation_and_the_promise_of_the_readme_name_each_kind() -> None:
    page, readme = ((Path(__file__).parents[2] / name).read_text() for name in ("docs/vocabulary.md", "README.md"))
    assert [rule.what for rule in LEFT_OUT if f" | {rule.what} | " not in page] == []
    promise = " ".join(readme.split()).split("is left out by name: ")[1].partition(". ")[0]
    assert [rule.what for rule in LEFT_OUT if rule.what.partition(",")[0] not in promise] == []
