"""Targets of packed documents: those of a batch of documents are those of each document alone."""

import pytest
import torch
import torch.nn.functional as F
from kinds import EMBED_DIM, LAYERS, VOCAB_SIZE
from torch import Tensor

import embedlayer as el
from embedlayer.core.documents import shifted_targets

PACKED = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 3], [0, 0, 4, 4, 4, 5, 5, 0]])
LABELS = torch.arange(16).view(2, 8)


def alone(depth: int, ignore_index: int) -> list[list[int]]:
    """The targets by their definition, token by token."""
    rows = []
    for labels, documents in zip(LABELS.tolist(), PACKED.tolist(), strict=True):
        pairs = zip(documents[: 7 - depth], documents[depth + 1 :], labels[depth + 1 :], strict=True)
        rows.append([label if one == other != 0 else ignore_index for one, other, label in pairs])
    return rows


@pytest.mark.parametrize("depth", [0, 1, 2, 6, 7, 9])
def test_a_target_in_another_document_is_ignored_at_every_depth(depth) -> None:
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
