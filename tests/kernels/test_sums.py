"""The kernel of the sums of K streams on CUDA, compared with the definition on the CPU."""

import pytest
import torch
from covering import cases
from kernel_paths import GPU_BACKENDS, launched_kernels, running_on

from embedlayer import TokenEmbedding, TokenIdError
from embedlayer.kernels import kernels_disabled
from embedlayer.tables import StreamTable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (5, 9, 1, 7)

pytestmark = pytest.mark.usefixtures("unchecked")


def some_ids(*shape: int) -> torch.Tensor:
    return torch.stack([torch.randint(size, shape) for size in SIZES], -1)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@cases("dtype, width, shape, count, shared, padding_idx", DTYPES, [7, 8, 1032], [(2, 3), (6,), ()], [None, 1, 3],
       [False, True], [None, 6], pairs=["shape, shared"])  # fmt: skip
def test_sums_have_the_bits_of_the_definition_and_one_gradient_of_the_rows(
    backend, dtype, width, shape, count, shared, padding_idx
) -> None:
    with running_on(backend):
        device = torch.empty(0).device
        rows = TokenEmbedding(sum(SIZES) + shared, width, padding_idx, scale=3.0, dtype=dtype).to(device)
        table = StreamTable(rows, SIZES, shared_padding_idx=sum(SIZES) if shared else None).to(device)
        ids = some_ids(*shape)
        if shared:
            ids[..., 1] = sum(SIZES)
        table(ids)  # the first launch of a process is a trial
        with launched_kernels() as names:
            sums = table(ids, streams=count)
        assert names == ["sum_streams"]
        upstream = torch.randint(-2, 3, sums.shape).to(dtype)  # of which each sum is exact
        sums.backward(upstream)
        by_kernel, rows.weight.grad = rows.weight.grad, None
        with kernels_disabled():
            expected = table(ids, streams=count)
            shifted = torch.where(ids == sum(SIZES), ids, ids + table.offsets)[..., :count]
            first, *others = rows.look_up(shifted).unbind(-2)
            assert torch.equal(sums, 3.0 * sum(others, first))
            expected.backward(upstream)
        assert torch.equal(by_kernel, rows.weight.grad)
        assert padding_idx is None or not by_kernel[padding_idx].any()


@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({(0, 1, 1): 9, (1, 0, 0): -1}, "token id 9 at row 0, column 1, stream 1"),
        ({(1, 2, 0): 5, (1, 2, 1): 20}, "token id 5 at row 1, column 2, stream 0"),
        ({(1, 0, 1): -3, (0, 1, 3): 7}, None),
    ],
)
def test_a_bad_id_adds_nothing_and_the_first_of_a_summed_stream_is_recorded(backend, count, bad, message) -> None:
    with running_on(backend):
        device = torch.empty(0).device
        table = StreamTable(TokenEmbedding(sum(SIZES), 8).to(device), SIZES).to(device)
        ids, is_bad = some_ids(2, 3), torch.zeros(2, 3, 4, dtype=torch.bool)
        good = ids + table.offsets
        for place, value in bad.items():
            ids[place], is_bad[place] = value, True
        vectors = table.rows.weight.detach()[good].masked_fill(is_bad.unsqueeze(-1), 0)[..., :count, :]
        sums = table(ids, streams=count)
        torch.testing.assert_close(sums, vectors.sum(-2))
        sums.sum().backward()
        counts = good[..., :count][~is_bad[..., :count]].bincount(minlength=sum(SIZES))
        assert torch.equal(table.rows.weight.grad[:, 0], counts.float())
        first = message or ("row 1, column 0, stream 1" if count else "token id 7 at row 0, column 1, stream 3")
        with pytest.raises(TokenIdError, match=first):
            table.check()
        table.check()


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_second_derivatives_and_sums_of_one_table(backend) -> None:
    with running_on(backend):
        table, ids = TokenEmbedding(12, 8).to(torch.empty(0).device), torch.randint(12, (5, 3))
        torch.testing.assert_close(table.summed(ids), table.look_up(ids).sum(-2))

        def squares() -> torch.Tensor:
            first = torch.autograd.grad(table.summed(ids).pow(3).sum(), table.weight, create_graph=True)[0]
            return torch.autograd.grad(first.square().sum(), table.weight)[0]

        by_kernel = squares()
        with kernels_disabled():
            torch.testing.assert_close(by_kernel, squares())
