"""Imports point down: every package imports only lower tiers, and no two modules import each other, even indirectly.

Other libraries are named in their integrations.
"""

import ast
import re
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
    ["integrations", *(f"integrations.{name}" for name in ("accelerate", "deepspeed", "dtensor", "fsdp", "peft"))],
    ["distributed", "checkpoints", "lessons"],
    ["models", *(f"integrations.{name}" for name in ("axolotl", "lightning", "transformers_trainer", "trl"))],
    ["training"],
    ["opening"],
    ["vocab", "analysis"],
    ["compress", "explorer", "plots"],
    ["cli"],
]
"""The packages and modules of `embedlayer/`, lowest first. ARCHITECTURE: docs/source-tree.md."""

UPWARD = {("embedlayer.heads.output", "embedlayer.integrations.peft")}
"""Lazy imports of a higher tier: `OutputHead.follow` makes a head see what PEFT puts in the place of its table."""

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
    """Return the subpackage or top module that a module belongs to: `tables` for `embedlayer.tables.dense`.

    Each module of `integrations` is one of its own.
    """
    parts = module.split(".")[1:]
    return ".".join(parts) if parts[0] == "integrations" and len(parts) > 1 else parts[0]


def test_every_package_has_a_tier() -> None:
    assert {part_of(name) for name in all_imports()} - {"__main__"} == set(TIER_OF)


@pytest.mark.parametrize("part", TIER_OF)
def test_the_modules_of_a_part_import_only_its_own_tier_and_lower_ones(part) -> None:
    modules = [module for module in all_imports() if part_of(module) == part]
    assert modules
    imported = {(module, name) for module in modules for name in all_imports()[module]}
    upward = {(module, name) for module, name in imported if TIER_OF[part_of(name)] > TIER_OF[part]}
    assert upward == {(module, name) for module, name in UPWARD if module in modules}


def test_packages_of_one_tier_import_each_other_in_one_direction() -> None:
    imported = {(module, name) for module, names in all_imports().items() for name in names} - UPWARD
    edges = {(part_of(module), part_of(name)) for module, name in imported}
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


def test_what_is_imported_upward_is_imported_in_the_call_that_needs_it() -> None:
    for module, name in UPWARD:
        top = [node for node in ast.parse(MODULES[module].read_text()).body if isinstance(node, ast.ImportFrom)]
        assert name not in {node.module for node in top}


NAMES = {
    "accelerate": r"accelerate",
    "axolotl": r"axolotl",
    "deepspeed": r"deepspeed|zero-?3|\bds_",
    "dtensor": r"(?<![a-z])dtensor|to_local|full_tensor|(?<![\w.])device_mesh\b|placements|redistribute",
    "fsdp": r"fsdp|fully_?shard|\b(un|re)shard\b",
    "lightning": r"lightning",
    "peft": r"peft|lora|base_layer|original_mod|token_adapter|trainable_tok|modules_to_save|active_adapter|merge_and_",
    "trl": r"(?<![a-z])trl(?![a-z])",
}
"""Names by which code means another library or a part of torch: its own, and those of its attributes and modules."""

EXCEPTIONS = {
    ("core.partitioned", "deepspeed dtensor fsdp"): "rows are read, and optimizers step, where a parameter is divided",
    ("core.own_attributes", "peft"): "`param_groups` is called with a model in which adapters are around tables",
    ("core.torch_state", "dtensor"): "private names of torch are in one file",
    ("distributed.sharded", "accelerate fsdp lightning peft"): "data: functions that would save or share one shard",
    ("families.left_out_files", "fsdp"): "data: names of folders",
    ("formats.adapters", "peft"): "data: a file format, which `DeltaEmbedding` writes and reads",
    ("integrations.accelerate", "deepspeed fsdp"): "attributes of transformers' Trainer that say what accelerate does",
    ("integrations.fsdp", "dtensor"): "FSDP2 shards parameters as DTensors",
}
"""Modules that name others than their integration does, and why. A user of an integration names what it imports."""


def words(tree: ast.Module) -> set[str]:
    """Return the names and texts in code, without docstrings, definitions, and what it imports from integrations."""
    nodes = [*ast.walk(tree)]
    found: set[str] = set()
    imported: set[str] = set()
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.add(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module, names = getattr(node, "module", None) or "", {alias.name for alias in node.names}
            is_ours = module.startswith("embedlayer.integrations")
            (imported if is_ours else found).update(names if is_ours else {module, *names})
        else:  # names, attributes, arguments and keywords
            found |= {word for key in ("id", "attr", "arg") if isinstance(word := getattr(node, key, None), str)}
    return found - imported


def test_other_libraries_are_named_in_their_integrations_alone() -> None:
    trees = {name.removeprefix("embedlayer."): ast.parse(file.read_text()) for name, file in MODULES.items()}
    defined = {getattr(node, "name", "") for library in NAMES for node in trees[f"integrations.{library}"].body}
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        used = words(tree) - defined
        for library, pattern in NAMES.items():
            if module != f"integrations.{library}" and any(re.search(pattern, word, re.I) for word in used):
                found.setdefault(module, set()).add(library)
    assert {(module, " ".join(sorted(libraries))) for module, libraries in found.items()} == EXCEPTIONS.keys()
