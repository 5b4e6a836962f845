"""Parts of input embeddings, each beside the plain formula; families compare them with transformers."""

import pytest
import torch
import torch.nn.functional as F

import embedlayer as el
from embedlayer.inputs.parts import (
    ElementwiseAffine,
    FeatureProjection,
    OffsetRMSNorm,
    PredictionStreams,
    TokenDropout,
    TrigramProjection,
    TypeTables,
)
from embedlayer.saving import build, describe

PARTS = {
    "types": lambda: TypeTables([el.TokenEmbedding(3, 8), el.TokenEmbedding(2, 8, scale=2.0)]),
    "affine": lambda: ElementwiseAffine(8),
    "offset norm": lambda: OffsetRMSNorm(8, eps=1e-5),
    "trigrams": lambda: TrigramProjection(24, 5, bias=False),
    "features": lambda: FeatureProjection(14, 5, features=[(3, 4), (2, 2)]),
    "dropout": lambda: TokenDropout(7),
    "streams": lambda: PredictionStreams(2, 8),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_built_again_from_its_description(name) -> None:
    part = PARTS[name]()
    again = build(describe(part))
    assert type(again) is type(part)
    assert describe(again) == describe(part)
    shapes = {key: tensor.shape for key, tensor in part.state_dict().items()}
    assert {key: tensor.shape for key, tensor in again.state_dict().items()} == shapes


def test_further_type_tables_add_their_row_0() -> None:
    types = PARTS["types"]()
    ids = torch.tensor([[0, 2]])
    first, second = types.tables
    assert torch.equal(types(ids), first.weight[ids] + 2 * second.weight[0])
    with pytest.raises(el.SizeError, match="one width"):
        TypeTables([el.TokenEmbedding(3, 8), el.TokenEmbedding(3, 4)])


def test_trigrams_are_the_next_the_same_and_the_former_vector() -> None:
    part, x = PARTS["trigrams"](), torch.randn(2, 4, 8)
    zero = torch.zeros(2, 1, 8)
    joined = torch.cat([torch.cat([x[:, 1:], zero], 1), x, torch.cat([zero, x[:, :-1]], 1)], -1)
    assert torch.allclose(part(x), joined @ part.weight.T, atol=1e-6)
    assert torch.allclose(part(x[0]), part(x)[0], atol=1e-6)


def test_features_are_the_first_rows_of_their_tables() -> None:
    part, x = PARTS["features"](), torch.randn(2, 4, 8)
    rows = [table.weight[0].expand(2, 4, -1) for table in part.features]
    assert torch.allclose(part(x), F.linear(torch.cat([x, *rows], -1), part.weight, part.bias), atol=1e-6)


def test_token_dropout_keeps_the_expected_length() -> None:
    part, x = PARTS["dropout"](), torch.ones(1, 10, 8)
    ids = torch.tensor([[7, 7, 1, 2, 3, 4, 5, 6, 8, 9]])
    vectors = part(x, ids, None)
    assert not vectors[0, :2].any()
    assert torch.allclose(vectors[0, 2:], torch.full((8, 8), 0.88 / 0.8))


def test_prediction_streams_follow_the_main_stream() -> None:
    part, x, following = PARTS["streams"](), torch.randn(2, 3, 8), torch.randn(3, 8)
    part.weight.data.normal_()
    out = part(x, following)
    assert torch.equal(out[:, :3], x)
    assert torch.equal(out[:, 3:6], (part.weight[1] + following).expand(2, -1, -1))
    assert torch.equal(out[:, 6:], (part.weight[0] + following).expand(2, -1, -1))
