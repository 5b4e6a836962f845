"""Every way to read or write the weight of a row-sparse table finds the rows of dense AdamW, of all kinds of tables."""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import looped
from torch import Tensor, nn
from torch.autograd import forward_ad

import embedlayer as el
from embedlayer.kernels import kernels_disabled
from embedlayer.row_sparse.storage import raw_weight
from embedlayer.tables import MappedEmbedding

V, D = 20, 4
OPTIONS: dict[str, Any] = {"dtype": torch.float64}


def shared() -> el.RowSparseEmbedding:
    other = el.RowSparseEmbedding(V, D, **OPTIONS)
    table = el.RowSparseEmbedding(V, D, **OPTIONS)
    table.weight = other.weight
    return table


def trained_before() -> el.RowSparseEmbedding:
    """The weight had a gradient and a hook before it became that of a table."""
    dense = nn.Embedding(V, D, sparse=True, **OPTIONS)
    dense(torch.arange(3)).sum().backward()
    dense.weight.grad = None
    return el.RowSparseEmbedding.from_embedding(dense)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "dense": lambda _: el.RowSparseEmbedding(V, D, **OPTIONS),
    "padded": lambda _: el.RowSparseEmbedding(V - 3, D, pad_to_multiple_of=V, **OPTIONS),
    "of a shared weight": lambda _: shared(),
    "of an nn.Embedding": lambda _: trained_before(),
    "a deep copy": lambda _: copy.deepcopy(el.RowSparseEmbedding(V, D, **OPTIONS)),
    "mapped": lambda folder: MappedEmbedding.create(folder / "rows", V, D, dtype=torch.float64),
}


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(0, V - 3, (3,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(ids).square().sum().backward()
        optimizer.step()


@pytest.fixture
def trained(request, tmp_path):
    """Return the weight of a row-sparse table with pending updates, and the same rows trained by dense AdamW."""
    tables: list[nn.Module] = []

    def build(kind: str) -> tuple[Any, Tensor]:
        torch.manual_seed(0)
        ours, dense = KINDS[kind](Path(mkdtemp(dir=tmp_path))), nn.Embedding(V, D, **OPTIONS)
        weight: Any = ours.weight  # held while it is trained
        with torch.no_grad():
            dense.weight.copy_(weight.copy_(torch.randn(V, D)))
        for module, optimizer in ((ours, el.RowAdamW), (dense, torch.optim.AdamW)):
            train(module, optimizer(module.parameters(), lr=0.05), range(5))
        assert weight.pending_updates.has_pending
        assert (raw_weight(weight) - dense.weight).abs().max() > 1e-3
        tables.append(ours)
        return weight, dense.weight

    yield build
    for table in tables:
        if isinstance(table, MappedEmbedding):
            table.close()


def saved(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tangent(weight: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(forward_ad.make_dual(weight, torch.ones_like(weight)) * 1.0).primal.clone()


def set_from(weight: Tensor) -> Tensor:
    other = torch.zeros(0, dtype=weight.dtype)
    return other.set_(weight.detach())  # type: ignore[call-overload]


def square(x: Tensor) -> Tensor:
    return x.square().sum()


def address(weight: Tensor) -> Tensor:
    assert weight.data_ptr()
    return raw_weight(weight)


@torch.library.custom_op("embedlayer_tests::copied", mutates_args=())
def copied(x: Tensor) -> Tensor:
    return x.clone()


READS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "clone": lambda w: w.clone(),
    "an index": lambda w: w[torch.arange(V)],
    "a product": lambda w: torch.eye(V, dtype=w.dtype) @ w,
    "in place into another": lambda w: torch.zeros_like(w).copy_(w),
    "assigned to rows": lambda w: torch.zeros(V, D, dtype=w.dtype).index_copy(0, torch.arange(V), w),
    "a list": lambda w: torch._foreach_mul([w], 1.0)[0],
    "out": lambda w: torch.add(w.detach(), 0, out=torch.empty_like(w)),
    "torch.tensor": lambda w: torch.tensor(w),
    "as_tensor": lambda w: torch.as_tensor(w, dtype=torch.float32).double(),
    "asarray": lambda w: torch.asarray(w, copy=True, requires_grad=False),
    "new_tensor": lambda w: torch.zeros(1, dtype=w.dtype).new_tensor(w),
    "legacy constructor": lambda w: torch.DoubleTensor(w),
    "alias": lambda w: torch.ops.aten.alias(w),
    "nested": lambda w: torch.nested.nested_tensor([w]).unbind()[0],
    "jagged": lambda w: torch.nested.nested_tensor([w], layout=torch.jagged).unbind()[0],
    "sparse": lambda w: torch.sparse_coo_tensor(torch.arange(V)[None], w, (V, D)).to_dense(),
    "set_": set_from,
    "numpy": lambda w: torch.from_numpy(w.requires_grad_(False).numpy().copy()),
    "np.asarray": lambda w: torch.from_numpy(np.asarray(w.requires_grad_(False)).copy()),
    "tolist": lambda w: torch.tensor(w.tolist(), dtype=w.dtype),
    "item": lambda w: torch.tensor([[x.item() for x in row] for row in w], dtype=w.dtype),
    "DLPack": lambda w: torch.from_dlpack(w.requires_grad_(False)).clone(),
    "storage": lambda w: torch.tensor(w.untyped_storage()[:], dtype=torch.uint8).view(w.dtype)[: V * D].view(V, D),
    "data_ptr": address,
    "nn.Parameter": lambda w: nn.Parameter(w),
    "deepcopy": lambda w: copy.deepcopy(w),
    "torch.save": lambda w: saved({"weight": w})["weight"],
    "F.embedding": lambda w: F.embedding(torch.arange(V), w),
    "embedding_bag": lambda w: F.embedding_bag(torch.arange(V)[:, None], w),
    "functional": lambda w: F.linear(torch.eye(D, dtype=w.dtype), w).T,
    "scripted": lambda w: torch.jit.trace(lambda x: x * 1.0, torch.ones(V, D, dtype=w.dtype))(w),
    "an operator": lambda w: copied(w.detach()),
    "an operator on the weight": lambda w: torch.no_grad()(copied)(w),
    "vmap": lambda w: torch.func.vmap(lambda row: row * 1.0)(w),
    "grad": lambda w: torch.func.grad(square)(w) / 2,
    "grad of a dict": lambda w: torch.func.grad(lambda p: square(p["w"]))({"w": w})["w"] / 2,
    "vjp": lambda w: torch.func.vjp(lambda x: x * 1.0, w)[0],
    "jvp": lambda w: torch.func.jvp(lambda x: x * 1.0, (w,), (torch.ones_like(w),))[0],
    "grad that closes over it": lambda w: torch.func.grad(lambda x: (x * w).sum())(torch.ones(V, D, dtype=w.dtype)),
    "vmap that closes over it": lambda w: torch.func.vmap(lambda x: x @ w)(torch.eye(V, dtype=w.dtype)),
    "a tangent": tangent,
    "inference mode": lambda w: torch.inference_mode()(lambda: w * 1.0)(),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:To copy construct", "ignore:The PyTorch API of nested", "ignore:.*jit.trace")
@looped("kind, name", KINDS, READS)
def test_each_way_to_read_the_weight_finds_the_rows_of_dense_adamw(trained, kind, name) -> None:
    weight, dense = trained(kind)
    found = READS[name](weight)
    torch.testing.assert_close(found.detach().clone(), dense.detach(), atol=3e-7, rtol=0, check_dtype=False)


@torch.no_grad()
def renormalised(weight: Tensor) -> None:
    F.embedding(torch.tensor([[1, 2, 5]]), weight, max_norm=0.5)


@torch.no_grad()
def assigned(weight: Tensor) -> None:
    weight[2:5] = 0.5


@torch.no_grad()
def into_out(weight: Tensor) -> None:
    torch.mul(weight, 0.5, out=weight)


@torch.no_grad()
def by_a_list(weight: Tensor) -> None:
    torch._foreach_mul_([weight], 0.9)


WRITES = {write.__name__: write for write in (renormalised, assigned, into_out, by_a_list)}


@pytest.mark.usefixtures("unchecked")
@looped("kind, name", KINDS, WRITES)
def test_each_way_to_write_the_weight_writes_current_rows_and_loses_no_update(trained, kind, name) -> None:
    weight, dense = trained(kind)
    for each in (weight, dense):
        WRITES[name](each)
    torch.testing.assert_close(weight.detach(), dense.detach(), atol=1e-12, rtol=0)


METADATA: dict[str, Callable[[Any], Any]] = {
    "attributes": lambda w: (w.shape, w.dtype, w.device, w.grad, w.requires_grad, w.is_leaf, w._version, w.stride()),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda w: w.new_zeros(3),
    "hooks": lambda w: w.register_hook(lambda grad: grad).remove(),
    "zero_grad": lambda w: torch.optim.SGD([w]).zero_grad(),
}


@looped("name", METADATA)
def test_what_reads_no_row_applies_no_update(trained, name) -> None:
    weight, _ = trained("dense")
    before = raw_weight(weight).clone()
    METADATA[name](weight)
    assert torch.equal(raw_weight(weight), before)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "change", [lambda m: m.float().double(), lambda m: m.load_state_dict({"weight": m.weight.detach() * 0.5})]
)
def test_training_continues_after_torch_swapped_or_converted_the_parameter(change, swap, request) -> None:
    request.addfinalizer(lambda: torch.__future__.set_swap_module_params_on_conversion(False))
    torch.__future__.set_swap_module_params_on_conversion(swap)
    torch.manual_seed(0)
    ours, dense = el.RowSparseEmbedding(V, D, **OPTIONS), nn.Embedding(V, D, **OPTIONS)
    dense.weight.data.copy_(ours.weight.data)
    runs = (ours, el.RowAdamW(ours.parameters(), lr=0.05)), (dense, torch.optim.AdamW(dense.parameters(), lr=0.05))
    for module, optimizer in runs:
        train(module, optimizer, range(4))
        optimizer.zero_grad()
        change(module)
        train(module, optimizer, range(4, 8))
    torch.testing.assert_close(ours.weight.detach(), dense.weight.detach(), atol=1e-12, rtol=0)


def test_hooks_and_gradient_of_a_parameter_stay_when_it_becomes_that_of_a_table() -> None:
    weight = nn.Parameter(torch.zeros(V, D))
    seen: list[str] = []
    weight.register_hook(lambda _: seen.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    weight.grad = torch.ones(V, D).to_sparse(1)
    table = el.RowSparseEmbedding(V, D)
    table.weight = weight
    assert type(weight) is type(el.RowSparseEmbedding(2, 2).weight)
    assert torch.equal(weight.grad.to_dense(), torch.ones(V, D))
    weight.grad = None
    table(torch.tensor([1])).sum().backward()
    assert seen == ["hook", "accumulated"]


def test_a_graph_of_a_parameter_that_became_that_of_a_table_is_an_error() -> None:
    weight = nn.Parameter(torch.zeros(V, D))
    loss = (weight * 2).sum()
    el.RowSparseEmbedding(V, D).weight = weight
    with pytest.raises(el.StaleRowsError, match="forward pass again"):
        loss.backward()


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("kernels", [True, False], ids=["by kernels", "by operators"])
def test_a_penalty_on_the_gradient_is_part_of_the_gradient(padding_idx, kernels) -> None:
    with nullcontext() if kernels else kernels_disabled():
        rows, factor = torch.randn(9, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
        found = []
        for kind in (el.RowSparseEmbedding, nn.Embedding):
            module = kind(9, 4, padding_idx, **OPTIONS)
            module.weight.data.copy_(rows)
            scale = factor.clone().requires_grad_()
            loss = (module(torch.tensor([1, 3, 3, 5])) * scale).square().sum()
            (gradient,) = torch.autograd.grad(loss, module.weight, create_graph=True)
            total = loss + (gradient.to_dense() if gradient.is_sparse else gradient).square().sum()
            found.append(torch.autograd.grad(total, scale)[0])
        torch.testing.assert_close(*found)


def test_a_dense_part_of_the_gradient_is_an_error_that_says_what_to_do() -> None:
    table = el.RowSparseEmbedding(V, D)
    loss = table(torch.tensor([1, 2])).sum() + table.weight.square().sum()
    with pytest.raises(el.ShapeError, match="TokenEmbedding"):
        loss.backward()


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "dtype": lambda module: module.double(),
    "shape": lambda module: setattr(module.weight, "data", torch.zeros(2, 4)),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_step_that_fails_in_a_later_group_changes_no_earlier_one(name) -> None:
    torch.manual_seed(0)
    parts = [el.RowSparseEmbedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizer = el.RowAdamW([{"params": list(part.parameters())} for part in parts], lr=0.1)
    for step in range(3):
        if step == 2:
            optimizer.zero_grad()
            CONVERSIONS[name](parts[2])
        hidden = parts[1](parts[0](torch.tensor([1, 2])))
        F.linear(hidden.to(parts[2].weight.dtype), parts[2].weight).sum().backward()
        before = copy.deepcopy([part.state_dict() for part in parts]), copy.deepcopy(optimizer.state_dict()["state"])
        if step < 2:
            optimizer.step()
    with pytest.raises(el.ShapeError, match="converted after a step"):
        optimizer.step()
    after = [part.state_dict() for part in parts], optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, atol=0, rtol=0)
