"""The package calls nothing that only Linux has, except behind a guard: macOS and other systems lack it."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hidden_calls import NOT_EVERYWHERE, NOT_ON_MACOS
from processes import run_program

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("ctypes", "errno", "fcntl", "mmap", "os", "resource", "select", "signal", "socket", "stat", "time")
"""Modules of Python whose names depend on the system."""


@cache
def trees() -> dict[Path, ast.Module]:
    """The files of the package that name what depends on the system, parsed."""
    words = re.compile(rf"^\s*(import|from) ({'|'.join(MODULES)})\b|sys\.platform|/(proc|sys|dev)/", re.MULTILINE)
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(ROOT.glob("embedlayer/**/*.py"))}
    return {file: ast.parse(text) for file, text in texts.items() if words.search(text)}


@cache
def stub_of(module: str) -> ast.Module:
    """The type stubs in mypy of a module of Python."""
    (package,) = find_spec("mypy").submodule_search_locations
    stubs = Path(package) / "typeshed" / "stdlib"
    file = next(each for each in (stubs / f"{module}.pyi", stubs / module / "__init__.pyi") if each.exists())
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def stub_names(module: str, platform: str) -> set[str]:
    """The names of a module of Python on a system, as its type stubs in mypy say."""
    system = type("sys", (), {"platform": platform, "version_info": sys.version_info})

    def names(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.If):
                condition = eval(compile(ast.Expression(node.test), module, "eval"), {"sys": system})
                yield from names(node.body if condition else node.orelse)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from (alias.asname or alias.name for alias in node.names)

    return set(names(stub_of(module).body))


@cache
def uses_of(file: Path) -> set[tuple[str, str, bool]]:
    """Module, name and whether an `if hasattr(module, name)` is around it, of each `module.name` in a file."""
    found = set()
    nodes: list[tuple[ast.AST, tuple[ast.expr, ...]]] = [(trees()[file], ())]
    while nodes:
        node, guards = nodes.pop()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
            guard = f"hasattr({node.value.id}, '{node.attr}')"
            found.add((node.value.id, node.attr, any(guard in ast.unparse(test) for test in guards)))
        inner = (*guards, node.test) if isinstance(node, ast.If | ast.IfExp) else guards
        nodes += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def all_uses() -> set[tuple[str, str, bool]]:
    return set().union(*map(uses_of, trees()))


def test_what_macos_lacks_is_listed_and_guarded() -> None:
    lacks = {
        (module, name) for module in MODULES for name in stub_names(module, "linux") - stub_names(module, "darwin")
    }
    assert ("os", "memfd_create") in lacks
    assert {use[:2] for use in all_uses()} & lacks == {
        (module.__name__, name) for module, names in NOT_ON_MACOS.items() for name in names
    }
    assert not [use for use in all_uses() if use[:2] in lacks and not use[2]]


def test_what_other_systems_lack_is_guarded() -> None:
    hidden = {(module.__name__, name) for module, names in NOT_EVERYWHERE.items() for name in names}
    assert not [use for use in all_uses() if use[:2] in hidden and not use[2]]
    assert "fork" not in {name for _, name, _ in all_uses()}


def test_no_name_that_depends_on_the_system_is_imported_by_itself() -> None:
    """The tests above see `os.name`, and not `from os import name`."""
    imports = [
        (node.module, alias.name)
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
    ]
    lacking = [(module, name) for module, name in imports if name not in stub_names(module, "darwin")]
    assert not lacking


def is_caught(tree: ast.AST, node: ast.AST) -> bool:
    """Whether a `try` or `suppress` for `OSError`, or `Path.exists`, is around a node."""
    for parent in ast.walk(tree):
        text = ""
        if isinstance(parent, ast.Try) and node in {*(each for part in parent.body for each in ast.walk(part))}:
            text = " ".join(ast.unparse(handler.type) for handler in parent.handlers if handler.type)
        elif isinstance(parent, ast.With) and node in {*ast.walk(parent)}:
            text = " ".join(ast.unparse(item) for item in parent.items)
        elif (
            isinstance(parent, ast.Call)
            and ast.unparse(parent.func).endswith(".exists")
            and node in {*ast.walk(parent)}
        ):
            return True
        if "OSError" in text:
            return True
    return False


def test_files_of_the_kernel_may_be_missing() -> None:
    places = [
        (file, node)
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith(("/proc/", "/sys/", "/dev/shm"))
    ]
    assert places
    assert not [(file, node.value) for file, node in places if not is_caught(trees()[file], node)]


def test_only_one_module_asks_the_c_library() -> None:
    asking = {
        file.relative_to(ROOT).as_posix()
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("ctypes.CDLL", "sys.platform", "os.name"))
    }
    assert asking == {"embedlayer/io/system_calls.py"}


def test_what_uses_the_calls_is_imported_where_they_are_missing() -> None:
    hidden = {module.__name__: (*NOT_ON_MACOS.get(module, ()), *names) for module, names in NOT_EVERYWHERE.items()}
    asking = {(module, name) for module, names in hidden.items() for name in names}
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in trees()
        if {use[:2] for use in uses_of(file)} & asking
    ]
    assert {"embedlayer.core.forks", "embedlayer.io.system_calls"} <= {*modules}
    code = f"""
import sys
import torch
for name in [name for name in sys.modules if name.partition(".")[0] == "embedlayer"]:
    del sys.modules[name]
sys.modules["fcntl"] = None
for module, names in {hidden}.items():
    for name in names:
        delattr(__import__(module), name)
for name in {modules}:
    __import__(name)
"""
    exit_code, _, errors = run_program("-c", code, cwd=ROOT)
    assert exit_code == 0, errors
