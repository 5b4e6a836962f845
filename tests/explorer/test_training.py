"""The lines of a run, as the page gets them."""

import json
import math

import pytest

from embedlayer import RunDirectory
from embedlayer.opening import OpenedModel


def test_lines_are_the_runs_own_with_its_options(ask, run, of_run):
    found = ask(of_run, "metrics")
    assert found["lines"] == run.read_metrics()
    assert [line["rows_touched"] > 0 for line in found["lines"]] == [False, True, True, True]
    assert found["uniform_loss"] == pytest.approx(math.log(of_run.table.vocab_size))
    assert found["options"]["steps"] == 6
    assert found["made_of"]["head"] == "tied to the table"
    assert found["neighbors_before"][0]["id"] == 40


def test_long_runs_are_thinned_to_end_with_the_last_line_without_numbers_that_json_lacks(ask, tmp_path, of_run):
    directory = RunDirectory(tmp_path)
    lines = [{"step": step, "loss": 1.0} for step in range(1, 5001)]
    directory.metrics.write_text("\n".join(map(json.dumps, lines)) + "\n")
    directory.add_metrics({"step": 5001, "loss": math.nan, "validation_losses": [1.0, math.nan, math.inf]})
    assert directory.read_metrics()[-1]["validation_losses"][0] == 1.0  # a diverged run is read
    found = ask(OpenedModel("long", of_run.table, run=directory), "metrics")["lines"]
    assert (len(found), found[-2]) == (1667, {"step": 4998, "loss": 1.0})
    assert found[-1] == {"step": 5001, "validation_losses": [1.0, None, None]}
