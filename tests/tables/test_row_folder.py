"""A folder of a trained table refuses what would lose rows, and loses none in refusing."""

import errno
import fcntl
import os
import shutil
from copy import deepcopy

import pytest
import torch

from embedlayer import RowAdamW
from embedlayer.errors import CheckpointError, FileError, SizeError, StaleRowsError
from embedlayer.io import undo_log
from embedlayer.tables.mapped import MappedEmbedding


def step_of(table: MappedEmbedding, optimizer: RowAdamW, seed: int = 0) -> None:
    optimizer.zero_grad()
    table(torch.randint(50, (3, 5), generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()


@pytest.fixture
def trained(tmp_path):
    """A table after a checkpoint and a step, its optimizer and its rows at the checkpoint."""
    table = MappedEmbedding.create(tmp_path / "rows", 50, 4, init_std=1.0)
    optimizer = RowAdamW(table.parameters(), lr=0.1)
    step_of(table, optimizer)
    rows = table.weight.data.clone()
    with table.checkpoint():
        pass
    step_of(table, optimizer, 1)
    return table, optimizer, rows


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_closed_folder_is_resumed_at_its_checkpoint_and_nowhere_else(tmp_path, trained) -> None:
    table, optimizer, rows = trained
    table.close()
    table.close()
    assert sorted(path.name for path in (tmp_path / "rows").iterdir()) == [
        *(f"{name}.0.safetensors" for name in ("exp_avg", "exp_avg_sq", "moment_steps")),
        "table.json",
        "undo.log",
        "value_steps.0.safetensors",
        "weight.safetensors",
    ]
    for use in (lambda: step_of(table, optimizer), lambda: table.checkpoint().__enter__(), lambda: table.rows(0, 1)):
        with pytest.raises(FileError, match="is closed: open it again"):
            use()
    with pytest.raises(CheckpointError, match="changed after its last checkpoint"):
        MappedEmbedding.open(tmp_path / "rows")
    with pytest.raises(CheckpointError, match="can be resumed at checkpoint 1, not at 2"):
        MappedEmbedding.resume(tmp_path / "rows", 2)
    with MappedEmbedding.resume(tmp_path / "rows", 1) as resumed:
        assert torch.equal(resumed.weight.data, rows)
    assert torch.equal(MappedEmbedding.open(tmp_path / "rows").rows(0, 50), rows)


def test_a_process_killed_between_two_checkpoints_can_be_resumed_at_both(tmp_path, trained) -> None:
    table, _, rows = trained
    later = table.weight.data.clone()
    with table.checkpoint() as generation:
        for name in ("first", "second"):
            shutil.copytree(tmp_path / "rows", tmp_path / name)
            (tmp_path / name / "open.json").unlink()
    assert generation == 2
    for name, number, expected in (("first", 2, later), ("second", 1, rows)):
        with MappedEmbedding.resume(tmp_path / name, number) as resumed:
            assert torch.equal(resumed.weight.data, expected)


def test_an_error_inside_a_checkpoint_leaves_the_last_one(tmp_path, trained) -> None:
    table, optimizer, rows = trained
    with pytest.raises(StaleRowsError, match="inside `with table.checkpoint"), table.checkpoint():
        step_of(table, optimizer, 2)
    with pytest.raises(StaleRowsError, match="being saved already"), table.checkpoint(), table.checkpoint():
        pass
    table.close()
    with MappedEmbedding.resume(tmp_path / "rows") as resumed:
        assert torch.equal(resumed.weight.data, rows)


def test_one_table_at_a_time_changes_a_folder(tmp_path, trained) -> None:
    table, _, _ = trained
    with pytest.raises(FileError, match="is open in this process already"):
        MappedEmbedding.resume(tmp_path / "rows")
    with pytest.raises(FileError, match="already holds table.json: continue with MappedEmbedding.resume"):
        MappedEmbedding.create(tmp_path / "rows", 50, 4)
    table.close()
    with (tmp_path / "rows" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FileError, match="is in use by"):
            MappedEmbedding.resume(tmp_path / "rows")
        with pytest.raises(FileError, match="is in use by"):
            MappedEmbedding.open(tmp_path / "rows")
    MappedEmbedding.resume(tmp_path / "rows").close()


def test_a_table_that_is_garbage_is_closed(tmp_path) -> None:
    table = MappedEmbedding.create(tmp_path / "rows", 50, 4)
    step_of(table, RowAdamW(table.parameters()))
    del table
    MappedEmbedding.resume(tmp_path / "rows").close()


def test_a_copy_of_an_open_folder_and_one_from_before_a_restart_are_refused(tmp_path, trained) -> None:
    table, _, rows = trained
    shutil.copytree(tmp_path / "rows", tmp_path / "copy", ignore=shutil.ignore_patterns(".lock"))
    with pytest.raises(CheckpointError, match="copied while a process had it open"):
        MappedEmbedding.resume(tmp_path / "copy")
    mark = (tmp_path / "rows" / "open.json").read_text()
    table.close()
    (tmp_path / "rows" / "open.json").write_text(mark.replace('"boot": "', '"boot": "another'))
    with pytest.raises(CheckpointError, match="open when the machine stopped"):
        MappedEmbedding.resume(tmp_path / "rows")
    (tmp_path / "rows" / "open.json").unlink()
    shutil.copytree(tmp_path / "rows", tmp_path / "closed")
    with MappedEmbedding.resume(tmp_path / "closed") as resumed:
        assert torch.equal(resumed.weight.data, rows)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: os.truncate(folder / "weight.safetensors", 4200), CheckpointError, "not a whole safetensors"),
        (lambda folder: shutil.copy(folder / "exp_avg.0.safetensors", folder / "weight.safetensors"), CheckpointError,
         "not the table of 50 x 4 F32"),
        (lambda folder: shutil.copy(folder / "exp_avg.0.safetensors", folder / "value_steps.0.safetensors"),
         CheckpointError, "not the state value_steps"),
        (lambda folder: (folder / "exp_avg.0.safetensors").unlink(), FileError, "exp_avg.0"),
        (lambda folder: (folder / "table.json").unlink(), FileError, "Its creation did not end"),
        (lambda folder: (folder / "table.json").write_text('{"format_version": 2}'), CheckpointError, "version 2"),
        (lambda folder: os.truncate(folder / "undo.log", 0), CheckpointError, "not an undo log"),
    ],
)  # fmt: skip
def test_files_that_do_not_belong_together_are_named_and_not_changed(tmp_path, trained, damage, error, message) -> None:
    trained[0].close()
    damage(tmp_path / "rows")
    before = {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()}
    with pytest.raises(error, match=message):
        MappedEmbedding.resume(tmp_path / "rows")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "rows").iterdir()}


def test_a_full_disk_is_found_when_files_are_created_and_leaves_the_rest(tmp_path, trained, monkeypatch) -> None:
    table, _, rows = trained
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full_disk)
        with pytest.raises(FileError, match="Cannot create .* No space left"):
            MappedEmbedding.create(tmp_path / "new", 50, 4)
        second = RowAdamW(table.parameters())
        with pytest.raises(FileError, match="Cannot create .* No space left"):
            step_of(table, second)
    step_of(table, second)
    assert list((tmp_path / "new").iterdir()) == []
    MappedEmbedding.create(tmp_path / "new", 50, 4).close()
    table.close()
    with MappedEmbedding.resume(tmp_path / "rows") as resumed:
        assert torch.equal(resumed.weight.data, rows)


def test_a_step_on_a_full_disk_changes_nothing_and_can_be_repeated(trained, monkeypatch) -> None:
    table, optimizer, _ = trained
    stored = table.source.folder("test").weight
    before = stored.clone()
    with monkeypatch.context() as patch:
        patch.setattr(undo_log, "write_at", full_disk)
        with pytest.raises(FileError, match="No space left"):
            table(torch.arange(50))
        optimizer.zero_grad()
        table.weight.grad = torch.sparse_coo_tensor([range(50)], torch.ones(50, 4), (50, 4), check_invariants=True)
        with pytest.raises(FileError, match="No space left"):
            optimizer.step()
    assert torch.equal(stored, before)
    optimizer.step()
    assert bool((stored != before).all())


def test_a_folder_that_cannot_be_written_is_not_trained(tmp_path, trained, monkeypatch) -> None:
    trained[0].close()
    opened = os.open

    def read_only(path, flags, *mode) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(FileError, match="Read-only file system"):
        MappedEmbedding.resume(tmp_path / "rows")


def test_a_forked_process_does_not_write(trained) -> None:
    table, optimizer, _ = trained
    child = os.fork()
    if not child:
        try:
            table.source.folder("test").before_write(torch.tensor([1]))
        except FileError as error:
            os._exit(7 if "from which this one was forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    step_of(table, optimizer)


def test_another_optimizer_starts_from_zeros_and_is_rolled_back_with_its_files(tmp_path, trained) -> None:
    table, _, rows = trained
    second = RowAdamW(table.parameters(), lr=0.1)
    step_of(table, second)
    assert (tmp_path / "rows" / "exp_avg.1.safetensors").exists()
    assert int(second.state[table.weight]["step"]) == 1
    state = deepcopy(second.state_dict())
    table.close()
    with MappedEmbedding.resume(tmp_path / "rows") as resumed:
        assert torch.equal(resumed.weight.data, rows)
        assert not (tmp_path / "rows" / "exp_avg.1.safetensors").exists()
        optimizer = RowAdamW(resumed.parameters(), lr=0.1)
        optimizer.load_state_dict(state)
        step_of(resumed, optimizer)
        with resumed.checkpoint():
            pass
        assert (tmp_path / "rows" / "exp_avg.1.safetensors").exists()
        assert not (tmp_path / "rows" / "exp_avg.0.safetensors").exists()


def test_state_in_memory_is_refused_at_a_checkpoint(trained) -> None:
    table = trained[0]
    pending = table.weight.pending_updates
    pending.moments = tuple(each.clone() for each in pending.moments)
    with pytest.raises(SizeError, match="not in this folder"), table.checkpoint():
        pass
