"""`python -m benchmarks [CASE...] [--save] [--busy N]`: run cases by name, all of them by default."""

import pkgutil
from importlib import import_module
from typing import cast

import click

import benchmarks
from benchmarks.harness import Case, busy_processes, report

NOT_CASES = {"__main__", "gpu_calls", "harness", "hot_paths", "operator_counter"}


def case_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in NOT_CASES)


@click.command()
@click.argument("cases", nargs=-1, type=click.Choice(case_names()))
@click.option("--save", is_flag=True, help="Append the rows to benchmarks/results/CASE.csv.")
@click.option("--busy", default=0, metavar="N", help="Measure beside N processes that do nothing but loop.")
def main(cases: tuple[str, ...], save: bool, busy: int) -> None:
    """Measure CASES and print a table each; the last line of each is JSON."""
    for name in cases or case_names():
        case = cast(Case, import_module(f"benchmarks.{name}").CASE)
        with busy_processes(busy):
            rows = case.run()
        if rows:
            report(name, case.title, rows, save=save, busy=busy)


if __name__ == "__main__":
    main()
