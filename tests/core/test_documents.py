"""Packed documents: the forms of their mask, and targets, which are those of each document alone."""

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kinds import EMBED_DIM, LAYERS, VOCAB_SIZE
from torch import Tensor

import embedlayer as el
from embedlayer.core.documents import cu_seqlens_of, document_mask, shifted_targets
from embedlayer.positions.position import positions_of

PACKED = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3], [0, 0, 4, 4, 4, 5, 5, 0]])
LABELS = torch.arange(16).view(2, 8)


def alone(depth: int, ignore_index: int) -> list[list[int]]:
    """The targets by their definition, token by token."""
    rows = []
    for labels, documents in zip(LABELS.tolist(), PACKED.tolist(), strict=True):
        pairs = zip(documents[: 7 - depth], documents[depth + 1 :], labels[depth + 1 :], strict=True)
        rows.append([label if one == other != 0 else ignore_index for one, other, label in pairs])
    return rows


def test_a_target_in_another_document_is_ignored_at_every_depth() -> None:
    for depth in (0, 1, 2, 6, 7, 9):
        found = shifted_targets(LABELS, PACKED, depth=depth, ignore_index=-1)
        assert found.tolist() == (alone(depth, -1) if depth < 7 else [[], []])
        assert torch.equal(shifted_targets(LABELS, depth=depth), LABELS[:, depth + 1 :])
        assert torch.equal(shifted_targets(LABELS[0], PACKED[0] == 1, depth=depth).ne(-100), LABELS[0, depth + 1 :] < 3)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_packed_batch_has_the_loss_of_its_documents_and_their_gradients(reduction) -> None:
    model, ids = LAYERS["DecoderLM"](), torch.randint(1, VOCAB_SIZE, PACKED.shape)
    count = None if reduction == "mean" else 1.0
    ours = model(input_ids=ids, labels=ids, attention_mask=PACKED, num_items_in_batch=count).loss
    texts = [row[documents == number] for row, documents in zip(ids, PACKED, strict=True) for number in range(1, 6)]
    each = [F.cross_entropy(model(text)[:-1], text[1:], reduction="none") for text in texts if len(text) > 1]
    expected = torch.cat(each).mean() if reduction == "mean" else torch.cat(each).sum()
    torch.testing.assert_close(ours, expected)
    learned = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(ours, learned), torch.autograd.grad(expected, learned))


def test_a_mask_without_documents_leaves_out_what_padding_predicts_and_what_is_padding() -> None:
    model, ids = LAYERS["DecoderLM"](), torch.randint(1, VOCAB_SIZE, (1, 6))
    for mask in ([0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]):
        text = ids[:, torch.tensor(mask) == 1]
        padded = model(input_ids=ids, labels=ids, attention_mask=torch.tensor([mask])).loss
        torch.testing.assert_close(padded, model(input_ids=text, labels=text).loss)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_multi_token_prediction_ignores_targets_across_documents_at_each_depth(reduction) -> None:
    head = el.OutputHead(EMBED_DIM, VOCAB_SIZE)
    states, weights = [torch.randn(2, 8, EMBED_DIM) for _ in range(3)], [1.0, 0.5, 0.25]
    found = head.multi_token_loss(states, LABELS, weights, documents=PACKED, reduction=reduction, ignore_index=-7)
    for depth, hidden in enumerate(states):
        targets = torch.tensor(alone(depth, -7))
        each: Tensor = head.loss(hidden[:, : 7 - depth], targets, reduction=reduction, ignore_index=-7)
        each = F.pad(each, (0, depth + 1)) if reduction == "none" else each
        torch.testing.assert_close(found.losses[depth], each)


def test_depths_and_labels_without_a_meaning_are_refused(unchecked) -> None:
    for depth in (-1, 1.5, True):
        with pytest.raises(el.SizeError, match="depth is 0 for the next token"):
            shifted_targets(torch.arange(5), depth=depth)
    with pytest.raises(el.ShapeError, match="Labels are token IDs, integers, not float32"):
        shifted_targets(torch.ones(5))


@st.composite
def packed_rows(draw: st.DrawFn) -> list[list[int]]:
    """The lengths of the documents of some rows."""
    return draw(st.lists(st.lists(st.integers(1, 4), max_size=5), min_size=1, max_size=3))


def mask_of(rows: list[list[int]], length: int) -> Tensor:
    """The mask by its definition, number by number."""
    texts = [[number for number, count in enumerate(lengths, 1) for _ in range(count)] for lengths in rows]
    return torch.tensor([text + [0] * (length - len(text)) for text in texts], dtype=torch.long).view(len(rows), length)


@given(packed_rows(), st.integers(0, 3), st.sampled_from([0, 1, 2, 5]), st.sampled_from([torch.int32, torch.int64]))
def test_each_form_of_documents_is_converted_to_the_mask_and_back(rows, padding, first, dtype) -> None:
    length = max(map(sum, rows)) + padding
    mask = mask_of(rows, length)
    positions = positions_of(mask, mask, offset=first, padding_position=first - 1)
    assert torch.equal(document_mask(position_ids=positions.to(dtype), first=first), mask)
    for lengths, row in zip(rows, mask, strict=True):
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=dtype)
        assert torch.equal(document_mask(cu_seqlens=cu_seqlens, length=length), row)
        assert torch.equal(document_mask(cu_seqlens=cu_seqlens), row[: sum(lengths)])
        assert torch.equal(cu_seqlens_of(row), cu_seqlens)
        assert cu_seqlens_of(row).dtype == torch.int32
        ends = torch.zeros(length, dtype=torch.bool).index_fill(0, cu_seqlens[1:].long() - 1, True)
        # a document of one token is its separator, which belongs to the document before it
        of_corpus = [place for place, count in zip(cu_seqlens.tolist(), lengths, strict=False) if count > 1]
        starts = torch.zeros(length, dtype=torch.long).index_fill(0, torch.tensor(of_corpus, dtype=torch.long), 1)
        starts[:1] = 1
        assert torch.equal(document_mask(separators=ends)[: sum(lengths)], starts.cumsum(0)[: sum(lengths)])


def test_a_batch_of_rows_has_the_cumulative_lengths_of_its_rows_one_after_another() -> None:
    assert cu_seqlens_of(torch.tensor([[1, 1, 2], [2, 2, 2], [1, 3, 0]])).tolist() == [0, 2, 3, 6, 7, 8]
    assert cu_seqlens_of(torch.tensor([[True, True], [True, False]])).tolist() == [0, 2, 3]
    assert cu_seqlens_of(torch.zeros(2, 3, dtype=torch.long)).tolist() == [0]
    assert document_mask(cu_seqlens=torch.tensor([0, 2, 2, 3])).tolist() == [1, 1, 3], "documents without tokens"


@pytest.mark.parametrize("family", ["RoBERTa", "OPT"])
def test_positions_that_transformers_computes_are_read_with_the_first_position_of_the_family(family) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    if family == "RoBERTa":
        roberta = pytest.importorskip("transformers.models.roberta.modeling_roberta")
        ids, first = torch.where(mask == 1, 7, 1), 2
        positions = roberta.RobertaEmbeddings.create_position_ids_from_input_ids(ids, 1)
    else:
        positions, first = mask.cumsum(-1) * mask - 1, 0  # OPTLearnedPositionalEmbedding, which adds its offset later
    assert torch.equal(document_mask(position_ids=positions, first=first), mask)


LONGS = torch.tensor([[0, 1, 2]])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "takes one of cu_seqlens, position_ids, separators, not 0 of them"),
    ({"cu_seqlens": LONGS[0], "position_ids": LONGS}, "not 2 of them"),
    ({"cu_seqlens": [0, 3]}, "cu_seqlens must be a tensor of integers of shape .N . 1,.; found list"),
    ({"cu_seqlens": LONGS}, r"found int64 values of shape \(1, 3\)"),
    ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "found float32 values"),
    ({"cu_seqlens": torch.tensor([], dtype=torch.long)}, r"summed up from 0, such as \[0, 3, 5\]; found \[\]"),
    ({"cu_seqlens": torch.tensor([3, 5])}, r"found \[3, 5\]"),
    ({"cu_seqlens": torch.tensor([0, 5, 3])}, r"found \[0, 5, 3\]"),
    ({"cu_seqlens": torch.tensor([0, 5]), "length": 4}, "lengths of at most 4"),
    ({"position_ids": LONGS.bool()}, "position_ids must be integers"),
    ({"position_ids": torch.tensor(0)}, "found int64 values of shape"),
    ({"position_ids": torch.tensor([0, 1, 3])}, "3 at token 2 is neither 0, where a document begins, nor one more"),
    ({"position_ids": torch.tensor([[0, 1], [1, 0]])}, r"1 at token 0 of row \[1\]"),
    ({"position_ids": torch.tensor([3, 4]), "first": 2}, "3 at token 0 is neither 2"),
    ({"separators": LONGS}, "separators must be booleans of shape .*, ids == end_of_text; found int64"),
    ({"separators": torch.tensor(True)}, "found bool values"),
]


def test_what_is_no_form_of_documents_is_refused(unchecked) -> None:
    for form, message in REFUSED:
        with pytest.raises((el.ShapeError, el.SizeError), match=message):
            document_mask(**form)


def test_padding_between_documents_has_no_cumulative_lengths() -> None:
    for mask in ([0, 1], [1, 0, 2], [1, 0, 1]):
        with pytest.raises(el.ShapeError, match="no padding between documents: take it out"):
            cu_seqlens_of(torch.tensor(mask))
    with pytest.raises(el.ShapeError, match="rising numbers"):
        cu_seqlens_of(torch.tensor([2, 1]))


def test_documents_are_converted_in_compiled_graphs(unchecked) -> None:
    def masks(cu_seqlens: Tensor, positions: Tensor, ids: Tensor) -> list[Tensor]:
        return [
            document_mask(cu_seqlens=cu_seqlens, length=6),
            document_mask(position_ids=positions),
            document_mask(separators=ids == 9),
        ]

    inputs = torch.tensor([0, 3, 5]), torch.tensor([0, 1, 2, 0, 1, -1]), torch.tensor([4, 5, 9, 6, 9, 7])
    compiled = torch.compile(masks, fullgraph=True, backend="eager")(*inputs)
    assert [mask.tolist() for mask in compiled] == [[1, 1, 1, 2, 2, 0]] * 2 + [[1, 1, 1, 2, 2, 3]]
