"""Tools of torch take a table, a head and a bag for the modules of torch whose place these take."""

from collections.abc import Callable

import pytest
import torch
from covering import looped
from kinds import TABLES, TIED_HEADS, UNTIED_HEADS
from torch import Tensor, fx, nn

import embedlayer as el
from embedlayer.core.errors import SizeError
from embedlayer.tables import Bag

IDS, HIDDEN = torch.tensor([[1, 5, 7], [2, 2, 9]]), torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    **{name: (build, IDS) for name, build in TABLES.items()},
    **{name: (lambda table=table: el.OutputHead(TABLES[table]()), HIDDEN) for name, table in TIED_HEADS.items()},
    **{name: (build, HIDDEN) for name, build in UNTIED_HEADS.items()},
    **{f"bag of {name}": (lambda build=build: Bag(build()), IDS) for name, build in TABLES.items()},
}


@looped("name", MODULES)
@torch.no_grad()
def test_a_call_by_keyword_is_that_by_place(name) -> None:
    build, value = MODULES[name]
    module = build().eval()
    assert torch.equal(module(input=value), module(value))


@looped("name", MODULES)
@torch.no_grad()
def test_a_module_is_a_leaf_of_a_symbolic_trace(unchecked: None, name) -> None:
    build, value = MODULES[name]
    model = nn.Sequential(build(), nn.Identity()).eval()
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1"]
    assert torch.equal(traced(value), model(value))


def test_a_bag_is_traced_with_all_of_its_arguments(unchecked: None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = Bag(el.TokenEmbedding(9, 4), mode="sum")

        def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
            return self.bag(input=ids, offsets=offsets, per_sample_weights=weights) * 2

    model, arguments = Model(), (torch.tensor([1, 2, 3, 8]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0, 0.5, 0.0]))
    assert torch.equal(fx.symbolic_trace(model)(*arguments), model(*arguments))
    with pytest.raises(SizeError, match="a module that contains a TokenEmbedding"):
        fx.symbolic_trace(model.bag.table)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_a_bag_has_the_attributes_of_torch(padding_idx) -> None:
    theirs = nn.EmbeddingBag(9, 4, mode="sum", padding_idx=padding_idx)
    ours = Bag.from_embedding_bag(theirs)
    for name in ("num_embeddings", "embedding_dim", "padding_idx", "mode", "include_last_offset", "weight"):
        assert getattr(ours, name) is getattr(theirs, name) or getattr(ours, name) == getattr(theirs, name), name


@looped("name", TABLES)
def test_tools_that_count_leaves_find_no_check_of_ids_in_a_table(name) -> None:
    """torchinfo takes a module without children for one that has parameters; the record of the check still moves."""
    table = TABLES[name]()
    assert not any(hasattr(each, "first_bad_index") for each in table.children())
    if name.startswith("dense"):
        assert not list(table.children())
    check = next((each for each in table.modules() if hasattr(each, "first_bad_index")), None)
    if check is not None:
        assert not any(each.training for each in table.eval().modules())
        assert table.to("meta") is table
        assert check.first_bad_index.is_meta
