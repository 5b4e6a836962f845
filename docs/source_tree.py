"""Write the tree of the package into docs/source-tree.md: `python docs/source_tree.py --write`.

Each line is the first line of the module's docstring.
"""

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from tables import between_markers, write_between_markers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "source-tree.md"


def first_line(file: Path) -> str:
    """Return the first line of a module's docstring, or an empty string."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0]


GROUPS = {
    "What everything stands on": "core io families kernels",
    "Text": "tokenization saving data",
    "The layer": "losses row_sparse formats tables positions heads inputs",
    "Training": "optim distributed",
    "Models and files": "models checkpoints training integrations opening",
    "Editing and studying": "vocab compress analysis",
    "What people see": "lessons plots explorer cli",
}
"""The packages of `embedlayer/` from the bottom up."""


def table(folder: Path) -> str:
    """Return the heading of a folder and the table of its modules."""
    files = sorted(folder.glob("[!_]*.py"))
    rows = [f"| `{file.name}` | {first_line(file).replace('|', chr(92) + '|')} |\n" for file in files]
    lines = ["| module | what it does |\n|---|---|\n", *rows, "\n"] if rows else []
    return f"### {folder.relative_to(ROOT)}/\n\n{first_line(folder / '__init__.py')}\n\n" + "".join(lines)


def tree() -> str:
    """Return the groups, with one table for each package: module and what it does.

    Raises:
        ValueError: A package is in no group.
    """
    package = ROOT / "embedlayer"
    grouped = [name for names in GROUPS.values() for name in names.split()]
    missing = {file.parent.name for file in package.glob("*/__init__.py")} - {*grouped}
    if missing:
        raise ValueError(f"GROUPS of docs/source_tree.py has no package {', '.join(sorted(missing))}.")
    parts = []
    for group, names in GROUPS.items():
        parts.append(f"## {group}\n\n")
        for name in names.split():
            if (package / f"{name}.py").exists():
                parts.append(f"### embedlayer/{name}.py\n\n{first_line(package / f'{name}.py')}\n\n")
                continue
            folders = [package / name, *sorted(file.parent for file in (package / name).glob("*/__init__.py"))]
            parts += map(table, folders)
    return "".join(parts)


def page() -> str:
    """Return the text of the page with the tree of today."""
    return between_markers(PAGE, "tree", tree())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "tree", tree())
    else:
        print(tree())
