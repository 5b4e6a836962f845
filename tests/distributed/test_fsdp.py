"""Modules of embedlayer with torch's `fully_shard`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import LONG
from processes import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from embedlayer import DecoderLM, DeltaEmbedding, EmbeddingLayer, OutputHead, TokenEmbedding, TransformerEmbedding
from embedlayer.distributed import register_fsdp_methods
from embedlayer.heads.prediction import PredictionHead

V, D, T = 23, 8, 6


class Case(NamedTuple):
    """A model, its parts that are sharded one by one, and its trained parameters."""

    make: Callable[[], nn.Module]
    parts: Callable[[Any], list[nn.Module]]
    loss: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def separate() -> nn.ModuleDict:
    head = OutputHead(vocab_size=V, embed_dim=D, bias=True)
    return nn.ModuleDict({"table": TokenEmbedding(V, D, padding_idx=0), "mixing": nn.Linear(D, D), "head": head})


def losses(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = model["mixing"](model["table"](ids))
    return model["head"].loss(hidden, targets) - model["table"].token_log_probs(hidden, targets).mean()


def position_named(name: str) -> nn.Module:
    return input_embedding(name).position


def decoder(position: str, tied: bool = True) -> DecoderLM:
    table = TokenEmbedding(V, D, padding_idx=0, scale="sqrt_dim")
    head = OutputHead(table, bias=True) if tied else OutputHead(vocab_size=V, embed_dim=D)
    return DecoderLM(table, position_named(position), head, num_layers=2, num_heads=2)


def whole(model: nn.Module) -> list[nn.Module]:
    return [model]


def by_parts(model: DecoderLM) -> list[nn.Module]:
    return [model.table, model.position, *model.blocks, model.head, model]


def loss_of_model(model: DecoderLM, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model.loss(ids, targets) + model(ids).square().mean() + model.hidden(ids[0])[:, 0].mean()


def two_ends() -> EmbeddingLayer:
    table = TokenEmbedding(V, D)
    head = PredictionHead(OutputHead(table), dense=nn.Linear(D, D), activation="gelu")
    return EmbeddingLayer(table, position_named("learned"), head, recipe=("position", "norm"), norm=nn.LayerNorm(D))


def loss_of_ends(layer: EmbeddingLayer, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    hidden = layer.input(ids)
    return layer.head.loss(hidden, targets) + layer.head.transform(hidden).square().mean()


def delta() -> nn.ModuleDict:
    return nn.ModuleDict({"table": DeltaEmbedding(TokenEmbedding(V, D), [3, 5, 8])})


def input_embedding(position: str) -> TransformerEmbedding:
    return TransformerEmbedding(V, D, T, 0.0, position=position, num_heads=2)


def loss_of_input(layer: TransformerEmbedding, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return layer.table.loss(layer(ids), targets) + layer.table.rows(2, 5).square().sum()


CASES = {
    "table and head": Case(separate, lambda model: [*model.values()], losses),
    "both ends": Case(two_ends, lambda layer: [layer.table, layer.position, layer.head, layer], loss_of_ends),
    "delta": Case(
        delta,
        lambda model: [model["table"].base, model["table"]],
        lambda model, ids, targets: model["table"].loss(model["table"](ids), targets),
    ),
}
for position in ("learned", "sinusoidal", "scaled-sinusoidal", "rotary", "relative"):
    CASES[f"decoder, {position}"] = Case(lambda p=position: decoder(p), whole, loss_of_model)
    CASES[f"decoder by parts, {position}"] = Case(lambda p=position: decoder(p), by_parts, loss_of_model)
    CASES[f"way in, {position}"] = Case(
        lambda p=position: input_embedding(p), lambda layer: [layer.table, layer.position, layer], loss_of_input
    )
CASES["decoder by parts, untied head"] = Case(lambda: decoder("rotary", tied=False), by_parts, loss_of_model)
ALWAYS = (
    *("table and head", "both ends", "delta", "decoder, learned", "decoder by parts, relative"),
    *("decoder by parts, untied head", "way in, learned", "way in, scaled-sinusoidal"),
)


def create(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, targets = torch.randint(0, V, (2, 2, T), generator=torch.Generator().manual_seed(rank))
    return ids, targets


def evaluated(case: Case, model: nn.Module, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return case.loss(model.eval(), *batch(rank))


def sharded(names: list[str]) -> dict[str, list[torch.Tensor | None]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name in names:
        case = CASES[name]
        model = create(case)
        for part in case.parts(model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        register_fsdp_methods(register_fsdp_methods(model))
        before = evaluated(case, model, dist.get_rank())
        loss = case.loss(model.train(), *batch(dist.get_rank()))
        loss.backward()
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        found[name] = [before, evaluated(case, model, dist.get_rank()), loss.detach(), *gradients]
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in CASES if name in ALWAYS], id="one of each"),
        pytest.param([name for name in CASES if name not in ALWAYS], id="the others", marks=LONG),
    ],
)
def test_losses_and_gradients_are_those_of_the_whole_model(names) -> None:
    results = on_ranks(2, sharded, names)
    for name in names:
        case = CASES[name]
        model = create(case)
        each = [case.loss(model, *batch(rank)) for rank in range(2)]
        (sum(each) / 2).backward()
        for rank, result in enumerate(results):
            *values, loss = result[name][:3]
            assert torch.allclose(loss, each[rank], rtol=1e-5), name
            for value in values:
                assert torch.allclose(value, evaluated(case, model, rank), rtol=1e-5), name
            for ours, parameter in zip(result[name][3:], model.parameters(), strict=True):
                theirs = parameter.grad
                assert (ours is None) == (theirs is None), name
                assert theirs is None or torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), name


def reset_after_meta() -> tuple[torch.Tensor, torch.Tensor]:
    """Initialise in FSDP's order: on the meta device, sharded, `to_empty`, then `reset_parameters` of every module."""
    with torch.device("meta"):
        table = TokenEmbedding(V, D, padding_idx=3, pad_to_multiple_of=8, init_std=1.0)
        model = DecoderLM(table, position_named("learned"), num_layers=1, num_heads=2)
    for part in by_parts(model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(parameter.full_tensor().isfinite().all() for parameter in model.parameters())
    return model.table.weight.full_tensor(), model.blocks[0].mlp.down.weight.full_tensor()


def test_reset_after_the_meta_device_zeroes_padding_and_spare_rows_on_every_rank() -> None:
    with torch.device("meta"):
        down = DecoderLM(TokenEmbedding(V, D), position_named("learned"), num_layers=1, num_heads=2).blocks[0].mlp.down
    for weight, found in on_ranks(2, reset_after_meta):
        assert weight.shape == (24, D)
        assert weight.eq(0).all(dim=1).nonzero().flatten().tolist() == [3, 23]
        assert 0.8 < weight[:V].std() < 1.2
        assert 0.8 < found.std() / down.init_std < 1.2
