"""Row maps, and their application to named tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embedlayer as el
from embedlayer.vocab.edit import ModelEdit, ModelResult
from embedlayer.vocab.map import DROPPED, NEW, RowMap, RowTensor, row_fingerprint
from embedlayer.vocab.targets.apply_rows import apply_row_map

SOURCES = st.lists(st.integers(NEW, 11), min_size=1, max_size=20)


def edit(row_map: RowMap, values: torch.Tensor) -> ModelEdit:
    return ModelEdit(row_map, lambda rows: values.split(2))


@given(sources=SOURCES, padding=st.integers(0, 3))
def test_each_new_row_is_its_source_or_its_initial_value(sources, padding) -> None:
    old = torch.arange(36.0).view(12, 3)
    row_map = RowMap(torch.tensor(sources), 12)
    start = -torch.arange(1.0, 3 * len(row_map.initialised) + 1).view(-1, 3)
    tensors = {"table": RowTensor(old, "table", padding)}
    new = apply_row_map(tensors, edit(row_map, start))["table"]
    fresh = iter(start)
    expected = [next(fresh) if source == NEW else old[source] for source in sources] + [torch.zeros(3)] * padding
    assert torch.equal(new, torch.stack(expected))
    zeros = row_map.apply(old)[row_map.initialised]
    assert not zeros.any()
    for old_id, new_id in enumerate(row_map.new_ids.tolist()):
        assert new_id == (sources.index(old_id) if old_id in sources else DROPPED)
    assert row_map.dropped.tolist() == sorted(set(range(12)) - set(sources))


@given(sources=SOURCES)
def test_the_inverse_map_with_the_dropped_rows_restores_every_bit(sources) -> None:
    old, row_map = torch.randn(12, 2), RowMap(torch.tensor(sources), 12)
    first = ModelEdit(row_map)
    edited = apply_row_map({"table": RowTensor(old)}, first)["table"]
    undo = ModelResult.of(first, {"table": RowTensor(old)}, {}).resolve_undo([], row_map.size, False)
    assert torch.equal(apply_row_map({"table": RowTensor(edited)}, undo)["table"], old)
    assert torch.equal(undo.row_map.initialised, row_map.dropped)
    changed = edited.index_fill(0, row_map.initialised, 3.0)  # rows that the undo drops
    assert torch.equal(apply_row_map({"table": RowTensor(changed)}, undo)["table"], old)
    if len(row_map.initialised) < len(sources):
        with pytest.raises(el.CheckpointError, match="other values"):
            apply_row_map({"table": RowTensor(edited + 1)}, undo)


def test_types_devices_and_shapes_stay() -> None:
    row_map = RowMap(torch.tensor([1, NEW]), 2)
    for tensor in (torch.ones(2, dtype=torch.bfloat16), torch.ones(2, 3, 4, dtype=torch.int8), torch.ones(2, 0)):
        new = row_map.apply(tensor)
        assert (new.dtype, new.shape) == (tensor.dtype, tensor.shape)
        assert not new[1].any()


def test_an_edit_returns_the_dropped_rows_and_changes_no_tensor() -> None:
    table, state = torch.randn(3, 2), torch.randn(3, 2)
    tensors = {"table": RowTensor(table, "table"), "state": RowTensor(state)}
    before = [table.clone(), state.clone()]
    change = edit(RowMap(torch.tensor([2, NEW]), 3), torch.ones(1, 2))
    new, result = apply_row_map(tensors, change), ModelResult.of(change, tensors, {})
    assert torch.equal(new["table"], torch.stack([table[2], torch.ones(2)]))
    assert torch.equal(new["state"], torch.stack([state[2], torch.zeros(2)]))
    assert torch.equal(result.dropped_rows["table"], table[:2])
    assert result.before["table"] == row_fingerprint(table) != row_fingerprint(new["table"])
    assert all(torch.equal(*pair) for pair in zip(before, (table, state), strict=True))


def test_an_init_must_compute_one_row_for_each_new_token() -> None:
    with pytest.raises(el.ShapeError, match="1 rows were computed for 2 new tokens"):
        apply_row_map(
            {"table": RowTensor(torch.ones(1, 2), "table")}, edit(RowMap(torch.tensor([NEW, NEW]), 1), torch.ones(1, 2))
        )


def test_fingerprints_tell_numbers_types_and_shapes_apart() -> None:
    ones = torch.ones(4, 2)
    different = [ones, ones.double(), ones.view(2, 4), ones.flatten(), torch.zeros(4, 2), torch.ones(())]
    assert len({row_fingerprint(tensor) for tensor in different}) == len(different)
    assert row_fingerprint(ones) == row_fingerprint(torch.ones(2, 4).T)


def test_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(el.TokenIdError, match="there are 3"):
        RowMap(torch.tensor([0, 3]), 3)
    with pytest.raises(el.SizeError, match="No token would be left"):
        RowMap(torch.tensor([], dtype=torch.int64), 3)
