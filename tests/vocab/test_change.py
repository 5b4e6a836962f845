"""What an edit asks for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embedlayer as el
from embedlayer.vocab.change import Asked, Change, change_of_ids, change_of_tokens, rows_after
from embedlayer.vocab.rows import NEW, Slot, moved
from embedlayer.vocab.starting_rows import Copy, Mean


@pytest.mark.parametrize(
    ("tokens", "rows", "name"),
    [(32011, 32064, "Phi-3"), (50257, 50304, "GPT-2, padded"), (32100, 32128, "T5"), (128256, 128256, "LLaMA 3")],
)
def test_a_padded_table_stays_padded_as_it_was(tokens, rows, name) -> None:
    assert rows_after(tokens, rows, tokens) == rows
    assert rows_after(tokens, rows, tokens - 1000) >= tokens - 1000
    assert rows_after(tokens, rows, tokens - 1000) < tokens
    if rows > tokens:
        assert rows_after(tokens, rows, tokens + 1) == rows


def test_rows_that_no_multiple_explains_stay_for_new_tokens() -> None:
    assert rows_after(151_646, 151_936, 151_700) == 151_936  # Qwen2
    assert rows_after(151_646, 151_936, 152_000) == 152_000
    assert rows_after(151_646, 151_936, 20_000) == 20_000
    assert rows_after(151_646, 151_936, 20_000, 64) == 20_032


@given(st.integers(1, 500), st.integers(0, 200), st.integers(1, 700), st.sampled_from([None, 1, 7, 64]))
def test_there_is_always_room_for_all_tokens(tokens, spare, new, multiple) -> None:
    rows = rows_after(tokens, tokens + spare, new, multiple)
    assert rows >= new
    assert rows % (multiple or 1) == 0
    if new == tokens and multiple is None:
        assert rows == tokens + spare


def test_tokens_that_come_take_rows_that_had_none_and_the_others_stay() -> None:
    move = Change((0, 1, 2, 3, 4, NEW), 5).move(8)
    assert move.sources.tolist() == [0, 1, 2, 3, 4, NEW, 6, 7]
    assert move.dropped.tolist() == [5]
    trimmed = Change((0, 4), 5).move(8)
    assert trimmed.sources.tolist() == [0, 4, NEW, NEW, NEW, 5, 6, 7]


def test_rows_without_a_token_start_as_the_mean_which_changes_a_softmax_least() -> None:
    rows, hidden = torch.randn(300, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    change = Change((*range(300),), 300)
    move = change.move(300, 64)
    asked = Asked(lambda tokenizer, size: change, Mean(), Mean(), 64)
    result = moved([Slot("table", rows, print, end="table")], move, asked.starts(change, move))
    padded = result.tensors["table"]
    assert padded.shape == (320, 8)
    before, after = ((hidden @ table.T).logsumexp(1) for table in (rows, padded))
    assert (after - before).max() <= torch.tensor(1 + 20 / 300).log()


def test_pieces_of_a_new_token_are_those_of_the_old_tokenizer() -> None:
    tokenizer = el.train_tokenizer((), "byte")
    change = change_of_tokens(tokenizer, add=["ab", "c d"])
    assert [(token.text, bytes(token.pieces)) for token in change.new_tokens([257, 258])] == [
        ("ab", b"ab"),
        ("c d", b"c d"),
    ]
    assert change_of_ids(5, add=2).new_tokens([5])[0].pieces == ()
    asked = Asked(lambda *_: change, Copy(of=1), Copy(of=2), None)
    start = asked.starts(change, change.move(257))
    assert next(start(Slot("head", torch.eye(257), print, end="head"))).origins == ["copy of 2"] * 2


def test_merged_ids_stand_for_the_token_that_stays() -> None:
    change = change_of_ids(6, merge={1: 4}, remove=[0])
    assert change.sources == (2, 3, 4, 5)
    assert change.merged == {1: 2}
    receipt_move = change.move(6)
    assert receipt_move.dropped.tolist() == [0, 1]
