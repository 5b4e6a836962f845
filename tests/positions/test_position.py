"""Positions of tokens, the neutral scheme, and schemes that the library does not know."""

import copy
from typing import Any

import pytest
import torch
from covering import cases
from kinds import POSITIONS

import embedlayer as el
from embedlayer import DecoderLM, Position, TokenEmbedding, plots, positions_of
from embedlayer.explorer.positions import described
from embedlayer.positions import AdditivePosition


def test_padding_shifts_nothing_and_packed_documents_count_from_the_offset() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert positions_of(ids).tolist() == [0, 1, 2, 3]
    assert positions_of(ids, offset=5).tolist() == [5, 6, 7, 8]
    for mask, expected in (
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([0, 0, 1, 1], [0, 0, 0, 1]),
        ([1, 1, 0, 0], [0, 1, 0, 0]),
        ([1, 0, 1, 1], [0, 0, 1, 2]),
        ([1, 1, 2, 2], [0, 1, 0, 1]),
        ([0, 1, 2, 2], [0, 0, 0, 1]),
        ([1, 0, 2, 2], [0, 0, 0, 1]),
        ([1, 2, 3, 0], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ):
        assert positions_of(ids, torch.tensor([mask])).tolist() == [expected]
        if max(mask) == 1:
            assert positions_of(ids, torch.tensor([mask]).bool()).tolist() == [expected]


def test_no_position_leaves_everything_as_it_is() -> None:
    position = Position()
    x, q, places = torch.randn(2, 3, 4), torch.randn(2, 2, 3, 2), torch.arange(3)
    assert position.add(x, places) is x
    assert position.rotate(q, q, places) == (q, q)
    assert position.bias(places, places) is None


class Ramp(AdditivePosition):
    """A scheme that the library does not know: adds the position itself to every dimension."""

    def __init__(self, embed_dim: int, *, slope: float = 0.5) -> None:
        super().__init__()
        self.embed_dim, self.slope = embed_dim, slope

    def vectors(self, positions: torch.Tensor) -> torch.Tensor:
        return (self.slope * positions.float()).unsqueeze(-1).expand(*positions.shape, self.embed_dim)


class Window(Position):
    """A scheme that the library does not know: keys further than `width` before the query get a fixed penalty."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.num_heads, self.width = num_heads, width

    def bias(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        query, key = torch.atleast_2d(query_positions), torch.atleast_2d(key_positions)
        far = (query.unsqueeze(-1) - key.unsqueeze(-2) > self.width).unsqueeze(1)
        return far.expand(-1, self.num_heads, -1, -1) * -10.0


STRANGE = {"add": lambda: Ramp(16), "bias": lambda: Window(2, 3)}


SAVED = [
    el.LearnedPositionalEmbedding(40, 8, offset=2),
    el.SinusoidalPositionalEmbedding(40, 8, base=100.0, init_scale=3.0),
    el.SinusoidalPositionalEmbedding(40, 8, layout="concatenated", endpoint=True, offset=2, padding_idx=1),
    el.RotaryEmbedding(8, 500000.0, interleaved=True, rotary_dim=4),
    el.AlibiBias(2, max_bias=16.0, scale=0.5),
    el.RelativePositionBias(2, num_buckets=8, max_distance=20, bidirectional=False),
    el.positions.AxialPositionalEmbedding((4, 10), (2, 6)),
]
"""Schemes with other options than those that they have by default."""


@pytest.mark.parametrize("position", SAVED, ids=lambda position: type(position).__name__)
def test_every_option_is_saved(position, tmp_path) -> None:
    position.save_pretrained(tmp_path)
    again = type(position).from_pretrained(tmp_path)
    q, places = torch.randn(1, 2, 30, 8), torch.arange(30)
    assert again.config == position.config
    assert again.state_dict().keys() == position.state_dict().keys()
    assert torch.equal(again.add(q[0, 0], places), position.add(q[0, 0], places))
    assert torch.equal(again.rotate(q, q, places)[0], position.rotate(q, q, places)[0])
    assert position.hook != "bias" or torch.equal(again.bias(places, places), position.bias(places, places))


@pytest.mark.parametrize("hook", STRANGE)
def test_a_scheme_says_its_hook_and_its_arguments_without_code_for_it(hook) -> None:
    position = STRANGE[hook]()
    assert position.hook == hook
    assert type(position)(**position.config).config == position.config
    assert position.config == {"add": {"embed_dim": 16, "slope": 0.5}, "bias": {"num_heads": 2, "width": 3}}[hook]
    assert position.device == torch.device("cpu")


@pytest.mark.parametrize("hook", STRANGE)
def test_an_unknown_scheme_runs_and_is_traced_drawn_and_described(hook) -> None:
    position, ids = STRANGE[hook](), torch.arange(1, 7)
    model = DecoderLM(TokenEmbedding(50, 16), position, num_layers=1, num_heads=2).eval()
    assert not torch.allclose(model(ids), DecoderLM.forward(_without_positions(model), ids))
    *_, last = model.trace(ids)
    assert torch.equal(last.vectors, position.add(model.table(ids), torch.arange(6)))
    assert plots.position_heatmap(position, length=8).axes[0].images
    content = described(position, trained_length=32)
    assert (content["kind"], content["trained_length"]) == ({"add": "learned", "bias": "relative"}[hook], 32)
    assert content["name"].startswith(type(position).__name__)


def _without_positions(model: DecoderLM) -> DecoderLM:
    other = copy.deepcopy(model)
    other.position = Position()
    return other


@pytest.mark.filterwarnings("ignore:.*flex_attention:UserWarning")
@cases(
    "name, places",
    [name for name, build in POSITIONS.items() if build().hook == "bias"],
    [
        (None, None),
        (torch.arange(3, 8), torch.arange(8)),
        (torch.tensor([[0, 1, 0, 1, 2], [4, 3, 2, 1, 0]]), torch.tensor([[0, 1, 0, 1, 2, 0, 0, 0], [7] * 8])),
    ],
)
def test_flex_attention_with_the_score_mod_equals_attention_with_the_bias(name, places, unchecked: None) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    queries, keys = places
    position: Any = POSITIONS[name]()
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    ours = flex_attention(q, k, v, score_mod=position.score_mod(queries, keys))
    bias = position.bias(torch.arange(5) if queries is None else queries, torch.arange(8) if keys is None else keys)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(2, -1, -1, -1))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
