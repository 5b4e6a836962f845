"""Alignment of two tables, checked against SciPy, and the movement of their rows."""

import numpy as np
import pytest
import torch
from covering import looped

from embedlayer.analysis import align_tables, row_movement, shared_tokens
from embedlayer.tokenization.train import train_tokenizer


@looped("width, count", [6, 9, 4], [50, 9000])
def test_alignment_is_the_best_rotation(width, count):
    linalg = pytest.importorskip("scipy.linalg")
    before, after = torch.randn(count, 6, dtype=torch.float64), torch.randn(count, width, dtype=torch.float64)
    found = align_tables(before, after)
    turned = found.scale * before @ found.rotation
    assert found.residual == pytest.approx(float((turned - after).square().sum() / after.square().sum()))
    if width == 6:
        expected, _ = linalg.orthogonal_procrustes(before.numpy(), after.numpy())
        np.testing.assert_allclose(found.rotation.numpy(), expected, atol=1e-9)
    for _ in range(5):
        nearby = torch.linalg.qr(found.rotation + 0.1 * torch.randn(6, width, dtype=torch.float64)).Q
        if nearby.shape == found.rotation.shape:
            assert (found.scale * before @ nearby - after).square().sum() > (turned - after).square().sum() - 1e-9


def test_rows_that_were_turned_apart_are_the_ones_that_moved():
    before = torch.randn(400, 16)
    turn = torch.linalg.qr(torch.randn(16, 16)).Q
    after = 2 * before @ turn
    after[[7, 90]] = torch.randn(2, 16)
    before[3], after[4] = 0.0, torch.nan
    plain = row_movement(before, after)
    assert plain.cosines.nanmedian() < 0.5  # without turning, all have moved
    moved = row_movement(before, after, alignment=align_tables(before, after))
    assert {row.before for row in moved.most(2)} == {7, 90}
    assert moved.least(1)[0].cosine > 0.999
    assert moved.cosines[[3, 4]].isnan().all()
    assert len(moved.most(1000)) == 398
    assert moved.most(1)[0].norm_after == pytest.approx(float(after[moved.most(1)[0].after].norm()), rel=1e-5)


def test_two_vocabularies_are_compared_by_what_their_tokens_say():
    text = "the cats and the dogs ran to the log, and the mats lay on it " * 20
    bpe, unigram = train_tokenizer(text, vocab_size=290), train_tokenizer(text, "unigram", vocab_size=60)
    pairs = shared_tokens(bpe, unigram)
    assert [bpe.token_to_id("Ġthe"), unigram.token_to_id("▁the")] in pairs.tolist()
    one, other = torch.randn(bpe.get_vocab_size(), 8), torch.zeros(unigram.get_vocab_size(), 8)
    other[pairs[:, 1]] = one[pairs[:, 0]]
    moved = row_movement(one, other, pairs=pairs)
    torch.testing.assert_close(moved.cosines, torch.ones(len(pairs)).double())


def test_rows_with_the_same_direction_are_ordered_by_the_change_of_their_norms() -> None:
    rows = torch.randn(50, 8)
    changed = rows.clone()
    changed[[3, 4]] *= torch.tensor([[8.0], [0.5]])
    changed[9] = -changed[9]
    moved = row_movement(rows, changed)
    assert [each.after for each in moved.most(3)] == [9, 3, 4]
    assert [each.after for each in moved.least(50)][-3:] == [4, 3, 9]
