"""The harness of other libraries' tests: what it takes, rewrites and counts."""

from pathlib import Path

import pytest

from interop.__main__ import BEGIN, END, PAGE, markdown, results, unpack
from interop.suites import SUITES

SCRIPTS = Path(__file__).parents[1] / "interop" / "scripts"


def test_every_script_belongs_to_a_suite_and_has_at_most_60_lines() -> None:
    named = {test for suite in SUITES.values() for test in suite.tests if "/" not in test}
    assert named == {script.name for script in SCRIPTS.glob("test_*.py")}
    for script in SCRIPTS.glob("test_*.py"):
        assert len(script.read_text().splitlines()) <= 60, script.name


@pytest.mark.parametrize("mode", ["plain", "ours"])
def test_tests_of_an_installed_wheel_are_copied_and_rewritten_in_the_copy(mode, tmp_path) -> None:
    pytest.importorskip("gensim", reason="the package gensim is missing")
    (path,) = unpack(SUITES["gensim"], mode, tmp_path)
    assert Path(path).is_relative_to(tmp_path)
    assert ("interop_vectors(" in Path(path).read_text()) == (mode == "ours")


def test_the_table_in_the_docs_is_the_results() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert table == markdown(results())
    assert {row["suite"] for row in results()} == set(SUITES)
