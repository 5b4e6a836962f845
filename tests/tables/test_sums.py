"""Sums of looked-up vectors, of K streams and of bags: numbers and gradients of the definition on every path."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from covering import cases
from kernel_paths import BRANCHES, on_branch, runs_of_kernels
from kinds import EMBED_DIM, LOOKUP_TABLES, VOCAB_SIZE
from torch import Tensor, nn

from embedlayer import RowAdamW, RowSparseEmbedding, ShapeError, TokenEmbedding, TokenIdError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BOUNDS = {"streams": None, "bags": torch.tensor([0, 3, 3, 16, 17, 30])}

all_bounds = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)


def ids_for(bounds: Tensor | None) -> Tensor:
    ids = torch.randint(VOCAB_SIZE, (2, 3, 5) if bounds is None else (30,))
    ids.view(-1)[:12] = ids.view(-1)[3]  # equal IDs, in one sum and in several
    ids.view(-1)[7] = 0  # the padding row
    return ids


def ordered(vectors: Tensor, bounds: Tensor | None) -> Tensor:
    """Add vectors, `(..., K, D)` or those of bags, one after another."""
    if bounds is None:
        first, *others = vectors.unbind(-2)
        return sum(others, first)
    edges = zip(bounds.tolist(), bounds.tolist()[1:], strict=False)
    return torch.stack([sum(vectors[a:b], torch.zeros_like(vectors[0])) for a, b in edges])


def by_definition(
    look_up: Callable[[Tensor], Tensor], ids: Tensor, bounds: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Look up, multiply by the weights, and add one after another."""
    vectors = look_up(ids)
    return ordered(vectors if weights is None else weights.unsqueeze(-1) * vectors, bounds)


def gradients(sums: Tensor, leaves: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    return [each.to_dense().double() for each in torch.autograd.grad(sums, leaves, cotangent.to(sums.dtype))]


@cases("name, layout, weighted", LOOKUP_TABLES, BOUNDS, [False, True], pairs=["name, layout", "layout, weighted"])
def test_each_kind_of_table_adds_its_vectors_one_after_another(name: str, layout: str, weighted: bool) -> None:
    table, bounds = LOOKUP_TABLES[name](), BOUNDS[layout]
    ids = ids_for(bounds)
    weights = torch.rand(ids.shape, requires_grad=True) if weighted else None
    expected = by_definition(table.look_up, ids, bounds, weights)
    sums = table.summed(ids, bounds, weights)
    assert torch.equal(sums, expected)
    leaves = [each for each in (*table.parameters(), weights) if each is not None and each.requires_grad]
    if leaves:
        cotangent = torch.randn_like(sums)
        ours, plain = (gradients(each, leaves, cotangent) for each in (sums, expected))
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@cases(
    "kind, layout, weighted, branch",
    [*((each, False) for each in DTYPES), *((each, True) for each in DTYPES[:3])],  # torch adds no sparse float16
    BOUNDS,
    (False, True),
    BRANCHES,
    pairs=["kind, branch", "layout, branch", "weighted, branch", "layout, weighted", "kind, layout"],
)
def test_sums_and_gradients_are_those_of_the_definition(
    kind: tuple[torch.dtype, bool], layout: str, weighted: bool, branch: str, both_paths: str
) -> None:
    (dtype, row_sparse), bounds = kind, BOUNDS[layout]
    table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(VOCAB_SIZE, EMBED_DIM, 0, dtype=dtype)
    ids = ids_for(bounds)
    with torch.no_grad():
        table.weight.normal_()
    weights = torch.rand(ids.shape, dtype=dtype, requires_grad=True) if weighted else None
    leaves = [table.weight, *([] if weights is None else [weights])]

    def definition(dtype: torch.dtype) -> list[Tensor]:
        weight, *others = (each.detach().to(dtype).requires_grad_() for each in leaves)
        look_up = partial(F.embedding, weight=weight, padding_idx=0)
        return computed(partial(by_definition, look_up, ids, bounds, *others), [weight, *others], cotangent)

    cotangent = torch.randn_like(table.summed(ids, bounds))
    plain, exact = definition(dtype), definition(torch.float64)
    ours = on_branch(branch, computed, partial(table.summed, ids, bounds, weights), leaves, cotangent)
    if branch == "cpu" and (bounds is None or dtype.itemsize > 2):
        assert torch.equal(ours[0], plain[0])
    for each, of_torch, wanted in zip(ours, plain, exact, strict=True):
        error, plain_error = ((found.double() - wanted).abs().max() for found in (each, of_torch))
        assert error <= plain_error + 2 * torch.finfo(dtype).eps * wanted.abs().max()
    assert not ours[1][0].any()  # the padding row


def computed(function: partial[Tensor], leaves: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    sums = function()
    return [sums.detach(), *gradients(sums, leaves, cotangent)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("row_sparse", [False, True])
def test_gradients_equal_those_of_look_ups_to_the_bit(dtype: torch.dtype, row_sparse: bool, kernels: None) -> None:
    table = (RowSparseEmbedding if row_sparse else TokenEmbedding)(VOCAB_SIZE, EMBED_DIM, 0, dtype=dtype)
    ids, offsets = torch.randint(10, (4, 50, 5)), torch.arange(5) * 10
    ids += offsets  # K streams with rows of their own
    cotangent = torch.randn(4, 50, EMBED_DIM, dtype=dtype)
    sums = (table.summed(ids), by_definition(table.look_up, ids))
    ours, plain = (gradients(each, [table.weight], cotangent)[0] for each in sums)
    assert torch.equal(ours, plain)


@all_bounds
def test_second_derivatives_are_those_of_the_definition(bounds: Tensor | None) -> None:
    table, ids = TokenEmbedding(VOCAB_SIZE, 3, dtype=torch.float64), ids_for(bounds)
    weights = torch.rand(ids.shape, dtype=torch.float64, requires_grad=True)

    def twice(sums: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(sums.tanh().sum(), (table.weight, weights), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), (table.weight, weights))

    ours = twice(table.summed(ids, bounds, weights))
    torch.testing.assert_close(ours, twice(by_definition(table.look_up, ids, bounds, weights)))


@all_bounds
def test_row_sparse_rows_train_as_look_ups_do(bounds: Tensor | None, both_paths: str) -> None:
    tables = [RowSparseEmbedding(VOCAB_SIZE, EMBED_DIM, 0) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [RowAdamW(each.parameters(), lr=0.1) for each in tables]
    for _ in range(4):  # rows of earlier steps have pending updates
        ids, target = ids_for(bounds), torch.randn(EMBED_DIM)
        for table, optimizer, is_ours in zip(tables, optimizers, (True, False), strict=True):
            optimizer.zero_grad()
            sums = table.summed(ids, bounds) if is_ours else by_definition(table.look_up, ids, bounds)
            (sums - target).square().sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight)


@all_bounds
def test_sums_are_compiled_and_transformed(bounds: Tensor | None, unchecked: None) -> None:
    table, ids = TokenEmbedding(VOCAB_SIZE, EMBED_DIM, 0), ids_for(bounds)
    expected = table.summed(ids, bounds)
    compiled = torch.compile(table.summed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, bounds), expected)

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self) -> Tensor:
            return table.summed(ids, bounds)

    def loss(weight: Tensor) -> Tensor:
        return torch.func.functional_call(Summed(), {"table.weight": weight}, ()).square().sum()

    ours = torch.func.grad(loss)(table.weight.detach())
    torch.testing.assert_close(ours, torch.autograd.grad(expected.square().sum(), table.weight)[0])
    if bounds is None:
        rows = torch.func.vmap(table.summed)(ids)
        torch.testing.assert_close(rows, expected)


def test_sums_of_nothing_are_zero() -> None:
    table = TokenEmbedding(VOCAB_SIZE, EMBED_DIM)
    none = torch.empty(0, dtype=torch.long)
    assert torch.equal(table.summed(none, torch.tensor([0, 0])), torch.zeros(1, EMBED_DIM))
    assert table.summed(none, torch.tensor([0])).shape == (0, EMBED_DIM)
    assert torch.equal(table.summed(none.view(2, 0)), torch.zeros(2, EMBED_DIM))
    assert table.summed(none.view(0, 3)).shape == (0, EMBED_DIM)


def test_zeros_keep_their_sign(kernels: None) -> None:
    table = TokenEmbedding.from_pretrained(torch.tensor([[-0.0], [0.0]]), freeze=False)
    sums = table.summed(torch.tensor([[0] * 5, [0] * 4 + [1]]))
    assert torch.signbit(sums).flatten().tolist() == [True, False]


def test_bad_arguments_are_refused(unchecked: None) -> None:
    table, ids = TokenEmbedding(20, EMBED_DIM), torch.arange(6)
    bad: list[tuple[Tensor, ...]] = [(torch.tensor(3),), (ids, torch.tensor([0, 6]), torch.rand(5))]
    bad += [(ids, torch.tensor(bounds).long()) for bounds in ([0, 4], [1, 6], [0, 4, 2, 6], [])]
    for arguments in bad:
        with pytest.raises(ShapeError):
            table.summed(*arguments)
    with pytest.raises(TokenIdError, match="token id 20 at row 0, column 1"):
        table.summed(torch.tensor([3, 20]), torch.tensor([0, 2]))


@pytest.mark.parametrize(("branch", "first"), [("cuda", "-1 at row 0, column 1"), ("triton", "20 at row 0, column 1")])
def test_on_an_accelerator_a_bad_id_adds_nothing_and_gets_no_gradient(branch: str, first: str) -> None:
    table, ids = TokenEmbedding(20, EMBED_DIM), torch.tensor([[1, 20, 3], [-1, 4, 4]])

    def check() -> None:
        sums = table.summed(ids)
        rows = table.weight.detach()
        torch.testing.assert_close(sums, torch.stack([rows[1] + rows[3], 2 * rows[4]]))
        sums.sum().backward()
        assert table.weight.grad.sum(1).nonzero().flatten().tolist() == [1, 3, 4]
        with pytest.raises(TokenIdError, match=f"token id {first}"):
            table.check()

    on_branch(branch, check)


def test_dense_sums_run_the_kernel_once_forward_and_once_backward(kernels: None) -> None:
    table = TokenEmbedding(VOCAB_SIZE, EMBED_DIM)
    with runs_of_kernels() as names:
        table.summed(ids_for(None)).sum().backward()
    assert names == ["sum_rows", "segments_of_equal_ids", "sum_rows"]
