"""`python -m interop [SUITE...] [--save]`: run other libraries' tests, plain and with ours in their place."""

import csv
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from interop.suites import SUITES, Suite

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results.csv"
PAGE = ROOT / "docs" / "using-it-with.md"
BEGIN, END = "<!-- interop results -->\n", "<!-- end of interop results -->\n"
Outcomes = dict[str, str]


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(SUITES)))
@click.option("--scratch", type=click.Path(path_type=Path), default=ROOT / "out" / "interop", help="Where to unpack.")
@click.option("--save", is_flag=True, help="Write the counts to interop/results.csv and into the page of the docs.")
def main(names: tuple[str, ...], scratch: Path, save: bool) -> None:
    """Run SUITES (all by default); each row shows passed and failed, plain beside ours."""
    rows = []
    for name in names or SUITES:
        suite = SUITES[name]
        plain, ours = (outcomes_of(suite, mode, scratch / name / mode) for mode in ("plain", "ours"))
        new = sorted(test for test, outcome in ours.items() if outcome == "failed" and plain.get(test) == "passed")
        rows.append(row_of(name, suite, plain, ours, len(new)))
        click.echo(f"{name}: plain {counts(plain)}; ours {counts(ours)}")
        for test in new:
            click.echo(f"  passes plain, fails with ours: {test}")
    show(rows)
    if save:
        write(rows)


def outcomes_of(suite: Suite, mode: str, folder: Path) -> Outcomes:
    """Run the suite in `folder`; the outcome of each test by its name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tests = unpack(suite, mode, folder)
    report = folder / "report.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "EMBEDLAYER_INTEROP": mode,
        "EMBEDLAYER_INTEROP_LIBRARY": suite.library,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "interop.substitution", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(folder), f"--junitxml={report}"]
    command += ["-k", suite.select] if suite.select else []
    with (folder / "output.txt").open("w") as output:
        subprocess.run([*command, *tests], cwd=folder, env=environment, stdout=output, stderr=output, check=False)
    if not report.exists():
        raise click.ClickException(f"pytest did not run: see {folder / 'output.txt'}")
    return dict(read_report(report))


def read_report(report: Path) -> list[tuple[str, str]]:
    """Each test of a JUnit report and its outcome: passed, failed or skipped."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found.append((f"{case.get('classname')}::{case.get('name')}", outcome))
    return found


def unpack(suite: Suite, mode: str, folder: Path) -> list[str]:
    """Put the tests into `folder`, with ours in place of the library's classes if asked; their paths there."""
    if suite.carrier == "script":
        return [str(HERE / "scripts" / test) for test in suite.tests]
    source = source_of(suite, folder.parent)
    wanted = [path for pattern in (*suite.tests, *suite.copied) for path in source.glob(pattern)]
    for path in wanted:
        text = path.read_text(encoding="utf-8")
        for pattern, replacement in suite.replace.items() if mode == "ours" else ():
            text = re.sub(pattern, replacement, text)
        target = folder / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    for name, text in suite.stand_ins.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [str(HERE / "scripts" / test if not list(source.glob(test)) else folder / test) for test in suite.tests]


def source_of(suite: Suite, folder: Path) -> Path:
    """The folder that the tests' paths start from: the installed packages, or the unpacked source distribution."""
    if suite.carrier == "wheel":
        return Path(sysconfig.get_paths()["purelib"])
    name = f"{suite.library}-{version(suite.library)}"
    if not (folder / name).is_dir():
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        download += ["--dest", str(folder), f"{suite.library}=={version(suite.library)}"]
        subprocess.run(download, check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / name


def counts(outcomes: Outcomes) -> str:
    """How many passed, failed and were skipped, in words."""
    values = list(outcomes.values())
    return ", ".join(f"{values.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))


def row_of(name: str, suite: Suite, plain: Outcomes, ours: Outcomes, new: int) -> dict[str, str | int]:
    """One row of the table and of the results."""
    row: dict[str, str | int] = {"suite": name, "version": version(suite.library), "tests from": suite.carrier}
    for mode, outcomes in {"plain": plain, "ours": ours}.items():
        for kind in ("passed", "failed", "skipped"):
            row[f"{mode} {kind}"] = list(outcomes.values()).count(kind)
    return {**row, "fail only with ours": new}


def show(rows: list[dict[str, str | int]]) -> None:
    """Print the table."""
    table = Table(*rows[0], title="Other libraries' tests, plain and with ours")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(width=140).print(table)


def write(rows: list[dict[str, str | int]]) -> None:
    """Write the rows to the results and to the docs; those of suites that were not run stay."""
    merged: dict[str, Mapping[str, str | int]] = {row["suite"]: row for row in results()}
    merged |= {str(row["suite"]): row for row in rows}
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged[name] for name in SUITES if name in merged)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + markdown(results()) + END + rest.partition(END)[2], encoding="utf-8")


def results() -> list[dict[str, str]]:
    """Read the rows of interop/results.csv."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(rows: list[dict[str, str]]) -> str:
    """Return the rows as the table of the docs."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
