"""Resetting all modules, in any order and on any memory, gives what construction gives."""

import math
from collections.abc import Callable

import torch
from covering import looped
from kinds import BAGS, LAYERS, POSITIONS, STREAM_HEADS, STREAM_TABLES, TABLES, TIED_HEADS, UNTIED_HEADS, dense
from torch import nn

from embedlayer import OutputHead, RowAdamW, RowSparseEmbedding


def tied(name: str) -> nn.Module:
    table = TABLES[TIED_HEADS[name]]()
    return nn.ModuleDict({"table": table, "head": OutputHead(table, bias=True)})


KINDS: dict[str, Callable[[], nn.Module]] = {
    **{f"table: {name}": make for name, make in TABLES.items()},
    **{f"bag: {name}": make for name, make in BAGS.items()},
    **{f"streams: {name}": make for name, make in STREAM_TABLES.items() if name != "mapped"},
    **{f"position: {name}": make for name, make in POSITIONS.items()},
    **{f"head: {name}": make for name, make in UNTIED_HEADS.items()},
    **{f"head: {name}": lambda name=name: tied(name) for name in TIED_HEADS},
    **{f"streams: {name}": make for name, make in STREAM_HEADS.items()},
    **{f"layer: {name}": make for name, make in LAYERS.items()},
}

ORDERS: dict[str, Callable[[list[nn.Module]], list[nn.Module]]] = {
    "as modules() gives them": lambda modules: modules,
    "reversed": lambda modules: modules[::-1],
    "twice": lambda modules: [*modules, *modules[::2], *modules[1::2]],
}


def built_anew(module: nn.Module) -> nn.Module:
    """What the constructor gives for a module of this kind; one that was made of other numbers is made without them."""
    if isinstance(module, nn.ModuleDict):
        table = built_anew(module["table"])
        return nn.ModuleDict({"table": table, "head": OutputHead(table, bias=True)})
    return type(module).from_config(module.config)


def without_numbers(module: nn.Module) -> nn.Module:
    """A module as it is after the meta device and `to_empty`: what memory held before is in it."""
    module = module.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(math.nan if tensor.is_floating_point() else 77)
    return module


@looped("name, order", KINDS, ORDERS)
def test_resetting_all_modules_gives_what_construction_gives(name, order) -> None:
    module = without_numbers(KINDS[name]())
    expected = built_anew(module)
    for part in ORDERS[order](list(module.modules())):
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    state = expected.state_dict()
    assert module.state_dict().keys() == state.keys()
    for key, found in module.state_dict().items():
        numbers, others = found.double(), state[key].double()
        assert torch.equal(numbers == 0, others == 0), key
        share = 5 / math.sqrt(2 * numbers.numel())  # five times the error of a standard deviation
        torch.testing.assert_close(numbers.std(correction=0), others.std(correction=0), rtol=2 * share, atol=0)
        torch.testing.assert_close(
            numbers.mean(), others.mean(), rtol=0, atol=float(others.std(correction=0)) * share * 2
        )
    for (key, found), (other, wanted) in zip(module.named_buffers(), expected.named_buffers(), strict=True):
        assert key == other
        if key not in state:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@looped("name", [name for name in KINDS if "delta" not in name])
def test_with_the_same_seed_they_are_the_same_numbers(name) -> None:
    """A delta starts as a copy of its base's rows and is drawn when it is reset: it has their distribution only."""
    module = without_numbers(KINDS[name]())
    torch.manual_seed(3)
    expected = built_anew(module)
    torch.manual_seed(3)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    state = expected.state_dict()
    assert all(torch.equal(found, state[key]) for key, found in module.state_dict().items())


@looped("name", TIED_HEADS)
def test_a_tied_head_leaves_the_table_alone(name) -> None:
    pair = tied(name)
    nn.init.ones_(pair["head"].bias)
    before = {key: value.clone() for key, value in pair["table"].state_dict().items()}
    pair["head"].reset_parameters()
    assert all(torch.equal(value, before[key]) for key, value in pair["table"].state_dict().items())
    assert pair["head"].bias.eq(0).all()


def test_a_reset_row_sparse_table_has_no_update_pending() -> None:
    table = dense(RowSparseEmbedding)
    optimizer = RowAdamW(table.parameters(), lr=0.1, weight_decay=0.5)
    for ids in (torch.tensor([1, 2]), torch.tensor([3])):
        table(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    table.reset_parameters()
    drawn = table.weight.detach().clone()
    assert torch.equal(table.rows(0, 50), drawn)
    assert torch.equal(table.state_dict()["weight"], drawn)
