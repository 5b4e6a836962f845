"""Compare the results of two versions of the package, on this machine.

    python tools/golden.py compare COMMIT [--areas tables losses] [--all]
    python tools/golden.py record FOLDER [--areas tables losses]

`compare` runs every case of `tools/golden_cases` on a commit and on the working tree, and prints each case with
different results: different in the last bits, or by more. Results of the commit are kept in `out/golden`, so a second
comparison runs only the working tree. The exit code is 1 if a result differs by more than its last bits or is missing.

A module in `tools/golden_cases` is an area. Its function `cases()` yields names and functions without arguments, which
use only exported names of the package, so that they run on both versions. A result consists of tensors, arrays,
numbers, texts, files and records of these. An exception that a case raises is compared by its class.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tools" / "golden_cases"
AREAS = sorted(path.stem for path in CASES.glob("[a-z]*.py"))
LAST_BITS = 6
"""Numbers differ in their last bits if they differ by less than 2 to this power times the precision of their dtype."""

TEXT_CHARACTERS = 20_000
_TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/\w+")
Leaf = Any  # a tensor, a number, a text or None


def leaves(value: object, place: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield the tensors, numbers and texts that a result is made of, each with its place in the result."""
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        value = value.detach().coalesce()
        yield from leaves({"indices": value.indices(), "values": value.values()}, place)
    elif isinstance(value, torch.Tensor):
        yield place, value.detach().clone(memory_format=torch.contiguous_format)
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        yield place, torch.from_numpy(np.array(value, order="C"))
    elif isinstance(value, BaseException):
        yield f"{place}!", type(value).__name__
    elif isinstance(value, bytes):
        yield place, f"{len(value)} bytes {hashlib.sha256(value).hexdigest()}"
    elif isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{place}/{key}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from leaves({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, place)
    elif hasattr(value, "_asdict"):
        yield from leaves(value._asdict(), place)
    elif isinstance(value, Sequence | set | frozenset | range) and not isinstance(value, str):
        items = [*value] if isinstance(value, Sequence) else sorted(value)
        if len(items) > 32 and all(type(item) in (int, bool) for item in items):
            yield place, torch.tensor(items)
        else:
            for index, item in enumerate(items):
                yield from leaves(item, f"{place}/{index}")
    elif isinstance(value, bool | int | float | None):
        yield place, value
    else:
        yield place, _TEMPORARY.sub("FOLDER", str(value))[:TEXT_CHARACTERS]


def files_of(folder: Path | str) -> dict[str, object]:
    """Return the content of each file in a folder, as a result of a case; of safetensors, its tensors and metadata."""
    contents: dict[str, object] = {}
    for file in sorted(Path(folder).rglob("*")):
        name = str(file.relative_to(folder))
        if file.is_file() and file.read_bytes()[8:10] == b'{"':  # a safetensors file of any name
            with safe_open(file, "pt") as opened:
                tensors = {key: opened.get_tensor(key) for key in sorted(opened.keys())}
                contents[name] = {"metadata": json.dumps(opened.metadata(), sort_keys=True), **tensors}
        elif file.is_file():
            content = _TEMPORARY.sub("FOLDER", file.read_bytes().decode("latin-1"))
            contents[name] = {"size and hash": content.encode("latin-1"), "start": content[:TEXT_CHARACTERS]}
    return contents


def result_of(name: str, case: Callable[[], object]) -> object:
    """Run a case with random numbers of its own, and return its result, or the error that it raises."""
    torch.manual_seed(zlib.crc32(name.encode()))
    try:
        return case()
    except Exception as error:  # noqa: BLE001 - the class of an error is a result
        return error


def record(folder: Path, area: str) -> None:
    """Run the cases of an area on the package that is imported, and write their results into a folder."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Leaf] = {}
    seconds: dict[str, float] = {}
    for name, case in importlib.import_module(f"golden_cases.{area}").cases():
        assert name not in seconds, f"two cases have the name {name}"
        started = time.perf_counter()
        result = result_of(name, case)
        seconds[name] = time.perf_counter() - started
        for place, leaf in leaves(result, f"{name}:"):
            (tensors if isinstance(leaf, torch.Tensor) else values)[place] = leaf
        if isinstance(result, Exception) and type(result).__module__ != "embedlayer.core.errors":
            print(f"{area}, {name}: {result!r} (most likely a mistake in the case)", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{area}.safetensors")
    (folder / f"{area}.json").write_text(json.dumps({"values": values, "seconds": seconds}))


def difference(old: Leaf, new: Leaf) -> tuple[str, str]:
    """Return how two results differ, `("equal", "")` for example, and a figure or the results themselves.

    The other kinds are `"last bits"`, with the largest difference in units of the precision of the dtype at the largest
    number, and `"more"`.
    """
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        if type(old) is type(new) and (old == new or (isinstance(old, float) and math.isnan(old) and math.isnan(new))):
            return "equal", ""
        if isinstance(old, float) and isinstance(new, float):
            old, new = (torch.tensor([each], dtype=torch.float32) for each in (old, new))  # most are of float32
            kind, figure = difference(old, new)
            return ("last bits", "less than float32") if kind == "equal" else (kind, figure)
        return "more", f"{str(old)[:60]!r} -> {str(new)[:60]!r}"
    if old.dtype != new.dtype or old.shape != new.shape:
        return "more", f"{old.dtype} {tuple(old.shape)} -> {new.dtype} {tuple(new.shape)}"
    if torch.equal(old.reshape(-1).view(torch.uint8), new.reshape(-1).view(torch.uint8)):
        return "equal", ""
    if not old.is_floating_point():
        return "more", f"{int((old != new).sum())} of {old.numel()} differ"
    precision, old, new = torch.finfo(old.dtype).eps, old.double(), new.double()
    if not torch.equal(old.isfinite(), new.isfinite()) or not torch.equal(
        old[~old.isfinite()].nan_to_num(7.0), new[~new.isfinite()].nan_to_num(7.0)
    ):
        return "more", "NaN or infinity elsewhere"
    old, new = (each.nan_to_num(0.0, 0.0, 0.0) for each in (old, new))
    units = float((old - new).abs().max() / (precision * max(float(old.abs().max()), 1e-300)))
    return ("last bits" if units < 2**LAST_BITS else "more"), f"{units:.2g} units"


def compared(old: Path, new: Path, area: str) -> dict[str, tuple[str, str]]:
    """Return how the results of each case of an area differ between two recordings, the worst of each case."""
    sides = []
    for folder in (old, new):
        noted = json.loads((folder / f"{area}.json").read_text())
        sides.append(({**load_file(folder / f"{area}.safetensors"), **noted["values"]}, noted["seconds"]))
    (before, cases_before), (after, cases_after) = sides
    results = dict.fromkeys(cases_after, ("equal", ""))
    results |= dict.fromkeys(cases_before.keys() ^ cases_after.keys(), ("missing", "in one of the versions"))
    for place in sorted(before.keys() | after.keys()):
        name = place.partition(":")[0]
        kind, figure = difference(before.get(place, "missing"), after.get(place, "missing"))
        order = ("equal", "last bits", "more", "missing")
        if order.index(kind) > order.index(results[name][0]):
            results[name] = kind, f"{place.partition(':')[2] or 'result'}: {figure}"
    return results


def tree_of(commit: str) -> Path:
    """Return a folder with the files of a commit, which is created once."""
    sha = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
    tree = ROOT / "out" / "golden" / sha / "tree"
    if not tree.exists():
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=tree.parent, ignore_cleanup_errors=True) as partial:
            archive = subprocess.check_output(["git", "archive", sha, "embedlayer"], cwd=ROOT)
            subprocess.run(["tar", "x", "-C", partial], input=archive, check=True)
            Path(partial).rename(tree)
    return tree


def start(tree: Path, folder: Path, area: str) -> subprocess.Popen[bytes]:
    """Start a process that records an area with the package in `tree`."""
    numba = str(tree / "out" / "numba")  # compiled kernels are kept by the path of their source
    paths = os.pathsep.join(map(str, (tree, ROOT / "tests", ROOT / "tests" / "formats")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": numba}
    environment["PYTHONHASHSEED"] = "0"  # PEFT writes sets
    command = [sys.executable, str(ROOT / "tools" / "golden.py"), "record", str(folder), "--areas", area]
    return subprocess.Popen(command, env=environment, cwd=folder.parent)


def compare(commit: str, areas: Sequence[str], *, shows_all: bool) -> int:
    """Compare the working tree with a commit, print what differs, and return the exit code."""
    tree = tree_of(commit)
    sources = b"".join(path.read_bytes() for path in [Path(__file__), *sorted(CASES.glob("*.py"))])
    old = tree.parent / f"results-{hashlib.sha256(sources).hexdigest()[:12]}"
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary) / "results"
        for area in areas:
            started = time.perf_counter()
            sides = [start(ROOT, new, area)]
            if not (old / f"{area}.json").exists():
                sides.append(start(tree, old, area))
            if sum(side.wait() for side in sides):
                print(f"{area}: a recording ended with an error")
                failed += 1
                continue
            results = compared(old, new, area)
            for name, (kind, figure) in results.items():
                if shows_all or kind != "equal":
                    print(f"{area}, {name}: {kind} {figure}")
            counts = Counter(kind for kind, _ in results.values())
            failed += counts["more"] + counts["missing"]
            shown = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
            print(f"{area}: {shown} of {len(results)} cases, {time.perf_counter() - started:.0f} s", flush=True)
    return int(failed > 0)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("compare", "record"))
    parser.add_argument("argument", metavar="COMMIT|FOLDER")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=AREAS)
    parser.add_argument("--all", action="store_true", help="print the cases with equal results too")
    options = parser.parse_args()
    if options.action == "compare":
        return compare(options.argument, options.areas, shows_all=options.all)
    for area in options.areas:
        record(Path(options.argument), area)
    return 0


if __name__ == "__main__":
    sys.exit(main())
