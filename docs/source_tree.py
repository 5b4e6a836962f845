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


def tree() -> str:
    """Return one table per package: module and what it does."""
    package = ROOT / "embedlayer"
    folders = [package, *sorted(path.parent for path in package.rglob("__init__.py") if path.parent != package)]
    parts = []
    for folder in folders:
        name = str(folder.relative_to(ROOT))
        parts.append(f"## {name}/\n\n{first_line(folder / '__init__.py')}\n\n| module | what it does |\n|---|---|\n")
        for file in sorted(folder.glob("*.py")):
            if not file.name.startswith("__"):
                parts.append(f"| `{file.name}` | {first_line(file).replace('|', chr(92) + '|')} |\n")
        parts.append("\n")
    return "".join(parts)


def page() -> str:
    """Return the text of the page with the tree of today."""
    return between_markers(PAGE, "tree", tree())


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_between_markers(PAGE, "tree", tree())
    else:
        print(tree())
