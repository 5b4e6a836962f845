"""Folders: the new one is complete or not there, also on a full disk; `tests/io/test_files.py` kills the process."""

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from commands import run
from vocab_models import checkpoint as write_checkpoint

import embedlayer as el
from embedlayer.vocab import last_receipt


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("kind", ["checkpoint", "layer"])
def test_a_disk_that_is_full_leaves_nothing_behind(kind, tmp_path) -> None:
    folder = tmp_path / "old"
    if kind == "layer":
        el.TransformerEmbedding(3000, 8, 8).save_pretrained(folder)
    else:
        write_checkpoint(folder, 3000)
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


def test_receipts_are_numbered_and_the_last_is_that_of_the_last_edit(tmp_path) -> None:
    checkpoint = folder = write_checkpoint(tmp_path / "old", 3000)
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
