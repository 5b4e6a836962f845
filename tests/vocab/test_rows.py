"""One description that moves every tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embedlayer as el
from embedlayer.vocab.rows import GONE, NEW, RowMove, Slot, Start, moved, row_fingerprint

SOURCES = st.lists(st.integers(NEW, 11), min_size=1, max_size=20)


@given(sources=SOURCES, spare=st.integers(0, 3))
def test_each_new_row_is_its_source_or_its_start(sources, spare) -> None:
    old = torch.arange(36.0).view(12, 3)
    move = RowMove(torch.tensor(sources), 12)
    start = -torch.arange(1.0, 3 * len(move.started) + 1).view(-1, 3)
    new = move.apply(old, start, spare=spare)
    fresh = iter(start)
    expected = [next(fresh) if source == NEW else old[source] for source in sources] + [torch.zeros(3)] * spare
    assert torch.equal(new, torch.stack(expected))
    for old_id, new_id in enumerate(move.new_ids.tolist()):
        assert new_id == (sources.index(old_id) if old_id in sources else GONE)
    assert move.dropped.tolist() == sorted(set(range(12)) - set(sources))


@given(sources=SOURCES)
def test_the_inverse_leads_back(sources) -> None:
    old = torch.randn(12, 2)
    move = RowMove(torch.tensor(sources), 12)
    back = move.inverse()
    assert torch.equal(back.apply(move.apply(old), old[move.dropped]), old)
    assert torch.equal(back.started, move.dropped)


def test_types_devices_and_shapes_stay() -> None:
    move = RowMove(torch.tensor([1, NEW]), 2)
    for tensor in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, 3, 4, dtype=torch.int8), torch.ones(2, 0)):
        new = move.apply(tensor)
        assert (new.dtype, new.shape) == (tensor.dtype, tensor.shape)
        assert not new[1].any()


def test_moving_says_what_was_lost_and_touches_nothing() -> None:
    table, state = torch.randn(3, 2), torch.randn(3, 2)
    slots = [Slot("table", table, print, end="table"), Slot("state", state, print)]
    move = RowMove(torch.tensor([2, NEW]), 3)
    result = moved(slots, move, lambda slot: [Start(torch.ones(1, 2), ["ones"])])
    assert torch.equal(result.tensors["table"], torch.stack([table[2], torch.ones(2)]))
    assert torch.equal(result.tensors["state"], torch.stack([state[2], torch.zeros(2)]))
    assert torch.equal(result.rows["table"], table[:2])
    assert result.origins == {1: "ones"}
    assert result.before["table"] == row_fingerprint(table) != result.after["table"]


def test_fingerprints_tell_numbers_types_and_shapes_apart() -> None:
    ones = torch.ones(4, 2)
    different = [ones, ones.double(), ones.view(2, 4), ones.flatten(), torch.zeros(4, 2), torch.ones(())]
    assert len({row_fingerprint(tensor) for tensor in different}) == len(different)
    assert row_fingerprint(ones) == row_fingerprint(torch.ones(2, 4).T)


def test_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(el.TokenIdError, match="there are 3"):
        RowMove(torch.tensor([0, 3]), 3)
    with pytest.raises(el.SizeError, match="No token would be left"):
        RowMove(torch.tensor([], dtype=torch.int64), 3)
