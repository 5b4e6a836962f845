"""Every dotted name, command and file of ours that an error, a docstring, a page or a help text names exists."""

import ast
import functools
import importlib
import re
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import click
from package_modules import NAMES, package_modules

from embedlayer.cli.main import cli

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "embedlayer").rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]

DOTTED = re.compile(r"(?<![\w/.-])(?:embedlayer|el)(?:\.[A-Za-z_]\w*)+")
COMMAND = re.compile(r"(?<![\w./])embedlayer ([a-z][^\n`|;#]*)")
FILE = re.compile(r"(?<![\w/.-])(?:embedlayer|docs|tests|examples|benchmarks|interop|tools)(?:/[\w-]+)+\.(?:py|md)\b")

NAMED = re.compile(r"embedlayer|\bel\.|(docs|tests|examples|benchmarks|interop|tools)/")
"""What is in each file of the package that names something of ours, beside its imports."""
IMPORT = re.compile(r"^\s*(?:import|from) .*", re.MULTILINE)

NOT_NAMES = {"embedlayer.base", "embedlayer.table"}
"""Keys of the metadata in safetensors files."""
EXAMPLE = re.compile(r"\bNAME\b|(?i:log_?distance|tables[./](?:test_)?normalized|NormalizedEmbedding|example_family)")
"""What the reader fills in, and what CONTRIBUTING's worked examples add."""


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Return `(place, text)` of each line of a page and each literal of the package; `...` for values of f-strings."""
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            found.append((f"{page.relative_to(ROOT)}:{number}", line))
    for source in SOURCES:
        text = source.read_text(encoding="utf-8")
        tree = ast.parse(text if NAMED.search(IMPORT.sub("", text)) else "")
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
                found.append((f"{source.relative_to(ROOT)}:{node.lineno}", "".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append((f"{source.relative_to(ROOT)}:{node.lineno}", node.value))
    return found


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one, of a class, or of what a module lists."""
    path, _, rest = name.partition(".")
    found, path = importlib.import_module("embedlayer"), "embedlayer"
    for part in rest.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                return False
    return True


def unknown_of(words: list[str]) -> str | None:
    """Return the first word of a command line that is no subcommand or option of it, or `None`."""
    command: click.Command = cli
    options: set[str] = set()
    for word in words:
        if isinstance(command, click.Group):
            if word.strip(".,:)") not in command.commands:
                return word if re.fullmatch("[a-z-]+", word) else None  # after it: nothing, or any text
            command = command.commands[word.strip(".,:)")]
            options |= {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        elif (option := re.match(r"\[?(--[a-z-]+)", word)) and option[1] not in {*options, "--help"}:
            return option[1]
    return None


def test_every_dotted_name_can_be_imported() -> None:
    named = {name: place for place, text in texts() for name in DOTTED.findall(text) if not EXAMPLE.search(name)}
    assert {name: place for name, place in named.items() if name not in NOT_NAMES and not exists(name)} == {}
    assert len(named) > 200


def test_every_command_has_the_subcommands_and_options_that_are_named() -> None:
    lines = [(place, each.split()) for place, text in texts() for each in COMMAND.findall(text)]
    commands = [(place, words) for place, words in lines if words[0] in cli.commands]
    assert {(place, unknown) for place, words in commands if (unknown := unknown_of(words))} == set()
    assert len(commands) > 150


def test_every_file_of_the_project_that_is_named_is_there() -> None:
    named = {name: place for place, text in texts() for name in FILE.findall(text) if not EXAMPLE.search(name)}
    assert {name: place for name, place in named.items() if not (ROOT / name).exists()} == {}
    assert len(named) > 30


def test_no_module_has_the_name_of_a_public_function_or_class_that_it_defines() -> None:
    packages = [importlib.import_module(name) for name in ("embedlayer", *NAMES)]
    packages = [package for package in packages if hasattr(package, "__path__")]
    listed = {(each.__module__, name) for package in packages for name, each in public_objects(package)}
    assert [module.__name__ for module in package_modules() if (module.__name__, stem(module)) in listed] == []
    assert len(listed) > 100


def stem(module: ModuleType) -> str:
    """Return the last part of a module's name."""
    return module.__name__.rpartition(".")[2]


def public_objects(package: ModuleType) -> list[tuple[str, Any]]:
    """Return the functions and classes that a package lists, by name."""
    listed = ((name, getattr(package, name)) for name in getattr(package, "__all__", ()))
    return [(name, each) for name, each in listed if isinstance(each, type | FunctionType)]
