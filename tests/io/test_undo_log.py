"""A log restores what was changed, wherever the process was killed while it wrote the log."""

import errno
import os
from typing import Any

import pytest
import torch

from embedlayer.core.errors import CheckpointError, FileError
from embedlayer.io.undo_log import UndoLog, read_log, roll_back

pytestmark = pytest.mark.usefixtures("system")


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
    ((_, _, blocks),), _ = read_log(path)
    roll_back(path, blocks, [(present[0], 24), (present[1], 4)])
    return all(map(torch.equal, present, arrays()))


def rows_of(path) -> list[Any]:
    return [block for _, _, rows in read_log(path)[0] for block in rows]


def test_changed_rows_are_restored_and_the_log_is_little_more_than_they_are(tmp_path) -> None:
    path = tmp_path / "log"
    present = logged(path, [1, 5, 19], [0], [], [7, 8])
    assert len(rows_of(path)) == 3
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
        assert read_log(path)[1] == size
        with pytest.raises(CheckpointError, match="restore a copy"):
            read_log(path, size=len(whole))
    assert restored(path, present)


def test_rows_are_relative_to_the_checkpoint_before_them(tmp_path) -> None:
    log, present = UndoLog.create(tmp_path / "log", {"generation": 3}), arrays()
    states = []
    for generation, rows in ((4, [1, 5]), (5, [5, 9])):
        log.append_rows(torch.tensor(rows), present)
        for array in present:
            array[rows] -= generation
        log.append_next({"generation": generation})
        states.append([array.clone() for array in present])
    log.append_rows(torch.tensor([0, 1]), present)
    present[0][:2] = 7
    checkpoints, _ = read_log(log.path)
    assert [state["generation"] for state, _, _ in checkpoints] == [3, 4, 5]
    for (_, start, blocks), expected in zip(reversed(checkpoints), [*reversed(states), arrays()], strict=True):
        roll_back(log.path, blocks, [(present[0], 24), (None, 4)])
        assert torch.equal(present[0], expected[0])
        assert torch.equal(present[1], states[-1][1])
        log.cut(max(start, 1))


@pytest.mark.parametrize("place", [2, 30, 60, 75])
def test_damage_is_not_taken_for_the_end(tmp_path, place) -> None:
    path = tmp_path / "log"
    logged(path, [1, 5], [2])
    raw = bytearray(path.read_bytes())
    raw[place] ^= 255
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged"):
        read_log(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError):
        read_log(path)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_block_that_is_written_in_part_is_not_in_the_log_and_the_next_one_may_be_shorter(
    tmp_path, monkeypatch, error
) -> None:
    log, calls = UndoLog.create(tmp_path / "log", {"generation": 0}), []
    name = "pwritev" if hasattr(os, "pwritev") else "pwrite"
    write = getattr(os, name)

    def write_some(descriptor, parts, offset) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise error
        return int(write(descriptor, [bytes(parts[0])[:5]] if name == "pwritev" else bytes(parts)[:5], offset))

    before = log.path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises((FileError, KeyboardInterrupt)) as caught:
        patch.setattr(os, name, write_some)
        log.append_rows(torch.arange(20), arrays())
    if isinstance(error, OSError):
        assert "No space left on device. No row was changed" in str(caught.value)
        assert log.path.read_bytes() == before
    assert rows_of(log.path) == []
    log.append_rows(torch.tensor([1]), arrays())
    assert [block.num_rows for block in rows_of(log.path)] == [1]
