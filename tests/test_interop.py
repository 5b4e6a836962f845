"""The harness of other libraries' tests: what it takes, rewrites and counts."""

import re
from pathlib import Path

import pytest

from interop.__main__ import BEGIN, END, PAGE, counts, markdown, read_report, results, unpack
from interop.suites import EMBEDDING, SUITES, VECTORS

SCRIPTS = Path(__file__).parents[1] / "interop" / "scripts"


def test_every_script_belongs_to_a_suite_and_has_at_most_60_lines() -> None:
    named = {test for suite in SUITES.values() for test in suite.tests if "/" not in test}
    assert named == {script.name for script in SCRIPTS.glob("test_*.py")}
    for script in SCRIPTS.glob("test_*.py"):
        assert len(script.read_text().splitlines()) <= 60, script.name


def test_what_a_test_builds_is_replaced_and_nothing_else() -> None:
    ((pattern, replacement),) = EMBEDDING.items()
    text = (
        "emb = torch.nn.Embedding(10, 5); other = nn.Embedding(3, 2); isinstance(emb, nn.Embedding); "
        "nn.EmbeddingBag(1, 1)"
    )
    assert re.sub(pattern, replacement, text) == (
        "emb = interop_embedding(10, 5); other = interop_embedding(3, 2); isinstance(emb, nn.Embedding); "
        "nn.EmbeddingBag(1, 1)"
    )
    ((pattern, replacement),) = VECTORS.items()
    read = "gensim.models.KeyedVectors.load_word2vec_format(datapath('x.bin'), binary=True)"
    assert re.sub(pattern, replacement, read) == "interop_vectors(datapath('x.bin'), binary=True)"


@pytest.mark.parametrize("mode", ["plain", "ours"])
def test_tests_of_an_installed_wheel_are_copied_and_rewritten_in_the_copy(mode, tmp_path) -> None:
    pytest.importorskip("gensim", reason="the package gensim is missing")
    (path,) = unpack(SUITES["gensim"], mode, tmp_path)
    assert Path(path).is_relative_to(tmp_path)
    assert ("interop_vectors(" in Path(path).read_text()) == (mode == "ours")


def test_a_report_is_counted_by_outcome(tmp_path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='A' name='one'/>"
        "<testcase classname='A' name='two'><failure>no</failure></testcase>"
        "<testcase classname='A' name='three'><skipped/></testcase>"
        "<testcase classname='A' name='four'><error/></testcase></testsuite></testsuites>"
    )
    outcomes = dict(read_report(report))
    assert outcomes == {"A::one": "passed", "A::two": "failed", "A::three": "skipped", "A::four": "failed"}
    assert counts(outcomes) == "1 passed, 2 failed, 1 skipped"


def test_the_table_in_the_docs_is_the_results() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert table == markdown(results())
    assert {row["suite"] for row in results()} == set(SUITES)
