"""Edits of models whose parameters are DTensors, by `fully_shard` or by hand, compared with edits of whole models."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import embedlayer as el
from embedlayer.distributed import fsdp, register_fsdp_methods
from embedlayer.vocab import MeanNoiseInit, RandomInit, edit_vocabulary

V, D = 29, 4
EDITS: dict[str, dict[str, Any]] = {
    "rows added and removed": {"add": 6, "remove": [1, 9, 28], "init": MeanNoiseInit(), "init_head": RandomInit()},
    "as many rows": {"add": 2, "remove": [7, 28]},
    "fewer rows": {"keep": range(0, 28, 2)},
}


def decoder(*, padded: bool = False, tied: bool = True) -> el.DecoderLM:
    table = el.TokenEmbedding(V, D, padding_idx=3, pad_to_multiple_of=8 if padded else None)
    head = el.OutputHead(table, bias=True) if tied else el.OutputHead(vocab_size=V, embed_dim=D, bias=True)
    return el.DecoderLM(table, el.RotaryEmbedding(2), head, num_layers=1, num_heads=2)


def llama(*, tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": D, "intermediate_size": D}
    config = LlamaConfig(vocab_size=V, **sizes, pad_token_id=3, tie_word_embeddings=tied, bos_token_id=5)
    return el.patch(LlamaForCausalLM(config))


def whole_model(model: nn.Module) -> list[Any]:
    return [*(model.blocks if isinstance(model, el.DecoderLM) else model.model.layers), model]


def table_alone(model: nn.Module) -> list[Any]:
    if isinstance(model, el.DecoderLM):
        return [model.table, *([] if model.head.tied else [[model.norm, model.head]]), *whole_model(model)]
    return [model.model.embed_tokens, [model.model.norm, model.lm_head], *whole_model(model)]


MODELS = {
    "tied": (decoder, whole_model),
    "tied, padding rows": (lambda: decoder(padded=True), whole_model),
    "tied, table by itself": (decoder, table_alone),
    "untied, table and head by themselves": (lambda: decoder(tied=False), table_alone),
    "untied, padding rows": (lambda: decoder(tied=False, padded=True), whole_model),
    "transformers, tied": (lambda: llama(tied=True), whole_model),
    "transformers, table and head by themselves": (lambda: llama(tied=False), table_alone),
}


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors of parameters, gradients and moments, and all sizes."""
    fsdp.fsdp_parameters(model)  # shards what a call has gathered
    state = {}
    for name, parameter in model.named_parameters():
        moments = {} if optimizer is None else optimizer.state[parameter]
        state[name] = full(parameter)
        state |= {f"{name}.{key}": full(value) for key, value in {**moments, "grad": parameter.grad}.items()}
    for name, part in model.named_modules():
        sizes = [getattr(part, size, None) for size in ("vocab_size", "num_rows", "out_features", "padding_idx")]
        state[f"{name} sizes"] = torch.tensor([-1 if size is None else size for size in sizes])
    return state


def restored(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that undoing restores: not the gradients of removed rows."""
    return {name: tensor for name, tensor in state_of(model, optimizer).items() if "grad" not in name}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], case: str) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, msg=lambda text, name=name: f"{case} {name} {text}")


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(12).view(2, 6) + 2
    return model.loss(ids[:, :-1], ids[:, 1:]) if isinstance(model, el.DecoderLM) else model(ids, labels=ids).loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def made(kind: str, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    make, parts = MODELS[kind]
    torch.manual_seed(0)
    model = make()
    for part in parts(model) if sharded else ():
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    register_fsdp_methods(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    train(model, optimizer)
    return model, optimizer


def logits_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        found = model(ids)
        return torch.as_tensor(found if isinstance(model, el.DecoderLM) else found.logits[:])


def edits_under_fsdp() -> None:
    for number, kind in enumerate(MODELS):
        whole, its = made(kind, sharded=False)
        model, optimizer = made(kind, sharded=True)
        chosen = EDITS if number == 1 else [*EDITS][:2]
        for name in chosen:
            case = f"{kind}, {name}:"
            before = restored(model, optimizer)
            assert_same(state_of(model, optimizer), state_of(whole, its), case)
            parameters = list(model.parameters())
            torch.manual_seed(7)
            expected = edit_vocabulary(whole, **EDITS[name], optimizer=its)
            for again in range(2):
                torch.manual_seed(7 + dist.get_rank())  # rank 0's numbers count
                receipt = edit_vocabulary(model, **EDITS[name], optimizer=optimizer)
                assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
                assert receipt.origins == expected.origins
                if not again:
                    assert_same(state_of(model, optimizer), state_of(whole, its), case)
                    assert dropped_rows(receipt, expected)
                    receipt.undo(model, optimizer=optimizer)
                    assert_same(restored(model, optimizer), before, case)
            assert torch.equal(logits_of(model), logits_of(whole)), case
            for _ in range(2):
                train(model, optimizer)
                train(whole, its)
            assert_same(state_of(model, optimizer), state_of(whole, its), case)


def dropped_rows(receipt: Any, expected: Any) -> bool:
    """Whether the ranks together have the rows that one process has dropped."""
    for name, rows in expected.dropped_rows.items():
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, receipt.dropped_rows[name])
        found = [parts[0]] if "optimizer" not in name and len(parts[0]) == len(rows) else parts
        assert torch.equal(torch.cat(found), rows), name
    return bool(expected.dropped_rows)


def test_an_edit_under_fsdp_is_that_of_the_whole_model() -> None:
    on_ranks(2, edits_under_fsdp)
