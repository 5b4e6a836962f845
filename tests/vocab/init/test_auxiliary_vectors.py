"""Vectors paired with tokens: those of a donor, of words, and of fastText."""

import sys

import pytest
import torch

import embedlayer as el
from embedlayer.core.errors import MissingExtraError, ShapeError, SizeError, TextError, VocabularyError
from embedlayer.vocab import FocusInit, OMPInit, WechselInit, add_tokens, edit_tokenizer, transplant
from embedlayer.vocab.init.auxiliary_vectors import AuxiliaryVectors, train_fasttext
from embedlayer.vocab.init.old_rows import WeightRows

TEXT = "the small dog loved other small dogs . they barked ; the dog loved it . " * 9


def model_of(tokenizer, width: int = 8) -> el.DecoderLM:
    table = el.TokenEmbedding(tokenizer.get_vocab_size(), width)
    return el.DecoderLM(table, el.RotaryEmbedding(4), num_layers=1, num_heads=2).eval()


def test_a_donor_of_another_width_and_spelling_is_matched_by_bytes() -> None:
    """The donor's row of " dogs" is the sum of two shared rows, so the new row is the sum of the model's own."""
    old, donor = el.train_tokenizer(TEXT, vocab_size=280), el.train_tokenizer(TEXT, kind="word")
    edit = edit_tokenizer(old, add=[" dogs"])
    table = el.TokenEmbedding(donor.get_vocab_size(), 20)
    shared = AuxiliaryVectors.from_donor(table, donor, old, edit.tokenizer)
    one, other = [token for token in shared.old if token > 255][:2]
    with torch.no_grad():
        table.weight[shared.new[" dogs"]] = 2 * table.weight[shared.old[one]] - table.weight[shared.old[other]]
    model = model_of(old)
    wanted = 2 * model.table.weight[one] - model.table.weight[other]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receipt = add_tokens(model, [" dogs"], tokenizer=old, init=OMPInit(shared))
    torch.testing.assert_close(model.table.weight[-1], wanted.detach(), rtol=1e-4, atol=1e-5)
    assert set(receipt.origins.values()) <= {f"OMP of {one}, {other}", f"OMP of {other}, {one}"}
    receipt.undo(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_word_vectors_belong_to_tokens_that_start_a_word() -> None:
    old = el.train_tokenizer(TEXT, vocab_size=300)
    new = edit_tokenizer(old, add=[" otters"]).tokenizer
    found = AuxiliaryVectors.from_words(["dog", "otters", "the", "ed"], torch.eye(4), old, new)
    assert found.old[old.token_to_id("Ġdog")] == 0
    assert found.new == {new.id_to_token(token): row for token, row in found.old.items()} | {" otters": 1}
    assert old.token_to_id("ed") not in found.old
    spelled = AuxiliaryVectors.from_words(["▁dog", "ed"], torch.eye(2), old, new)
    assert spelled.old == {old.token_to_id("Ġdog"): 0, old.token_to_id("ed"): 1}


def test_fasttext_vectors_of_two_tokenizers_are_in_one_space() -> None:
    old, new = el.train_tokenizer(TEXT, vocab_size=270), el.train_tokenizer(TEXT, kind="word")
    vectors = train_fasttext([TEXT], old, new, embed_dim=8, epochs=1)
    assert vectors.old[old.token_to_id("Ġthe")] == vectors.new["the"]
    assert vectors.new["barked"] not in vectors.old.values()
    model = model_of(old)
    receipt = transplant(model, new, tokenizer=old, init=FocusInit(vectors), init_head=WechselInit(vectors))
    assert any(origin.startswith("FOCUS of ") for origin in receipt.origins.values())
    again = train_fasttext([TEXT], old, new, embed_dim=8, epochs=1)
    assert torch.equal(again.vectors.weight, vectors.vectors.weight)
    with pytest.raises(TextError, match="has no tokens"):
        train_fasttext(["\n"], old, new)


def test_a_missing_gensim_is_an_error_with_an_install_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gensim.models.fasttext", None)
    tokenizer = el.train_tokenizer((), "byte")
    with pytest.raises(MissingExtraError, match="pip install"):
        train_fasttext([TEXT], tokenizer, tokenizer)


def test_what_cannot_be_is_an_error() -> None:
    pair = AuxiliaryVectors.from_tensors
    words = el.train_tokenizer("une otter", kind="word", special_tokens=["<s>"])
    old = el.train_tokenizer("the dog", kind="word", special_tokens=["<t>"])
    for error, message, wrong in [
        (ShapeError, "equal widths", lambda: pair([0], torch.ones(1, 2), ["a"], torch.ones(1, 3))),
        (ShapeError, "one row for each", lambda: pair([0, 1], torch.ones(1, 2), ["a"], torch.ones(1, 2))),
        (VocabularyError, "no shared tokens", lambda: pair([], torch.ones(0, 2), ["a"], torch.ones(1, 2))),
        (VocabularyError, "no shared tokens", lambda: AuxiliaryVectors.from_words(["x"], torch.ones(1, 2), old, words)),
        (SizeError, r"rows 0\.\.1", lambda: AuxiliaryVectors(WeightRows(torch.ones(2, 2)), {0: 2}, {})),
    ]:
        with pytest.raises(error, match=message):
            wrong()
