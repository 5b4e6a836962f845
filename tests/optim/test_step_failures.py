"""A step that fails changes nothing, so it can be repeated: for every kind of failure and every place of the table."""

import errno
import os
from collections.abc import Callable

import pytest
import torch
from covering import cases
from torch import nn

import embedlayer as el
from embedlayer.io import safetensors_files, undo_log
from embedlayer.row_sparse import pending_updates_applied
from embedlayer.row_sparse.storage import raw_weight
from embedlayer.tables import MappedEmbedding

V, D = 40, 4


def full_disk(*_) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Run:
    """A dense layer, a table in memory and a mapped table, which one optimizer trains in this order."""

    def __init__(self, folder, kind: Callable[..., torch.optim.Optimizer] = el.RowAdamW, **options) -> None:
        torch.manual_seed(0)
        self.mapped = MappedEmbedding.create(folder, V, D, init_std=1.0)
        self.memory, self.linear = el.RowSparseEmbedding(V, D), nn.Linear(D, 3)
        parameters = [p for module in (self.linear, self.memory, self.mapped) for p in module.parameters()]
        self.optimizer = kind(parameters, lr=0.1, **options)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        ids = torch.randint(V, (3, 4), generator=torch.Generator().manual_seed(step))
        self.linear(self.memory(ids) + self.mapped(ids)).square().sum().backward()

    def numbers(self) -> list[torch.Tensor]:
        """All parameters and states, with the updates of all rows applied, as copies."""
        states = self.optimizer.state_dict()["state"].values()
        parameters = [self.linear.weight, self.linear.bias, self.memory.weight, self.mapped.weight]
        return [each.detach().clone() for each in [*parameters, *(v for s in states for v in s.values())]]


FAILURES: dict[str, Callable[[Run, pytest.MonkeyPatch], object]] = {
    "full disk": lambda _, patch: patch.setattr(undo_log, "write_at", full_disk),
    "full disk for state": lambda _, patch: patch.setattr(safetensors_files, "allocate", full_disk),
    "inside a checkpoint": lambda run, patch: patch.setattr(run.mapped.source.folder("test"), "_saving", True),
    "large weight decay": lambda run, patch: patch.setitem(run.optimizer.param_groups[0], "weight_decay", 10.0),
}


@pytest.mark.usefixtures("both_paths")
@cases("failure, kind, every", FAILURES, [el.RowAdamW, el.RowAdagrad], [None, 1], pairs=["failure, kind"])
def test_a_step_that_fails_changes_no_parameter_and_can_be_repeated(tmp_path, failure, kind, every) -> None:
    runs = [Run(tmp_path / name, kind, apply_pending_every=every) for name in ("whole", "failing")]
    steps = range(1) if failure == "full disk for state" else range(4)
    for step in steps:
        for run in runs:
            run.backward(step)
            if run is runs[1] and step == steps[-1]:
                if step:
                    with run.mapped.checkpoint():
                        pass  # from here on every row is logged anew
                with pytest.MonkeyPatch.context() as patch, pytest.raises(el.EmbedLayerError):
                    FAILURES[failure](run, patch)
                    run.optimizer.step()
            run.optimizer.step()
    assert all(map(torch.equal, *(run.numbers() for run in runs)))
    for run in runs:
        run.mapped.close()


@pytest.mark.usefixtures("both_paths")
def test_updates_of_all_rows_after_a_step_are_logged_before_it(tmp_path, monkeypatch) -> None:
    runs = [Run(tmp_path / name) for name in ("whole", "failing")]
    for step in range(3):
        for run in runs:
            run.backward(step)
            with pending_updates_applied(run.mapped):
                if step == 2:
                    with run.mapped.checkpoint():
                        pass
                    if run is runs[1]:
                        with monkeypatch.context() as patch, pytest.raises(el.FileError, match="No row was changed"):
                            patch.setattr(undo_log, "write_at", full_disk)
                            run.optimizer.step()
                run.optimizer.step()
    assert not runs[1].mapped.weight.pending_updates.has_pending
    assert all(map(torch.equal, *(run.numbers() for run in runs)))
    for run in runs:
        run.mapped.close()


@pytest.mark.usefixtures("both_paths")
def test_a_write_through_an_older_tensor_is_refused_before_other_parameters_take_their_step(tmp_path) -> None:
    run = Run(tmp_path / "rows")
    for step in range(2):
        run.backward(step)
        run.optimizer.step()
    run.backward(2)
    before = run.linear.weight.detach().clone()
    raw_weight(run.mapped.weight).fill_(0.25)
    with pytest.raises(el.StaleRowsError, match="written in place"):
        run.optimizer.step()
    assert torch.equal(run.linear.weight, before)
    run.mapped.close()
