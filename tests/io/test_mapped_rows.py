"""Rows of files in memory maps are those of the file, however little memory they may take."""

import numpy as np
import pytest
import torch

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io import mapped_rows
from embedlayer.io.mapped_rows import RESIDENT_BYTES, MappedRows, ResidentLimit, default_resident_bytes

pytestmark = pytest.mark.usefixtures("system")


@pytest.fixture(params=[None, 0, 1 << 27], ids=["no limit", "no memory", "a limit"])
def limit(request) -> ResidentLimit:
    return ResidentLimit(request.param)


@pytest.mark.parametrize(("start", "row_bytes"), [(8, 16), (4096, 8192), (13, 12), (0, 3)])
def test_rows_are_those_of_the_file(tmp_path, monkeypatch, limit, start, row_bytes) -> None:
    whole = torch.randint(256, (start + 500 * row_bytes,), dtype=torch.uint8)
    whole.numpy().tofile(tmp_path / "rows")
    expected = whole[start:].view(500, row_bytes)
    ids = torch.randint(500, (700,))
    for _ in range(2):
        rows = MappedRows(tmp_path / "rows", start, 500, row_bytes, limit=limit)
        assert torch.equal(rows.read(ids), expected[ids])
        assert torch.equal(rows.read_slice(7, 450), expected[7:450])
        assert rows.read(ids[:0]).shape == rows.read_slice(9, 9).shape == (0, row_bytes)
        monkeypatch.setattr(mapped_rows, "_resident_file_bytes", lambda: None)  # as without /proc


def test_what_is_written_reaches_the_file_also_after_its_pages_were_released(tmp_path) -> None:
    (tmp_path / "rows").write_bytes(bytes(8 + 64))
    rows = MappedRows(tmp_path / "rows", 8, 4, 16, writable=True)
    rows.view(torch.float64, 4, 2)[2] = torch.tensor([1.5, 2.5])
    rows.limit.release()
    rows.flush()
    assert np.fromfile(tmp_path / "rows", np.float64)[5:7].tolist() == [1.5, 2.5]


def test_files_that_cannot_be_mapped_are_refused(tmp_path) -> None:
    (tmp_path / "rows").write_bytes(bytes(63))
    with pytest.raises(CheckpointError, match="63 bytes where its rows need 64"):
        MappedRows(tmp_path / "rows", 0, 4, 16)
    with pytest.raises(FileError, match="Cannot read .*none"):
        MappedRows(tmp_path / "none", 0, 4, 16)
    with pytest.raises(CheckpointError, match="not aligned for torch.float32"):
        MappedRows(tmp_path / "rows", 1, 1, 16).view(torch.float32, 1, 4)
    assert MappedRows(tmp_path / "rows", 8, 0, 16).read(torch.tensor([], dtype=torch.long)).shape == (0, 16)


def test_only_files_that_are_large_for_the_machine_have_a_limit() -> None:
    assert default_resident_bytes(1 << 20) is None
    assert default_resident_bytes(1 << 44) == RESIDENT_BYTES
