"""Figures of little, of nothing and of broken numbers; what cannot be drawn is refused."""

import math

import pytest
import torch
from covering import looped
from pictures import drawn

import embedlayer as el
from embedlayer import plots

NOTHING, NAN, ONE = torch.zeros(0, 4), torch.full((3, 2), math.nan), torch.ones(1, 4)
ROTARY, SCALED = el.RotaryEmbedding(8), el.RotaryEmbedding(8, scaling=el.positions.YarnScaling(4.0, 64))
TABLE = el.TokenEmbedding(9, 8)
WORDS = el.train_tokenizer("cat dog fish bird x 12", "word")
LAYOUT = el.analysis.neighbor_layout(TABLE, rounds=3)
LOSSES = [{"step": 0, "loss": 8.3}]


SMALL = [
    *(lambda rows=rows: plots.position_heatmap(rows) for rows in (torch.zeros(3, 2), NAN, NOTHING, -ONE)),
    *(lambda rows=rows: plots.dimension_curves(rows, [(0, 1)]) for rows in (ONE, NAN, NOTHING)),
    *(lambda rows=rows: plots.similarity_matrix(rows) for rows in (ONE, NOTHING)),
    *(lambda rows=rows: plots.position_similarity(rows) for rows in (ONE, NAN, NOTHING)),
    *(lambda rows=rows: plots.spectrum({"rows": rows}) for rows in (ONE, NAN, NOTHING)),
    *(lambda rows=rows: plots.gradient_rows(rows) for rows in (torch.zeros(5, 3), NAN, NOTHING)),
    *(lambda rows=rows: plots.table_map(rows, labels={0: "a"}) for rows in (torch.zeros(1, 2), torch.zeros(5, 2))),
    *(lambda loss=loss: plots.loss_curve([{"step": 0, "loss": loss}, {"step": 1}]) for loss in (8.3, math.inf)),
    lambda: plots.loss_curve([]),
    lambda: plots.table_map(torch.zeros(0, 2)),
    lambda: plots.table_map(torch.rand(1, 2), values=torch.tensor([math.nan])),
    lambda: plots.table_map(el.TokenEmbedding(3, 1)),
    lambda: plots.table_map(el.TokenEmbedding.from_pretrained(NAN)),
    lambda: plots.norm_histogram(torch.zeros(0)),
    lambda: plots.attention_bias(el.AlibiBias(2), length=1),
    lambda: plots.rotary_angles(el.RotaryEmbedding(2), length=1),
    lambda: plots.rotary_angles(SCALED, length=1),
]  # fmt: skip


@looped("draw", SMALL)
@pytest.mark.filterwarnings("ignore:Attempting to set identical")
def test_little_nothing_and_broken_numbers_are_still_figures(draw) -> None:
    drawn(draw())


REFUSED = [
    (lambda: plots.attention_bias(ROTARY), el.SizeError),
    (lambda: plots.rotary_scores(el.AlibiBias(2)), el.SizeError),
    (lambda: plots.dimension_curves(el.SinusoidalPositionalEmbedding(16, 8), [(0, 1, 2, 3, 4)]), el.SizeError),
    (lambda: plots.position_heatmap(el.Position()), el.SizeError),
    (lambda: plots.spectrum(dict.fromkeys("abcde", ONE)), el.SizeError),
    (lambda: plots.token_path({"row": torch.zeros(2, 4)}, list("abc")), el.ShapeError),
    (lambda: plots.path_steps(el.lessons.GPTEmbedding(10, 8, 6), torch.tensor([[5, 2]])), el.ShapeError),
    (lambda: plots.table_map(torch.randn(9, 2), values=torch.arange(8.0)), el.ShapeError),
    (lambda: plots.table_map(el.TokenEmbedding(3, 8), layout=LAYOUT), el.ShapeError),
    (lambda: plots.table_map(torch.randn(9, 2), layout=LAYOUT), el.ShapeError),
    (lambda: plots.gradient_rows(TABLE), el.ShapeError),
    (lambda: plots.similarity_matrix(torch.zeros(1, 1).expand(50257, 1)), el.SizeError),
    (lambda: plots.similarity_matrix(torch.zeros(3, 2), ["a", "b"]), el.ShapeError),
    (lambda: plots.token_similarity(TABLE, WORDS, ["bear"]), el.TokenizerError),
    (lambda: plots.position_similarity(el.AlibiBias(4)), el.SizeError),
    (lambda: plots.attention_orders(torch.ones(4, 8), [0, 0, 1, 2], list("abcd")), el.SizeError),
    (lambda: plots.attention_orders(torch.ones(4, 8), range(4), list("abc")), el.ShapeError),
    (lambda: plots.loss_curves(dict.fromkeys("abcde", LOSSES)), el.SizeError),
    (lambda: plots.loss_curve("nowhere"), el.FileError),
]


@looped("draw, error", REFUSED)
def test_what_cannot_be_drawn_is_refused(draw, error, unchecked) -> None:
    with pytest.raises(error):
        draw()
