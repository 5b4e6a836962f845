"""Tables and heads under torch's own `fully_shard`."""

import torch
import torch.distributed as dist
from processes import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from embedlayer import OutputHead, TokenEmbedding
from embedlayer.distributed.fsdp import register_fsdp_methods

V, D = 23, 6


def model_of() -> nn.ModuleDict:
    torch.manual_seed(0)
    head = OutputHead(vocab_size=V, embed_dim=D, bias=True)
    return nn.ModuleDict({"table": TokenEmbedding(V, D, padding_idx=0), "mixing": nn.Linear(D, D), "head": head})


def losses(model: nn.ModuleDict, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = model["mixing"](model["table"](ids))
    return model["head"].loss(hidden, targets) + model["table"].loss(hidden, targets)


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, V, (2, 8), generator=torch.Generator().manual_seed(rank)).unbind(0)


def sharded() -> list[torch.Tensor]:
    model, mesh = model_of(), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in model.values():
        fully_shard(part, mesh=mesh)
    register_fsdp_methods(model)
    loss = losses(model, *batch(dist.get_rank()))
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return [loss.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)]


def test_losses_and_gradients_are_those_of_the_whole_model() -> None:
    results = on_ranks(2, sharded)
    model = model_of()
    each = [losses(model, *batch(rank)) for rank in range(2)]
    (sum(each) / 2).backward()
    for rank, (loss, *gradients) in enumerate(results):
        assert torch.allclose(loss, each[rank], rtol=1e-5)
        for ours, parameter in zip(gradients, model.parameters(), strict=True):
            assert torch.allclose(ours, parameter.grad, rtol=1e-4, atol=1e-6)
