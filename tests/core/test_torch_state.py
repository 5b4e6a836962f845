"""When a faster computation may take the place of the calls that it stands for."""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import embedlayer
from embedlayer.core.torch_state import has_hooks, is_current, is_unchanged


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fast(x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x + x

    def fast(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def nothing(*_: object) -> None:
    return None


@pytest.mark.parametrize(
    "register",
    [
        lambda module: module.register_forward_pre_hook(nothing),
        lambda module: module.register_forward_hook(nothing),
        lambda module: module.register_forward_hook(nothing, with_kwargs=True, always_call=True),
        lambda module: module.register_full_backward_pre_hook(nothing),
        lambda module: module.register_full_backward_hook(nothing),
        lambda _: torch_module.register_module_forward_pre_hook(nothing),
        lambda _: torch_module.register_module_forward_hook(nothing, always_call=True),
        lambda _: torch_module.register_module_full_backward_pre_hook(nothing),
        lambda _: torch_module.register_module_full_backward_hook(nothing),
    ],
)
def test_every_hook_is_seen_until_it_is_removed(register) -> None:
    module = Doubling()
    assert not has_hooks(module)
    handle = register(module)
    try:
        assert has_hooks(module)
    finally:
        handle.remove()
    assert not has_hooks(module)


def test_a_module_that_was_compiled_in_place_is_called() -> None:
    module = Doubling()
    module.compile(backend="eager")
    assert has_hooks(module)


def test_a_method_is_unchanged_until_a_subclass_an_instance_or_the_class_has_another(monkeypatch) -> None:
    methods = {"forward": Doubling.forward, "__call__": nn.Module.__call__}
    module = Doubling()
    assert is_unchanged(module, **methods)
    assert is_unchanged(type("Named", (Doubling,), {})(), **methods)
    assert not is_unchanged(type("Changed", (Doubling,), {"forward": lambda self, x: x})(), **methods)
    assert not is_unchanged(type("Called", (Doubling,), {"__call__": lambda self, x: x})(), **methods)
    assert not is_unchanged(nn.Linear(2, 2), **methods)
    assert not is_unchanged(module, missing=nothing)
    module.forward = module.plain
    assert not is_unchanged(module, **methods)
    del module.forward
    assert is_unchanged(module, **methods)
    monkeypatch.setattr(Doubling, "forward", Doubling.plain)
    assert not is_unchanged(module, **methods)


def test_a_shortcut_is_current_where_no_subclass_overrides_the_definition_alone() -> None:
    tripled = {"plain": lambda self, x: 3 * x}
    both = {**tripled, "fast": lambda self, x: 3 * x}
    assert is_current(Doubling, "fast", "plain")
    assert not is_current(type("Left", (Doubling,), tripled), "fast", "plain")
    assert is_current(type("Both", (Doubling,), both), "fast", "plain")
    assert is_current(type("Faster", (Doubling,), {"fast": Doubling.fast}), "fast", "plain")
    assert not is_current(type("Again", (type("Both", (Doubling,), both),), tripled), "fast", "plain")


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
    package = Path(embedlayer.__file__).parent
    texts = {str(file.relative_to(package)): file.read_text() for file in package.rglob("*.py")}
    # where `private_names` can find any: to parse all takes 2 s
    may_have = re.compile(r"(?<!self)\._[A-Za-z]|from torch\S* import (\([^)]*|.*)\b_[A-Za-z]")
    found = {file: private_names(ast.parse(text)) for file, text in texts.items() if may_have.search(text)}
    assert found.pop("core/torch_state.py")
    documented = {"torch._dynamo", "torch._dynamo.graph_break"}  # with this name, in torch's guide to torch.compile
    assert {name: private for name, names in found.items() if (private := names - documented)} == {}
