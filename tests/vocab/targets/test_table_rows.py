"""Rows of a whole table in place of those of a file."""

import torch
from stored_folders import words

import embedlayer as el
from embedlayer.vocab.map import NEW, RowTensor
from embedlayer.vocab.targets.apply_rows import token_sources, unchanged_rows, written_rows


def test_rows_belong_together_by_their_tokens_and_without_one_by_their_numbers() -> None:
    old = words(5)  # t0 to t4, in 8 rows
    receipt = el.vocab.edit_vocabulary(el.TokenEmbedding(5, 2), add=["new"], remove=["t1", "t3"], tokenizer=old)
    new = receipt.tokenizer  # t0, t2, t4, new
    assert new is not None
    assert token_sources(old, new, 8, 8).tolist() == [0, 2, 4, NEW, NEW, 5, 6, 7]
    assert token_sources(old, new, 4, 4).tolist() == [0, 2, NEW, NEW]  # t4 has no row
    assert token_sources(old, old, 5, 7).tolist() == [0, 1, 2, 3, 4, NEW, NEW]


def test_unchanged_rows_keep_their_bytes_in_the_dtype_of_the_table() -> None:
    old = RowTensor(torch.tensor([[1.0, 2.0], [3.0, 4.0 + 2**-20]]))
    sources = torch.tensor([1, 0, NEW])
    rows = torch.tensor([[3.0, 4.0], [1.0, 2.0], [1.0, 2.0]])
    assert unchanged_rows(old, rows, sources).tolist() == [False, True, False]
    unchanged = unchanged_rows(old, rows.bfloat16(), sources)
    assert unchanged.tolist() == [True, True, False]
    assert written_rows(old, rows.bfloat16(), sources, unchanged).tolist() == [[3.0, 4.0 + 2**-20], [1, 2], [1, 2]]
