"""Shares of a sequence on the ranks of a group: what they exchange, torch's shares, and a decoder trained on them."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import SECONDS, started, torchrun
from releases import has, skip_without
from together import together
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import embedlayer as el
from embedlayer.distributed import exchange_halo, gather_shares, halo_rows, share_of

ROOT = Path(__file__).resolve().parents[2]
ORDERS: tuple[Any, ...] = ("contiguous", "zigzag")
X = torch.randn(2, 32, 3, generator=torch.Generator().manual_seed(0))


def weights(rank: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def exchanged() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for order in ORDERS:
        chunk = 32 // ranks // (2 if order == "zigzag" else 1)
        for halo in (0, 1, chunk):
            whole, part = X.clone().requires_grad_(), share_of(X, rank, ranks, order=order, dim=1).clone()
            part.requires_grad_()
            rows = exchange_halo(part, halo=halo, order=order, fill=7)
            expected = [halo_rows(whole, each, ranks, halo=halo, order=order, fill=7) for each in range(ranks)]
            assert torch.equal(rows, expected[rank])
            (rows * weights(rank, rows.shape)).sum().backward()
            torch.stack(
                [(each * weights(number, each.shape)).sum() for number, each in enumerate(expected)]
            ).sum().backward()
            assert part.grad is not None
            assert whole.grad is not None
            torch.testing.assert_close(part.grad, share_of(whole.grad, rank, ranks, order=order, dim=1))
            ids = share_of(torch.arange(64).view(2, 32), rank, ranks, order=order)
            expected_ids = halo_rows(torch.arange(64).view(2, 32), rank, ranks, halo=halo, order=order)
            assert torch.equal(exchange_halo(ids, halo=halo, order=order), expected_ids)
        with pytest.raises(el.SizeError, match=f"at most the {chunk} of a chunk, not {chunk + 1}"):
            exchange_halo(part, halo=chunk + 1, order=order)
        part.grad = None
        gathered = gather_shares(part, order=order, dim=1)
        assert torch.equal(gathered, X)
        (gathered * weights(rank, X.shape)).sum().backward()
        total = torch.stack([weights(number, X.shape) for number in range(ranks)]).sum(0)
        torch.testing.assert_close(part.grad, share_of(total, rank, ranks, order=order, dim=1))


def shares_of_torch() -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _context_parallel_shard, _HeadTailLoadBalancer

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh, ids, hidden = init_device_mesh("cpu", (ranks,)), torch.arange(64).view(2, 32), X.clone()
    buffers, balancer = [ids.clone(), hidden.clone()], _HeadTailLoadBalancer(32, ranks, "cpu")
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1]):
        default = [buffer.clone() for buffer in buffers]
    balanced = _context_parallel_shard(mesh, [ids, hidden], [1, 1], balancer)
    plain = _context_parallel_shard(mesh, [ids, hidden], [1, 1])
    for order, theirs in (("zigzag", default), ("zigzag", balanced), ("contiguous", plain)):
        for x, part in zip((ids, hidden), theirs, strict=True):
            assert torch.equal(share_of(x, rank, ranks, order=order, dim=1), part)


def example() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / "context_parallel.py"), run_name="example")


def differences() -> list[float]:
    """The largest difference of a trained decoder from one on whole sequences, and of the first loss in float32."""
    names = example()
    torch.manual_seed(0)
    whole = names["build"](257).float()
    ids = torch.randint(0, 257, (2, 48))
    documents = (1 + (torch.arange(48) > 13).long() + (torch.arange(48) > 14).long()).expand(2, 48)
    targets = ids.where(torch.arange(48) % 3 > 0, -100)
    expected = whole.loss(ids, targets, attention_mask=documents).detach()
    whole.injections[0] = names["GatedOverRanks"](whole.injections[0])
    loss = names["loss_of_share"](whole, ids, targets, documents).detach()
    dist.all_reduce(loss)
    return [names["train"](), float((loss - expected).abs() / expected)]


BALANCER = "torch.distributed.tensor.experimental._attention:_HeadTailLoadBalancer"
CALLS = ((exchanged,), (differences,), *([(shares_of_torch,)] if has(BALANCER) else []))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_what_ranks_exchange_is_that_of_the_whole_with_its_gradients(ranks) -> None:
    together(ranks, CALLS, (exchanged,))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_share_has_the_tokens_that_context_parallel_of_torch_gives_the_rank(ranks) -> None:
    skip_without(BALANCER)
    together(ranks, CALLS, (shares_of_torch,))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_decoder_trained_on_shares_equals_one_trained_on_whole_sequences(ranks) -> None:
    for trained, loss in together(ranks, CALLS, (differences,)):
        assert trained < 1e-12
        assert loss < 1e-6


@pytest.mark.long
def test_the_example_runs_under_torchrun() -> None:
    with started(*torchrun(2), ROOT / "examples" / "context_parallel.py") as process:
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    assert output.count("loss of whole sequences") == 3
