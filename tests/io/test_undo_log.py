"""A log restores what was changed, wherever the process was killed while it wrote the log."""

import errno
import os

import pytest
import torch

from embedlayer.errors import CheckpointError, FileError
from embedlayer.io import undo_log
from embedlayer.io.undo_log import UndoLog, read_log, roll_back


def arrays() -> list[torch.Tensor]:
    return [torch.arange(60).view(20, 3), torch.arange(20, dtype=torch.int32).view(20, 1)]


def logged(path, *batches) -> list[torch.Tensor]:
    """Change rows as a table does: the log first."""
    log, present = UndoLog.create(path, {"generation": 3}), arrays()
    for rows in batches:
        log.append_rows(torch.tensor(rows), present)
        for array in present:
            array[rows] = -1
    log.close()
    return present


def restored(path, present) -> bool:
    roll_back(path, read_log(path), present)
    return all(map(torch.equal, present, arrays()))


def test_changed_rows_are_restored_and_the_log_is_little_more_than_they_are(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(undo_log, "BLOCK_BYTES", 100)  # two rows in a block
    path = tmp_path / "log"
    present = logged(path, [1, 5, 19], [0], [], [7, 8])
    assert len(read_log(path).rows) == 4
    assert restored(path, present)
    assert restored(path, present)
    assert path.stat().st_size < 2 * 6 * (24 + 4) + 200


def test_a_block_that_was_not_written_to_its_end_is_ignored(tmp_path) -> None:
    path = tmp_path / "log"
    present = logged(path, [1, 5])
    size = path.stat().st_size
    log = UndoLog(path, size)
    log.append_rows(torch.tensor([3]), present)
    whole = path.read_bytes()
    for length in range(size, len(whole)):
        path.write_bytes(whole[:length])
        assert read_log(path).size == size
    assert restored(path, present)


def test_the_state_of_the_next_checkpoint_counts_if_nothing_follows_it(tmp_path) -> None:
    log = UndoLog.create(tmp_path / "log", {"generation": 3})
    size = log.size
    log.append_next({"generation": 4})
    assert read_log(log.path).following == {"generation": 4}
    log.cut(size)
    assert read_log(log.path).following is None


@pytest.mark.parametrize(("place", "message"), [(2, "at byte 0"), (30, "at byte 0"), (60, "damaged"), (75, "damaged")])
def test_damage_is_not_taken_for_the_end(tmp_path, place, message) -> None:
    path = tmp_path / "log"
    logged(path, [1, 5], [2])
    raw = bytearray(path.read_bytes())
    raw[place] ^= 255
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        read_log(path)


def test_rows_of_other_arrays_are_refused_and_nothing_is_changed(tmp_path) -> None:
    logged(tmp_path / "log", [1, 19])
    others = [torch.zeros(20, 5, dtype=torch.int64)]
    with pytest.raises(CheckpointError, match="damaged"):
        roll_back(tmp_path / "log", read_log(tmp_path / "log"), others)
    with pytest.raises(CheckpointError, match="damaged"):
        roll_back(tmp_path / "log", read_log(tmp_path / "log"), [each[:10] for each in arrays()])
    (tmp_path / "log").write_bytes(b"")
    with pytest.raises(CheckpointError, match="not an undo log"):
        read_log(tmp_path / "log")


def test_on_a_full_disk_the_log_stays_as_it_was(tmp_path, monkeypatch) -> None:
    log, calls = UndoLog.create(tmp_path / "log", {"generation": 0}), []

    def write_some(descriptor, parts, offset) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(descriptor, bytes(parts[0])[:5], offset)

    before = (tmp_path / "log").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(FileError, match="No space left .* No row was changed"):
        patch.setattr(undo_log, "write_at", write_some)
        log.append_rows(torch.tensor([1]), arrays())
    assert (tmp_path / "log").read_bytes() == before
    log.append_rows(torch.tensor([1]), arrays())
    assert len(read_log(tmp_path / "log").rows) == 1
