"""Sphinx: Markdown pages and executed lessons by MyST-NB, the API reference by autodoc, the theme is Furo."""

import ast
import logging
import os
import re
import runpy
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from docutils.statemachine import StringList
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import embedlayer

project = "embedlayer"
author = "the embedlayer authors"
copyright = "the embedlayer authors"
version = release = embedlayer.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build"]
default_role = "code"  # docstrings write `code` as Markdown does
napoleon_use_ivar = True
napoleon_attr_annotations = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 2  # a page links to a section of another one by its title
nb_execution_mode = "force"  # a lesson is executed when its page is read; it writes into a temporary folder
LESSONS = sorted(file.name for file in (Path(__file__).parent / "course").glob("[0-9]*.md"))
nb_execution_excludepatterns = [  # EMBEDLAYER_LESSONS is how many lessons are executed; by default all
    f"course/{lesson}" for lesson in LESSONS[int(os.environ.get("EMBEDLAYER_LESSONS", len(LESSONS))) :]
]
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120  # seconds for a cell
nb_output_stderr = "error"  # a warning in a lesson is a warning of the build
nb_merge_streams = True
nb_code_prompt_show = "Show the {type}"
nb_code_prompt_hide = "Hide the {type}"
html_theme = "furo"
html_title = "embedlayer"
html_math_renderer = "mathml"  # the site needs no network
html_static_path, templates_path = ["_static"], ["_templates"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
suppress_warnings = ["config.cache", "myst-nb.lexer"]  # the latter: of lessons that are not executed

ROOT = Path(__file__).resolve().parents[1]
DOWNLOAD = re.compile(r"^Notebook: .*\n\n", flags=re.M)
"""The line of a lesson that offers it as a notebook."""
PARAMETERS = re.compile(r"<dl>(\n(?:<dd><em class=\"sig-param\">.*</dd>\n)+)</dl>")
PARAMETER = re.compile(r"<dd>(<em class=\"sig-param\">.*)</dd>")
"""Sphinx's markup of the parameters of a signature that has one in a line."""


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
    own = [name for name in exports(package) if name not in top]
    if not top and not own:  # a module such as `embedlayer.lessons.scratch`: its own public functions and classes
        module = import_module(package)
        own = [name for name, value in vars(module).items() if is_defined_in(module.__name__, name, value)]
    return [f"embedlayer.{name}" for name in sorted(top)] + [f"{package}.{name}" for name in sorted({*own} - {*top})]


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


def draw_math(translator: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers draw themselves."""
    is_block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=is_block)
    translator.body.append(f"<p>{formula}</p>" if is_block else formula)
    raise nodes.SkipNode


def use_own_ipython_profile(app: Sphinx) -> None:
    """Execute lessons with an IPython profile of this build's own."""
    folder = tempfile.TemporaryDirectory()
    app.connect("build-finished", lambda app, error: folder.cleanup())
    use_ipython_profile(Path(folder.name))


def use_ipython_profile(folder: Path) -> None:
    """Write an IPython profile and let kernels use it, so that no profile of the user changes an output of a lesson."""
    profile = folder / "profile_default"
    profile.mkdir()
    settings = ["c.IPKernelApp.log_level = 'ERROR'", "c.HistoryManager.enabled = False"]
    (profile / "ipython_kernel_config.py").write_text("\n".join(["c = get_config()", *settings]))
    os.environ["IPYTHONDIR"] = str(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # lessons compute little; more threads wait for each other
    for name in ("traitlets", "embedlayer"):  # they say which kernel runs a lesson, and that it waits for CPU kernels
        logging.getLogger(name).setLevel(logging.WARNING)


def strip_links_of_notebooks(app: Sphinx, error: Exception | None) -> None:
    """Replace links in the notebooks for download by their labels: beside a downloaded file there are no pages."""
    for file in Path(app.outdir).glob("_downloads/*/*.ipynb"):
        notebook = nbformat.read(file, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                text = DOWNLOAD.sub("", cell.source)
                cell.source = re.sub(r"\[([^\]]+)\]\([^)]+\)|<a [^>]*>([^<]+)</a>", r"\1\2", text)
        nbformat.write(notebook, file)


def write_story(app: Sphinx, error: Exception | None) -> None:
    """Write the story that lessons link to beside the pages."""
    if error is None and app.builder.name == "html":
        runpy.run_path(str(Path(app.srcdir) / "story.py"))["write_story"](
            Path(app.outdir) / "story.html", course="course/index.html"
        )


def correct_roles(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Replace markup of Sphinx and MyST-NB whose roles and names assistive technology cannot use, in place.

    Captions of the navigation are headings without a level; a folded solution has another name than the text it shows;
    and the parameters of a signature, one in a line, are definitions without a term.
    """
    for part in {"body", "furo_navigation_tree"} & context.keys():
        html = context[part].replace('role="heading"', 'role="heading" aria-level="2"')
        html = html.replace('<summary aria-label="Toggle hidden content">', "<summary>")
        html = PARAMETERS.sub(r'<ul class="parameters">\1</ul>', html)
        context[part] = PARAMETER.sub(r"<li>\1</li>", html)


def shorten_paths_of_diffs(app: Sphinx, doctree: nodes.document) -> None:
    """Name the files of a `literalinclude` with `:diff:` relative to the repository, in place."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            block[:] = [nodes.Text(block.astext().replace(f"{ROOT}/", ""))]
            block.rawsource = block.astext()  # highlighted only where both are equal


def setup(app: Sphinx) -> None:
    """Register the directive, the conversion of tables, the paths of diffs, and what lessons and their links need."""
    app.connect("builder-inited", use_own_ipython_profile)
    app.connect("build-finished", strip_links_of_notebooks)
    app.connect("build-finished", write_story)
    app.add_directive("public-names", PublicNames)
    app.add_html_math_renderer("mathml", (draw_math, None), (draw_math, None))
    app.connect("doctree-read", shorten_paths_of_diffs)
    app.connect("html-page-context", correct_roles, priority=900)  # after the theme's own
    app.connect("autodoc-process-docstring", convert_tables, priority=900)
