"""A folder of a trained table refuses what would lose rows, and loses none in refusing."""

import errno
import fcntl
import os
import shutil
from contextlib import suppress
from copy import deepcopy
from random import Random

import pytest
import torch
from covering import some

from embedlayer import RowAdagrad, RowAdamW
from embedlayer.core.errors import CheckpointError, FileError, SizeError, StaleRowsError
from embedlayer.io import safetensors_files, undo_log
from embedlayer.row_sparse.hooks import without_applying_updates
from embedlayer.tables.stored.mapped import MappedEmbedding

pytestmark = [
    pytest.mark.usefixtures("system"),
    pytest.mark.parametrize("system", ["Linux", "macOS"], indirect=True),  # others cannot tell a restart of the machine
]


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


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def state_of(folder, name):
    return folder / "state" / f"{name}.0.safetensors"


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_closed_folder_is_resumed_at_its_checkpoint_and_nowhere_else(tmp_path, trained) -> None:
    table, optimizer, rows = trained
    table.close()
    table.close()
    assert names_in(tmp_path / "rows") == ["closed.json", "state", "table.json", "undo.log", "weight.safetensors"]
    arrays = ("exp_avg", "exp_avg_sq", "moment_steps", "value_steps")
    assert names_in(tmp_path / "rows" / "state") == [f"{name}.0.safetensors" for name in arrays]
    for use in (lambda: step_of(table, optimizer), lambda: table.checkpoint().__enter__(), lambda: table.rows(0, 1)):
        with pytest.raises(FileError):
            use()
    with pytest.raises(CheckpointError):
        MappedEmbedding.open(tmp_path / "rows")
    with pytest.raises(CheckpointError):
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


def test_a_table_is_closed_when_its_log_is_on_the_disk(trained, monkeypatch) -> None:
    table, _, _ = trained
    on_disk: list[str] = []

    def fsync(descriptor: int, wait=os.fsync) -> None:
        on_disk.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        wait(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    table.close()
    assert on_disk[-3:] == ["undo.log", "closed.json", "rows"]


def test_an_error_inside_a_checkpoint_leaves_the_last_one(tmp_path, trained) -> None:
    table, optimizer, rows = trained
    with pytest.raises(StaleRowsError), table.checkpoint():
        step_of(table, optimizer, 2)
    with pytest.raises(StaleRowsError), table.checkpoint(), table.checkpoint():
        pass
    table.close()
    with MappedEmbedding.resume(tmp_path / "rows") as resumed:
        assert torch.equal(resumed.weight.data, rows)


class Ended(Exception):
    """What ends a block of a checkpoint."""


@pytest.mark.parametrize("seed", some((0, 1), range(4)))
def test_a_table_can_be_resumed_at_each_number_until_a_later_checkpoint_is_completed(
    tmp_path, seed, monkeypatch
) -> None:
    random = Random(seed)
    table = MappedEmbedding.create(tmp_path / "rows", 50, 4, init_std=1.0)
    optimizer = RowAdamW(table.parameters(), lr=0.1)
    saved: dict[int, list[torch.Tensor]] = {}
    given = set()
    for turn in range(25):
        kind = random.choice(("step", "step", "step", "checkpoint", "error in the block", "full disk at its end"))
        if kind == "step":
            step_of(table, optimizer, turn)
            continue
        before = dict(saved)
        with monkeypatch.context() as patch, suppress(Ended, OSError), table.checkpoint() as number:
            assert number not in given
            given.add(number)
            saved = {**before, number: stored(table, optimizer)}
            if kind == "error in the block":
                raise Ended
            if kind == "full disk at its end":
                patch.setattr(undo_log, "replace_file", full_disk)
            else:
                saved = {number: saved[number]}
        for number, expected in list(saved.items()) if turn % 3 == 0 else ():
            copy = tmp_path / f"{turn}-{number}"
            shutil.copytree(tmp_path / "rows", copy)
            (copy / "open.json").unlink()
            with MappedEmbedding.resume(copy, number) as resumed:
                again = RowAdamW(resumed.parameters(), lr=0.1)
                assert all(torch.equal(*pair) for pair in zip(stored(resumed, again), expected, strict=True))
        if turn % 7 == 0 and saved:  # a process that was killed and goes on from any of them
            number = random.choice(list(saved))
            table.close()
            table = MappedEmbedding.resume(tmp_path / "rows", number)
            optimizer, saved = RowAdamW(table.parameters(), lr=0.1), {number: saved[number]}
    assert len(given) > 3


def stored(table: MappedEmbedding, optimizer: RowAdamW) -> list[torch.Tensor]:
    """Return copies of the rows and their state, with pending updates."""
    with without_applying_updates(table):
        rows = table.weight.data.clone()
    pending = table.weight.pending_updates
    return [rows, *(each.clone() for each in (*pending.moments, *pending.state()[0].values()))]


def test_a_process_killed_while_it_rolls_back_can_be_resumed_again(tmp_path, trained, monkeypatch) -> None:
    table, _, rows = trained
    later = stored(table, trained[1])[0]
    with suppress(Ended), table.checkpoint():
        raise Ended
    step_of(table, trained[1], 5)
    table.close()
    with monkeypatch.context() as patch, pytest.raises(Ended):
        patch.setattr(undo_log.UndoLog, "create", raised(Ended))
        MappedEmbedding.resume(tmp_path / "rows", 1)
    with pytest.raises(CheckpointError):
        MappedEmbedding.resume(tmp_path / "rows", 2)
    with MappedEmbedding.resume(tmp_path / "rows", 1) as resumed:
        assert torch.equal(resumed.weight.data, rows)
        with resumed.checkpoint() as number:
            assert number == 3
    assert not torch.equal(later, rows)


def raised(error):
    def call(*_, **__):
        raise error

    return call


def test_files_of_others_in_the_folder_are_kept(tmp_path) -> None:
    table = MappedEmbedding.create(tmp_path / "rows", 50, 4)
    with table.checkpoint():
        (tmp_path / "rows" / "rest.1.safetensors").write_text("rest")
    table.close()
    MappedEmbedding.resume(tmp_path / "rows").close()
    assert (tmp_path / "rows" / "rest.1.safetensors").read_text() == "rest"


def test_a_relative_folder_stays_the_same_after_a_change_of_the_working_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = MappedEmbedding.create("rows", 50, 4)
    monkeypatch.chdir("/")
    with table.checkpoint():
        pass
    table.close()
    assert names_in(tmp_path / "rows") == ["closed.json", "table.json", "undo.log", "weight.safetensors"]
    table = MappedEmbedding.resume(tmp_path / "rows")
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(FileError):
        table.close()


def test_one_table_at_a_time_changes_a_folder(tmp_path, trained) -> None:
    table, _, _ = trained
    with pytest.raises(FileError):
        MappedEmbedding.resume(tmp_path / "rows")
    with pytest.raises(FileError):
        MappedEmbedding.open(tmp_path / "rows")
    with pytest.raises(FileError):
        MappedEmbedding.create(tmp_path / "rows", 50, 4)
    table.close()
    with (tmp_path / "rows" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(FileError):
            MappedEmbedding.resume(tmp_path / "rows")
        with pytest.raises(FileError):
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
    with pytest.raises(CheckpointError):
        MappedEmbedding.resume(tmp_path / "copy")
    with pytest.raises(CheckpointError):
        MappedEmbedding.open(tmp_path / "copy")
    mark = (tmp_path / "rows" / "open.json").read_text()
    table.close()
    (tmp_path / "rows" / "open.json").write_text(mark.replace('"boot": "', '"boot": "another'))
    with pytest.raises(CheckpointError):
        MappedEmbedding.resume(tmp_path / "rows")
    (tmp_path / "rows" / "open.json").unlink()
    shutil.copytree(tmp_path / "rows", tmp_path / "closed")
    with MappedEmbedding.resume(tmp_path / "closed") as resumed:
        assert torch.equal(resumed.weight.data, rows)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda folder: os.truncate(folder / "weight.safetensors", 4200), CheckpointError),
        (lambda folder: shutil.copy(state_of(folder, "exp_avg"), folder / "weight.safetensors"), CheckpointError),
        (lambda folder: shutil.copy(state_of(folder, "exp_avg"), state_of(folder, "value_steps")), CheckpointError),
        (lambda folder: state_of(folder, "exp_avg").unlink(), FileError),
        (lambda folder: (folder / "table.json").unlink(), FileError),
        (lambda folder: (folder / "table.json").write_text('{"format_version": 2}'), CheckpointError),
        (lambda folder: os.truncate(folder / "undo.log", 0), CheckpointError),
        (lambda folder: os.truncate(folder / "undo.log", (folder / "undo.log").stat().st_size - 1), CheckpointError),
    ],
)
def test_files_that_do_not_belong_together_are_refused_and_not_changed(tmp_path, trained, damage, error) -> None:
    trained[0].close()
    damage(tmp_path / "rows")
    before = contents(tmp_path / "rows")
    with pytest.raises(error) as first:
        MappedEmbedding.resume(tmp_path / "rows")
    assert before == contents(tmp_path / "rows")
    with pytest.raises(error) as second:  # not that the folder is open, while a notebook keeps the first error
        MappedEmbedding.resume(tmp_path / "rows")
    assert str(second.value) == str(first.value)


def test_a_full_disk_is_found_when_files_are_created_and_leaves_the_rest(tmp_path, trained, monkeypatch) -> None:
    table, _, rows = trained
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_files, "allocate", full_disk)
        with pytest.raises(FileError):
            MappedEmbedding.create(tmp_path / "new", 50, 4)
        second = RowAdamW(table.parameters())
        with pytest.raises(FileError):
            step_of(table, second)
    for _ in range(2):  # room for one of two moments
        calls = iter([safetensors_files.allocate, full_disk])
        with monkeypatch.context() as patch, pytest.raises(FileError):
            patch.setattr(safetensors_files, "allocate", lambda *arguments, calls=calls: next(calls)(*arguments))
            step_of(table, second)
    step_of(table, second)
    assert len(names_in(tmp_path / "rows" / "state")) == 8  # of the checkpoint, and of the second optimizer
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
        with pytest.raises(FileError):
            table(torch.arange(50))
        optimizer.zero_grad()
        table.weight.grad = torch.sparse_coo_tensor([range(50)], torch.ones(50, 4), (50, 4), check_invariants=True)
        with pytest.raises(FileError):
            optimizer.step()
    assert torch.equal(stored, before)
    optimizer.step()
    assert bool((stored != before).all())


def test_a_folder_that_cannot_be_written_is_not_trained(tmp_path, trained, monkeypatch) -> None:
    trained[0].close()
    opened = os.open

    def read_only(path, flags, *mode, **place) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode, **place)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(FileError):
        MappedEmbedding.resume(tmp_path / "rows")


def test_a_forked_process_does_not_write(trained) -> None:
    table, optimizer, _ = trained
    child = os.fork()
    if not child:
        try:
            table.source.folder("test").before_write(torch.tensor([1]))
        except FileError:
            os._exit(7)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    step_of(table, optimizer)


def test_another_optimizer_starts_from_zeros_and_is_rolled_back_with_its_files(tmp_path, trained) -> None:
    table, _, rows = trained
    second = RowAdamW(table.parameters(), lr=0.1)
    step_of(table, second)
    assert (tmp_path / "rows" / "state" / "exp_avg.1.safetensors").exists()
    assert int(second.state[table.weight]["step"]) == 1
    state = deepcopy(second.state_dict())
    table.close()
    with MappedEmbedding.resume(tmp_path / "rows") as resumed:
        assert torch.equal(resumed.weight.data, rows)
        assert not (tmp_path / "rows" / "state" / "exp_avg.1.safetensors").exists()
        optimizer = RowAdamW(resumed.parameters(), lr=0.1)
        optimizer.load_state_dict(state)
        step_of(resumed, optimizer)
        with resumed.checkpoint():
            pass
        assert (tmp_path / "rows" / "state" / "exp_avg.1.safetensors").exists()
        assert not (tmp_path / "rows" / "state" / "exp_avg.0.safetensors").exists()


def test_the_state_of_an_optimizer_that_was_replaced_is_not_given_to_a_later_one(tmp_path, trained) -> None:
    table, _, _ = trained
    step_of(table, RowAdagrad(table.parameters(), lr=0.1))
    with table.checkpoint():
        pass
    table.close()
    with MappedEmbedding.resume(tmp_path / "rows") as resumed:
        kept = RowAdagrad(resumed.parameters(), lr=0.1)
        assert float(kept.moments(resumed.weight)["step"]) == 1
        assert bool((kept.moments(resumed.weight)["sum"] > 0).any())
        assert not RowAdamW(resumed.parameters()).moments(resumed.weight)["exp_avg"].any()


def test_state_in_memory_is_refused_at_a_checkpoint(trained) -> None:
    table = trained[0]
    pending = table.weight.pending_updates
    pending.moments = tuple(each.clone() for each in pending.moments)
    with pytest.raises(SizeError), table.checkpoint():
        pass


def test_rows_that_lack_optimizer_steps_are_not_opened_for_reading(tmp_path) -> None:
    table = MappedEmbedding.create(tmp_path / "rows", 50, 4, init_std=0.1)
    optimizer = RowAdamW(table.parameters(), lr=0.1)
    for ids in ([1, 2], [2, 3], [3, 4]):
        table(torch.tensor(ids)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with table.checkpoint() as generation:
        pass
    assert table.weight.shape == (50, 4)  # reading all rows applies the steps, after the checkpoint
    table.close()
    for source in (tmp_path / "rows", tmp_path / "rows" / "weight.safetensors"):
        with pytest.raises(CheckpointError):
            MappedEmbedding.open(source)
    table = MappedEmbedding.resume(tmp_path / "rows", generation)
    table.apply_pending_updates()
    with table.checkpoint():
        pass
    rows = table.weight.detach().clone()
    table.close()
    for source in (tmp_path / "rows", tmp_path / "rows" / "weight.safetensors"):
        assert torch.equal(MappedEmbedding.open(source).rows(0, 50), rows)
