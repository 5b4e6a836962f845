"""The lines of a run, as the page gets them."""

import math

import pytest

from embedlayer.explorer import training
from embedlayer.opening import OpenedModel
from embedlayer.training.run_directory import RunDirectory


def test_lines_are_the_runs_own_with_its_options(run, of_run):
    found = training.metrics(of_run, {})
    assert found["lines"] == run.read_metrics()
    assert [line["rows_touched"] > 0 for line in found["lines"]] == [False, True, True, True]
    assert found["uniform_loss"] == pytest.approx(math.log(of_run.table.vocab_size))
    assert found["options"]["steps"] == 6
    assert found["made_of"]["head"] == "tied to the table"
    assert found["neighbors_before"][0]["id"] == 40


def test_long_runs_are_thinned_to_end_with_the_last_line(tmp_path, of_run, monkeypatch):
    monkeypatch.setattr(training, "LINES", 100)
    directory = RunDirectory(tmp_path)
    for step in range(1, 251):
        directory.add_metrics({"step": step, "loss": math.nan if step == 250 else 1.0})
    lines = training.metrics(OpenedModel("long", of_run.table, run=directory), {})["lines"]
    assert len(lines) == 84
    assert lines[-1] == {"step": 250}  # what JSON cannot hold is left out


def test_numbers_that_json_lacks_are_left_out_at_any_depth(tmp_path, of_run):
    directory = RunDirectory(tmp_path)
    directory.add_metrics({"step": 1, "loss": math.nan, "validation_losses": [1.0, math.nan, math.inf]})
    assert directory.read_metrics()[0]["validation_losses"][0] == 1.0  # a diverged run is read
    lines = training.metrics(OpenedModel("diverged", of_run.table, run=directory), {})["lines"]
    assert lines == [{"step": 1, "validation_losses": [1.0, None, None]}]
