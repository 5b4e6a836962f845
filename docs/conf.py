"""Sphinx: Markdown pages by MyST, the API reference by autodoc, the theme is Furo."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import embedlayer

project = "embedlayer"
author = "the embedlayer authors"
copyright = "the embedlayer authors"
version = release = embedlayer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
default_role = "code"  # docstrings write `code` as Markdown does
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
html_title = "embedlayer"
suppress_warnings = ["config.cache"]

ROOT = Path(__file__).resolve().parents[1]


def exports(package: str) -> dict[str, str]:
    """Return the public names of a package and the module that defines each, read from its stub `__init__.pyi`."""
    stub = Path(embedlayer.__file__).parents[1].joinpath(*package.split("."), "__init__.pyi")
    if not stub.exists():
        return {}
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: f"{package}.{node.module}" for node in imports for alias in node.names}


def public_names(package: str) -> list[str]:
    """Return the import paths of a subpackage's public names, those that `embedlayer` itself exports first."""
    inside = (package, f"{package}.")
    top = [name for name, home in exports("embedlayer").items() if home == package or home.startswith(inside[1])]
    own = list(exports(package))
    if not top and not own:  # a module such as `embedlayer.scratch`: its own public functions and classes
        module = import_module(package)
        own = [name for name, value in vars(module).items() if is_defined_in(module.__name__, name, value)]
    return [f"embedlayer.{name}" for name in sorted(top)] + [f"{package}.{name}" for name in sorted(own)]


def defining_module(path: str) -> str:
    """Return the module that defines a public name, from the stub of the package that exports it."""
    package, _, name = path.rpartition(".")
    return exports(package).get(name, package)


def is_defined_in(module: str, name: str, value: object) -> bool:
    """Return whether a module defines a public class or function itself."""
    return not name.startswith("_") and getattr(value, "__module__", None) == module and callable(value)


def convert_tables(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Replace the Markdown tables of a docstring by reST list tables, in place."""
    new: list[str] = []
    for line in lines:
        if line.startswith("|---"):
            continue
        if not line.startswith("| "):
            new.append(line)
            continue
        if not (new and new[-1].startswith("     - ")):
            new += ["", ".. list-table::", "   :header-rows: 1", ""]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        new += [f"{'   * - ' if place == 0 else '     - '}{cell}" for place, cell in enumerate(cells)]
    lines[:] = new


class PublicNames(SphinxDirective):
    """`.. public-names:: embedlayer.positions` documents every public name of a subpackage."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of one autodoc entry per public name."""
        lines: list[str] = []
        for path in public_names(self.arguments[0]):
            home, _, name = path.rpartition(".")
            value: Any = getattr(import_module(home), name)
            if isinstance(value, type):
                lines += [f".. autoclass:: {path}", "   :members:", "   :show-inheritance:", ""]
            elif callable(value):
                lines += [f".. autofunction:: {path}", ""]
            else:
                comment = ModuleAnalyzer.for_module(defining_module(path)).find_attr_docs().get(("", name), [])
                lines += [f".. py:data:: {path}", "", *(f"   {line}" for line in comment), ""]
        node = nodes.section()
        node.document = self.state.document
        self.state.nested_parse(StringList(lines, self.arguments[0]), self.content_offset, node)
        return node.children


def shorten_paths_of_diffs(app: Sphinx, doctree: nodes.document) -> None:
    """Name the files of a `literalinclude` with `:diff:` relative to the repository, in place."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            block[:] = [nodes.Text(block.astext().replace(f"{ROOT}/", ""))]
            block.rawsource = block.astext()  # highlighted only where both are equal


def setup(app: Sphinx) -> None:
    """Register the directive, the conversion of tables and the paths of diffs."""
    app.add_directive("public-names", PublicNames)
    app.connect("doctree-read", shorten_paths_of_diffs)
    app.connect("autodoc-process-docstring", convert_tables, priority=900)
