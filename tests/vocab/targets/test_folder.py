"""Folders: the new one is complete or not there, whatever stops the edit."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import Program

import embedlayer as el
from embedlayer.cli.main import main
from embedlayer.io.files import write_json
from embedlayer.io.safetensors_files import save_tensors
from embedlayer.vocab.receipt import Receipt, last_receipt
from embedlayer.vocab.targets.folder import receipts_in


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    save_tensors(folder / "model.safetensors", {"wte.weight": torch.randn(3000, 64), "wpe.weight": torch.randn(8, 64)})
    write_json(folder / "config.json", {"model_type": "gpt2", "vocab_size": 3000, "n_embd": 64})
    return folder


@pytest.fixture
def layer(tmp_path) -> Path:
    el.TransformerEmbedding(3000, 64, 8).save_pretrained(tmp_path / "old")
    return tmp_path / "old"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["checkpoint", "layer"])
def test_a_disk_that_is_full_leaves_nothing_behind(kind, tmp_path, request) -> None:
    folder = request.getfixturevalue(kind)
    before = contents(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        with pytest.raises(el.FileError, match=r"Cannot write|File too large"):
            el.vocab.remove_tokens(folder, [7], out=tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert contents(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["old"]
    el.vocab.remove_tokens(folder, [7], out=tmp_path / "new")


@pytest.mark.parametrize("where", ["of", "save"])
@pytest.mark.parametrize("kind", ["checkpoint", "layer"])
def test_what_fails_late_leaves_nothing_behind_either(kind, where, tmp_path, request, monkeypatch) -> None:
    folder = request.getfixturevalue(kind)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Receipt, where, fail)
    with pytest.raises(KeyboardInterrupt):
        el.vocab.remove_tokens(folder, [7], out=tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["old"]


def test_a_killed_edit_leaves_no_folder_of_that_name(checkpoint, tmp_path) -> None:
    code = (
        "import sys, time, embedlayer as el\n"
        "from embedlayer.vocab import Receipt\n"
        "Receipt.save = lambda *_: (print('now', flush=True), time.sleep(600))\n"
        "el.vocab.remove_tokens(sys.argv[1], [7], out=sys.argv[2])\n"
    )
    with Program("-c", code, checkpoint, tmp_path / "new") as program:
        assert program.stdout.readline() == "now\n"
        program.kill()
        assert program.wait() == -signal.SIGKILL
    assert not (tmp_path / "new").exists()
    time.sleep(0)
    receipt = el.vocab.remove_tokens(checkpoint, [7], out=tmp_path / "new")
    assert receipt.row_map.size == 2999


def test_receipts_are_numbered_and_the_last_is_that_of_the_last_edit(checkpoint, tmp_path) -> None:
    folder = checkpoint
    for number in range(1, 4):
        el.vocab.remove_tokens(folder, [number], out=tmp_path / str(number))
        folder = tmp_path / str(number)
    assert [file.name for file in receipts_in(folder)] == [f"vocabulary-{number}.receipt" for number in (1, 2, 3)]
    assert last_receipt(folder).dropped == {3: "#3"}
    with pytest.raises(el.CheckpointError, match="has no receipt"):
        last_receipt(checkpoint)


def test_where_nothing_can_be_read_or_written_is_said(checkpoint, tmp_path) -> None:
    with pytest.raises(el.FileError, match="There is no folder"):
        el.vocab.remove_tokens(tmp_path / "none", [7], out=tmp_path / "new")
    with pytest.raises(el.FileError, match=r"name it with out="):
        el.vocab.remove_tokens(checkpoint, [7])
    with pytest.raises(el.FileError, match="is not empty"):
        el.vocab.remove_tokens(checkpoint, [7], out=checkpoint)
    (tmp_path / "file").write_text("")
    with pytest.raises(el.FileError, match="Cannot write"):
        el.vocab.remove_tokens(checkpoint, [7], out=tmp_path / "file" / "new")
    with pytest.raises(el.SizeError, match="for live modules"):
        parameter = torch.nn.Parameter(torch.zeros(1))
        el.vocab.remove_tokens(checkpoint, [7], out=tmp_path / "new", optimizer=torch.optim.SGD([parameter]))
    assert sorted(os.listdir(tmp_path)) == ["file", "old"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch's default", "safetensors"])
def test_a_checkpoint_of_many_processes_is_called_by_its_name(kind, tmp_path, capsys) -> None:
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "shards"
    writer = None if kind != "safetensors" else dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save({"rows": torch.randn(30, 4)}, checkpoint_id=folder, storage_writer=writer, no_dist=True)
    words = r"in shards.*torchrun.*edit_vocabulary\(model.*Its vocabulary"
    for refused in (
        lambda: el.vocab.edit_vocabulary(folder, add=1),
        lambda: el.vocab.trim_vocabulary(folder, "text", out=tmp_path / "new"),
    ):
        with pytest.raises(el.CheckpointError, match=words):
            refused()
    for command in ("add", "remove", "trim"):
        with pytest.raises(SystemExit) as ended:
            main(["vocab", command, str(folder), "README.md", "-o", str(tmp_path / "new")])
        assert ended.value.code == 2
        assert "in shards" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
