"""`python -m benchmarks gpu` without a GPU: calls run on the CPU and take a time that the test says."""

import json
import time

import pytest
import torch
from click.testing import CliRunner

from benchmarks import gpu, gpu_calls
from benchmarks.__main__ import main
from benchmarks.gpu_calls import BY_NAME, BY_OPERATORS, IN_A_GRAPH, KERNELS, OURS, PEERS, PREDICTED, measured
from benchmarks.hot_paths import SMALLEST_VOCAB_SIZE, Call, HotPath, ids, trained
from embedlayer import TokenEmbedding


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    """Measure on the CPU, where a call takes 2 ms and adds 1 GiB, in a CUDA graph too."""
    monkeypatch.setattr(gpu_calls, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_calls, "settle", lambda: None)
    monkeypatch.setattr(gpu_calls, "added_gib", lambda call: 1.0)
    monkeypatch.setattr(gpu_calls, "milliseconds", lambda call, repeats: 2.0)
    monkeypatch.setattr(gpu_calls, "captured", lambda call: call)
    monkeypatch.setattr(gpu_calls, "of_kernels", lambda call: {"kernels": 3, "time_ms": 1.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")


def test_without_a_gpu_one_line_says_so(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["gpu"])
    assert result.exit_code == 0
    assert result.output.splitlines() == ["gpu: nothing is measured, because torch finds no CUDA device here."]


def test_each_peer_is_one_of_a_hot_path() -> None:
    assert not PEERS.keys() - BY_NAME.keys()


def small_look_up() -> Call:
    table, tokens = TokenEmbedding(SMALLEST_VOCAB_SIZE, 2), ids(1, 5)
    return trained([table.weight], lambda: table(tokens))


SMALL = HotPath("small", "5 x 2", small_look_up)
REAL = [BY_NAME[name] for name in ("GPT-2 input embedding, evaluation", "rotary, training")]


@pytest.mark.parametrize(
    "path",
    [SMALL, *(pytest.param(path, marks=pytest.mark.long) for path in REAL)],
    ids=lambda path: path.name,
)
def test_a_path_is_measured_beside_its_peers_and_its_prediction(no_gpu, unchecked, path) -> None:
    rows = {row["competitor"]: row for row in measured(path)}
    peers = PEERS.get(path.name, {})
    assert list(rows) == [OURS, BY_OPERATORS, *peers, PREDICTED, KERNELS, IN_A_GRAPH]
    for competitor in (OURS, BY_OPERATORS, *peers):
        assert rows[competitor]["time_ms"] == 2.0
        assert rows[competitor]["added_gib"] == 1.0
    assert rows[PREDICTED]["waits"] == 0
    assert 0.005 < rows[PREDICTED]["time_ms"] < 10


def test_a_competitor_that_fails_leaves_the_others(no_gpu, unchecked, monkeypatch) -> None:
    def fails() -> None:
        raise ImportError("no such peer\nat all")

    monkeypatch.setitem(PEERS, SMALL.name, {"missing": fails, "other": small_look_up})
    rows = {row["competitor"]: row for row in measured(SMALL)}
    assert rows["missing"]["error"] == "ImportError: no such peer"
    assert rows["other"]["time_ms"] == rows[OURS]["time_ms"] == 2.0


PROGRAM = """
import json, os, sys, time
for name in sys.argv[1:]:
    print(json.dumps({"begins": name}), flush=True)
    if name == "crash":
        os._exit(3)
    if name == "slow":
        time.sleep(60)
    print("a warning of some library")
    print(json.dumps({"case": name, "time_ms": 1}), flush=True)
"""


def test_a_case_that_ends_its_process_or_takes_too_long_leaves_the_others(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "SECONDS_OF_A_CALL", 1)
    names = ["first", "crash", "second", "slow", "third"]
    rows = list(gpu.measured(names, time.monotonic() + 60, ("-c", PROGRAM)))
    assert rows == [
        {"case": "first", "time_ms": 1},
        {"case": "crash", "error": "the process ended with 3"},
        {"case": "second", "time_ms": 1},
        {"case": "slow", "error": "stopped: it took too long"},
        {"case": "third", "time_ms": 1},
    ]
    assert list(gpu.measured(["late"], time.monotonic(), ("-c", PROGRAM))) == [
        {"case": "late", "error": "left out: no time"}
    ]


TESTS = """
import pytest

pytestmark = pytest.mark.gpu

def test_right() -> None: ...

def test_wrong() -> None:
    assert 1 == 2

@pytest.mark.skip(reason="needs 2 CUDA devices")
def test_of_two() -> None: ...
"""


def test_tests_are_counted_by_outcome_and_skips_are_listed(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "test_others.py").write_text("def test_without_a_mark() -> None: ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (row,) = gpu.tested(gpu.files_of_tests(), time.monotonic() + 60)
    assert (row["passed"], row["failed"], row["skipped"], row["errors"]) == (1, 1, 1, 0)
    assert "needs 2 CUDA devices" in row["not_passed"]
    assert "test_wrong" in row["not_passed"]
    assert row["error"] == "pytest ended with 1"
    assert "assert 1 == 2" in capsys.readouterr().out


def test_each_row_is_printed_when_it_is_measured(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "measured", lambda names, deadline: iter([{"case": names[0]}]))
    monkeypatch.setattr(gpu, "tested", lambda files, deadline: iter([{"case": "pytest -m gpu"}]))
    rows = gpu.run()
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows
    assert [row["case"] for row in rows] == [gpu.RATES, "pytest -m gpu", gpu.CASES[1]]
