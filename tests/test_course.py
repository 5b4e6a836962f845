"""The course: its parts, its quotations, and its links into the story. The build of the site executes the lessons."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COURSE = ROOT / "docs" / "course"
LESSONS = sorted(COURSE.glob("[0-9]*.md"))
CELL = re.compile(r"^```\{code-cell\}\n(?:---\n(.*?)---\n)?(.*?)^```", flags=re.S | re.M)
STORY_LINK = re.compile(r'href="\.\./story\.html#learn\?s=(\w+)([^"]*)"')
LETTERS = {"L": "000", "M": "001", "N": "002", "E": "003", "G": "004"}
"""The letter by which the course names a text, and the start of the text's file name."""


def plain(text: str) -> str:
    """The text in lower case, without white space and the marks of Markdown and of comments."""
    for mark, sign in (("’", "'"), ("“", '"'), ("”", '"'), ('")', ""), ('print("', "")):
        text = text.replace(mark, sign)
    return re.sub(r"\\n|[\\`*#\s]", "", text).lower()


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_has_its_parts(lesson) -> None:
    text = lesson.read_text(encoding="utf-8")
    cells = CELL.findall(text)
    assert f"{{nb-download}}`{lesson.stem}.ipynb`" in text
    assert re.search(r"^> ", text, flags=re.M), "a statement of a text"
    assert any("plots." in code for _, code in cells), "a picture"
    assert "\n## Where the text" in text
    hidden = ["hide-cell" in options for options, _ in cells]
    assert hidden == sorted(hidden), "solutions are the last cells"
    exercises = text[text.index("\n## Exercises\n") : text.index("\n## In the story\n")]
    assert [int(number) for number in re.findall(r"^\*\*Exercise (\d)\.\*\* ", exercises, flags=re.M)] == [1, 2, 3]
    assert hidden.count(True) == exercises.count("hide-cell") == 3, "a solution for each"
    assert STORY_LINK.search(text)
    too_long = [line for _, code in cells for line in code.splitlines() if len(line) > 88]
    assert not too_long, "the page has room for 88 characters"


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_quotation_is_in_its_text(lesson, shared_data) -> None:
    for quotation in re.findall(r"(?:^>.*\n)+", lesson.read_text(encoding="utf-8"), flags=re.M):
        *passages, rest = re.split(r"\\\[([LMNEG])\\\]", re.sub(r"^> ?", "", quotation, flags=re.M))
        assert not rest.strip(), "each quotation names its text"
        for said, letter in zip(passages[::2], passages[1::2], strict=True):
            (file,) = (shared_data.parent / "seeds").glob(f"{LETTERS[letter]}_*")
            source = plain(file.read_text(encoding="utf-8"))
            for sentence in re.split(r"(?<=[.!?:…])\s+", said.strip()):
                assert plain(sentence).rstrip(".:!…") in source, f"[{letter}] does not say: {sentence}"
            for passage in said.split("…"):
                assert re.sub(r"\W", "", plain(passage)) in re.sub(r"\W", "", source), f"… is missing: {passage}"


def test_the_index_lists_the_lessons_and_where_each_text_is_quoted() -> None:
    page = (COURSE / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[\d.*?\]\((.*?)\)", page, flags=re.M) == [lesson.name for lesson in LESSONS]
    for lesson in LESSONS:
        assert f"[{lesson.read_text(encoding='utf-8').partition('# ')[2].partition(chr(10))[0]}]({lesson.name})" in page
    for letter, said in re.findall(r"^\| \\\[(\w)\\\] \|.*\| ([\d, ]+) \|$", page, flags=re.M):
        quoted = [int(lesson.name[:2]) for lesson in LESSONS if f"\\[{letter}\\]" in lesson.read_text(encoding="utf-8")]
        assert said == ", ".join(map(str, quoted))


def test_lessons_and_scenes_link_to_each_other() -> None:
    learn = ROOT / "embedlayer" / "explorer" / "page" / "learn"
    rows = re.findall(r'^  \["([\w-]+)", "(.*)", "([\w ]+)"\],$', (learn / "course.js").read_text("utf-8"), flags=re.M)
    assert [file for file, _, _ in rows] == [lesson.stem for lesson in LESSONS]
    for lesson, (_, title, scenes) in zip(LESSONS, rows, strict=True):
        text = lesson.read_text(encoding="utf-8")
        assert re.search(r"^# \d\. (.*)$", text, flags=re.M)[1] == title
        assert {*scenes.split()} <= {scene for scene, _ in STORY_LINK.findall(text)}
    declared = re.findall(
        r'^  id: "(\w+)",$', "".join(file.read_text("utf-8") for file in learn.glob("*.js")), flags=re.M
    )
    assert sorted(" ".join(scenes for *_, scenes in rows).split()) == sorted(declared), "each scene has one lesson"


def test_no_lesson_sends_a_reader_to_a_later_one_for_a_term() -> None:
    for lesson in LESSONS:
        named = re.findall(r"\(lesson (\d)[^)]*\)", lesson.read_text(encoding="utf-8"))
        assert all(int(number) <= int(lesson.stem[:2]) for number in named), f"{lesson.stem} uses what comes later"


@pytest.mark.long
def test_lessons_are_written_as_executed_notebooks_beside_the_story(tmp_path) -> None:
    for package in ("nbclient", "myst_nb", "sphinx"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    command = [sys.executable, str(ROOT / "docs" / "lessons.py"), str(tmp_path / "course")]
    environment = {**os.environ, "EMBEDLAYER_LESSONS": "1"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"{tmp_path / 'course'} has 1 executed lessons" in shown.stdout
    assert not shown.stderr
    notebook = json.loads((tmp_path / "course" / f"{LESSONS[0].stem}.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell["outputs"])
    prose = "".join(line for cell in notebook["cells"] if cell["cell_type"] == "markdown" for line in cell["source"])
    for address in re.findall(r"\]\(([^#)]+)", prose):
        assert (tmp_path / "course" / address).exists(), address
    assert "](story.html#learn?s=ids)" in prose


def test_the_install_lines_of_the_index_bring_what_the_lessons_import() -> None:
    page = (COURSE / "index.md").read_text(encoding="utf-8")
    assert page.index("make lessons") < page.index("pip install"), "what needs no command more comes first"
    checkout, *others = re.findall(r"^pip install (.*?)(?:  +#.*)?$", page, flags=re.M)
    extras, *packages = re.fullmatch(r"'\.\[([\w,]+)\]' (.*)", checkout).groups()
    assert f'`pip install "$(ls dist/*.whl)[{extras}]" {packages[0]}`' in page, "the same with the wheel"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *" ".join([*packages, *others]).split()]
    for extra in extras.split(","):
        requirements += project["optional-dependencies"][extra]
    modules = {re.match(r"[\w-]+", requirement)[0].replace("-", "_") for requirement in requirements}
    for lesson in LESSONS:
        for _, code in CELL.findall(lesson.read_text(encoding="utf-8")):
            for node in ast.walk(ast.parse(code)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                imported = {name.partition(".")[0] for name in names}
                assert imported <= {"embedlayer", *modules, *sys.stdlib_module_names}, lesson.stem
    assert "plots" in extras, "each lesson has a picture"


def test_the_cells_that_need_a_network_run_without_one(tmp_path, monkeypatch, unchecked) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # it would download the tokenizer
    for block in re.findall(
        r"^```python\n(.*?)^```", (COURSE / "texts.md").read_text(encoding="utf-8"), flags=re.S | re.M
    ):
        exec(compile(block, "texts.md", "exec"), {})
