"""The kernels of the input embedding on CUDA, compared with plain operators in float64, and with the mask of the CPU."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from covering import cases
from interpreted import interpreted
from kernel_paths import GPU_BACKENDS, running_on
from torch import Tensor

from embedlayer import (
    LearnedPositionalEmbedding,
    PositionError,
    ShapeError,
    SinusoidalPositionalEmbedding,
    TokenEmbedding,
    TokenIdError,
    TransformerEmbedding,
)
from embedlayer.core.index_checks import clamp_and_record
from embedlayer.inputs.fused import gather_scale_add_drop, plain_scale_add_drop, scale_add_drop
from embedlayer.kernels import kernels_disabled
from embedlayer.kernels.gpu.launch import launch, launch_table, launches_observed
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import Dropout, StoredRows, gather_rows
from embedlayer.positions.position import positions_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, PLACES, OFFSET = 11, 9, 2
ADDENDS = ["none", "(T,)", "(1, T)", "(B, T)", "positions (T,)", "positions (B, T)"]

pytestmark = pytest.mark.usefixtures("unchecked")


def some_ids(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """Return IDs of which two are outside if there are several, on the default device."""
    ids = torch.randint(ROWS, shape)
    if ids.numel() > 3:
        ids.view(-1)[2], ids.view(-1)[-1] = ROWS + 5, -3
    return ids.to(dtype)


def mask_of(dropout: float, shape: tuple[int, ...]) -> Tensor:
    """Return the factors 0 and 1 / (1 - dropout) of the CPU for the present seed, in float64, on the default device."""
    drawn = Dropout.drawn(dropout)
    like = torch.empty(0, shape[-1], dtype=torch.float64)
    return drawn.mask(0, math.prod(shape[:-1]), like).view(shape) * drawn.growth


def rows_of(weight: Tensor, ids: Tensor, size: int, padding_idx: int | None) -> Tensor:
    """Return the definition of a look-up that records bad IDs: zeros for them, and no gradient."""
    is_bad = (ids < 0) | (ids >= size)
    return F.embedding(ids.clamp(0, size - 1), weight, padding_idx).masked_fill(is_bad.unsqueeze(-1), 0)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("dtype, added, scale, dropout, shape, width", DTYPES, ADDENDS, [None, 3.0, "tensor"], [0.0, 0.25],
       [(3, 5), (5,)], [8, 7, 1040], pairs=["added, shape"])  # fmt: skip
def test_values_and_gradients_are_no_worse_than_those_of_the_definition(
    backend, dtype, added, scale, dropout, shape, width
) -> None:
    torch.manual_seed(3)
    padding_idx = 4 if dropout else None
    with running_on(backend):
        ids = some_ids(shape, torch.int32 if width == 7 else torch.int64)
        factor = torch.tensor(1.5, dtype=dtype) if scale == "tensor" else scale
        sizes = {"none": (), "(T,)": (5,), "(1, T)": (1, 5), "(B, T)": shape}.get(added, (PLACES + OFFSET,))
        weight = torch.randn(ROWS, width).to(dtype)
        addend = torch.randn(*sizes, width).to(dtype) if sizes else None
        positions = None
        if added.startswith("positions"):
            positions = torch.randint(-OFFSET, PLACES, shape if added.endswith("(B, T)") else (5,))
            positions.view(-1)[1] = PLACES
        grad = torch.randn(*shape, width).to(dtype)
        checks = IndexCheck(ROWS, "token id"), IndexCheck(PLACES, "position", offset=OFFSET)

        def kernel(weight: Tensor, addend: Tensor | None) -> Tensor:
            more = addend if positions is None or addend is None else StoredRows(positions, addend, check=checks[1])
            return gather_scale_add_drop(StoredRows(ids, weight, padding_idx, check=checks[0]), factor, more, dropout)

        def plain(weight: Tensor, addend: Tensor | None) -> Tensor:
            more = addend
            if positions is not None and addend is not None:
                more = rows_of(addend, positions + OFFSET, PLACES + OFFSET, None)
            scaled = factor.to(weight.dtype) if isinstance(factor, Tensor) else factor
            x = plain_scale_add_drop(rows_of(weight, ids.long(), ROWS, padding_idx), scaled, more, 0.0)
            return x * mask_of(dropout, tuple(x.shape)).to(x.dtype) if dropout else x

        def results(compute, dtype: torch.dtype) -> list[Tensor]:
            leaves = [each.detach().to(dtype).requires_grad_() for each in (weight, addend) if each is not None]
            torch.manual_seed(5)
            y = compute(leaves[0], leaves[1] if len(leaves) > 1 else None)
            y.backward(grad.to(dtype))
            return [each.detach().double() for each in (y, *(leaf.grad for leaf in leaves))]

        names: list[str] = []
        with launches_observed(lambda each: names.append(each.name)):
            ours = results(kernel, dtype)
        exact, usual = results(plain, torch.float64), results(plain, dtype)
        assert names[0] == "gather_scale_add_drop"
        for found, theirs, right in zip(ours, usual, exact, strict=True):
            error, own = ((each - right).abs().max().item() for each in (found, theirs))
            assert error <= 1.5 * own + torch.finfo(dtype).eps * right.abs().max().item()
        first = (2, ROWS + 5, shape[-1])
        assert checks[0].first_bad_index.tolist() == list(first)
        if positions is not None:
            assert checks[1].first_bad_index.tolist() == [1, PLACES + OFFSET, 5]


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("width", [7, 24])
def test_the_mask_of_a_seed_is_that_of_the_cpu(backend, width) -> None:
    layer, ids = TransformerEmbedding(50, width, 16, 0.3), torch.randint(50, (4, 16))
    torch.manual_seed(3)
    expected = layer(ids)
    with running_on(backend):
        layer.to(torch.empty(0).device)
        torch.manual_seed(3)
        y = layer(ids.to(torch.empty(0).device))
        torch.testing.assert_close(y.cpu(), expected)
        assert torch.equal(y.cpu() == 0, expected == 0)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("bad", [[], [5], [0, 5], [5, 17, 18], [699], list(range(700))], ids=len)
def test_the_first_bad_index_of_a_call_is_recorded_if_the_record_is_empty(backend, bad) -> None:
    with running_on(backend):
        for kind, dtype in (("token id", torch.int64), ("position", torch.int32)):
            check, ids = IndexCheck(10, kind), torch.randint(10, (7, 100), dtype=dtype)
            for place in bad:
                ids.view(-1)[place] = -place - 1 if place % 2 else 10 + place
            expected = torch.full((3,), -1)
            right = clamp_and_record(ids, 10, expected)
            looked_up = gather_rows(StoredRows(ids, torch.ones(10, 8), check=check))
            assert torch.equal(looked_up[..., 0] == 0, right[1])
            record = check.first_bad_index.tolist()
            check.first_bad_index.fill_(-1)
            for _ in range(2):  # the record is that of the first call
                clamped, outside = check.clamp_and_record(ids)
                assert torch.equal(clamped, right[0])
                assert torch.equal(outside, right[1])
                assert check.first_bad_index.tolist() == expected.tolist() == record
                ids = ids.flip(0)
                right = right[0].flip(0), right[1].flip(0)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_layer_raises_the_error_of_a_bad_id_and_of_a_bad_position_when_it_is_asked(backend) -> None:
    with running_on(backend):
        device = torch.empty(0).device
        layer = TransformerEmbedding(10, 8, 6, 0.0).to(device)
        ids = torch.tensor([[1, 2, 3], [4, 10, -5]])
        y = layer(ids, positions=torch.tensor([[0, 1, 2], [0, 1, 6]]))
        assert torch.equal(y[1, 1], layer.position.weight[1])
        assert y[1, 2].eq(0).all()
        y.sum().backward()
        counts = torch.tensor([0.0, 1, 1, 1, 1, 0, 0, 0, 0, 0])
        assert torch.equal(layer.table.weight.grad, (counts * layer.scale).unsqueeze(1).expand(10, 8))
        assert torch.equal(layer.position.weight.grad[:, 0], torch.tensor([2.0, 2, 1, 0, 0, 0]))
        with pytest.raises(TokenIdError, match="token id 10 at row 1, column 1"):
            layer.check()
        with pytest.raises(PositionError, match="position 6 at row 1, column 2"):
            layer.check()
        layer.check()
        for table in (layer.table, layer.position):
            with pytest.raises(ShapeError, match=r"int64 or int32|not float32"):
                table(torch.zeros(1, 3))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_second_derivatives_are_those_of_the_definition(backend, dropout) -> None:
    with running_on(backend):
        weight, addend = torch.randn(6, 4), torch.randn(5, 4)
        ids, v = torch.randint(6, (2, 5)), torch.randn(2, 5, 4)
        ids[1, 2] = 7
        check, found = IndexCheck(6, "token id"), []
        for dtype in (torch.float32, torch.float64):
            leaves = [each.to(dtype).requires_grad_() for each in (weight, addend)]
            torch.manual_seed(7)
            if dtype == torch.float32:
                y = gather_scale_add_drop(StoredRows(ids, leaves[0], check=check), 2.0, leaves[1], dropout)
            else:
                mask = mask_of(dropout, (2, 5, 4)) if dropout else 1.0
                y = (2.0 * rows_of(leaves[0], ids, 6, None) + leaves[1]) * mask
            first = torch.autograd.grad((y.square() * v.to(dtype)).sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
            found.append([each.double() for each in (*first, *second)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
def test_no_tokens_launch_nothing_and_give_zero_gradients(backend, shape) -> None:
    with running_on(backend):
        layer = TransformerEmbedding(20, 8, 6, 0.5).to(torch.empty(0).device)
        with launches_observed(lambda each: pytest.fail(each.name)):
            y = layer(torch.empty(shape, dtype=torch.int64))
            y.sum().backward()
        assert y.shape == (*shape, 8)
        assert layer.table.weight.grad.eq(0).all()


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_expanded_gradients_frozen_rows_and_vectors_of_other_tables_are_taken(backend) -> None:
    with running_on(backend):
        layer = TransformerEmbedding(20, 8, 6, 0.0, scale=None).to(torch.empty(0).device)
        layer.table.requires_grad_(False)
        layer(torch.randint(20, (3, 6))).sum().backward()
        assert torch.equal(layer.position.weight.grad, torch.full((6, 8), 3.0))
        x, addend = torch.randn(3, 6, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
        torch.manual_seed(1)
        y = scale_add_drop(x * 1.0, 2.0, addend, 0.5)
        torch.manual_seed(1)
        mask = mask_of(0.5, (3, 6, 8)).float()
        torch.testing.assert_close(y, (2 * x + addend) * mask)
        y.sum().backward()
        torch.testing.assert_close(x.grad, 2 * mask)
        torch.testing.assert_close(addend.grad, mask.sum(0))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("kind", ["learned", "learned, offset", "sinusoidal", "sinusoidal, factor"])
def test_each_additive_scheme_adds_the_vectors_of_its_definition(backend, kind) -> None:
    scheme = {
        "learned": lambda: LearnedPositionalEmbedding(12, 8),
        "learned, offset": lambda: LearnedPositionalEmbedding(12, 8, offset=2),
        "sinusoidal": lambda: SinusoidalPositionalEmbedding(12, 8, offset=1),
        "sinusoidal, factor": lambda: SinusoidalPositionalEmbedding(12, 8, init_scale=0.5),
    }[kind]()
    layer = TransformerEmbedding(20, 8, 12, 0.0, position=scheme)
    ids, mask = torch.randint(20, (2, 6)), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 2, 2, 2, 0]])
    expected = [layer(ids), layer(ids, attention_mask=mask), layer(ids, positions=torch.arange(3, 9))]
    with running_on(backend):
        device = torch.empty(0).device
        layer, ids, mask = layer.to(device), ids.to(device), mask.to(device)
        found = [layer(ids), layer(ids, attention_mask=mask), layer(ids, positions=torch.arange(3, 9))]
        torch.testing.assert_close([each.cpu() for each in found], expected)


MASKS = {
    "padding left and right": [[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
    "documents with gaps": [[1, 0, 2, 2], [2, 2, 0, 5], [0, 3, 0, 3], [1, 2, 3, 4]],
}


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("name", MASKS)
def test_positions_of_a_mask_are_those_of_the_definition(backend, dtype, name) -> None:
    with running_on(backend):
        mask = torch.tensor(MASKS[name]).to(dtype)
        several_blocks = mask.repeat_interleave(300, dim=1)
        for each in (mask, mask[0], mask.T.contiguous().T, several_blocks if backend == "cuda" else mask[:, 1:]):
            found = positions_of(each.long(), each, offset=3, padding_position=7)
            with kernels_disabled():
                assert torch.equal(found, positions_of(each.long(), each, offset=3, padding_position=7))


@pytest.mark.long
def test_positions_over_several_blocks_are_those_of_the_definition() -> None:
    with running_on("triton"):
        mask = torch.tensor(MASKS["documents with gaps"]).repeat_interleave(300, dim=1)
        found = positions_of(mask, mask)
        with kernels_disabled():
            assert torch.equal(found, positions_of(mask, mask))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_replays_of_a_captured_graph_drop_other_numbers() -> None:
    layer = TransformerEmbedding(50, 64, 16, 0.5).cuda()
    ids = torch.randint(50, (4, 16), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(ids)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(y == 0)
    assert 0.4 < masks[0].float().mean() < 0.6
    assert not torch.equal(*masks)


def assert_rows_beyond_2_to_31_are_read(folder: Path) -> None:
    """The last rows of a table of more than 2^31 numbers are read, and the last vectors of as many written."""
    width, rows = 1032, 2**31 // 1032 + 9
    weight, out = (
        torch.from_file(str(folder / name), shared=True, size=rows * width, dtype=torch.bfloat16).view(rows, width)
        for name in ("weight", "out")
    )
    weight[-3:] = torch.randn(3, width)
    kept, record = torch.empty(rows, dtype=torch.int64), torch.full((3,), -1)
    ids = torch.zeros(rows, dtype=torch.int64)
    ids[-3:] = torch.tensor([rows - 1, rows - 3, rows - 2])
    none = dict.fromkeys(("factor", "addend", "places", "places_record", "kept_places", "threshold"))
    sizes = {"tokens": rows, "units": width // 8, "UNIT": 8, "rows": rows, "offset": 0, "length": 1, "ignored": -1}
    more = dict.fromkeys(("addends", "places_count", "places_offset", "places_length"), 1)
    with interpreted() as run:
        run.programs = lambda grid: [(n, i) for n in range(rows - 3, rows) for i in range(grid[1])]
        launch("input", "gather_scale_add_drop", x=weight, ids=ids, record=record, kept_ids=kept, out=out,
               scale=1.0, seed=0, growth=1.0, **none, **sizes, **more)  # fmt: skip
    assert torch.equal(out[-3:], weight[ids[-3:]])
    assert record.tolist() == [-1] * 3


def test_rows_beyond_2_to_31_numbers_are_read_and_written(tmp_path) -> None:
    pytest.importorskip("triton")
    assert_rows_beyond_2_to_31_are_read(tmp_path)


@cases("width, added", [8, 1024, 1040], [False, True])
def test_little_more_than_rows_and_vectors_is_read_and_written(width, added) -> None:
    with running_on("triton"), interpreted() as run:
        weight, ids = torch.randn(ROWS, width), torch.randint(ROWS, (2, 3))
        addend = torch.randn(3, width) if added else None
        y = gather_scale_add_drop(StoredRows(ids, weight, check=IndexCheck(ROWS, "token id")), 2.0, addend, 0.1)
    (seen,) = run.launches
    parts = -(-width // (4 * launch_table("input")["gather_scale_add_drop"].blocks["WORDS"]))
    assert seen.written == {"out": y.nbytes, "kept_ids": ids.nbytes}
    assert seen.read == {"x": y.nbytes, "ids": parts * ids.nbytes, **({"addend": y.nbytes} if added else {})}


def test_a_float64_table_on_cuda_is_looked_up_by_plain_operators() -> None:
    with running_on("triton"):
        table, ids = TokenEmbedding(10, 4, dtype=torch.float64), torch.tensor([[1, 11]])
        assert table.stored(ids) is None
        assert torch.equal(table(ids)[0], torch.stack([table.weight[1], torch.zeros(4, dtype=torch.float64)]))
        with pytest.raises(TokenIdError, match="token id 11 at row 0, column 1"):
            table.check()
