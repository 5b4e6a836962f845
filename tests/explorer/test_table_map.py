"""The map is computed once in the background, can be cancelled, is stored, and leaves out rows that are not learned."""

import logging
import os
import threading
import time

import pytest
import torch
from explorer_requests import Refused, numbers

from embedlayer import TokenEmbedding
from embedlayer.core import CheckpointError
from embedlayer.opening import OpenedModel

COMPUTE = "embedlayer.explorer.table_map.compute_layout"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EMBEDLAYER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "layouts"


def opened(rows: torch.Tensor) -> OpenedModel:
    return OpenedModel("table", TokenEmbedding.from_pretrained(rows))


def grouped(size: int = 100, unused: int = 0) -> torch.Tensor:
    centres = 0.7 * torch.randn(5, 32)
    learned = centres[torch.arange(size) % 5] + torch.randn(size, 32)
    return torch.cat([learned, torch.randn(32) + 0.05 * torch.randn(unused, 32), torch.zeros(1, 32)])


@pytest.fixture
def progress_of(ask):
    """Compute the map of a source, and return the last progress."""

    def compute(source):
        progress = ask(source, "layout-start")
        while progress["state"] == "running":
            time.sleep(0.005)
            progress = ask(source, "layout-progress")
        return progress

    return compute


def test_the_answers_hold_layout_and_clusters_of_all_rows_but_those_that_are_not_learned(ask, progress_of) -> None:
    source = opened(grouped(400, 60))
    assert ask(source, "layout-progress")["state"] == "absent"
    assert progress_of(source) == {"state": "ready", "stage": "", "share": 1.0, "error": None}
    folded = numbers(ask(source, "folded"), dtype=torch.uint8)
    assert folded.tolist() == [0] * 400 + [1] * 61
    places = numbers(ask(source, "layout"), 2, 461)
    assert places.isnan().all(0).equal(folded == 1)
    assert ask(source, "layout-recall") == {"recall": 1.0}
    clusters = ask(source, "clusters")["clusters"]
    of = numbers(ask(source, "cluster-of"), 2, 461, dtype=torch.int32)
    for number, cluster in enumerate(clusters):
        level = of[cluster["level"]]
        assert (level == number).sum() == cluster["size"]
        assert all(level[name] == number for name in cluster["names"])
    first = [cluster for cluster in clusters if cluster["level"] == 0]
    assert len(first) >= 5
    for number in range(len(first)):  # a cluster has rows of one group, nearly
        assert ((of[0] == number).nonzero()[:, 0] % 5).bincount().max() >= 0.8 * first[number]["size"]


def test_a_running_computation_is_cancelled_and_can_be_started_again(ask, progress_of, monkeypatch) -> None:
    source, begun, go_on = opened(grouped()), threading.Event(), threading.Event()

    def slow(*args, on_progress, **options):
        begun.set()
        go_on.wait()
        on_progress("searching neighbours", 0.5)

    with monkeypatch.context() as patch:
        patch.setattr(COMPUTE, slow)
        assert ask(source, "layout-start")["state"] == "running"
        begun.wait()
        with pytest.raises(Refused, match="The layout is not ready: its state is 'running'"):
            ask(source, "layout")
        threading.Timer(0.05, go_on.set).start()
        assert ask(source, "layout-cancel")["state"] == "cancelled"
    assert progress_of(source)["state"] == "ready"


def test_a_failure_is_a_state_with_a_sentence(ask, progress_of, monkeypatch) -> None:
    for error, said, refused in (
        (MemoryError("12 GB"), "There is not enough memory for the layout: 12 GB", "its state is 'failed'"),
        (CheckpointError("run.json is damaged"), "run.json is damaged", "^run.json is damaged"),
    ):

        def fail(*args, error=error, **options):
            raise error

        monkeypatch.setattr(COMPUTE, fail)
        source = opened(grouped())
        progress = progress_of(source)
        assert (progress["state"], progress["error"]) == ("failed", said)
        with pytest.raises(Refused, match=refused):
            ask(source, "layout")


def test_tiny_and_empty_tables_have_a_map(ask, progress_of) -> None:
    for rows in (torch.randn(1, 4), torch.randn(2, 1), torch.randn(3, 1), torch.zeros(9, 4)):
        source = opened(rows)
        assert progress_of(source)["state"] == "ready"
        assert len(ask(source, "layout")) == 8 * len(rows)


# What is stored


def test_what_was_stored_is_read_for_the_same_rows_only_and_damaged_files_are_computed_again(
    ask, progress_of, cache, monkeypatch, caplog
) -> None:
    rows = grouped()

    def layout_of(values):
        source = opened(values)
        assert progress_of(source)["state"] == "ready"
        return ask(source, "layout")

    first = layout_of(rows)
    with monkeypatch.context() as patch:
        patch.setattr(COMPUTE, None)
        assert layout_of(rows.clone()) == first
    changed, fewer = rows.clone(), rows.clone()
    changed[3, 2] += 1e-6
    fewer[7] = 0
    for count, other in enumerate((changed, fewer, 2 * rows), start=2):
        layout_of(other)
        assert len([*cache.iterdir()]) == count
    for file in cache.iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING, "embedlayer"):
        layout_of(rows)
        assert layout_of(rows) == first
    assert caplog.text.count("is computed again") == 1


def test_a_folder_that_cannot_be_written_costs_one_line_and_the_oldest_files_are_removed(
    ask, progress_of, cache, monkeypatch, caplog, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "embedlayer"):
        patch.setenv("EMBEDLAYER_CACHE", str(tmp_path / "file"))
        assert progress_of(opened(grouped()))["state"] == "ready"
    assert "The layout is not stored" in caplog.text
    cache.mkdir(parents=True)
    for age in range(70):
        (cache / f"{age}.safetensors").touch()
        os.utime(cache / f"{age}.safetensors", (age, age))
    progress_of(opened(grouped()))
    stored = {file.stem for file in cache.iterdir()}
    assert (len(stored), {str(age) for age in range(7, 70)} <= stored) == (64, True)


def test_the_folder_is_the_one_of_the_environment(progress_of, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("EMBEDLAYER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for place in ("xdg/embedlayer", "home/.cache/embedlayer"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg") if "xdg" in place else "")
        progress_of(opened(grouped()))
        assert [file.suffix for file in (tmp_path / place / "layouts").iterdir()] == [".safetensors"]
