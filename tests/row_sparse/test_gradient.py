"""Clipping, scaling and accumulating gradients of row-sparse tables gives what it gives for dense ones."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

from embedlayer import RowSparseEmbedding, ShapeError, TokenEmbedding, clip_grad_norm_

pytestmark = pytest.mark.usefixtures("both_paths")

V, D = 30, 4
IDS = torch.tensor([[1, 5, 5, 0], [7, 1, 29, 3]])


def model_of(*, row_sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    kind = RowSparseEmbedding if row_sparse else TokenEmbedding
    table = kind(V, D, padding_idx=0, init_std=1.0, dtype=torch.float64)
    return nn.Sequential(table, nn.Linear(D, 3, dtype=torch.float64))


def backward(model: nn.Module, *, batches: int = 2, scale: float = 1.0) -> None:
    """Accumulate gradients in which rows repeat, within a batch and between batches."""
    for batch in range(batches):
        (model(IDS + (IDS > 0) * (IDS < V - 2) * batch).square().sum() * scale).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.to_dense() for p in model.parameters()]


def both(**options: int) -> tuple[nn.Module, nn.Module]:
    models = model_of(row_sparse=True), model_of(row_sparse=False)
    for model in models:
        backward(model, **options)
    return models


def assert_same(ours: nn.Module, dense: nn.Module) -> None:
    for mine, theirs in zip(gradients(ours), gradients(dense), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-14)


CLIPS = {"torch's": nn.utils.clip_grad_norm_, "ours": clip_grad_norm_}


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.5, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("name", CLIPS)
def test_the_norm_is_that_of_the_dense_gradients_and_clipping_gives_the_dense_ones(name, foreach, norm_type) -> None:
    ours, dense = both()
    norms = [
        clip(model.parameters(), 0.5, norm_type, foreach=foreach)
        for clip, model in ((CLIPS[name], ours), (nn.utils.clip_grad_norm_, dense))
    ]
    assert torch.allclose(*norms, rtol=1e-12, atol=0)
    assert_same(ours, dense)


def test_foreach_functions_of_torch_take_lists_of_dense_and_row_sparse_gradients() -> None:
    ours, dense = both()
    lists = [[p.grad for p in model.parameters()] for model in (ours, dense)]
    norms = [torch.stack(torch._foreach_norm(grads, 2.0)) for grads in lists]
    assert torch.allclose(*norms, rtol=1e-12)
    for grads in lists:
        torch._foreach_mul_(grads, torch.tensor(0.5, dtype=torch.float64))
        torch._foreach_mul_(grads, [0.5] * len(grads))
        torch._foreach_clamp_min_(grads, -0.1)
        torch._foreach_clamp_max_(grads, 0.2)
    assert_same(ours, dense)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_by_value_sums_equal_rows_first(foreach) -> None:
    ours, dense = both()
    for model in (ours, dense):
        nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=foreach)
        assert max(float(grad.abs().max()) for grad in gradients(model)) <= 0.3
    assert_same(ours, dense)
    with pytest.raises(ShapeError, match=r"Clamping .* \(30, 4\) to 0.1..None would give every row a gradient"):
        ours[0].weight.grad.clamp_(min=0.1)


@pytest.mark.parametrize("name", CLIPS)
def test_a_norm_that_is_not_finite_is_refused_if_asked(name) -> None:
    ours, _ = both()
    ours[0].weight.grad._values()[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        CLIPS[name](ours.parameters(), 1.0, error_if_nonfinite=True)
    assert math.isnan(CLIPS[name](ours.parameters(), 1.0))


def test_a_gradient_without_rows_has_norm_zero() -> None:
    model = model_of(row_sparse=True)
    model[0](torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert model[0].weight.grad._nnz() == 0
    for norm_type in (2.0, math.inf):
        assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type) == 0


@pytest.mark.parametrize("foreach", [None, False, True])
def test_the_norm_of_one_ranks_rows_is_refused_where_the_ranks_are_not_known(foreach) -> None:
    model = model_of(row_sparse=True)
    model[0].weight.shard_group = None
    backward(model)
    grad = model[0].weight.grad
    before = grad.to_dense().clone()
    for norm in (
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach),
        lambda: nn.utils.get_total_norm([grad.clone(), torch.ones(2, dtype=grad.dtype)], foreach=foreach),
        lambda: torch.linalg.vector_norm(grad * 2),
    ):
        with pytest.raises(ShapeError, match=r"\(30, 4\) with the rows of one rank alone.*embedlayer.clip_grad_norm_"):
            norm()
    assert torch.equal(grad.to_dense(), before)
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(2.0), foreach)  # by a norm of all ranks
    assert torch.allclose(grad.to_dense(), before / 2)


def test_the_two_halves_of_clipping_work_alone() -> None:
    ours, dense = both()
    totals = []
    for model in (ours, dense):
        totals.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, totals[-1])
    assert torch.allclose(*totals, rtol=1e-12)
    assert_same(ours, dense)


def test_clipping_between_batches_and_zeros_in_place_give_the_dense_gradients() -> None:
    ours, dense = both()
    for model in (ours, dense):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    assert_same(ours, dense)
    for model in (ours, dense):
        torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
        assert not any(grad.any() for grad in gradients(model))
        backward(model, batches=1)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert_same(ours, dense)


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_are_unscaled_before_they_are_clipped_and_a_step_with_inf_is_skipped(bad) -> None:
    models, steps = both(scale=1024.0), []
    for model in models:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model[0].weight.detach().clone()
        scaler.scale(torch.zeros(()))  # creates the scale
        if bad:
            values = model[0].weight.grad
            (values._values() if values.is_sparse else values).fill_(math.inf)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        steps.append((not torch.equal(model[0].weight, before), scaler.get_scale()))
    assert steps == [(not bad, 512.0 if bad else 1024.0)] * 2
    assert torch.allclose(models[0][0].weight, models[1][0].weight, rtol=1e-12)


def test_the_gradient_is_a_sparse_tensor_that_can_be_copied_saved_and_taken_apart() -> None:
    ours, dense = both()
    grad = ours[0].weight.grad
    assert grad.is_sparse
    assert grad.layout is torch.sparse_coo
    for again in (grad.clone(), copy.deepcopy(grad), pickle.loads(pickle.dumps(grad)), grad.detach(), grad.coalesce()):
        assert torch.equal(again.to_dense(), grad.to_dense())
    assert grad.data.norm() == pytest.approx(float(dense[0].weight.grad.norm()))
    assert "sparse_coo" in repr(grad)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad does not say whether it checks
def test_optimizers_of_torch_for_sparse_gradients_take_it() -> None:
    for kind, options in ((torch.optim.SGD, {"lr": 0.1}), (torch.optim.Adagrad, {"lr": 0.1})):
        ours, dense = both(batches=1)
        for model in (ours, dense):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            kind(model.parameters(), **options).step()
        assert torch.allclose(ours[0].weight, dense[0].weight, rtol=1e-12)
    ours, _ = both()
    torch.optim.SparseAdam([ours[0].weight]).step()


def test_adamw_of_torch_refuses_it_with_the_message_that_the_documentation_quotes() -> None:
    ours, _ = both()
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        with pytest.raises(RuntimeError, match="^Adam does not support sparse gradients, please consider SparseAdam"):
            kind(ours.parameters()).step()
    message = "Adam does not support sparse gradients, please consider SparseAdam instead"
    assert message in " ".join((RowSparseEmbedding.__doc__ or "").split())
