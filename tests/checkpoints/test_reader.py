"""The reader of checkpoints: by what they are opened."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.checkpoints.reader import Checkpoint


@pytest.mark.parametrize("wanted", [".", "rows.safetensors", "model.safetensors.index.json"])
def test_a_folder_a_file_and_an_index_are_the_same_checkpoint(tmp_path, wanted) -> None:
    save_file({"wte.weight": torch.ones(3, 2)}, tmp_path / "rows.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "rows.safetensors"}}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    checkpoint = Checkpoint.open(tmp_path / wanted)
    assert checkpoint.config == {"model_type": "gpt2"}
    assert checkpoint.names == ("wte.weight",)
    assert checkpoint.read("wte.weight").sum() == 6
    assert checkpoint.file("config.json") == tmp_path / "config.json"
    assert checkpoint.file("tokenizer.json") is None


@pytest.mark.parametrize("source", ["no/such/folder", "nothing here", "a" * 5000, "a\0b"])
def test_what_is_not_there_is_a_file_error(tmp_path, monkeypatch, source) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(el.FileError):
        Checkpoint.open(source)


def test_a_name_on_the_hub_is_found_in_the_cache_offline(tmp_path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    save_file({"wte.weight": torch.ones(3, 2)}, repository / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    (snapshot / "config.json").write_text('{"model_type": "none"}')
    code = """
import embedlayer as el
from embedlayer.checkpoints.reader import Checkpoint
checkpoint = Checkpoint.open("someone/tiny")
print(checkpoint.config["model_type"], checkpoint.read("wte.weight").sum().item())
for name, revision in (("someone/else", None), ("someone/tiny", "v2"), ("tiny", None)):
    try:
        Checkpoint.open(name, revision=revision)
    except el.FileError as error:
        print("cache" in str(error))
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.split() == ["none", "6.0", "True", "True", "True"], result.stderr


def test_without_the_extra_a_mistyped_path_is_still_said_not_to_be_there(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(el.MissingExtraError, match=r"no folder or file 'somewhere' here(.|\n)*pip install"):
        Checkpoint.open("somewhere")


def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(el.FileError, match="There is no folder or file 'out/demoo'"):
        Checkpoint.open("out/demoo")
