"""Folders: the new one is complete or not there, whatever stops the edit."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from commands import run
from processes import Program
from vocab_models import checkpoint as write_checkpoint

import embedlayer as el
from embedlayer.vocab import last_receipt


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "old", 3000)


@pytest.fixture
def layer(tmp_path) -> Path:
    el.TransformerEmbedding(3000, 8, 8).save_pretrained(tmp_path / "old")
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
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(el.FileError, match=r"Cannot write|File too large"):
            el.vocab.remove_tokens(folder, [7], out=tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert contents(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["old"]
    el.vocab.remove_tokens(folder, [7], out=tmp_path / "new")


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
    receipt = el.vocab.remove_tokens(checkpoint, [7], out=tmp_path / "new")
    assert receipt.row_map.size == 2999


def test_receipts_are_numbered_and_the_last_is_that_of_the_last_edit(checkpoint, tmp_path) -> None:
    folder = checkpoint
    for number in range(1, 4):
        el.vocab.remove_tokens(folder, [number], out=tmp_path / str(number))
        folder = tmp_path / str(number)
    receipts = sorted(file.name for file in folder.glob("*receipt*"))
    assert receipts == [f"vocabulary-{number}.receipt" for number in (1, 2, 3)]
    assert last_receipt(folder).dropped == {3: "#3"}
    with pytest.raises(el.CheckpointError):
        last_receipt(checkpoint)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch's default", "safetensors"])
def test_a_checkpoint_of_many_processes_is_called_by_its_name(kind, tmp_path, capsys) -> None:
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "shards"
    writer = None if kind != "safetensors" else dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save({"rows": torch.randn(30, 4)}, checkpoint_id=folder, storage_writer=writer, no_dist=True)
    for refused in (
        lambda: el.vocab.edit_vocabulary(folder, add=1),
        lambda: el.vocab.trim_vocabulary(folder, "text", out=tmp_path / "new"),
    ):
        with pytest.raises(el.CheckpointError, match=r"Sharded checkpoints"):
            refused()
    for command in ("add", "remove", "trim"):
        assert run("vocab", command, folder, "README.md", "-o", tmp_path / "new") == 2
        assert "Sharded checkpoints" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
