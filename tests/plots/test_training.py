"""Curves over steps and positions."""

import json
import math
from typing import Any

import numpy as np
import torch
from pictures import drawn, lines, texts

import embedlayer as el
from embedlayer import plots

METRICS: list[dict[str, Any]] = [
    {"step": 0, "loss": 8.3, "validation_loss": 8.31},
    {"step": 10, "loss": 6.0},
    {"step": 20, "loss": math.nan},
    {"step": 30, "loss": 5.0, "validation_loss": None},
    {"step": 40, "validation_loss": 4.9},
]


def test_optimizer_paths_hold_each_path_and_the_steps_with_a_gradient():
    paths = {"dense": [1.0, 2.0, 3.0], "rows": [1.0, 2.0, 3.0], "lazy": [1.0, 1.0, 1.5]}
    figure = plots.optimizer_paths(paths, touched=[1, 3])
    *curves, marks = figure.axes[0].lines
    assert {line.get_label(): line.get_ydata().tolist() for line in curves} == paths
    assert marks.get_xdata().tolist() == [1, 3]
    drawn(figure)


def test_the_loss_curve_holds_the_finite_losses_and_the_baseline():
    figure = plots.loss_curve(METRICS, baseline=math.log(4096))
    training, validation, baseline = figure.axes[0].lines
    assert training.get_xydata().tolist() == [[0, 8.3], [10, 6.0], [30, 5.0]]
    assert validation.get_xydata().tolist() == [[0, 8.31], [40, 4.9]]
    assert baseline.get_ydata()[0] == math.log(4096)
    assert texts(figure) == ["ln V = 8.32, uniform"]
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"


def test_runs_are_read_from_lines_a_file_and_a_folder_alike(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in METRICS[:2]) + '{"step": 30, "lo')
    figure = plots.loss_curves({"lines": METRICS[:2], "file": file, "folder": str(tmp_path)}, key="loss")
    found = {name: points.tolist() for name, points in lines(figure).items()}
    assert found == {name: [[0, 8.3], [10, 6.0]] for name in ("lines", "file", "folder")}
    assert figure.axes[0].get_ylabel() == "training loss (nats per token)"
    assert lines(plots.loss_curve(tmp_path))["validation"].tolist() == [[0, 8.31]]


def test_runs_are_told_apart_without_colours():
    figure = plots.loss_curves(dict.fromkeys("abcd", METRICS))
    looks = {str(line._dash_pattern) for line in figure.axes[0].lines}
    assert len(looks) == 4


def test_long_names_of_runs_find_room():
    figure = plots.loss_curves({"a run with a very long name indeed": METRICS, "another one, no shorter": METRICS})
    renderer = drawn(figure)
    box = figure.axes[0].get_legend().get_window_extent(renderer)
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1 + 2


def test_each_strip_holds_its_columns():
    waves = el.SinusoidalPositionalEmbedding(80, 64)
    figure = plots.dimension_curves(waves, [(0, 1), (30,)], length=50)
    values = waves.vectors(torch.arange(50)).double().numpy()
    first, second = lines(figure, 0), lines(figure, 1)
    assert list(first) == ["dimension 0", "dimension 1"]
    np.testing.assert_array_equal(first["dimension 1"][:, 1], values[:, 1])
    np.testing.assert_array_equal(second["dimension 30"], np.stack([np.arange(50), values[:, 30]], 1))
    assert figure.axes[1].get_xlabel() == "position"
    assert figure.get_supylabel() == "added to the token"
