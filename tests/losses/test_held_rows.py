"""One process that holds all rows: whatever is asked of the others changes nothing."""

import torch

from embedlayer.losses.held_rows import AllRows


def test_who_holds_all_rows_has_nobody_to_ask() -> None:
    held, chunk, sizes = AllRows(), torch.randn(5, 3), [5]
    assert held.counts(5, wanted=True) == (sizes, True)
    for answer in (held.gather(chunk, sizes), held.own(chunk, sizes), held.home(chunk, sizes), held.highest(chunk)):
        assert answer is chunk
    assert held.total(chunk, chunk[0])[1].equal(chunk[0])
    places, here = held.places(torch.tensor([4, 0]))
    assert (places * here).tolist() == [4, 0]
    assert held.same(chunk[0, 0])
