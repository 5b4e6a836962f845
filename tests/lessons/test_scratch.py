import math
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import looped
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from embedlayer.core.errors import PositionError, ShapeError, SizeError, TokenIdError
from embedlayer.lessons.scratch import (
    ScratchCombinedEmbedding,
    ScratchEmbedding,
    ScratchEmbeddingWithGrad,
    ScratchFactorizedEmbedding,
    ScratchPositionEmbedding,
    ScratchTiedHead,
    log_softmax,
    one_hot,
    scratch_sinusoidal,
)

IDS = np.array([[3, 7, 1], [5, 3, 9]])


@pytest.fixture(autouse=True)
def _numpy_seed() -> None:
    np.random.seed(0)


def numeric_gradient(f: Callable[[], float], x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of `f` over every number of `x`, which `f` reads."""
    gradient = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        kept = x[place]
        x[place] = kept + step
        above = f()
        x[place] = kept - step
        gradient[place] = (above - f()) / (2 * step)
        x[place] = kept
    return gradient


def leaf(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.copy()).requires_grad_()


def torch_one_hot(ids: np.ndarray, size: int) -> torch.Tensor:
    return F.one_hot(torch.from_numpy(ids), size).double()


def test_a_numpy_seed_gives_the_table_that_introductions_print_bit_for_bit():
    np.random.seed(42)
    W = np.random.randn(10, 4) * 0.02
    np.random.seed(42)
    actual = ScratchEmbedding(10, 4)
    assert np.array_equal(actual.W, W)
    assert np.array_equal(actual(IDS), torch_one_hot(IDS, 10).numpy() @ W)


# --- look-up


@given(
    ids=st.integers(1, 6).flatmap(
        lambda T: arrays(np.int64, st.sampled_from([(T,), (2, T), (1, 3, T), (0, T)]), elements=st.integers(0, 6))
    ),
    embed_dim=st.integers(1, 5),
)
@settings(max_examples=40, deadline=None)
def test_a_lookup_picks_rows_and_its_gradient_adds_up_uses(ids, embed_dim):
    emb = ScratchEmbeddingWithGrad(7, embed_dim)
    out = emb.forward(ids)
    assert np.array_equal(out, emb.W[ids])
    uses = np.bincount(ids.ravel(), minlength=7)
    assert np.array_equal(emb.backward(np.ones_like(out)), np.repeat(uses[:, None], embed_dim, axis=1))


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint16, np.uint32])
def test_any_integer_type_is_an_id(integer):
    emb = ScratchEmbedding(10, 4)
    assert np.array_equal(emb(IDS.astype(integer)), emb.W[IDS])


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_numbers_stay_in_the_type_of_the_weights(real):
    W = np.random.randn(10, 4).astype(real)
    emb = ScratchEmbeddingWithGrad(10, 4, scale="sqrt_dim", W=W)
    out = emb.forward(IDS)
    head = ScratchTiedHead(emb)
    head.loss(out, IDS)
    assert {x.dtype for x in (out, emb.backward(out), *head.backward(), head.logits(out))} == {np.dtype(real)}
    factors = ScratchFactorizedEmbedding(10, 4, 2, E1=W[:, :2], E2=W[:2])
    out = factors(IDS)
    assert {x.dtype for x in (out, *factors.backward(out))} == {np.dtype(real)}


def test_given_weights_are_copied():
    W = np.ones((10, 4))
    emb = ScratchEmbedding(10, 4, padding_idx=0, W=W)
    assert np.array_equal(emb.W, W)
    assert not np.shares_memory(emb.W, W)
    assert not ScratchEmbedding(10, 4, padding_idx=0).W[0].any()


@pytest.mark.parametrize("scale", [None, 0.5, "sqrt_dim"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradient_of_the_table_equals_autograd_and_finite_differences(scale, padding_idx):
    emb = ScratchEmbeddingWithGrad(10, 4, scale=scale, padding_idx=padding_idx)
    towards = np.random.randn(2, 3, 4)
    out = emb.forward(IDS)
    grad_W = emb.backward(towards)

    factor = {None: 1.0, 0.5: 0.5, "sqrt_dim": 2.0}[scale]
    W = leaf(emb.W)
    expected = factor * torch_one_hot(IDS, 10) @ W
    expected.backward(torch.from_numpy(towards))
    wanted, looked_up = W.grad.numpy(), expected.detach().numpy()
    differences = numeric_gradient(lambda: float((emb.forward(IDS) * towards).sum()), emb.W)
    if padding_idx is not None:
        wanted[padding_idx] = differences[padding_idx] = 0
    assert np.allclose(out, looked_up)
    assert np.allclose(grad_W, wanted)
    assert np.allclose(grad_W, differences, atol=1e-8)


# --- factorised


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradients_of_both_factors_equal_autograd_and_finite_differences(padding_idx):
    emb = ScratchFactorizedEmbedding(10, 4, 2, padding_idx=padding_idx, scale=3.0)
    towards = np.random.randn(2, 3, 4)
    out = emb.forward(IDS)
    grad_E1, grad_E2 = emb.backward(towards)

    E1, E2 = leaf(emb.E1), leaf(emb.E2)
    expected = 3.0 * torch_one_hot(IDS, 10) @ E1 @ E2
    expected.backward(torch.from_numpy(towards))
    if padding_idx is not None:
        E1.grad[padding_idx] = 0
        assert not emb.W[padding_idx].any()
    assert np.allclose(out, expected.detach().numpy())
    assert np.allclose(grad_E1, E1.grad.numpy())
    assert np.allclose(grad_E2, E2.grad.numpy())
    assert np.allclose(grad_E2, numeric_gradient(lambda: float((emb.forward(IDS) * towards).sum()), emb.E2))


def test_a_factorised_table_starts_as_wide_as_a_dense_one():
    assert ScratchFactorizedEmbedding(2000, 64, 16).W.std() == pytest.approx(0.02, rel=0.1)


# --- positions


@pytest.mark.parametrize("embed_dim", [1, 2, 7, 64])
def test_sinusoids_follow_the_formula_at_any_width(embed_dim):
    pe = scratch_sinusoidal(50, embed_dim)
    for t in (0, 1, 17, 49):
        for column in range(embed_dim):
            angle = t / 10000 ** (column // 2 * 2 / embed_dim)
            assert pe[t, column] == pytest.approx(math.sin(angle) if column % 2 == 0 else math.cos(angle))


def test_positions_can_be_given_and_their_gradients_add_up():
    pos = ScratchPositionEmbedding(6, 3)
    positions = np.array([[0, 0, 1], [2, 3, 4]])
    assert np.array_equal(pos(positions), pos.W[positions])
    grad_W = pos.backward(np.ones((2, 3, 3)))
    assert grad_W[:, 0].tolist() == [2, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_both_tables_of_the_combination_get_the_gradient_of_autograd(shape):
    combined = ScratchCombinedEmbedding(10, 5, 6, scale="sqrt_dim")
    ids = np.random.randint(10, size=shape)
    towards = np.random.randn(*shape, 5)
    out = combined.forward(ids)
    grad_token, grad_position = combined.backward(towards)

    tokens, positions = leaf(combined.token_emb.W), leaf(combined.pos_emb.W)
    expected = math.sqrt(5) * torch_one_hot(ids, 10) @ tokens + positions[: shape[-1]]
    expected.backward(torch.from_numpy(towards))
    assert np.allclose(out, expected.detach().numpy())
    assert np.allclose(grad_token, tokens.grad.numpy())
    assert np.allclose(grad_position, positions.grad.numpy())
    assert not grad_position[4:].any()


@pytest.mark.parametrize("positions", [np.array([2, 3]), np.array([[2, 3]]), np.array([[0, 1], [2, 3]])])
def test_the_combination_takes_positions_for_all_or_for_each(positions):
    combined = ScratchCombinedEmbedding(10, 5, 6)
    ids = np.array([[1, 2], [3, 4]])
    assert np.allclose(combined(ids, positions), combined.token_emb.W[ids] + combined.pos_emb.W[positions])
    grad_token, grad_position = combined.backward(np.ones((2, 2, 5)))
    assert grad_token.sum() == grad_position.sum() == 20


# --- the tied head


TARGETS = np.array([[7, 1, -100], [3, 9, 0]])


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_loss_and_gradients_of_the_tied_head_equal_autograd_and_finite_differences(padding_idx):
    table = ScratchEmbedding(10, 4, padding_idx=padding_idx, W=np.random.randn(10, 4))
    hidden = np.random.randn(2, 3, 4)
    head = ScratchTiedHead(table)
    loss = head.loss(hidden, TARGETS)
    grad_hidden, grad_W = head.backward()

    W, h = leaf(table.W), leaf(hidden)
    logits = h @ W.T
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(TARGETS).flatten())
    expected.backward()
    differences = numeric_gradient(lambda: head.loss(hidden, TARGETS), table.W)
    if padding_idx is not None:
        W.grad[padding_idx] = 0
        differences[padding_idx] = 0
    assert loss == pytest.approx(expected.item())
    assert np.allclose(head.logits(hidden), logits.detach().numpy())
    assert np.allclose(grad_W, W.grad.numpy())
    assert np.allclose(grad_W, differences)
    assert np.allclose(grad_hidden, h.grad.numpy())
    assert np.allclose(grad_hidden, numeric_gradient(lambda: head.loss(hidden, TARGETS), hidden))


def test_a_tied_model_adds_both_ends_into_one_gradient():
    table = ScratchEmbeddingWithGrad(10, 4, scale=2.0, W=np.random.randn(10, 4))
    head = ScratchTiedHead(table)
    loss = head.loss(table.forward(IDS), TARGETS)
    grad_hidden, from_head = head.backward()
    total = table.backward(grad_hidden) + from_head

    W = leaf(table.W)
    hidden = 2.0 * torch_one_hot(IDS, 10) @ W
    expected = F.cross_entropy((hidden @ W.T).flatten(0, 1), torch.from_numpy(TARGETS).flatten())
    expected.backward()
    assert loss == pytest.approx(expected.item())
    assert np.allclose(total, W.grad.numpy())


def test_a_tied_head_sends_gradients_to_both_factors():
    table = ScratchFactorizedEmbedding(10, 4, 2, padding_idx=3, E1=np.random.randn(10, 2), E2=np.random.randn(2, 4))
    table.E1[3] = 0  # as in a new table
    head = ScratchTiedHead(table)
    hidden = np.random.randn(2, 3, 4)
    head.loss(hidden, TARGETS)
    grad_E1, grad_E2 = table.split_gradient(head.backward()[1])

    E1, E2 = leaf(table.E1), leaf(table.E2)
    logits = torch.from_numpy(hidden) @ (E1 @ E2).T
    F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(TARGETS).flatten()).backward()
    E1.grad[3] = 0
    assert np.allclose(grad_E1, E1.grad.numpy())
    assert np.allclose(grad_E2, E2.grad.numpy())


def test_targets_that_are_all_ignored_cost_nothing():
    head = ScratchTiedHead(ScratchEmbedding(10, 4))
    assert head.loss(np.ones((3, 4)), np.full(3, -100)) == 0
    assert not any(gradient.any() for gradient in head.backward())


def test_log_softmax_does_not_overflow():
    assert np.allclose(log_softmax(np.array([1e4, 0.0, -1e4])), [0, -1e4, -2e4])


# --- what cannot be


EMB = ScratchEmbedding(10, 4)
NO_IDS = [
    (np.array([[0, 1], [2, 10]]), "token id 10 at row 1, column 1 "),
    (np.array([4, -1]), "token id -1 at column 1"),
    (np.array([1.0, 2.0]), "float64"),
    (np.array([True]), "bool"),
]
TABLES = (EMB, ScratchFactorizedEmbedding(10, 4, 2), ScratchCombinedEmbedding(10, 4, 8))
REFUSED = [
    *((lambda table=table, ids=ids: table(ids), TokenIdError, said) for table in TABLES for ids, said in NO_IDS),
    (lambda: ScratchTiedHead(EMB).loss(np.ones((1, 1, 4)), np.array([[10]])), TokenIdError, "row 0, column 0"),
    (lambda: ScratchCombinedEmbedding(10, 4, 8)(np.zeros((1, 9), dtype=int)), PositionError, "0..8"),
    (lambda: ScratchPositionEmbedding(8, 4)(np.array([-1, 2])), PositionError, "-1..2"),
    (lambda: ScratchEmbedding(10, 4, W=np.ones((4, 10))), SizeError, ""),
    (lambda: ScratchEmbeddingWithGrad(10, 4).backward(np.ones((1, 2, 4))), ShapeError, ""),
    (lambda: ScratchTiedHead(EMB).backward(), ShapeError, ""),
]


@looped("call, error, said", REFUSED)
def test_what_cannot_be_is_refused_and_a_bad_id_named(call, error, said, unchecked) -> None:
    with pytest.raises(error, match=re.escape(said) or None):
        call()


def test_ids_may_be_a_list_or_a_tensor(unchecked) -> None:
    ids = [[3, 7, 1]]
    for same in (ids, torch.tensor(ids)):
        np.testing.assert_array_equal(EMB(same), EMB(np.array(ids)))
        np.testing.assert_array_equal(one_hot(same, 10), one_hot(np.array(ids), 10))


def test_torch_is_not_needed():
    code = "import embedlayer, sys; embedlayer.lessons.demonstrate_embeddings(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True)
