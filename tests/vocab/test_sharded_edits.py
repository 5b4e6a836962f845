"""Edits of tables that are sharded over ranks, compared with the same edits of whole tables."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from processes import on_ranks
from sharded_tensors import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import embedlayer as el
from embedlayer.distributed import ShardedTable, shard_table, sharded_parameters
from embedlayer.vocab import (
    AuxiliaryVectors,
    CopyInit,
    FocusInit,
    MeanInit,
    MeanNoiseInit,
    OMPInit,
    RandomInit,
    VectorsInit,
    add_tokens,
    edit_vocabulary,
    remove_tokens,
    transplant,
    trim_vocabulary,
)

V, D = 29, 4
VECTORS = AuxiliaryVectors.from_tensors(
    range(0, 28, 2), torch.randn(14, 5, generator=torch.Generator().manual_seed(0)), ["#29"], torch.ones(1, 5)
)
EDITS = {
    "added": {"add": 9},
    "removed": {"remove": [0, 5, 6, 28]},
    "both": {"add": 3, "remove": [1, *range(9, 19)], "init": CopyInit(of=[7, 9, 20])},
    "turned around": {"order": range(V - 1, -1, -1)},
    "merged, drawn": {"merge": {4: 5}, "add": 2, "init": MeanNoiseInit(), "init_head": RandomInit(std=0.3)},
    "weighted": {"add": 2, "init": OMPInit(VECTORS, k=3), "init_head": FocusInit(VECTORS)},
    "given": {"add": 2, "init": VectorsInit(torch.arange(8.0).view(2, 4)), "init_head": MeanInit()},
}


def tied(table) -> nn.ModuleDict:
    made = nn.ModuleDict({"table": table, "head": el.OutputHead(table, bias=True)})
    nn.init.normal_(made["head"].bias)
    return made


def decoder(table, **options) -> el.DecoderLM:
    head = el.OutputHead(vocab_size=V, embed_dim=D, bias=True, **options)
    nn.init.normal_(head.bias)
    return el.DecoderLM(table, el.RotaryEmbedding(2), head, num_layers=1, num_heads=2)


MODELS = {
    "tied": lambda: tied(el.TokenEmbedding(V, D, padding_idx=2)),
    "factorised": lambda: tied(el.FactorizedEmbedding(V, 6, D, padding_idx=2)),
    "two tables": lambda: nn.ModuleDict({"table": el.TokenEmbedding(V, D), "rows": el.TokenEmbedding(V, D)}),
    "whole head": lambda: nn.ModuleDict(
        {"table": el.TokenEmbedding(V, D), "own": el.OutputHead(vocab_size=V, embed_dim=D, bias=True)}
    ),
    "free": lambda: decoder(el.RowSparseEmbedding(V, D, padding_idx=2), padding_idx=2),
}


def made(kind: str):
    """A whole model with moments and gradients, its optimizer, and both divided."""
    whole: list[Any] = []
    parts: list[Any] = []
    for found in (whole, parts):
        torch.manual_seed(0)
        model = MODELS[kind]()
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
        for part in model.modules():
            if isinstance(part, el.TokenTable) and part.padding_idx is not None:
                with torch.no_grad():
                    getattr(part, "inner", part).weight[part.padding_idx] = 0
        if found is parts:
            divide(model)
        optimizer = el.RowAdamW(model.parameters())
        for name, parameter, table in parameters_of(model):
            generator = torch.Generator().manual_seed(len(name))
            span = slice(None) if table is None else slice(table.partition.start, table.partition.stop)
            shape = parameter.shape if table is None else (V, *parameter.shape[1:])
            for key, value in optimizer.moments(parameter).items():
                value.copy_(torch.rand(shape, generator=generator)[span] if key != "step" else torch.tensor(5.0))
            grad = torch.randn(shape, generator=generator)
            if hasattr(parameter, "pending_updates"):
                grad[::2] = 0
            grad = grad[span].clone()
            parameter.grad = grad.to_sparse(1).coalesce() if hasattr(parameter, "pending_updates") else grad
        found += [model, optimizer]
    return *whole, *parts


def parameters_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ShardedTable | None]]:
    """Yield each parameter with its name in the whole model, and with the sharded table that it is the rows of."""
    tables = {name: part for name, part in model.named_modules() if isinstance(part, ShardedTable)}
    sharded = sharded_parameters(model)
    for name, parameter in model.named_parameters():
        owner = next((owner for owner in tables if name.startswith(f"{owner}.local.")), None)
        if owner is None:
            yield name, parameter, None
        else:
            rest = name.removeprefix(f"{owner}.local.")
            yield f"{owner.removesuffix('.rows')}.{rest}", parameter, tables[owner] if parameter in sharded else None


def divide(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if isinstance(model, el.DecoderLM):
        rows = el.TokenEmbedding(V, D, padding_idx=model.head.padding_idx)
        rows.load_state_dict({"weight": model.head.weight})
        head = el.OutputHead(rows=shard_table(rows, mesh), bias=True)
        head.bias = model.head.bias
        model.table, model.head = shard_table(model.table, mesh), head
        return
    for name, part in list(model.items()):
        if isinstance(part, el.TokenTable):
            model[name] = shard_table(part, mesh)
    if "head" in model:
        bias = model["head"].bias
        model["head"] = el.OutputHead(model["table"], bias=True)
        model["head"].bias = bias


def state_of(model: nn.Module, optimizer: el.RowAdamW) -> dict[str, torch.Tensor]:
    """Everything that undoing puts back, and every size."""
    state = {}
    for name, parameter, _ in parameters_of(model):
        state[name] = parameter.detach().clone()
        state |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[parameter].items()}
    for name, part in model.named_modules():
        sizes = [getattr(part, size, None) for size in ("vocab_size", "num_rows", "start", "stop", "padding_idx")]
        state[f"{name} sizes"] = torch.tensor([-1 if size is None else size for size in sizes])
    return state


def assert_parts(model, optimizer, whole, its) -> None:
    """Each parameter, moment and gradient is the whole one's, or its rows that belong here; and look-ups work."""
    expected = {name: parameter for name, parameter, _ in parameters_of(whole)}
    count, rank = dist.get_world_size(), dist.get_rank()
    for name, parameter, table in parameters_of(model):
        theirs = expected.pop(name)
        span = slice(None)
        if table is not None:
            each = -(-len(theirs) // count)
            span = slice(rank * each, (rank + 1) * each)
            assert (table.partition.start, table.partition.stop) == (rank * each, min((rank + 1) * each, len(theirs)))
            assert parameter.shard_group is table.mesh.get_group()
        for ours, full in [
            (parameter, theirs),
            (parameter.grad.to_dense(), theirs.grad.to_dense()),
            *((value, its.state[theirs][key]) for key, value in optimizer.state[parameter].items()),
        ]:
            assert torch.equal(ours, full if full.dim() == 0 else full[span]), name
    assert not expected
    if isinstance(model, el.DecoderLM):
        ids = torch.arange(whole.table.vocab_size).unsqueeze(0)
        with torch.no_grad():
            torch.testing.assert_close(model.loss(ids, ids), whole.loss(ids, ids))
    for name, table in model.named_modules():
        same = dict(whole.named_modules()).get(name)
        if isinstance(table, ShardedTable) and same is not None:
            ids = torch.arange(same.vocab_size)
            torch.testing.assert_close(table(ids), same(ids))
            assert table.padding_idx == same.padding_idx
            assert {*map(len, table.state_dict().values())} == {*map(len, same.state_dict().values())}
            with pytest.raises(el.TokenIdError):
                table(ids + 1)


CASES = [(kind, name) for kind in MODELS for name in EDITS if (kind, name) != ("factorised", "given")]


@pytest.mark.parametrize(
    ("ranks", "cases"), [(1, [("free", "both"), ("tied", "merged, drawn")]), (3, sorted(covering(CASES)))]
)
def test_every_edit_of_divided_rows_is_that_of_whole_ones(ranks, cases) -> None:
    on_ranks(ranks, check_edits, cases)


def check_edits(cases: list[tuple[str, str]]) -> None:
    rank = dist.get_rank()
    for kind, name in cases:
        options = EDITS[name]
        whole, its, model, optimizer = made(kind)
        if whole.get_submodule("table").padding_idx is None and name == "added":
            its = optimizer = None
        before = state_of(model, optimizer) if optimizer else None
        parameters = list(model.parameters())
        torch.manual_seed(7)
        expected = edit_vocabulary(whole, **options, optimizer=its)
        torch.manual_seed(7 + rank)  # rank 0's numbers count
        receipt = edit_vocabulary(model, **options, optimizer=optimizer)
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert receipt.origins == expected.origins
        assert (receipt.added, receipt.dropped, receipt.merged) == (
            expected.added,
            expected.dropped,
            expected.merged,
        )
        kept = torch.tensor([token for token in range(V) if token not in expected.dropped])
        assert torch.equal(receipt.remap(kept), expected.remap(kept))
        if optimizer is None:
            continue
        assert_parts(model, optimizer, whole, its)
        receipt.undo(model, optimizer=optimizer)
        assert_same(state_of(model, optimizer), before)


def test_shorthands_with_a_tokenizer_and_gradients_afterwards() -> None:
    on_ranks(2, shorthands)


def shorthands() -> None:
    text = "the cat sat on the mat and the dog sat on the cat . " * 9
    tokenizer, other = el.train_tokenizer((), "byte"), el.train_tokenizer(text, vocab_size=1500)
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for edit in (
        lambda model: add_tokens(model, [" cat", " dog"], tokenizer=tokenizer),
        lambda model: remove_tokens(model, ["<|endoftext|>"], tokenizer=tokenizer),
        lambda model: trim_vocabulary(model, text, tokenizer=tokenizer),
        lambda model: transplant(model, other, tokenizer=tokenizer),
        lambda model: add_tokens(model, [f" t{number}" for number in range(1200)], tokenizer=tokenizer),
    ):
        torch.manual_seed(0)
        whole = el.TokenEmbedding(257, D)
        table = shard_table(whole, mesh)
        expected, receipt = edit(whole), edit(table)
        assert torch.equal(table.weight, whole.weight[table.partition.start : table.partition.stop])
        assert receipt.origins == expected.origins
        assert receipt.tokenizer.to_str() == expected.tokenizer.to_str()
        ids = torch.randint(0, whole.vocab_size, (2, 6), generator=torch.Generator().manual_seed(1))
        table(ids[rank]).square().mean().backward()
        whole(ids).square().mean().backward()
        torch.testing.assert_close(table.weight.grad, whole.weight.grad[table.partition.start : table.partition.stop])
    with pytest.raises(el.SizeError):
        add_tokens(nn.ModuleDict({"table": table}), 1, train_only_new=True)
    assert torch.equal(table.weight, whole.weight[table.partition.start : table.partition.stop])


def test_what_is_refused_on_one_process_is_refused_on_all_and_changes_nothing() -> None:
    found = on_ranks(3, refusals)
    assert found[0] == found[1]
    assert found[0][:-4] == found[2][:-4]
    assert [error for error, _ in found[0]][-4:] == ["PeerError"] * 4
    assert [error for error, _ in found[2]][-4:] == ["PeerError", "PeerError", "VocabularyError", "CheckpointError"]


def refusals() -> list[tuple[str, str]]:
    rank, found = dist.get_rank(), []
    _, _, model, optimizer = made("free")
    stranger = torch.optim.AdamW([nn.Parameter(torch.zeros(V, D))])
    quantized = shard_table(el.QuantizedEmbedding.from_table(el.TokenEmbedding(V, D)), init_device_mesh("cpu", (3,)))
    before = state_of(model, optimizer)
    last = rank == 2
    receipt = add_tokens(model, 1, optimizer=optimizer)
    receipt.undo(model, optimizer=optimizer)
    for error, refused in [
        (el.SizeError, lambda: edit_vocabulary(model, keep=[2, 3, 4, 5])),  # no row is left for the last rank
        (el.TokenIdError, lambda: remove_tokens(model, [2], optimizer=optimizer)),
        (el.VocabularyError, lambda: remove_tokens(model, [V])),
        (el.SizeError, lambda: add_tokens(model, 1, optimizer=stranger)),
        (el.SizeError, lambda: add_tokens(model, 1, pad_to_multiple_of=8)),
        (el.SizeError, lambda: add_tokens(quantized, 1)),
        (el.ShapeError, lambda: add_tokens(model, 2, init=VectorsInit(torch.zeros(3, D)))),
        (el.VocabularyError, lambda: add_tokens(model, 1, init=CopyInit(of=29), optimizer=optimizer)),
        (el.PeerError, lambda: remove_tokens(model, [5 if last else 6], optimizer=optimizer)),
        (el.PeerError, lambda: add_tokens(model, 1, optimizer=None if last else optimizer)),
        (el.EmbedLayerError, lambda: remove_tokens(model, [V if last else 6])),
        (el.EmbedLayerError, lambda: undo_of_another(model, optimizer, last)),
    ]:
        with pytest.raises(error) as caught:
            refused()
        found.append((type(caught.value).__name__, str(caught.value)))
        assert_same(state_of(model, optimizer), before)
    return found


def undo_of_another(model: nn.Module, optimizer: el.RowAdamW, last: bool) -> None:
    """One rank has trained on since the edit."""
    receipt = add_tokens(model, 1, optimizer=optimizer)
    moments = optimizer.moments(model.table.local.weight)["exp_avg"]
    before = moments.clone()
    moments += int(last)
    try:
        receipt.undo(model, optimizer=optimizer)
    finally:
        moments.copy_(before)
        receipt.undo(model, optimizer=optimizer)


def test_rows_are_sent_to_the_rank_that_needs_them_a_few_at_a_time() -> None:
    assert max(on_ranks(3, transfers)) <= 8192


def transfers() -> int:
    """Edit a table of more rows than are read or sent at once, with bits of every kind; return the most rows sent."""
    rank, size = dist.get_rank(), 20_000
    numbers = torch.arange(size).unsqueeze(1) + torch.tensor([0.0, -0.0])
    numbers[::7, 1], numbers[1::7, 0] = torch.nan, -0.0
    whole = el.TokenEmbedding.from_pretrained(numbers.bfloat16())
    table = shard_table(whole, init_device_mesh("cpu", (3,)))
    parameter, partition = table.weight, table.partition
    ids = torch.tensor([[0, 1], [], [0, 1]][rank], dtype=torch.int64)
    rows = numbers[ids + partition.start].bfloat16()
    parameter.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), rows, parameter.shape, check_invariants=False)
    most, original = [0], dist.all_to_all_single

    def measured(received: torch.Tensor, sent: torch.Tensor, *args: Any, **options: Any) -> Any:
        if sent.dim() > 1:  # no IDs, and no text of the ranks
            most.append(max(len(received), len(sent)))
        return original(received, sent, *args, **options)

    dist.all_to_all_single = measured  # type: ignore[assignment]
    order = [*range(9000, size), *range(8999, -1, -1)]
    for edited in (whole, table):
        edit_vocabulary(edited, order=order, add=3, init=MeanInit())
    assert len(most) > 3
    after = table.partition
    assert torch.equal(
        table.weight.detach().view(torch.int16), whole.weight.detach()[after.start : after.stop].view(torch.int16)
    )
    places = sorted(order.index(source) for source in (0, 1, 13_334, 13_335))
    own = [place for place in places if after.start <= place < after.stop]
    grad = table.weight.grad
    assert grad._indices()[0].tolist() == [place - after.start for place in own]
    assert torch.equal(grad._values()[:, 0], numbers[[order[place] for place in own], 0].bfloat16())
    return max(most)
