"""Imports point down: every package imports only lower tiers, and no two modules import each other, even indirectly."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "embedlayer"

TIERS = [
    ["core"],
    ["io", "kernels"],
    ["families", "row_sparse"],
    ["tokenization"],
    ["saving", "data", "losses"],
    ["formats", "positions"],
    ["tables"],
    ["heads"],
    ["optim", "inputs"],
    ["distributed", "checkpoints", "lessons"],
    ["models", "integrations"],
    ["training"],
    ["opening"],
    ["vocab", "analysis"],
    ["compress", "explorer", "plots"],
    ["cli"],
]
"""The packages and modules of `embedlayer/`, lowest first. ARCHITECTURE: docs/source-tree.md."""

TIER_OF = {name: tier for tier, names in enumerate(TIERS) for name in names}


def module_name(file: Path) -> str:
    """Return the dotted name of a module's file."""
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(file): file for file in PACKAGE.rglob("*.py")}


@cache
def imports_of(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements of a file."""
    return [node for node in statements(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a tree, without the expressions in them."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            yield node
            yield from statements(node)


def imported_modules(file: Path) -> set[str]:
    """Return the modules of this package that a file imports, also inside functions and for type checkers."""
    found = set()
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name in MODULES and name != "embedlayer"}


@cache
def all_imports() -> dict[str, set[str]]:
    """Return what each module imports from this package."""
    return {name: imported_modules(file) for name, file in MODULES.items() if name != "embedlayer"}


def part_of(module: str) -> str:
    """Return the subpackage or top module that a module belongs to: `tables` for `embedlayer.tables.dense`."""
    return module.split(".")[1]


def test_every_package_has_a_tier() -> None:
    assert {part_of(name) for name in all_imports()} - {"__main__"} == set(TIER_OF)


@pytest.mark.parametrize("part", TIER_OF)
def test_the_modules_of_a_part_import_only_its_own_tier_and_lower_ones(part) -> None:
    modules = [module for module in all_imports() if part_of(module) == part]
    assert modules
    imported = {(module, name) for module in modules for name in all_imports()[module]}
    assert not {(module, name) for module, name in imported if TIER_OF[part_of(name)] > TIER_OF[part]}


def test_packages_of_one_tier_import_each_other_in_one_direction() -> None:
    edges = {(part_of(module), part_of(name)) for module, names in all_imports().items() for name in names}
    assert {(a, b) for a, b in edges if a != b and (b, a) in edges} == set()


def test_no_module_imports_itself_through_others() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for name in sorted(all_imports().get(module, ())):
                visit(name, (*path, module))
            done.add(module)

    for module in sorted(all_imports()):
        visit(module, ())


def test_modules_import_names_from_where_they_are_defined() -> None:
    through_the_top = {
        (str(file.relative_to(PACKAGE)), alias.name)
        for file in PACKAGE.rglob("*.py")
        for node in imports_of(file)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "embedlayer"
        for alias in node.names
    }
    assert {name for _, name in through_the_top} <= {"__version__"}, through_the_top


def test_one_file_imports_axolotl() -> None:
    found = {
        name
        for name, file in MODULES.items()
        for node in imports_of(file)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "axolotl"
    }
    assert found == {"embedlayer.integrations.axolotl"}
