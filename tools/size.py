"""Count what the next owner of this project must read: `python tools/size.py [ROOT]`.

Definitions are counted as well as lines, because a function, a class or a module is something to learn.
`tests/test_budget.py` holds a ceiling for each figure.
"""

import ast
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGE = "embedlayer"
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_RECORDS = {"NamedTuple", "namedtuple", "make_dataclass"}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def sizes(root: Path) -> dict[str, int]:
    """Return each figure of the project in folder `root`."""
    figures: Counter[str] = Counter()
    for path in (root / PACKAGE).rglob("*.py"):
        figures.update(_module_sizes(path))
    figures["packages"] = len([*(root / PACKAGE).glob("*/__init__.py")])
    for folder, pattern in (("tools", "**/*.py"), ("docs", "*.py"), ("tests", "**/*.py")):
        figures[f"lines of {folder}"] = sum(path.read_bytes().count(b"\n") for path in (root / folder).glob(pattern))
    return dict(figures)


def _module_sizes(path: Path) -> dict[str, int]:
    """Return the figures of one file."""
    nodes = [*ast.walk(ast.parse(path.read_bytes()))]
    owners = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | _Function)]
    docstrings = [node.body[0] for node in owners if ast.get_docstring(node) is not None]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    raised = _lines([node for node in nodes if isinstance(node, ast.Raise)])
    built = _lines([node for node in nodes if _called_name(node).endswith(("Error", "Warning", "warn"))])
    with path.open("rb") as file:
        tokens = [*tokenize.tokenize(file.readline)]
    code = {line for each in tokens if each.type not in _NO_CODE for line in range(each.start[0], each.end[0] + 1)}
    return {
        "defs": sum(isinstance(node, _Function) for node in nodes),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "modules": 1,
        "lambdas": sum(isinstance(node, ast.Lambda) for node in nodes),
        "named tuples": sum(isinstance(node, ast.Name) and node.id in _RECORDS for node in nodes),
        "lines of code": len(code - _lines(docstrings) - _lines(imports)),
        "lines of raise": len(raised),
        "lines of errors built elsewhere": len(built - raised),
        "docstring lines": len(_lines(docstrings)),
        "docstring characters": sum(len(ast.get_docstring(node) or "") for node in owners),
        "comment lines": len({each.start[0] for each in tokens if each.type == tokenize.COMMENT}),
    }


def _called_name(node: ast.AST) -> str:
    """Return the last part of the name that a call calls; empty for anything else."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _lines(nodes: Iterable[ast.stmt | ast.expr]) -> set[int]:
    """Return the numbers of all lines of these nodes."""
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    for name, figure in sizes(folder).items():
        print(f"{figure:>9,} {name}")
