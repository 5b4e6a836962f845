"""CPU seconds of tests: those of children count, and a slow test that is not in the list is named."""

import subprocess
import sys
from pathlib import Path

import cpu_time
import pytest
from cpu_time import LIMIT, TOLERANCE, CpuSeconds, cpu_seconds, listed

BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


def test_children_count_while_they_run_and_when_they_have_ended() -> None:
    before = cpu_seconds()
    with subprocess.Popen([sys.executable, "-S", "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds() - before > 0.25
        child.communicate(b"\n")
    assert cpu_seconds() - before > 0.25


def test_a_slow_test_is_named_unless_it_is_listed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cpu_time, "LIST", tmp_path / "slow_tests.txt")
    seconds = {"a.py::quick": 0.1, "a.py::slow[x y]": 2 * LIMIT, "b.py::nearly": LIMIT * TOLERANCE - 0.1}
    written = CpuSeconds("write")
    written.seconds = {**seconds}
    assert written.unlisted() == []
    assert written.text().splitlines()[2:] == ["   6.0 a.py::slow[x y]", "   4.4 b.py::nearly"]
    assert "2, in all 10 of the 10 of the suite" in written.text()
    cpu_time.LIST.write_text(written.text())
    checked = CpuSeconds("check")
    checked.seconds = {**seconds, "b.py::new": 2 * LIMIT, "b.py::nearly new": LIMIT * TOLERANCE - 0.1}
    assert checked.unlisted() == ["b.py::new"]


@pytest.mark.parametrize("test", sorted(listed()))
def test_every_listed_test_exists(test) -> None:
    file, name = test.partition("[")[0].split("::")
    assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
