"""The kernels of the input embedding on CUDA, compared with plain operators, and with the mask of the CPU."""

from unittest.mock import patch

import pytest
import torch
from covering import cases, some
from interpreted import interpreted
from kernel_paths import GPU_BACKENDS, launched_kernels, running_on
from kernel_records import operation_of
from looked_up_rows import (
    ADDENDS,
    ROWS,
    assert_no_worse_than_the_definition,
    assert_rows_beyond_2_to_31_are_read,
    assert_the_first_is_recorded,
    rows_of,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from embedlayer import (
    LearnedPositionalEmbedding,
    PositionError,
    ShapeError,
    SinusoidalPositionalEmbedding,
    TokenEmbedding,
    TokenIdError,
    TransformerEmbedding,
)
from embedlayer.kernels import kernels_disabled
from embedlayer.positions.position import positions_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("dtype, added, scale_and_dropout, shape, width", DTYPES, ADDENDS,
       [(None, 0.0), (3.0, 0.25), ("rounded", 0.0), (None, 0.25)], [(3, 5), (5,)], [8, 7, 1040],
       pairs=["added, shape"])  # fmt: skip
def test_values_and_gradients_are_no_worse_than_those_of_the_definition(
    backend, dtype, added, scale_and_dropout, shape, width
) -> None:
    scale, dropout = scale_and_dropout
    with running_on(backend):
        assert_no_worse_than_the_definition(dtype, added, scale, dropout, shape, width)


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
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("bad", [[], [5], [0, 5], [5, 517, 518], [1199], list(range(1200))], ids=str)
def test_a_check_records_the_first_bad_index_of_a_call_if_the_record_is_empty(backend, dtype, bad) -> None:
    with running_on(backend):
        assert_the_first_is_recorded(bad, dtype)


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
        layer = TransformerEmbedding(6, 4, 5, dropout, scale=2.0, init_std=1.0).to(torch.empty(0).device)
        ids, v, leaves = torch.randint(6, (2, 5)), torch.randn(2, 5, 4), list(layer.parameters())
        ids[1, 2] = 7

        def derivatives(y: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            first = torch.autograd.grad((y.square() * v.to(y.dtype)).sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
            return [each.double() for each in (*first, *second)]

        y = layer(ids)
        weight, positions = wide = [each.detach().double().requires_grad_() for each in leaves]
        exact = (2.0 * rows_of(weight, ids) + positions) * (y != 0).double() / (1 - dropout)
        torch.testing.assert_close(derivatives(y, leaves), derivatives(exact, wide), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0,)])
def test_no_tokens_launch_nothing_and_give_zero_gradients(backend, shape) -> None:
    with running_on(backend):
        layer = TransformerEmbedding(20, 8, 6, 0.5).to(torch.empty(0).device)
        with launched_kernels() as names:
            y = layer(torch.empty(shape, dtype=torch.int64))
            y.sum().backward()
        assert not set(names) - {"statistics_factors"}  # which is compiled to see whether anything can be
        assert y.shape == (*shape, 8)
        assert layer.table.weight.grad.eq(0).all()


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_expanded_gradients_and_frozen_rows_are_taken(backend) -> None:
    with running_on(backend):
        layer = TransformerEmbedding(20, 8, 6, 0.0, scale=None).to(torch.empty(0).device)
        layer.table.requires_grad_(False)
        layer(torch.randint(20, (3, 6))).sum().backward()
        assert torch.equal(layer.position.weight.grad, torch.full((6, 8), 3.0))


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize(
    "kind",
    some(["learned, offset", "sinusoidal"], ["learned", "learned, offset", "sinusoidal", "sinusoidal, factor"]),
)
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


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind", ["table", "rotary layer"])
def test_a_scaled_table_is_looked_up_in_one_launch(backend, rounded, kind) -> None:
    table = TokenEmbedding(20, 24, scale="sqrt_dim", round_scale=rounded, padding_idx=3, dtype=torch.bfloat16)
    layer = table if kind == "table" else TransformerEmbedding(20, 24, 8, position="rotary", num_heads=4, table=table)
    ids, grad = torch.randint(20, (2, 6)), torch.randn(2, 6, 24).bfloat16()
    expected = layer.eval()(ids)
    expected.backward(grad)
    right, table.weight.grad = table.weight.grad, None
    with running_on(backend):
        device = torch.empty(0).device
        layer, ids, grad = layer.to(device), ids.to(device), grad.to(device)
        layer(ids)  # compiles a kernel to see whether any can be
        with launched_kernels() as names:
            y = layer(ids)
        assert names == ["gather_scale_add_drop"]
        slack = 0.0 if backend == "cuda" else 2**-7  # the interpreter rounds to bfloat16 towards zero
        torch.testing.assert_close(y.cpu(), expected, rtol=slack, atol=0.0)
        y.backward(grad)
        torch.testing.assert_close(table.weight.grad.cpu(), right)


MASKS = {
    "padding left and right": [[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]],
    "documents with gaps": [[1, 0, 2, 2], [2, 2, 0, 5], [0, 3, 0, 3], [1, 2, 3, 4]],
}


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("dtype, name", [torch.int64, torch.int32, torch.bool], MASKS)
def test_positions_of_a_mask_are_those_of_the_definition(backend, dtype, name) -> None:
    blocks = operation_of("positions_of_mask").gpu()["positions_of_mask"].blocks
    with running_on(backend), patch.dict(blocks, SIZE=blocks["SIZE"] if backend == "cuda" else 4):
        mask = torch.tensor(MASKS[name]).to(dtype)
        several_blocks = mask.repeat_interleave(300 if backend == "cuda" else 3, dim=1)
        for each in (mask, mask[0], mask.T.contiguous().T, mask[:, 1:], several_blocks):
            found = positions_of(each.long(), each, offset=3, padding_position=7)
            with kernels_disabled():
                assert torch.equal(found, positions_of(each.long(), each, offset=3, padding_position=7))


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


def test_rows_beyond_2_to_31_numbers_are_read_and_written(tmp_path) -> None:
    pytest.importorskip("triton")
    assert_rows_beyond_2_to_31_are_read(tmp_path)


@cases("width, added", [8, 1024, 1040], [False, True])
def test_little_more_than_rows_and_vectors_is_read_and_written(width, added) -> None:
    layer = TransformerEmbedding(ROWS, width, 3, 0.1, scale=2.0, position="learned" if added else "none")
    ids = torch.randint(ROWS, (2, 3))
    with running_on("triton"), interpreted() as run:
        y = layer(ids)
    seen = run.launches[-1]
    parts = -(-width // (4 * operation_of("positions_of_mask").gpu()["gather_scale_add_drop"].blocks["WORDS"]))
    assert seen.written == {"out": y.nbytes, "kept_ids": ids.nbytes}
    assert seen.read == {"x": y.nbytes, "ids": parts * ids.nbytes, **({"addend": y.nbytes} if added else {})}


def test_a_float64_table_on_cuda_is_looked_up_by_plain_operators() -> None:
    with running_on("triton"):
        table, ids = TokenEmbedding(10, 4, dtype=torch.float64), torch.tensor([[1, 11]])
        assert table.stored(ids) is None
        assert torch.equal(table(ids)[0], torch.stack([table.weight[1], torch.zeros(4, dtype=torch.float64)]))
        with pytest.raises(TokenIdError, match="token id 11 at row 0, column 1"):
            table.check()


def test_a_compiled_layer_on_cuda_is_one_graph_of_plain_operators_and_records_the_same() -> None:
    with running_on("triton"):
        layer, ids = TransformerEmbedding(20, 8, 6, 0.0), torch.tensor([[1, 2, 3], [4, 25, 19]])
        mask = torch.tensor([[0, 1, 1], [1, 2, 2]])
        expected = layer(ids, attention_mask=mask)
        record = layer.table.index_check.first_bad_index.clone()
        layer.table.index_check.first_bad_index.fill_(-1)
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        with launched_kernels() as names:
            torch.testing.assert_close(compiled(ids, attention_mask=mask), expected)
        assert torch.equal(layer.table.index_check.first_bad_index, record)
        assert record.tolist() == [4, 25, 3]
        assert not names


def test_fake_tensors_on_cuda_are_looked_up_in_one_launch() -> None:
    pytest.importorskip("triton")

    with FakeTensorMode(), torch.device("cuda"), launched_kernels() as names:
        layer = TransformerEmbedding(20, 8, 6, 0.1).requires_grad_(False)  # torch for CPUs has no gradients on CUDA
        ids = torch.zeros(2, 3, dtype=torch.int64)
        y = layer(ids, attention_mask=torch.ones_like(ids))
    assert y.shape == (2, 3, 8)
    assert names == ["positions_of_mask", "gather_scale_add_drop"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reads_rows_beyond_2_to_31_numbers_and_writes_as_many() -> None:
    width, rows = 1032, 2**31 // 1032 + 9
    with torch.device("cuda"), torch.no_grad():
        table = TokenEmbedding(rows, width, dtype=torch.bfloat16)
        ids = torch.zeros(rows, dtype=torch.int64)
        ids[-3:] = torch.tensor([rows - 1, rows - 3, rows])
        vectors = table(ids)
        assert torch.equal(vectors[-3:-1], table.weight[ids[-3:-1]])
        assert not vectors[-1].any()
        with pytest.raises(TokenIdError, match=f"token id {rows} at row 0, column {rows - 1}"):
            table.check()
