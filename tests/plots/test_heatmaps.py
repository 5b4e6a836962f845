"""Vectors as colours."""

import numpy as np
import pytest
import torch
from covering import looped
from pictures import drawn, image

import embedlayer as el
from embedlayer import plots
from embedlayer.analysis import position_values


def test_the_heat_map_is_white_at_zero_and_reaches_equally_far_both_ways():
    values = torch.tensor([[0.0, -3.0], [1.0, 2.0], [0.5, 0.0]])
    figure = plots.position_heatmap(values, title="t", value_label="bias", column_label="head")
    picture = figure.axes[0].images[0]
    np.testing.assert_array_equal(picture.get_array(), values.numpy())
    assert picture.get_clim() == (-3.0, 3.0)
    assert min(picture.to_rgba(0.0)) > 0.95
    assert (figure.axes[0].get_xlabel(), figure.axes[1].get_ylabel()) == ("head", "bias")


def test_what_is_not_finite_is_grey_and_the_scale_says_so():
    values = torch.tensor([[1.0, torch.nan], [torch.inf, -1.0]], dtype=torch.float64)
    kept = values.clone()
    figure = plots.position_heatmap(values)
    assert image(figure).mask.tolist() == [[False, True], [True, False]]
    assert figure.axes[0].images[0].get_clim() == (-1.0, 1.0)
    assert figure.axes[1].get_ylabel() == "value (grey: not finite)"
    torch.testing.assert_close(values, kept, equal_nan=True)


def limit_of(values: torch.Tensor) -> float:
    """Return the number that the last colour of a heat map stands for."""
    return plots.position_heatmap(values).axes[0].images[0].get_clim()[1]


def test_colours_reach_the_largest_number_but_not_for_a_few_outliers():
    values = torch.linspace(-1, 1, 1000).view(40, 25)
    assert limit_of(values) == 1.0
    values[0, 0] = 1.9
    assert limit_of(values) == pytest.approx(1.9)
    values[0, 0] = 50.0
    assert limit_of(values) == pytest.approx(0.99, abs=0.01)
    assert plots.position_heatmap(values).axes[0].images[0].cmap.colorbar_extend == "both"
    assert not plots.position_heatmap(torch.eye(3)).axes[0].images[0].cmap.colorbar_extend


SCHEMES = (el.LearnedPositionalEmbedding(40, 8), el.SinusoidalPositionalEmbedding(40, 8), el.RotaryEmbedding(8),
           el.AlibiBias(4), el.RelativePositionBias(4))  # fmt: skip


@looped("scheme", SCHEMES)
def test_a_scheme_is_drawn_as_the_library_computes_it(scheme):
    figure = plots.position_heatmap(scheme, length=30)
    picture = position_values(scheme, 30)
    np.testing.assert_array_equal(image(figure), picture.values.detach().double().numpy())
    assert figure.axes[0].get_title(loc="left") == picture.title
    assert figure.axes[0].get_ylabel() == picture.row_label
    assert figure.axes[1].get_ylabel() == picture.value_label


def test_schemes_side_by_side_hold_each_its_own_numbers_and_range():
    learned, fixed = el.LearnedPositionalEmbedding(20, 8), el.SinusoidalPositionalEmbedding(50, 6)
    figure = plots.compare_positions({"learned": learned, "sinusoidal": fixed, "mine": torch.ones(3, 2)}, length=30)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title(loc="left") for axes in panels] == ["learned", "sinusoidal", "mine"]
    np.testing.assert_array_equal(panels[0].images[0].get_array(), learned.weight.detach().double().numpy())
    np.testing.assert_array_equal(panels[1].images[0].get_array(), fixed.vectors(torch.arange(30)).double().numpy())
    assert panels[1].images[0].get_clim()[1] <= 1.0 < 5 * panels[0].images[0].get_clim()[1] * 10


IDS = torch.tensor([5, 2, 7, 2])


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "none"])
@pytest.mark.parametrize("scale", [None, "sqrt_dim"])
def test_the_last_step_is_what_enters_the_first_block(position, scale):
    layer = el.TransformerEmbedding(10, 16, 8, position=position, scale=scale).eval()
    steps = plots.path_steps(layer, IDS)
    torch.testing.assert_close(list(steps.values())[-1], layer(IDS).detach(), rtol=0, atol=0)
    torch.testing.assert_close(steps["row"], layer.table.rows(0, 10)[IDS].detach(), rtol=0, atol=0)
    names = ["row"] + ["× 4"] * (scale is not None)
    if position != "none":
        names += ["position", "row × 4 + position" if scale else "row + position"]
        torch.testing.assert_close(steps["position"], layer.position.vectors(torch.arange(4)).detach())
    assert list(steps) == names


def test_the_path_of_gpt_and_of_a_decoder():
    gpt = el.lessons.GPTEmbedding(10, 8, 6)
    assert torch.equal(list(plots.path_steps(gpt, IDS).values())[-1], gpt(IDS))
    model = el.DecoderLM(el.TokenEmbedding(10, 16, scale="sqrt_dim"), el.RotaryEmbedding(8), num_layers=1, num_heads=2)
    assert list(plots.path_steps(model, IDS)) == ["row", "× 4"], "rotary positions act inside attention"


def test_the_path_of_a_checkpoint_follows_its_recipe():
    layer = el.EmbeddingLayer(
        el.TokenEmbedding(10, 8, scale=2.0),
        el.LearnedPositionalEmbedding(6, 8),
        recipe=("types", "position", "norm"),
        types=el.TokenEmbedding(2, 8),
        norm=torch.nn.LayerNorm(8),
    )
    steps = plots.path_steps(layer, IDS)
    assert list(steps) == ["row", "× 2", "+ type", "+ position", "LayerNorm"]
    assert torch.equal(steps["LayerNorm"], layer.input(IDS))
    assert torch.equal(steps["+ position"], steps["+ type"] + layer.position.vectors(torch.arange(4)))
    assert layer.recipe == ("types", "position", "norm"), "the layer itself stays as it is"


def test_the_path_has_the_vectors_of_additional_tables():
    added = el.inputs.AddedEmbedding(el.TokenEmbedding(10, 16))
    model = el.DecoderLM(el.TokenEmbedding(10, 16), "rotary", num_layers=1, num_heads=2, injections=[added])
    steps = plots.path_steps(model, IDS)
    assert list(steps) == ["row", "+ injections"]
    assert torch.equal(steps["+ injections"], steps["row"] + added.table(IDS))


def test_the_path_shows_every_step_with_its_range_and_every_token():
    layer = el.TransformerEmbedding(10, 64, 8, position="sinusoidal")
    steps = plots.path_steps(layer, IDS)
    figure = plots.token_path(steps, ["I", " love", "$x$", " love"], dimensions=20)
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == list(steps)
    for axes, vectors in zip(panels, steps.values(), strict=True):
        limit = float(axes.get_xlabel().removeprefix("± "))
        np.testing.assert_allclose(
            axes.images[0].get_array() * limit_of(vectors[:, :20]), vectors[:, :20].double().numpy(), rtol=1e-5
        )
        assert limit == pytest.approx(limit_of(vectors[:, :20]), rel=0.1)
    names = panels[0].get_yticklabels()
    assert [name.get_text() for name in names] == ["I", "·love", "$x$", "·love"]
    assert not any(name.get_parse_math() for name in names), "tokens are no formulas"
    assert figure.get_supxlabel() == "dimension (the first 20 of 64)"
    drawn(figure)
