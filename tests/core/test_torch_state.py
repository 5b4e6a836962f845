"""A faster computation takes the place of the calls that it stands for only where nothing can see the difference."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import embedlayer as el

Register = Callable[[nn.Module, Callable[..., None]], Any]
HOOKS: dict[str, Register] = {
    "forward pre-hook": lambda module, seen: module.register_forward_pre_hook(seen),
    "forward hook": lambda module, seen: module.register_forward_hook(seen),
    "hook of any call": lambda module, seen: module.register_forward_hook(seen, with_kwargs=True, always_call=True),
    "backward pre-hook": lambda module, seen: module.register_full_backward_pre_hook(seen),
    "backward hook": lambda module, seen: module.register_full_backward_hook(seen),
    "global pre-hook": lambda module, seen: torch_module.register_module_forward_pre_hook(seen),
    "global hook": lambda module, seen: torch_module.register_module_forward_hook(seen, always_call=True),
    "global backward pre-hook": lambda module, seen: torch_module.register_module_full_backward_pre_hook(seen),
    "global backward hook": lambda module, seen: torch_module.register_module_full_backward_hook(seen),
}
PARTS: dict[str, Callable[[Any], nn.Module]] = {
    "table": lambda layer: layer.table,
    "position": lambda layer: layer.position,
    "dropout": lambda layer: layer.dropout,
}


def layer_of(kind: type[el.TokenEmbedding] = el.TokenEmbedding) -> Any:
    """An input embedding, all parts of which are one computation."""
    torch.manual_seed(0)
    return el.TransformerEmbedding(10, 4, 5, table=kind(10, 4), dropout=1e-9)


@pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:For backward hooks")
@pytest.mark.parametrize("part", PARTS)
def test_a_part_with_a_hook_is_called_until_the_hook_is_removed(part) -> None:
    for name, register in HOOKS.items():
        layer, calls = layer_of(), list[nn.Module]()
        observed = PARTS[part](layer)
        handle = register(observed, lambda module, *_, calls=calls: calls.append(module))
        try:
            layer(torch.tensor([1, 2])).sum().backward()
            assert observed in calls, name
        finally:
            handle.remove()
        calls.clear()
        layer(torch.tensor([1, 2])).sum().backward()
        assert not calls, name


def test_a_part_that_was_compiled_in_place_is_called(monkeypatch) -> None:
    calls: list[str] = []

    def compiled(call: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def recorded(*given: Any) -> Any:
            calls.append(part)
            return call(*given)

        return recorded

    monkeypatch.setattr(torch, "compile", compiled)
    for part in PARTS:
        layer = layer_of()
        PARTS[part](layer).compile()
        layer(torch.tensor([1, 2]))
    assert calls == [*PARTS]


def test_a_part_whose_forward_another_one_replaced_is_called(monkeypatch) -> None:
    """Replaced in a subclass, in the object and in the class."""
    ids, Table = torch.tensor([1, 2]), el.TokenEmbedding
    plain, before = layer_of()(ids), Table.forward
    replaced = lambda self, ids: before(self, ids) * 0  # noqa: E731
    assert torch.equal(layer_of(type("Named", (Table,), {}))(ids), plain)
    for name in ("forward", "__call__"):
        changed = layer_of(type("Changed", (Table,), {name: replaced}))
        assert torch.equal(changed(ids), changed.position(torch.arange(2))), name
    layer = layer_of()
    layer.table.forward = lambda ids: before(layer.table, ids) * 0
    assert torch.equal(layer(ids), layer.position(torch.arange(2)))
    del layer.table.forward
    assert torch.equal(layer(ids), plain)
    monkeypatch.setattr(Table, "forward", replaced)
    assert torch.equal(layer(ids), layer.position(torch.arange(2)))


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names of torch that a module reads, and the private modules of torch that it imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            found |= {name} if name.startswith(("torch.", "Tensor.")) else set()
    return {name for name in found if any(re.match("_[a-z]", part, re.I) for part in name.split("."))}


def test_private_names_of_torch_are_in_one_file() -> None:
    package = Path(el.__file__).parent
    texts = {str(file.relative_to(package)): file.read_text() for file in package.rglob("*.py")}
    # where `private_names` can find any: to parse all takes 2 s
    may_have = re.compile(r"(?<!self)\._[A-Za-z]|from torch\S* import (\([^)]*|.*)\b_[A-Za-z]")
    found = {file: private_names(ast.parse(text)) for file, text in texts.items() if may_have.search(text)}
    assert found.pop("core/torch_state.py")
    documented = {"torch._dynamo", "torch._dynamo.graph_break"}  # with this name, in torch's guide to torch.compile
    assert {name: private for name, names in found.items() if (private := names - documented)} == {}
