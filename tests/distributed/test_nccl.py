"""Sharded tables and wrapped models on GPUs, with NCCL."""

import json
from pydoc_data.topics import topics

import pytest
import torch
import torch.distributed as dist
from launches import SECONDS, SIZES, TRAIN, assert_same_run, started, torchrun, unlucky
from processes import on_ranks
from sharded_tensors import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from embedlayer import DecoderLM, RotaryEmbedding, TokenEmbedding, TokenIdError, clip_grad_norm_
from embedlayer.distributed import shard_table

DEVICE = "cuda"
BOTH = "cpu:gloo,cuda:nccl"
V, D = 23, 6

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def ranks_of(count: int) -> int:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")
    return count


def whole() -> TokenEmbedding:
    torch.manual_seed(0)
    return TokenEmbedding(V, D, padding_idx=2, scale=1.5, init_std=0.5, dtype=torch.float64)


def results_of(table, hidden, ids) -> list[torch.Tensor]:
    """Return vectors, loss, logits, the norm of the gradients before clipping, and the clipped gradient."""
    vectors = table(ids)
    loss = table.loss(hidden, ids)
    (vectors.sum() + loss).backward()
    logits, rows = table.logits(hidden), table.rows(3, 9)
    norm = clip_grad_norm_(table.parameters(), 0.1)
    return [each.detach().cpu() for each in (vectors, loss, logits, rows, norm, table.weight.grad)]


def sharded(ids: torch.Tensor, hidden: torch.Tensor) -> list[torch.Tensor]:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    of_cpu, of_gpu = shard_table(whole(), mesh).to(DEVICE), shard_table(whole().to(DEVICE), mesh)
    found = results_of(of_cpu, hidden.to(DEVICE), ids.to(DEVICE))
    again = results_of(of_gpu, hidden.to(DEVICE), ids.to(DEVICE))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
    of_gpu.weight.grad = None  # a frozen table has none, and its ranks agree on that
    assert clip_grad_norm_(of_gpu.parameters(), 1.0) == 0
    if DEVICE == "cuda":
        assert of_gpu(torch.tensor([V], device=DEVICE)).eq(0).all()
        with pytest.raises(TokenIdError, match=f"token id {V} at row 0, column 0"):
            of_gpu.check()
    return found


@pytest.mark.parametrize("backend", ["nccl", BOTH])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_table_sharded_among_gpus_is_the_whole_one(ranks, backend) -> None:
    ids = torch.randint(0, V, (2, 5), generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(2, 5, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = results_of(whole(), hidden, ids)
    results = on_ranks(ranks_of(ranks), sharded, ids, hidden, backend=backend)
    for found in results:
        for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
            assert torch.allclose(ours, theirs)
    assert torch.allclose(torch.cat([found[-1] for found in results]), expected[-1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_gpus_is_that_of_one_process_and_goes_on_after_an_accident(ranks, tmp_path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(topics[name] for name in sorted(topics))[:30_000])
    arguments = [tmp_path / "text.txt", *SIZES, "--steps", 8, "--device", DEVICE, "--precision", "float32"]
    with started(*TRAIN, *arguments, "-o", tmp_path / "alone") as process:
        assert process.wait(SECONDS) == 0, process.stderr.read()
    command, environment = unlucky(arguments, tmp_path / "many", [[ranks_of(ranks) - 1, "step", 5]])
    with started(*torchrun(ranks, restarts=1), *command, **environment) as process:
        said, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
        assert "Continuing at step 4" in said
    assert json.loads((tmp_path / "many.json").read_text()) == []
    assert_same_run(tmp_path / "many", tmp_path / "alone")


def with_both_ends() -> nn.Module:
    torch.manual_seed(0)
    table = TokenEmbedding(V, 8, padding_idx=2)
    return DecoderLM(table, RotaryEmbedding(4), num_layers=1, num_heads=2).double()


def trained_by(wrapper: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the weights after two steps of SGD on the loss of a wrapped model, by their names."""
    model = with_both_ends().to(DEVICE)
    wrapped = DistributedDataParallel(model, device_ids=[0]) if wrapper == "DDP" else fully_shard(model)
    return after_two_steps(wrapped, model, ids.to(DEVICE))


def after_two_steps(called: nn.Module, model: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        called(ids).logsumexp(-1).mean().backward()
        optimizer.step()
    return {name: full(each).cpu() for name, each in model.named_parameters()}


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_a_wrapped_model_on_one_gpu_trains_as_a_plain_one(wrapper) -> None:
    ids = torch.randint(3, V, (2, 5), generator=torch.Generator().manual_seed(1))
    model = with_both_ends()
    expected = after_two_steps(model, model, ids)
    (found,) = on_ranks(1, trained_by, wrapper, ids, backend="nccl")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, msg=name)
