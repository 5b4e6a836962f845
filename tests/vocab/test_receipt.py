"""Receipts: saved, read, applied to stored IDs."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizer_kinds import BUILDERS, tokenizer_of
from vocab_models import IDS, MODELS, V, same, state_of, train

import embedlayer as el
from embedlayer.vocab import Receipt, RowMap


def receipt_of(sources, old=8, num_tokens=None, **options) -> Receipt:
    return Receipt(RowMap(torch.tensor(sources), old), num_tokens or (old, len(sources)), **options)


@given(st.lists(st.integers(0, 7), unique=True, min_size=1), st.sampled_from([np.int32, np.int64, np.uint16]))
def test_ids_go_where_their_rows_went(sources, dtype) -> None:
    receipt = receipt_of(sources)
    old = np.array([sources, sources], dtype=dtype)
    new = receipt.remap(old)
    assert (new.dtype, new.shape) == (old.dtype, old.shape)
    assert new.tolist() == [list(range(len(sources)))] * 2
    tensor = torch.tensor(sources, dtype=torch.int32)
    assert receipt.remap(tensor).dtype == torch.int32
    assert receipt.remap(tensor).tolist() == new[0].tolist()


def test_what_losses_leave_out_stays_and_so_does_emptiness() -> None:
    receipt = receipt_of([3, 1])
    assert receipt.remap(torch.tensor([-100, 1, -1, 3])).tolist() == [-100, 1, -1, 0]
    assert receipt.remap(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4)


def test_merged_ids_become_the_one_that_stands_for_them() -> None:
    assert receipt_of([0, 2, 3], merged={1: 2}).remap(torch.tensor([1, 3, 0])).tolist() == [2, 2, 0]


def test_an_id_that_is_gone_is_an_error_that_says_what_to_do(unchecked) -> None:
    receipt = receipt_of([3, 1], dropped={2: "Ġotter"})
    with pytest.raises(el.TokenIdError, match=r"token id 2 \('Ġotter'\).* 2 times.*replacement"):
        receipt.remap(torch.tensor([[3, 2], [2, 1]]))
    assert receipt.remap(torch.tensor([3, 2]), replacement=1).tolist() == [0, 1]
    with pytest.raises(el.TokenIdError):
        receipt.remap(torch.tensor([2]), replacement=2)
    with pytest.raises(el.TokenIdError, match="old vocabulary"):
        receipt.remap(torch.tensor([8]))
    for wrong in (torch.ones(2), torch.ones(2, dtype=torch.bool), np.ones(2)):
        with pytest.raises(el.ShapeError):
            receipt.remap(wrong)  # type: ignore[type-var]
    wide = receipt_of([*range(1, 300), 0], old=300)
    with pytest.raises(el.ShapeError):
        wide.remap(np.zeros(1, dtype=np.uint8))


def test_tokens_that_go_with_a_removed_one_are_counted_and_named(tmp_path) -> None:
    tokenizer = el.train_tokenizer("the small dog loved other small dogs. " * 30, vocab_size=290)
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), 4)
    receipt = el.vocab.remove_tokens(table, ["Ġdo", "ved"], tokenizer=tokenizer)
    along: list[Any] = [tokenizer.token_to_id(name) for name in ("Ġdog", "Ġdogs", "Ġloved")]
    assert receipt.unreachable == tuple(sorted(along))
    assert set(receipt.dropped) == {tokenizer.token_to_id("Ġdo"), tokenizer.token_to_id("ved"), *along}
    assert "\n  of these 3 that no text is encoded with any more: 'Ġdog', 'Ġdogs', 'Ġloved'" in str(receipt)
    receipt.save(tmp_path / "receipt")
    assert str(Receipt.load(tmp_path / "receipt")) == str(receipt)
    receipt.undo(table)
    assert "of these" not in str(el.vocab.remove_tokens(table, ["Ġdogs"], tokenizer=tokenizer))


@pytest.mark.usefixtures("system")
def test_what_is_saved_comes_back_and_only_the_receipt_of_the_edit_undoes_it(tmp_path) -> None:
    made = MODELS["free"]()
    optimizer = torch.optim.AdamW(made.parameters())
    train(made, optimizer, IDS)
    before = state_of(made, optimizer)
    tokenizer = el.train_tokenizer("a b c d e f g h i j k l m n o p", "word", special_tokens=["<pad>"])
    receipt = el.vocab.edit_vocabulary(made, add=["otter"], remove=["k"], tokenizer=tokenizer, optimizer=optimizer)
    receipt.save(tmp_path / "edit.receipt")
    again = Receipt.load(tmp_path / "edit.receipt")
    assert str(again) == str(receipt)
    assert torch.equal(again.row_map.sources, receipt.row_map.sources)
    for name in ("num_tokens", "added", "dropped", "merged", "origins", "left_out"):
        assert getattr(again, name) == getattr(receipt, name)
    assert again.tokenizer.to_str() == receipt.tokenizer.to_str()
    assert list(again.added.values()) == ["otter"]
    assert list(again.dropped.values()) == ["k"]
    assert receipt.origins[len(again.row_map.sources) - 1 - (V - again.num_tokens[0])] == "mean"
    assert torch.equal(again.new_ids, receipt.new_ids)
    with pytest.raises(el.CheckpointError):
        again.undo(made, optimizer=optimizer)
    receipt.undo(made, optimizer=optimizer)
    assert same(state_of(made, optimizer), before)


def test_damaged_and_foreign_files_are_refused(tmp_path) -> None:
    file = tmp_path / "a.receipt"
    receipt_of([0, 1]).save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(el.CheckpointError):
        Receipt.load(file)
    save_file({"x": torch.ones(1)}, file)
    with pytest.raises(el.CheckpointError):
        Receipt.load(file)
    file.write_bytes(whole.replace(b'\\"format_version\\": 1', b'\\"format_version\\": 9'))
    with pytest.raises(el.CheckpointError):
        Receipt.load(file)
    with pytest.raises(el.FileError):
        Receipt.load(tmp_path / "none")


@pytest.mark.parametrize(
    ("init", "source"),
    [
        (el.vocab.SubwordMeanInit(), "3 from the mean of their subwords"),
        (el.vocab.RandomInit(), "3 from random numbers"),
        (el.vocab.CopyInit(97), "3 from a copy of another row"),
        (el.vocab.VectorsInit(torch.ones(3, 8)), "3 from given values"),
    ],
)
def test_a_receipt_counts_where_the_rows_of_new_tokens_came_from(init, source) -> None:
    table, tokenizer = el.TokenEmbedding(257, 8), el.train_tokenizer((), "byte")
    receipt = el.vocab.add_tokens(table, ["cat", "dog", "otter"], init=init, tokenizer=tokenizer)
    assert receipt.new_rows == source
    assert f"\n  rows     {source}" in str(receipt)
    assert "rows  " not in str(el.vocab.remove_tokens(table, ["cat"], tokenizer=receipt.tokenizer))


@pytest.mark.filterwarnings("ignore:Text around 1 of the new tokens is decoded differently")
@pytest.mark.parametrize("kind", BUILDERS)
def test_a_receipt_names_the_new_words_whose_every_use_costs_a_token_more(kind) -> None:
    old = tokenizer_of(kind)
    word = "otters" if kind in ("WordPiece", "word") else " otters"
    table = el.TokenEmbedding(old.get_vocab_size(), 8)
    receipt = el.vocab.edit_vocabulary(table, add=[word], special=["<|x|>"], tokenizer=old)
    [new] = [token for token, text in receipt.added.items() if text.strip("▁ ") == "otters"]

    def length(tokenizer, text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    per_use = length(receipt.tokenizer, "the otters dogs" * 9) - length(receipt.tokenizer, "the otters dogs" * 8)
    without = length(old, "the dogs" * 9) - length(old, "the dogs" * 8)
    costs = per_use - without > 1
    assert receipt.extra_space == [new] * costs
    assert ("each use of 1 of these costs one more token" in str(receipt)) == costs
    assert costs == (kind == "SentencePiece BPE with byte fallback")


def test_a_folder_is_no_receipt_and_a_name_no_initialisation(tmp_path, unchecked) -> None:
    with pytest.raises(el.FileError):
        el.vocab.Receipt.load(tmp_path)
    with pytest.raises(el.SizeError):
        el.vocab.add_tokens(el.TokenEmbedding(10, 4), 2, init="mean")
