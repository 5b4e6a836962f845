"""Count the internal definitions of the package that tests reach: `python tools/internals.py [--names]`.

A definition is internal if no stub (`__init__.pyi`) exports it. Tests reach it by an import, by an attribute of an
internal module, by `getattr`, or in the text of a program or of a patched name. `tests/test_budget.py` holds a ceiling.
"""

import ast
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "embedlayer"
_BY_NAME = {"getattr", "setattr", "delattr", "hasattr", "object"}  # the last one is `patch.object`


@cache
def _is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


@cache
def _exports() -> frozenset[str]:
    """Return all exported names, as names of their package and as names of the module that defines them."""
    names = set()
    for stub in (ROOT / PACKAGE).rglob("__init__.pyi"):
        package = ".".join(stub.parent.relative_to(ROOT).parts)
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    names |= {f"{package}.{each.name}", f"{package}.{node.module}.{each.name}"}
    return frozenset(names)


def _internal(path: str) -> str | None:
    """Return the module and name of the definition that a dotted path reaches; `None` if it is exported."""
    parts = path.split(".")
    size = next(end for end in range(len(parts), 0, -1) if _is_module(".".join(parts[:end])))
    module, rest = ".".join(parts[:size]), parts[size:]
    is_module = (ROOT / Path(*module.split("."))).with_suffix(".py").is_file()
    name = f"{module}.{rest[0]}" if rest and is_module and not rest[0].startswith("__") else None
    return None if name in _exports() else name


class _Reached:
    """The dotted paths that a file or the text of a program reaches."""

    def __init__(self, tree: ast.AST) -> None:
        self.nodes, self.names = [*ast.walk(tree)], {PACKAGE: PACKAGE}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self.names |= {each.asname: each.name for each in node.names if each.asname and _is_ours(each.name)}
            elif isinstance(node, ast.ImportFrom) and _is_ours(node.module):
                self.names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}

    def paths(self) -> Iterator[str]:
        """Yield the path of each import, attribute, call of `getattr` and its like, and name or program in a string."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
                yield from (f"{node.module}.{each.name}" for each in node.names)
            elif isinstance(node, ast.Attribute) and (path := self._dotted(node)):
                yield path
            elif isinstance(node, ast.Call) and len(node.args) > 1 and _called(node) in _BY_NAME:
                owner, name = self._dotted(node.args[0]), getattr(node.args[1], "value", "*")
                if owner and _is_module(owner):
                    yield f"{owner}.{name}"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and f"{PACKAGE}." in node.value:
                with suppress(SyntaxError):
                    yield from _Reached(ast.parse(textwrap.dedent(node.value))).paths()

    def _dotted(self, node: ast.expr) -> str | None:
        """Return the path of an expression that begins with a name of the package, or imports a module by its name."""
        if isinstance(node, ast.Attribute):
            return (start := self._dotted(node.value)) and f"{start}.{node.attr}"
        if isinstance(node, ast.Call) and _called(node) == "import_module":
            name = getattr(node.args[0], "value", None)
            return name if isinstance(name, str) and _is_ours(name) else None
        return self.names.get(node.id) if isinstance(node, ast.Name) else None


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == PACKAGE


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def reached() -> dict[str, dict[str, set[str]]]:
    """Return internal definitions, and the files that reach them, by package of tests."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in sorted((ROOT / "tests").rglob("*.py")):
        name = file.relative_to(ROOT / "tests").as_posix()
        for path in _Reached(ast.parse(file.read_text())).paths():
            if (definition := _internal(path)) is not None:
                found[name.rpartition("/")[0] or "."][definition].add(name)
    return found


def total(found: dict[str, dict[str, set[str]]]) -> int:
    """Return how many internal definitions are reached."""
    return len({definition for each in found.values() for definition in each})


if __name__ == "__main__":
    found = reached()
    for package, definitions in sorted(found.items()):
        print(f"{len(definitions):>5} {package}")
        if "--names" in sys.argv:
            print(*(f"      {name}: {', '.join(sorted(definitions[name]))}" for name in sorted(definitions)), sep="\n")
    print(f"{total(found):>5} distinct")
