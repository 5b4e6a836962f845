"""A layout is computed once for the same rows, and a cache that does not work is no error."""

import logging
import os

import pytest
import torch

from embedlayer.analysis.layout import NeighborLayout
from embedlayer.explorer import table_map
from embedlayer.explorer.table_map import cache_folder, layout_path, load_layout, store_layout


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EMBEDLAYER_CACHE", str(tmp_path / "cache"))


def test_what_was_stored_is_read_for_the_same_rows_only() -> None:
    rows, keep = torch.randn(20, 4), torch.ones(20, dtype=torch.bool)
    path, layout = layout_path(rows, keep), NeighborLayout(torch.randn(20, 2), 0.9123)
    assert load_layout(path, 20) is None
    store_layout(path, layout)
    found = load_layout(layout_path(rows.clone(), keep.clone()), 20)
    assert found is not None
    assert torch.equal(found.places, layout.places)
    assert found.recall == layout.recall
    changed, fewer = rows.clone(), keep.clone()
    changed[3, 2] += 1e-6
    fewer[7] = False
    for other in (layout_path(changed, keep), layout_path(rows, fewer), layout_path(2 * rows, keep)):
        assert load_layout(other, 20) is None


def test_a_damaged_file_and_one_of_another_size_are_computed_again(caplog) -> None:
    path = layout_path(torch.randn(20, 4), torch.ones(20, dtype=torch.bool))
    store_layout(path, NeighborLayout(torch.randn(20, 2), 1.0))
    with caplog.at_level(logging.WARNING, "embedlayer"):
        assert load_layout(path, 21) is None
        path.write_bytes(path.read_bytes()[:-9])
        assert load_layout(path, 20) is None
    assert caplog.text.count("is computed again") == 2


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EMBEDLAYER_CACHE", str(tmp_path / "file"))
    path = layout_path(torch.randn(4, 4), torch.ones(4, dtype=torch.bool))
    with caplog.at_level(logging.WARNING, "embedlayer"):
        store_layout(path, NeighborLayout(torch.randn(4, 2), 1.0))
    assert "The layout is not stored" in caplog.text
    assert load_layout(path, 4) is None


def test_the_oldest_files_are_removed(monkeypatch) -> None:
    monkeypatch.setattr(table_map, "MOST_FILES", 2)
    paths = [layout_path(torch.full((4, 4), float(each)), torch.ones(4, dtype=torch.bool)) for each in range(3)]
    for age, path in enumerate(paths):
        store_layout(path, NeighborLayout(torch.randn(4, 2), 1.0))
        os.utime(path, (age, age))
    assert [path.exists() for path in paths] == [False, True, True]


def test_the_folder_is_the_one_of_the_environment(tmp_path, monkeypatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("EMBEDLAYER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "embedlayer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "embedlayer")
