"""Row maps: where each row comes from, how many rows a table has after an edit, and what rows without a token hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from stored_folders import words
from vocab_models import checkpoint

import embedlayer as el
from embedlayer.vocab import MeanInit, RowInit, RowMap, edit_vocabulary

NEW = -1
SOURCES = st.lists(st.integers(NEW, 11), min_size=1, max_size=20)
TENSORS = (
    torch.arange(1.0, 37).view(12, 3),
    torch.arange(1, 13).bfloat16(),
    torch.arange(1, 97, dtype=torch.int8).view(12, 2, 4),
    torch.ones(12, 0),
)


@given(sources=SOURCES, padding=st.integers(0, 3))
def test_each_new_row_is_its_source_or_zero_and_the_inverse_map_moves_it_back(sources, padding) -> None:
    row_map = RowMap(torch.tensor(sources), 12)
    for old in TENSORS:
        new = row_map.apply(old, padding=padding)
        zero = torch.zeros_like(old[0])
        assert new.dtype == old.dtype
        assert torch.equal(new, torch.stack([*(zero if i == NEW else old[i] for i in sources), *[zero] * padding]))
        back = row_map.inverse().apply(new)
        assert torch.equal(back, torch.stack([old[i] if i in sources else zero for i in range(12)]))
    assert row_map.new_ids.tolist() == [sources.index(i) if i in sources else -1 for i in range(12)]
    assert row_map.dropped.tolist() == row_map.inverse().initialised.tolist() == sorted({*range(12)} - {*sources})
    assert row_map.initialised.tolist() == [place for place, source in enumerate(sources) if source == NEW]


def test_more_rows_than_are_moved_at_once_are_moved() -> None:
    sources = torch.randint(NEW, 20_000, (20_000,))
    moved = RowMap(sources, 20_000).apply(torch.arange(20_000))
    assert torch.equal(moved, sources.clamp(min=0))


def test_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(el.TokenIdError):
        RowMap(torch.tensor([0, 3]), 3)
    with pytest.raises(el.SizeError):
        RowMap(torch.tensor([], dtype=torch.int64), 3)


def rows_after(tokens: int, rows: int, new: int, multiple: int | None) -> int:
    """The padding of the old table decides, if no multiple is requested."""
    if multiple is None and rows > tokens:
        powers = [power for power in (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2) if -(-tokens // power) * power == rows]
        if not powers:
            return max(new, rows) if new >= tokens else new
        multiple = powers[0]
    return math.ceil(new / (multiple or 1)) * (multiple or 1)


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(1, 90), st.sampled_from([None, None, 1, 7, 64]))
def test_a_table_stays_padded_as_it_was_and_rows_without_a_token_stay_last(tokens, spare, new, multiple) -> None:
    rows = tokens + spare
    table = el.QuantizedEmbedding.from_table(el.TokenEmbedding(rows, 2), 8)
    before, words_before = table.rows(0, rows).clone(), words(tokens)
    change = {"add": [f"new{i}" for i in range(tokens, new)], "remove": range(new, tokens)}
    receipt = edit_vocabulary(table, **change, tokenizer=words_before, init=MeanInit(), pad_to_multiple_of=multiple)
    size = rows_after(tokens, rows, new, multiple)
    kept = min(spare, size - new)
    sources = [*range(min(tokens, new)), *[NEW] * (size - min(tokens, new) - kept), *range(rows - kept, rows)]
    assert receipt.row_map.sources.tolist() == sources
    assert receipt.num_tokens == (tokens, new)
    assert table.vocab_size == size
    moved = receipt.row_map.sources >= 0
    assert torch.equal(table.rows(0, size)[moved], before[receipt.row_map.sources[moved]])
    receipt.undo(table)
    assert torch.equal(table.rows(0, rows), before)


def test_rows_without_a_token_start_as_the_mean(tmp_path) -> None:
    folder = checkpoint(tmp_path / "old", 300)
    receipt = edit_vocabulary(folder, init=el.vocab.RandomInit(), pad_to_multiple_of=64, out=tmp_path / "new")
    old, new = (load_file(each / "model.safetensors")["wte.weight"] for each in (folder, tmp_path / "new"))
    assert torch.equal(new[:300], old)
    torch.testing.assert_close(new[300:], old.mean(0).expand(20, -1))
    assert receipt.origins == dict.fromkeys(range(300, 320), "mean")


def test_merged_ids_become_the_id_of_the_token_that_is_kept() -> None:
    table = el.TokenEmbedding(6, 2)
    receipt = edit_vocabulary(table, merge={1: 4}, remove=[0])
    assert receipt.row_map.sources.tolist() == [2, 3, 4, 5]
    assert receipt.row_map.dropped.tolist() == [0, 1]
    assert (receipt.merged, receipt.dropped) == ({1: 2}, {0: "#0"})
    assert receipt.new_ids.tolist() == receipt.row_map.token_ids(receipt.merged).tolist() == [-1, 2, 0, 1, 2, 3]


class OneRow(RowInit):
    """Computes a row for the first token only."""

    dead = ()

    def compute(self, live, tokens, chunk, generator):
        values, origins = MeanInit().compute(live, tokens, chunk, generator)
        return values[:1], origins[:1]


def test_an_init_must_compute_one_row_for_each_new_token() -> None:
    table = el.TokenEmbedding(6, 2)
    with pytest.raises(el.ShapeError):
        edit_vocabulary(table, add=2, init=OneRow())
    assert table.vocab_size == 6
