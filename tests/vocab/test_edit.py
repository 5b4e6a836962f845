"""Requests and token maps."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import embedlayer as el
from embedlayer.vocab.edit import EditRequest, TokenMap, rows_after
from embedlayer.vocab.init.row_init import CopyInit, MeanInit
from embedlayer.vocab.map import NEW, RowTensor
from embedlayer.vocab.targets.apply_rows import apply_row_map
from embedlayer.vocab.token_selection import NumberedTokens, select_tokens
from embedlayer.vocab.tokenizer_edit import edit_tokenizer


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
    row_map = TokenMap((0, 1, 2, 3, 4, NEW), 5).row_map(8)
    assert row_map.sources.tolist() == [0, 1, 2, 3, 4, NEW, 6, 7]
    assert row_map.dropped.tolist() == [5]
    trimmed = TokenMap((0, 4), 5).row_map(8)
    assert trimmed.sources.tolist() == [0, 4, NEW, NEW, NEW, 5, 6, 7]


def test_rows_without_a_token_start_as_the_mean_which_changes_a_softmax_least() -> None:
    rows, hidden = torch.randn(300, 8, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)
    tokens = TokenMap((*range(300),), 300)
    request = EditRequest(lambda tokenizer, size: tokens, MeanInit(), MeanInit(), pad_to_multiple_of=64)
    resolved = request.resolve([None], 300, True)
    padded = apply_row_map({"table": RowTensor(rows, "table")}, resolved)["table"]
    assert padded.shape == (320, 8)
    assert resolved.origins == dict.fromkeys(range(300, 320), "mean")
    before, after = ((hidden @ table.T).logsumexp(1) for table in (rows, padded))
    assert (after - before).max() <= torch.tensor(1 + 20 / 300).log()


def test_subwords_of_a_new_token_are_those_of_the_old_tokenizer() -> None:
    tokenizer = el.train_tokenizer((), "byte")
    edit = edit_tokenizer(tokenizer, add=["ab", "c d"])
    sources = tuple(NEW if source is None else source for source in edit.sources)
    tokens = TokenMap(sources, 257, edit.merged, edit.tokenizer, tokenizer)
    assert [(token.text, bytes(token.old_ids)) for token in tokens.new_tokens()] == [("ab", b"ab"), ("c d", b"c d")]
    assert TokenMap((0, NEW), 1).new_tokens()[0].old_ids == ()
    request = EditRequest(lambda *_: tokens, CopyInit(of=1), CopyInit(of=2))
    resolved = request.resolve([None], 257, False)
    apply_row_map({"head": RowTensor(torch.eye(257), "head")}, resolved)
    assert resolved.origins == {257: "copy of 2", 258: "copy of 2"}


def test_merged_ids_become_the_id_of_the_token_that_is_kept() -> None:
    _, sources, merged, _ = select_tokens(NumberedTokens(6), merge={1: 4}, remove=[0])
    assert sources == [2, 3, 4, 5]
    assert merged == {1: 2}
    tokens = TokenMap(tuple(sources), 6, merged)
    row_map = tokens.row_map(6)
    assert row_map.dropped.tolist() == [0, 1]
    assert tokens.dropped == {0: "#0"}
    assert row_map.token_ids(merged).tolist() == [-1, 2, 0, 1, 2, 3]
