"""`python -m benchmarks [CASE...] [--save]`: run cases by name, all of them by default."""

import pkgutil
from importlib import import_module
from typing import cast

import click

import benchmarks
from benchmarks.harness import Case, report

NOT_CASES = {"__main__", "harness"}


def case_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in NOT_CASES)


@click.command()
@click.argument("cases", nargs=-1, type=click.Choice(case_names()))
@click.option("--save", is_flag=True, help="Append the rows to benchmarks/results/CASE.csv.")
def main(cases: tuple[str, ...], save: bool) -> None:
    """Measure CASES and print a table each; the last line of each is JSON."""
    for name in cases or case_names():
        case = cast(Case, import_module(f"benchmarks.{name}").CASE)
        report(name, case.title, case.run(), save=save)


if __name__ == "__main__":
    main()
