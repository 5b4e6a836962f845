"""Rows weighted in an auxiliary space: the definitions of OMP, FOCUS and WECHSEL, with vectors of any source."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import embedlayer as el
from embedlayer.vocab import (
    AuxiliaryVectors,
    FocusInit,
    NewToken,
    OMPInit,
    SubwordMeanInit,
    WechselInit,
    add_tokens,
    edit_tokenizer,
    train_fasttext,
    transplant,
)

TEXT = "the small dog loved other small dogs . they barked ; the dog loved it . " * 9
V, D, A = 8300, 6, 9
OLD_IDS = [3, *range(8, 30), *range(8188, 8196)]  # in two blocks of rows
NEW = [f"new {number}" for number in range(130)]  # more than are weighted at once
TOKENS = [NewToken("no vector", (4, 9)), *[NewToken(text, (5,)) for text in NEW], NewToken("zero vector", (4,))]


def table_of(rows: torch.Tensor) -> el.TokenEmbedding:
    return el.TokenEmbedding.from_pretrained(rows)


def example(width=A):
    """Old rows, and vectors in a space of another width: some old tokens have none, one has a dead row."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(V, D, generator=generator, dtype=torch.float64)
    rows[12] = 0
    old = torch.randn(len(OLD_IDS), width, generator=generator, dtype=torch.float64)
    old[5] = torch.nan
    new = torch.cat([torch.randn(len(NEW), width, generator=generator, dtype=torch.float64), torch.zeros(1, width)])
    new[0] = old[2]  # one anchor is enough
    auxiliary = AuxiliaryVectors.from_tensors(OLD_IDS, old, [*NEW, "zero vector"], new)
    usable = [place for place, token in enumerate(OLD_IDS) if token != 12 and place != 5]
    return rows, auxiliary, old[usable].numpy(), [OLD_IDS[place] for place in usable], new[:-1].numpy()


def omp(target, anchors, k):
    """Orthogonal matching pursuit by its definition: least squares over all chosen anchors after each choice."""
    chosen: list[int] = []
    residual, weights = target, np.zeros(len(anchors))
    while len(chosen) < k and np.linalg.norm(residual) > 1e-9:
        scores = np.abs(anchors @ residual)
        scores[chosen] = -1
        chosen.append(int(scores.argmax()))
        solution = np.linalg.lstsq(anchors[chosen].T, target, rcond=None)[0]
        residual = target - anchors[chosen].T @ solution
    weights[chosen] = solution
    return weights


def cosines(target, anchors):
    return anchors @ target / np.linalg.norm(anchors, axis=1) / np.linalg.norm(target)


def focus(target, anchors):
    """Sparsemax by its definition: the threshold at which the positive parts sum to one, by bisection."""
    scores = cosines(target, anchors)
    low, high = scores.max() - 1, scores.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(scores - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(scores - low, 0)


def wechsel(target, anchors):
    scores, weights = cosines(target, anchors), np.zeros(len(anchors))
    nearest = sorted(range(len(anchors)), key=lambda place: -scores[place])[:10]
    total = sum(np.exp(scores[place] / 0.1) for place in nearest)
    for place in nearest:
        weights[place] = np.exp(scores[place] / 0.1) / total
    return weights


RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "OMP": (OMPInit, lambda target, anchors: omp(target, anchors, 64)),
    "OMP, k = 4": (lambda auxiliary: OMPInit(auxiliary, k=4), lambda target, anchors: omp(target, anchors, 4)),
    "FOCUS": (FocusInit, focus),
    "WECHSEL": (WechselInit, wechsel),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_row_is_the_weighted_sum_of_the_plain_definition(rule) -> None:
    rows, auxiliary, anchors, ids, targets = example()
    start, definition = RULES[rule][0](auxiliary), RULES[rule][1]
    new = start.rows(table_of(rows), TOKENS)
    weights = np.stack([definition(target, anchors) for target in targets])
    np.testing.assert_allclose(new.values[1:-1].numpy(), weights @ rows[ids].numpy(), atol=1e-8)
    for row, origin in zip(weights, new.origins[1:-1], strict=True):
        assert origin.method == rule.partition(",")[0]
        wanted = [ids[place] for place in np.argsort(-np.abs(row)) if abs(row[place]) > 1e-12]
        assert [*origin.old_ids][: len(wanted)] == wanted
    if rule.startswith("OMP"):
        assert str(new.origins[1]) == f"OMP of {OLD_IDS[2]}"
    fallback = SubwordMeanInit().rows(table_of(rows), TOKENS)
    for place in (0, -1):
        assert torch.equal(new.values[place], fallback.values[place])
        assert new.origins[place] == fallback.origins[place]


def test_dependent_anchors_and_a_single_one_are_no_error() -> None:
    vectors = torch.tensor([[1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    auxiliary = AuxiliaryVectors.from_tensors([0, 1, 2], vectors, ["new"], torch.tensor([[3.0, 1.0, 5.0]]))
    [row] = OMPInit(auxiliary).rows(table_of(torch.eye(3)), [NewToken("new")]).values
    torch.testing.assert_close(row @ vectors, torch.tensor([3.0, 1.0, 0.0]))
    alone = AuxiliaryVectors.from_tensors([2], vectors[:1], ["new"], torch.ones(1, 3))
    for start in (OMPInit(alone), FocusInit(alone), WechselInit(alone)):
        assert torch.equal(start.rows(table_of(torch.eye(3)), [NewToken("new")]).values, torch.eye(3)[2:])


def test_what_cannot_be_weighted_is_an_error() -> None:
    rows, auxiliary, *_ = example()
    with pytest.raises(el.SizeError):
        OMPInit(auxiliary, k=0)
    with pytest.raises(el.SizeError):
        WechselInit(auxiliary, temperature=0.0)
    with pytest.raises(el.VocabularyError):
        FocusInit(auxiliary, dead=OLD_IDS).rows(table_of(rows), TOKENS)


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
    with pytest.raises(el.TextError):
        train_fasttext(["\n"], old, new)


def test_a_missing_gensim_is_an_error_with_an_install_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gensim.models.fasttext", None)
    tokenizer = el.train_tokenizer((), "byte")
    with pytest.raises(el.MissingExtraError):
        train_fasttext([TEXT], tokenizer, tokenizer)


def test_vectors_that_do_not_belong_together_are_an_error() -> None:
    pair = AuxiliaryVectors.from_tensors
    words = el.train_tokenizer("une otter", kind="word", special_tokens=["<s>"])
    old = el.train_tokenizer("the dog", kind="word", special_tokens=["<t>"])
    for error, wrong in [
        (el.ShapeError, lambda: pair([0], torch.ones(1, 2), ["a"], torch.ones(1, 3))),
        (el.ShapeError, lambda: pair([0, 1], torch.ones(1, 2), ["a"], torch.ones(1, 2))),
        (el.VocabularyError, lambda: pair([], torch.ones(0, 2), ["a"], torch.ones(1, 2))),
        (el.VocabularyError, lambda: AuxiliaryVectors.from_words(["x"], torch.ones(1, 2), old, words)),
        (el.SizeError, lambda: AuxiliaryVectors(el.TokenEmbedding(2, 2), {0: 2}, {})),
    ]:
        with pytest.raises(error):
            wrong()
