"""Rows of files in memory maps are those of the file, however little memory they may take."""

import pytest
import torch
from hidden_calls import hide
from safetensors.torch import save_file

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.tables import MappedEmbedding

pytestmark = pytest.mark.usefixtures("system")


@pytest.mark.parametrize("limit", [None, 0, 1 << 27], ids=["no limit", "no memory", "a limit"])
def test_rows_are_those_of_the_file(tmp_path, monkeypatch, limit) -> None:
    tensors = {width: torch.randn(500, width).to(dtype) for width, dtype in SHAPES.items()}
    for _ in range(2):
        for width, expected in tensors.items():
            save_file({"rows": expected}, tmp_path / f"{width}.safetensors")
            ids = torch.randint(500, (700,))
            with MappedEmbedding.open(tmp_path / f"{width}.safetensors", max_resident_bytes=limit) as table:
                assert torch.equal(table(ids), expected[ids])
                assert torch.equal(table.rows(7, 450), expected[7:450])
                assert table(ids[:0]).shape == table.rows(9, 9).shape == (0, width)
        hide("POSIX", monkeypatch)  # without /proc, which tells the mapped pages


SHAPES = {4: torch.float32, 2048: torch.float32, 3: torch.bfloat16, 1: torch.float16}


def test_what_is_written_reaches_the_file_also_after_its_pages_were_released(tmp_path) -> None:
    with MappedEmbedding.create(tmp_path / "rows", 9, 2, max_resident_bytes=0) as table:
        with torch.no_grad():
            table.weight[2] = torch.tensor([1.5, 2.5])
        table.rows(0, 9)
    with MappedEmbedding.resume(tmp_path / "rows") as table:
        assert table.weight[2].tolist() == [1.5, 2.5]


def test_files_that_cannot_be_mapped_are_refused(tmp_path) -> None:
    save_file({"rows": torch.randn(9, 4)}, tmp_path / "rows.safetensors")
    raw = (tmp_path / "rows.safetensors").read_bytes()
    (tmp_path / "rows.safetensors").write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match="cut short"):
        MappedEmbedding.open(tmp_path / "rows.safetensors")
    with pytest.raises(FileError, match="none"):
        MappedEmbedding.open(tmp_path / "none.safetensors")
