"""All exported names with their signatures, as text: `python tools/api.py` writes tests/api.txt, which a test compares.

A change of the public interface is then a line in the diff of a commit.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "tests" / "api.txt"
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def snapshot() -> str:
    """Return a line for each exported name, and for each public method and field of an exported class."""
    lines = []
    for stub in sorted((ROOT / "embedlayer").glob("**/__init__.pyi")):
        package = ".".join(stub.parent.relative_to(ROOT).parts)
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                module = stub.parent / Path(*node.module.split("."))
                for name in node.names:
                    if package == "embedlayer":  # whose names are those of the packages
                        lines.append(f"{package}.{name.name}")
                    else:
                        lines += [f"{package}.{line}" for line in _lines_of(module.with_suffix(".py"), name.name)]
    return "".join(f"{line}\n" for line in sorted({*lines}))


@cache
def _definitions(path: Path) -> dict[str, list[ast.stmt]]:
    """Return the statements of a module that define each name; overloads and their function are several."""
    found: dict[str, list[ast.stmt]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found.setdefault(ast.unparse(target), []).append(node)
        elif isinstance(node, _Function | ast.ClassDef):
            found.setdefault(node.name, []).append(node)
    return found


def _lines_of(path: Path, name: str) -> Iterator[str]:
    """Yield the lines of one name of a module, without that of its package."""
    for node in _definitions(path)[name]:
        if isinstance(node, _Function):
            yield f"{name}{_signature(node)}"
        elif isinstance(node, ast.ClassDef):
            yield f"{name}({', '.join(map(ast.unparse, [*node.bases, *node.keywords]))})"
            for part in node.body:
                if isinstance(part, _Function) and (not part.name.startswith("_") or part.name == "__init__"):
                    kinds = "".join(f" @{ast.unparse(each)}" for each in part.decorator_list)
                    yield f"{name}.{part.name}{_signature(part)}{kinds}"
                elif isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
                    yield f"{name}.{ast.unparse(part)}"
        else:
            yield f"{name} = ..."


def _signature(node: _Function) -> str:
    """Return the arguments and the result of a function."""
    return f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot())
