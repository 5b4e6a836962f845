"""One process has all rows; `test_divided.py` has the others."""

import torch

from embedlayer.vocab.owners import ALONE


def test_one_process_has_all_rows_and_asks_nobody() -> None:
    rows, ids = torch.randn(5, 2), torch.tensor([3, 1])
    assert ALONE.span(5) == (0, 5)
    assert torch.equal(ALONE.sent(rows, [ids], 5), rows[ids])
    assert [torch.equal(*pair) for pair in zip(ALONE.delivered(ids, rows[:2], 5), (ids, rows[:2]), strict=True)]
    assert ALONE.first_says(rows) is rows
    reader = ALONE.reader(rows, 5, 4)
    assert (reader.vocab_size, reader.embed_dim) == (4, 2)
    assert torch.equal(reader.look_up(ids), rows[ids])
    assert torch.equal(reader.rows(1, 3), rows[1:3])
    with ALONE.agreed() as facts:
        facts["nothing"] = "is told"
