"""The source distribution and the wheel: what they contain, what an index shows of them, and that the wheel runs."""

import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from subprocess import CompletedProcess

import pytest
from markdown_it import MarkdownIt

import embedlayer

ROOT = Path(__file__).resolve().parents[1]
HOOK = runpy.run_path(str(ROOT / "hatch_build.py"))
REPOSITORY = "https://example.org/embedlayer"
TAG = f"v{embedlayer.__version__}"


@dataclass(frozen=True)
class Distribution:
    """A source distribution and the wheel that was built with it."""

    sdist: Path
    wheel: Path

    @property
    def metadata(self) -> email.message.Message:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(archive.read(name))

    @property
    def description(self) -> str:
        return self.metadata.get_payload(decode=True).decode()


BUILD = ("build", "--no-isolation", "--outdir")
"""Build a source distribution, and the wheel of that."""
HATCHLING = ("hatchling", "build", "--directory")
"""Build both of the tree, in one process; `--target` names one."""


def build(tool: tuple[str, ...], tree: Path, folder: Path, *options: str, repository: str = "") -> CompletedProcess:
    command = [sys.executable, "-m", *tool, str(folder), *options]
    environment = {**os.environ, "EMBEDLAYER_REPOSITORY": repository, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what is distributed, without the PKG-INFO that the root has if it is a source distribution."""
    folder = tmp_path_factory.mktemp("tree")
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = [name.removeprefix("/") for name in config["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]]
    for name in ["pyproject.toml", ".gitignore", *included]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def small_tree(tree, tmp_path_factory) -> Path:
    """The files of its root, and of the package those outside of subpackages: quicker to build, with all metadata."""
    folder = tmp_path_factory.mktemp("small_tree")
    (folder / "embedlayer").mkdir()
    for path in [*tree.glob("*"), *tree.glob("embedlayer/*")]:
        if path.is_file():
            shutil.copy(path, folder / path.relative_to(tree))
    return folder


@pytest.fixture(scope="module")
def plain(tree, tmp_path_factory) -> Distribution:
    return built(HATCHLING, tree, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def linked(small_tree, tmp_path_factory) -> Distribution:
    return built(BUILD, small_tree, tmp_path_factory.mktemp("linked"), REPOSITORY)


def built(tool: tuple[str, ...], tree: Path, folder: Path, repository: str = "") -> Distribution:
    result = build(tool, tree, folder, repository=repository)
    assert result.returncode == 0, result.stdout + result.stderr
    return Distribution(*folder.glob("*.tar.gz"), *folder.glob("*.whl"))


def links(markdown: str) -> list[str]:
    """The targets of all links and images, as a Markdown parser finds them."""
    tokens = [child for token in MarkdownIt().parse(markdown) for child in token.children or ()]
    return [str(target) for token in tokens for name in ("href", "src") if (target := token.attrGet(name))]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_contains_the_package_and_nothing_else(tree, plain) -> None:
    with zipfile.ZipFile(plain.wheel) as archive:
        names = {name for name in archive.namelist() if not PurePosixPath(name).parts[0].endswith(".dist-info")}
    assert names == {f"embedlayer/{name}" for name in files(tree / "embedlayer")}
    assert {"embedlayer/py.typed", "embedlayer/__init__.pyi", "embedlayer/explorer/page/index.html"} <= names


def test_the_source_distribution_contains_the_tree(tree, plain) -> None:
    with tarfile.open(plain.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == files(tree) | {"PKG-INFO"}


def test_the_tree_builds_the_wheel_of_the_source_distribution(small_tree, linked, tmp_path) -> None:
    result = build(HATCHLING, small_tree, tmp_path, "--target", "wheel", repository=f"{REPOSITORY}.git/")
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.read_bytes() == linked.wheel.read_bytes()


@pytest.mark.long
def test_twine_accepts_the_files(plain, linked) -> None:
    names = [str(path) for each in (plain, linked) for path in (each.sdist, each.wheel)]
    result = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *names], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("PASSED") == 4


def test_without_a_repository_there_are_no_urls_links_or_comments(plain) -> None:
    assert plain.metadata.get_all("Project-URL") is None
    assert links(plain.description) == []
    assert "<!--" not in plain.description


def test_with_a_repository_every_url_and_link_is_absolute_and_names_a_file(linked) -> None:
    found = dict(url.split(", ") for url in linked.metadata.get_all("Project-URL"))
    assert found == {
        "Homepage": REPOSITORY,
        "Documentation": f"{REPOSITORY}/blob/{TAG}/docs/index.md",
        "Changelog": f"{REPOSITORY}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }
    assert "<!--" not in linked.description
    absolute, relative = links(linked.description), links((ROOT / "README.md").read_text())
    assert len(absolute) == len(relative) > 10
    for link, path in zip(absolute, relative, strict=True):
        assert link == f"{REPOSITORY}/{'raw' if path.endswith('.png') else 'blob'}/{TAG}/{path}"
        assert (ROOT / path).is_file()


def test_the_description_has_the_headings_code_and_tables_of_the_readme(plain, linked) -> None:
    def kept(markdown: str) -> list[str]:
        tokens = MarkdownIt().enable("table").parse(markdown)
        return [token.type + token.content for token in tokens if token.type in ("fence", "heading_open", "td_open")]

    readme = (ROOT / "README.md").read_text()
    assert kept(plain.description) == kept(linked.description) == kept(readme)
    assert plain.metadata["Description-Content-Type"] == "text/markdown"


@pytest.mark.parametrize("repository", [None, REPOSITORY])
def test_links_in_code_and_absolute_links_stay(repository) -> None:
    code = "`x[i](y)`\n\n```python\nx[i](y)  # <!-- no comment -->\n```\n\n"
    text = f"{code}[a page](https://example.org/a) [mail](mailto:a@b)"
    assert HOOK["long_description"](text, repository, "v1") == text


def test_a_link_whose_label_is_not_its_path_keeps_both() -> None:
    text = "See [the guide](docs/a.md), [docs/b.md](docs/b.md).\n![A picture.](docs/c.png)<!-- a\ncomment -->"
    assert HOOK["long_description"](text, None, "v1") == "See the guide (docs/a.md), docs/b.md.\n"


@pytest.mark.parametrize(
    "value",
    [
        "http://example.org/embedlayer",
        "git@example.org:embedlayer.git",
        "https://example.org",
        "https://user:secret@example.org/embedlayer",
        "https://example.org/embedlayer?tab=readme",
        "https://example.org/embed layer",
        "https://example.org/embedlayer\n",
        "embedlayer",
    ],
)
def test_what_is_not_the_https_url_of_a_repository_is_refused(value) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(value))):
        HOOK["repository_url"](value)


def test_the_installed_wheel_runs(plain, tmp_path) -> None:
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", str(target), str(plain.wheel)], check=True)
    shown = subprocess.run(
        [sys.executable, "-m", "embedlayer", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "Usage: " in shown.stdout
