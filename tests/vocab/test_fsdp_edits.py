"""Edits of models whose parameters are DTensors, by `fully_shard` or by hand, compared with edits of whole models."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import PRELOADED, on_ranks
from sharded_tensors import assert_same, edit_both, full, state_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from vocab_models import interrupt_sets

import embedlayer as el
from embedlayer.distributed import register_fsdp_methods
from embedlayer.kernels import kernels_disabled
from embedlayer.vocab import MeanNoiseInit, RandomInit, add_tokens, edit_vocabulary

PRELOADED += ["embedlayer.vocab.operations", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
PRELOADED.append("transformers.models.llama.modeling_llama")

V, D = 29, 4
IS_OLD = tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 11)  # where a group of several modules is refused
EDITS: dict[str, dict[str, Any]] = {
    "rows added and removed": {"add": 6, "remove": [1, 9, 28], "init": MeanNoiseInit(), "init_head": RandomInit()},
    "as many rows": {"add": 2, "remove": [7, 28]},
    "fewer rows": {"keep": range(0, 28, 2)},
}


def decoder(*, padded: bool = False, tied: bool = True) -> el.DecoderLM:
    table = el.TokenEmbedding(V, D, padding_idx=3, pad_to_multiple_of=8 if padded else None)
    head = el.OutputHead(table, bias=True) if tied else el.OutputHead(vocab_size=V, embed_dim=D, bias=True)
    return el.DecoderLM(table, el.RotaryEmbedding(2), head, num_layers=1, num_heads=2)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": D, "intermediate_size": D}
    config = LlamaConfig(vocab_size=V, **sizes, pad_token_id=3, tie_word_embeddings=False, bos_token_id=5)
    return el.patch(LlamaForCausalLM(config))


def table_alone(model: Any) -> list[Any]:
    ends = [model.model.norm, model.lm_head]
    return [model.model.embed_tokens, *(ends if IS_OLD else [ends]), *model.model.layers, model]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], list[Any]]]] = {
    "tied, padding rows": (lambda: decoder(padded=True), lambda model: [*model.blocks, model]),
    "transformers, table and head by themselves": (llama, table_alone),
}


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
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
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
        for name in [*EDITS][: 2 if number == 0 else 1]:
            case = f"{kind}, {name}:"
            assert_same(state_of(model, optimizer), state_of(whole, its), case)
            edit_both((model, whole), (optimizer, its), EDITS[name], case)
            assert torch.equal(logits_of(model), logits_of(whole)), case
            train(model, optimizer)
            train(whole, its)
            assert_same(state_of(model, optimizer), state_of(whole, its), case)


def rowwise(table: el.TokenEmbedding, mesh: DeviceMesh) -> None:
    parallelize_module(table, mesh, RowwiseParallel(input_layouts=Replicate()))


def by_rows(table: el.TokenEmbedding, mesh: DeviceMesh) -> None:
    table.weight = nn.Parameter(distribute_tensor(table.weight, mesh, [Shard(0)]))


def replicated(table: el.TokenEmbedding, mesh: DeviceMesh) -> None:
    table.weight = nn.Parameter(distribute_tensor(table.weight, mesh))


def edits_of_dtensors() -> None:
    for shard in (rowwise, by_rows, replicated):
        torch.manual_seed(0)
        whole = decoder(padded=True).table
        table = copy.deepcopy(whole)
        shard(table, init_device_mesh("cpu", (2,)))
        for options in [*EDITS.values()][: 3 if shard is rowwise else 1]:
            edit_both((table, whole), (None, None), options)
        ids = torch.arange(whole.vocab_size)
        assert shard is not rowwise or torch.equal(table(ids), whole(ids))


def refusals() -> list[tuple[str, str]]:
    rank, found = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = made("tied, padding rows", sharded=True)
    summed, plain = el.TokenEmbedding(V, D), el.TokenEmbedding(V, D)
    summed.weight = nn.Parameter(DTensor.from_local(summed.weight.detach(), mesh, [Partial()]))
    by_rows(plain, mesh)
    loss = plain.weight.square().sum()
    unpatched = el.unpatch(llama())
    fully_shard(unpatched.model.layers[0], mesh=mesh)

    def with_a_failing_step(**options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_sets(patch, 1)
            edit_vocabulary(model, **options, optimizer=optimizer)

    def with_unreduced_gradients() -> None:
        model.set_requires_gradient_sync(False)
        loss_of(model).backward()
        edit_vocabulary(model, remove=[1])

    before = state_of(model, optimizer, is_whole=False)
    for error, refused in [
        (KeyboardInterrupt, lambda: with_a_failing_step(add=9)),
        (KeyboardInterrupt, lambda: with_a_failing_step(remove=[5])),  # as many rows as before, written in place
        (el.SizeError, lambda: edit_vocabulary(model.table, add=1)),
        (el.SizeError, lambda: add_tokens(model, 1, optimizer=None, train_only_new=True)),
        (el.CheckpointError, lambda: el.patch(unpatched)),
        (el.SizeError, lambda: edit_vocabulary(summed, add=1)),
        (el.SizeError, lambda: edit_vocabulary(plain, add=1)),  # a graph refers to its weight
        (el.SizeError, lambda: edit_vocabulary(plain, keep=[1])),
        (el.TokenIdError, lambda: edit_vocabulary(model, remove=[3], optimizer=optimizer)),
        (el.PeerError, lambda: edit_vocabulary(model, remove=[5 + rank])),
        (el.EmbedLayerError, lambda: edit_vocabulary(model, remove=[V if rank else 5])),
        (el.SizeError, with_unreduced_gradients),
    ]:
        with pytest.raises(error) as caught:
            refused()
        found.append((type(caught.value).__name__, str(caught.value)))
        assert_same(state_of(model, optimizer, is_whole=False), before, found[-1][1])
    model.set_requires_gradient_sync(True)
    train(model, optimizer)
    del loss
    edit_vocabulary(plain, add=1)
    return found


def losses_before_an_edit() -> None:
    for name, options in [*EDITS.items()][:2]:
        model, optimizer = made("tied, padding rows", sharded=True)
        loss = loss_of(model)
        edit_vocabulary(model, **options, optimizer=optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        if IS_OLD:  # which cannot train on after a failed backward pass
            continue
        model.reset_iter_state()
        train(model, optimizer)
        assert all(full(parameter).isfinite().all() for parameter in model.parameters()), name


def groups_of_modules() -> None:
    model = decoder(tied=False)
    fully_shard([model.norm, model.head])
    if IS_OLD:
        with pytest.raises(el.VersionError, match=r"of a group of modules.* crashes: shard each module by itself"):
            register_fsdp_methods(model)
    else:
        register_fsdp_methods(model)


def all_laws() -> list[tuple[str, str]]:
    with kernels_disabled():  # importing numba takes longer than most of this
        groups_of_modules()
        edits_under_fsdp()
        edits_of_dtensors()
        losses_before_an_edit()
        return refusals()


def test_edits_of_dtensors_are_those_of_the_whole_model_or_change_nothing() -> None:
    found = on_ranks(2, all_laws)
    assert [error for error, _ in found[0][-3:]] == ["PeerError", "PeerError", "SizeError"]
    assert [one == other for one, other in zip(*found, strict=True)].index(False) == len(found[0]) - 2
