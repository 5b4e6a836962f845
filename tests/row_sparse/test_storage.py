"""A storage learns of every row before it is written: from what it noted then, an earlier state can be restored."""

import pytest
import torch
from torch import Tensor

import embedlayer as el
from embedlayer.row_sparse.storage import RowsInMemory, RowStorage, raw_weight

V, D = 40, 4


class Logged(RowStorage):
    """Rows in memory, with the old contents of every row since the last `mark`."""

    def __init__(self, weight: Tensor) -> None:
        self.memory, self.stored = RowsInMemory(), {"weight": raw_weight(weight)}
        self.mark()

    def new_state(self, weight: Tensor, name: str, width: int | None, dtype: torch.dtype) -> Tensor:
        self.stored[name] = self.memory.new_state(weight, name, width, dtype)
        return self.stored[name]

    def place(self, weight: Tensor, name: str, value: Tensor) -> Tensor:
        self.stored[name] = self.memory.place(weight, name, value)
        return self.stored[name]

    def check_process(self) -> None:
        self.memory.check_process()

    def before_write(self, rows: Tensor) -> None:
        assert rows.unique().numel() == rows.numel()
        for row in set(rows.tolist()) - set(self.old):
            self.old[row] = {name: tensor[row].clone() for name, tensor in self.stored.items()}

    def mark(self) -> None:
        self.old: dict[int, dict[str, Tensor]] = {}
        self.copies = {name: tensor.clone() for name, tensor in self.stored.items()}

    def check(self) -> None:
        for name, copy in self.copies.items():
            restored = self.stored[name].clone()
            for row, old in self.old.items():
                restored[row] = old[name]
            assert torch.equal(restored, copy), name


@pytest.mark.usefixtures("both_paths")
def test_a_storage_is_told_of_every_row_before_it_is_written_and_of_no_row_that_is_only_read() -> None:
    generator = torch.Generator().manual_seed(0)
    table = el.RowSparseEmbedding(V, D, padding_idx=0)
    storage = table.pending_updates.storage = Logged(table.weight)
    optimizer = el.RowAdamW(table.parameters(), lr=0.1, apply_pending_every=25)
    for step in range(60):
        for _ in range(2):
            optimizer.zero_grad()
            ids = torch.randint(0, V if step % 7 == 0 else 6, (5,), generator=generator)
            table(ids).sum().backward()
            optimizer.step()
        table.rows(10, 14), table.weight[3] if step % 9 == 0 else None
        optimizer.state_dict() if step % 20 == 0 else None
        storage.check()
        if step % 3 == 0:
            storage.mark()
    table.weight.sum()
    storage.mark()
    table(torch.arange(V))
    table.rows(0, V)
    assert not storage.old
