"""A layer is the composition of its public parts, and whoever overrides, replaces or hooks one of them is honoured."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering, looped, some
from kinds import EMBED_DIM, LAYERS, MAX_SEQ_LEN, POSITIONS, TABLES, VOCAB_SIZE
from torch import nn
from torch.nn.modules import module as torch_module

import embedlayer as el
from embedlayer.positions.position import AdditivePosition, positions_of

IDS = torch.tensor([[1, 7, 0, 49], [3, 7, 48, 2]])
ADDITIVE = [name for name, build in POSITIONS.items() if isinstance(build(), AdditivePosition)]


def parts_of(layer: Any) -> tuple[nn.Module, nn.Module, nn.Module | None]:
    if isinstance(layer, el.lessons.GPTEmbedding):
        return layer.tok_emb, layer.pos_emb, None
    return layer.table, layer.position, layer.dropout


def composed(layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """What the layer is defined to be, by its public parts."""
    table, position, dropout = parts_of(layer)
    x = position.add(table(ids), positions_of(ids))
    x = x if dropout is None else dropout(x)
    return layer.head(layer.hidden(inputs_embeds=x)) if isinstance(layer, el.DecoderLM) else x


def as_subclass(module: nn.Module, **methods: Callable) -> None:
    """Make a module one of a subclass of its class with these methods."""
    module.__class__ = type(f"Changed{type(module).__name__}", (type(module),), methods)


def modes() -> list:
    """With gradients, without them, and in training: each has its own fused path."""
    return [
        pytest.param(lambda layer: (layer.eval(), torch.enable_grad())[1], id="eval"),
        pytest.param(lambda layer: (layer.eval(), torch.no_grad())[1], id="no_grad"),
        pytest.param(lambda layer: (layer.train(), torch.enable_grad())[1], id="train"),
    ]


@looped("name, mode", LAYERS, modes())
def test_a_layer_is_the_composition_of_its_public_parts(name, mode) -> None:
    layer = LAYERS[name]()
    with mode(layer):
        torch.testing.assert_close(layer(IDS), composed(layer, IDS))


def change_forward(table: nn.Module) -> Callable[[], None]:
    """A subclass's `forward`."""
    kind = type(table)
    as_subclass(table, forward=lambda self, ids: kind.forward(self, ids) + 1)
    return lambda: setattr(table, "__class__", kind)


def replace_forward(table: nn.Module) -> Callable[[], None]:
    """A `forward` put on the instance, as accelerate does."""
    before = table.forward
    table.forward = lambda ids: before(ids) + 1
    return lambda: delattr(table, "forward")


def change_call(table: nn.Module) -> Callable[[], None]:
    """A subclass's `__call__`."""
    kind = type(table)
    as_subclass(table, __call__=lambda self, ids: kind.__call__(self, ids) + 1)
    return lambda: setattr(table, "__class__", kind)


def hook(table: nn.Module) -> Callable[[], None]:
    return table.register_forward_hook(lambda _, given, found: found + 1).remove


def global_hook(table: nn.Module) -> Callable[[], None]:
    def added(module: nn.Module, given: tuple, found: torch.Tensor) -> torch.Tensor | None:
        return found + 1 if module is table else None

    return torch_module.register_module_forward_hook(added).remove


def change_look_up(table: nn.Module) -> Callable[[], None]:
    """A subclass's `look_up`; no scale hides what it adds."""
    kind, factor = type(table), table.factor
    as_subclass(table, look_up=lambda self, ids: kind.look_up(self, ids) + 1 / (1.0 if factor is None else factor))
    return lambda: setattr(table, "__class__", kind)


CHANGES = [change_forward, replace_forward, change_call, hook, global_hook, change_look_up]
FUSED = [
    f"TransformerEmbedding{part}" for part in (", learned", ", rotary", " over dense", " over int8", " over delta")
]
FUSED += ["GPTEmbedding", "DecoderLM"]
"""Layers with each path that leaves out calls: all changes are always tried on these."""
CHANGED = [*product(LAYERS, CHANGES)]


@looped("name, change", some(covering(CHANGED) | {*product(FUSED, CHANGES)}, CHANGED))
def test_whoever_changes_what_a_table_gives_is_honoured(name, change) -> None:
    layer = LAYERS[name]().eval()
    table, *_ = parts_of(layer)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            before, expected = layer(IDS), layer(inputs_embeds=table(IDS) + 1)
            undo = change(table)
            try:
                torch.testing.assert_close(layer(IDS), expected)
            finally:
                undo()  # what is global would break the tests that follow
            assert torch.equal(layer(IDS), before)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@looped("register", ["forward_pre_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_global_hooks_of_every_sort_see_the_table(register) -> None:
    layer, seen = LAYERS["TransformerEmbedding, learned"](), []
    handle = getattr(torch_module, f"register_module_{register}")(lambda module, *_: seen.append(module))
    try:
        layer(IDS).sum().backward()
    finally:
        handle.remove()
    assert any(module is layer.table for module in seen)
    assert any(module is layer.dropout for module in seen)


def change_vectors(position: nn.Module) -> Callable[[], None]:
    """A subclass's `vectors`, on which `add` is built."""
    kind = type(position)
    as_subclass(position, vectors=lambda self, positions: kind.vectors(self, positions) + 1)
    return lambda: setattr(position, "__class__", kind)


def change_add(position: nn.Module) -> Callable[[], None]:
    kind = type(position)
    as_subclass(position, add=lambda self, x, positions: kind.add(self, x, positions) + 1)
    return lambda: setattr(position, "__class__", kind)


def replace_add(position: Any) -> Callable[[], None]:
    before = position.add
    position.add = lambda x, positions: before(x, positions) + 1
    return lambda: delattr(position, "add")


def replace_vectors(position: Any) -> Callable[[], None]:
    before = position.vectors
    position.vectors = lambda positions: before(positions) + 1
    return lambda: delattr(position, "vectors")


@pytest.mark.parametrize("change", [change_add, replace_add, change_vectors, replace_vectors])
@looped("name", POSITIONS)
def test_whoever_changes_what_a_position_adds_is_honoured(name, change) -> None:
    if "vectors" in change.__name__ and name not in ADDITIVE:
        return
    layer = LAYERS[f"TransformerEmbedding, {name}"]().eval()
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            before = layer(IDS)
            undo = change(layer.position)
            torch.testing.assert_close(layer(IDS), before + 1)
            torch.testing.assert_close(layer(IDS, positions=torch.arange(4)), before + 1)
            undo()
            assert torch.equal(layer(IDS), before)


class Zeros(nn.Module):
    """A dropout of somebody else's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def test_the_dropout_module_decides_and_may_be_hooked_or_replaced() -> None:
    layer = el.TransformerEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, dropout=0.5)
    seen = []
    handle = layer.dropout.register_forward_hook(lambda _, given, found: seen.append(given[0]))
    layer(IDS)
    handle.remove()
    torch.testing.assert_close(seen, [layer.eval()(IDS)])
    layer.dropout.train()  # Monte-Carlo dropout: this module alone
    assert 0.2 < layer(IDS).eq(0).float().mean() < 0.8
    layer.train().dropout.eval()
    assert layer(IDS).ne(0).any(-1).all()
    layer.dropout = Zeros()  # type: ignore[assignment]
    assert layer(IDS).eq(0).all()
    model = LAYERS["DecoderLM"]()
    model.dropout = Zeros()
    assert model(IDS).eq(0).all()


@looped("name", [name for name in TABLES if name != "row-sparse"])
def test_the_loss_of_a_table_whose_logits_or_rows_are_changed_is_that_of_its_logits(name) -> None:
    hidden = torch.randn(2, 4, EMBED_DIM)

    def doubled(method: str) -> Callable:
        return lambda self, *given, **options: 2 * getattr(super(type(self), self), method)(*given, **options)

    for method in ("logits", "raw_logits", "rows"):
        table = TABLES[name]()
        plain = table.logits(hidden)
        as_subclass(table, **{method: doubled(method)})
        logits = table.logits(hidden)
        if method != "rows" or not name.startswith(("int", "delta")):  # these make products of what they store
            torch.testing.assert_close(logits, 2 * plain)
        expected = F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), IDS.view(-1))
        torch.testing.assert_close(table.loss(hidden, IDS), expected)
