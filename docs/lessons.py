"""Write the lessons of the course as executed notebooks, and the story beside them: `python docs/lessons.py FOLDER`.

`EMBEDLAYER_LESSONS` is how many lessons are executed; by default all.
"""

import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

DOCS = Path(__file__).resolve().parent
CONF = runpy.run_path(str(DOCS / "conf.py"))
LINK = re.compile(r'\[([^\]]+)\]\(([^)]+)\)|<a href="([^"]+)">([^<]+)</a>')


def link_beside_notebooks(link: re.Match[str]) -> str:
    """Return a link of a lesson as it is in the folder of notebooks: to a lesson or a scene, or without its address."""
    label, address = link[1] or link[4], link[2] or link[3]
    address = address.replace("../story.html", "story.html").replace("&amp;", "&")
    if address.removesuffix(".md") + ".md" in CONF["LESSONS"]:
        address = address.replace(".md", ".ipynb")
    elif not address.startswith(("story.html", "https:")):
        return label
    return f"[{label}]({address})"


def execute(lesson: Path) -> nbformat.NotebookNode:
    """Return a lesson as a notebook with the outputs of its cells.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raises an exception.
    """
    notebook = read_myst_markdown_notebook(lesson.read_text(encoding="utf-8"))
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(link_beside_notebooks, CONF["DOWNLOAD"].sub("", cell.source))
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=CONF["nb_execution_timeout"], resources=resources, record_timing=False
        ).execute()
    for cell in notebook.cells:
        if cell.metadata.get("mystnb", {}).get("output_stderr") == "remove":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def write_lessons(folder: Path) -> None:
    """Execute the lessons one after another, and write each as soon as it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    lessons = CONF["LESSONS"][: int(os.environ.get("EMBEDLAYER_LESSONS", len(CONF["LESSONS"])))]
    with tempfile.TemporaryDirectory() as profile:
        CONF["use_ipython_profile"](Path(profile))
        for name in lessons:
            start = perf_counter()
            print(f"{name.removesuffix('.md')} ...", end="", flush=True)
            nbformat.write(execute(DOCS / "course" / name), folder / Path(name).with_suffix(".ipynb"))
            print(f" {perf_counter() - start:.0f} s")
    runpy.run_path(str(DOCS / "story.py"))["write_story"](folder / "story.html")
    print(f"{folder} has {len(lessons)} executed lessons: open one in Jupyter Lab or an editor, such as")
    print(f"  pip install jupyterlab && jupyter lab {folder / Path(lessons[0]).with_suffix('.ipynb')}")
    print(f"The scenes that they link to are in {folder / 'story.html'}.")


if __name__ == "__main__":
    write_lessons(Path(sys.argv[1]))
