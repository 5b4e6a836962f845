"""The map is computed once in the background, can be cancelled, and leaves out rows that are not learned."""

import threading

import numpy as np
import pytest
import torch

from embedlayer import TokenEmbedding
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.explorer import table_map
from embedlayer.explorer.table_map import map_job
from embedlayer.opening import OpenedModel


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EMBEDLAYER_CACHE", str(tmp_path / "cache"))


def opened(rows: torch.Tensor) -> OpenedModel:
    return OpenedModel("table", TokenEmbedding.from_pretrained(rows))


def grouped(size: int = 400, unused: int = 60) -> torch.Tensor:
    centres = 0.7 * torch.randn(5, 32)
    learned = centres[torch.arange(size) % 5] + torch.randn(size, 32)
    return torch.cat([learned, torch.randn(32) + 0.05 * torch.randn(unused, 32), torch.zeros(1, 32)])


def test_the_answers_hold_layout_and_clusters_of_all_rows_but_those_that_are_not_learned() -> None:
    source = opened(grouped())
    assert table_map.progress(source, {})["state"] == "absent"
    map_job(source).wait()
    assert table_map.progress(source, {}) == {"state": "ready", "stage": "", "share": 1.0, "error": None}
    folded = np.frombuffer(table_map.folded(source, {}), np.uint8)
    assert folded.tolist() == [0] * 400 + [1] * 61
    places = np.frombuffer(table_map.layout(source, {}), np.float32).reshape(2, -1)
    assert np.array_equal(np.isnan(places).all(0), folded == 1)
    assert table_map.layout_recall(source, {}) == {"recall": 1.0}
    clusters = table_map.clusters(source, {})["clusters"]
    of = np.frombuffer(table_map.cluster_of(source, {}), np.int32).reshape(2, -1)
    first = [cluster for cluster in clusters if cluster["level"] == 0]
    assert len(first) >= 5
    for number, cluster in enumerate(clusters):
        level = of[cluster["level"]]
        assert (level == number).sum() == cluster["size"]
        assert all(level[name] == number for name in cluster["names"])
    for number in range(len(first)):  # a cluster has rows of one group, nearly
        assert np.bincount(np.nonzero(of[0] == number)[0] % 5).max() >= 0.8 * first[number]["size"]


def test_a_second_source_with_the_same_rows_reads_the_stored_layout(monkeypatch) -> None:
    rows = grouped(100, 0)
    first = map_job(opened(rows)).wait()
    monkeypatch.setattr(table_map, "compute_layout", None)
    second = map_job(opened(rows)).wait()
    torch.testing.assert_close(first.layout.places, second.layout.places, rtol=0, atol=0, equal_nan=True)


def test_a_running_computation_is_cancelled_and_can_be_started_again(monkeypatch) -> None:
    source, begun, go_on = opened(grouped(100, 0)), threading.Event(), threading.Event()
    compute = table_map.compute_layout

    def slow(*args, on_progress, **options):
        begun.set()
        go_on.wait()
        on_progress(table_map.MOVING, 0.5)
        return compute(*args, on_progress=on_progress, **options)

    monkeypatch.setattr(table_map, "compute_layout", slow)
    assert table_map.start(source, {})["state"] == "running"
    begun.wait()
    with pytest.raises(SizeError, match="The layout is not ready: its state is 'running'"):
        table_map.layout(source, {})
    threading.Timer(0.05, go_on.set).start()
    assert table_map.cancel(source, {})["state"] == "cancelled"
    monkeypatch.setattr(table_map, "compute_layout", compute)
    map_job(source).wait()
    assert table_map.progress(source, {})["state"] == "ready"


def test_a_failure_is_a_state_with_a_sentence(monkeypatch) -> None:
    def full(*args, **options):
        raise MemoryError("12 GB")

    monkeypatch.setattr(table_map, "compute_layout", full)
    source = opened(grouped(100, 0))
    with pytest.raises(SizeError, match="its state is 'failed'"):
        map_job(source).wait()
    assert table_map.progress(source, {})["error"] == "There is not enough memory for the layout: 12 GB"


def test_an_error_of_ours_is_raised_where_the_map_is_waited_for(monkeypatch) -> None:
    def damaged(*args, **options):
        raise CheckpointError("run.json is damaged")

    monkeypatch.setattr(table_map, "compute_layout", damaged)
    source = opened(grouped(100, 0))
    for ask in (map_job(source).wait, map_job(source).result):
        with pytest.raises(CheckpointError, match="run.json is damaged"):
            ask()
    assert table_map.progress(source, {})["state"] == "failed"
    assert table_map.progress(source, {})["error"] == "run.json is damaged"


@pytest.mark.parametrize("rows", [torch.randn(1, 4), torch.randn(2, 1), torch.randn(3, 1), torch.zeros(9, 4)])
def test_tiny_and_empty_tables_have_a_map(rows) -> None:
    assert map_job(opened(rows)).wait().layout.places.shape == (len(rows), 2)


def test_large_tables_are_not_computed_for_an_export(monkeypatch) -> None:
    source = opened(grouped(100, 0))
    monkeypatch.setattr(table_map, "EXPORTED_ROWS", 100)
    assert table_map.exported_requests(source) == []
    monkeypatch.setattr(table_map, "EXPORTED_ROWS", 101)
    assert table_map.exported_requests(source) == [{}]
