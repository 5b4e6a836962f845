"""Sharded rows in one safetensors file."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from embedlayer import CheckpointError, FileError, TokenEmbedding
from embedlayer.core.collectives import Collectives
from embedlayer.distributed import shard_table
from embedlayer.distributed.state import load_sharded, save_sharded
from embedlayer.io import safetensors_files

V, STORED = 23, 32


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "rows": torch.randn(V, 3),
        "step": torch.tensor(7.0),
        "half": torch.randn(V, 3).bfloat16(),
        "empty": torch.zeros(3, 0, dtype=torch.float64),
        "value_steps": torch.arange(V, dtype=torch.int32),
        "state": torch.arange(9, dtype=torch.uint8),
    }


DIVIDED = ("rows", "half", "value_steps")


def save_and_load(folder: Path) -> list[bool]:
    safetensors_files.CHUNK_BYTES = 30  # two rows, with one left over
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = shard_table(TokenEmbedding(V, 3), mesh)
    rows = dict.fromkeys(DIVIDED, (table, STORED))
    tensors = {
        name: table.as_dtensor(tensor[table.partition.start : table.partition.stop]) if name in DIVIDED else tensor
        for name, tensor in whole().items()
    }
    save_sharded(folder / "file", tensors, rows, Collectives(), {"who": "test"})
    dist.barrier()
    loaded, metadata = load_sharded(folder / "file", lambda names: rows)
    equal = [metadata == {"format": "pt", "who": "test"}, loaded.keys() == tensors.keys()]
    for name, tensor in tensors.items():
        ours, theirs = (each.to_local() if name in DIVIDED else each for each in (loaded[name], tensor))
        equal += [torch.equal(ours, theirs)]
    if dist.get_rank() == 0:  # the others' rows are on the way, and nobody takes them
        with pytest.raises(FileError, match="Cannot write"):
            save_sharded(folder / "nowhere" / "file", tensors, rows, Collectives())
    return equal


@pytest.mark.parametrize("ranks", [1, 3])
def test_rows_of_all_ranks_make_one_file_and_each_reads_its_own(ranks, tmp_path) -> None:
    results = on_ranks(ranks, save_and_load, tmp_path)
    assert all(all(result) for result in results)
    found = load_file(tmp_path / "file")
    for name, tensor in whole().items():
        assert torch.equal(found[name][: len(tensor)] if tensor.dim() else found[name], tensor), name
    assert found["rows"].shape == (STORED, 3)
    assert not found["rows"][V:].any()
    assert not found["half"][V:].any()
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(FileError, match="Cannot read"):
        load_sharded(tmp_path / "file", lambda names: {})
    (tmp_path / "file").write_bytes(b"12345678901234567890")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_sharded(tmp_path / "file", lambda names: {})
