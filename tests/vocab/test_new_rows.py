"""What new rows start from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import embedlayer as el
from embedlayer.vocab import (
    AuxiliaryVectors,
    CopyInit,
    FocusInit,
    MeanInit,
    MeanNoiseInit,
    NewToken,
    OMPInit,
    RandomInit,
    SubwordMeanInit,
    VectorsInit,
    WechselInit,
)

VECTORS = AuxiliaryVectors.from_tensors([2, 4, 9], torch.eye(3), ["zebra"], torch.tensor([[0.3, 2.0, -1.0]]))
STARTS = [
    MeanInit(),
    MeanNoiseInit(),
    SubwordMeanInit(),
    CopyInit(of=3),
    RandomInit(),
    RandomInit(std=0.1),
    VectorsInit(torch.ones(2, 16)),
    *(weighted(VECTORS) for weighted in (OMPInit, FocusInit, WechselInit)),
]
TOKENS = [NewToken("zebra", (3, 7)), NewToken("<tool>")]


def table_of(weight: torch.Tensor, **options) -> el.TokenEmbedding:
    table = el.TokenEmbedding(len(weight), weight.shape[1], dtype=weight.dtype, **options)
    with torch.no_grad():
        table.weight[: len(weight)] = weight
    return table


@pytest.fixture
def trained() -> torch.Tensor:
    """500 rows with a mean, and with numbers that go together: 16 wide, of rank 4."""
    return 3 + torch.randn(500, 4) @ torch.randn(4, 16)


@pytest.mark.parametrize("start", STARTS, ids=lambda start: type(start).__name__)
def test_rows_have_the_tables_type_and_are_nobody_elses_memory(start, trained) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        table = table_of(trained.to(dtype), pad_to_multiple_of=64)
        before = table.weight.detach().clone()
        new = start.rows(table, TOKENS)
        assert (new.values.shape, new.values.dtype, len(new.origins)) == ((2, 16), dtype, 2)
        assert not new.values.requires_grad
        new.values.fill_(7)
        assert torch.equal(table.weight, before)
        if not isinstance(start, VectorsInit):
            assert start.rows(table, []).values.shape == (0, 16)


def test_the_mean_is_that_of_the_rows_that_were_trained(trained) -> None:
    weight = torch.cat([trained, torch.zeros(3, 16), torch.full((1, 16), 1e6), torch.full((1, 16), torch.nan)])
    table = table_of(weight, padding_idx=2, pad_to_multiple_of=64)
    live = torch.cat([trained[:2], trained[3:]]).double().mean(0)
    new = MeanInit(dead=[503]).rows(table, TOKENS)
    torch.testing.assert_close(new.values.double(), live.expand(2, -1), rtol=1e-6, atol=1e-6)
    assert [*map(str, new.origins)] == ["mean", "mean"]
    marked = MeanInit(dead=lambda old: old.rows(0, old.vocab_size).norm(dim=1) > 1e5)
    assert torch.equal(marked.rows(table, TOKENS).values, new.values)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_mean_and_noise_have_the_distribution_of_trained_rows(trained, scale) -> None:
    drawn = MeanNoiseInit(scale).rows(table_of(trained), [NewToken(str(i)) for i in range(20_000)]).values.double()
    rows = trained.double()
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), atol=0.1 * scale, rtol=0)
    ours, theirs = drawn.T.cov(), scale**2 * rows.T.cov(correction=0)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()
    assert torch.linalg.matrix_rank(ours, rtol=1e-4) == 4


def test_noise_comes_from_the_generator(trained) -> None:
    for start in (MeanNoiseInit(), RandomInit()):
        table = table_of(trained)
        rows = [start.rows(table, TOKENS, torch.Generator().manual_seed(seed)).values for seed in (1, 1, 2)]
        assert torch.equal(rows[0], rows[1])
        assert not torch.equal(rows[0], rows[2])
        torch.manual_seed(5)
        first = start.rows(table, TOKENS).values
        torch.manual_seed(5)
        assert torch.equal(start.rows(table, TOKENS).values, first)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 11), max_size=5), max_size=6))
def test_a_subword_mean_is_the_mean_of_its_live_pieces(pieces) -> None:
    weight = torch.arange(1, 49, dtype=torch.float32).reshape(12, 4)
    weight[5] = 0
    new = SubwordMeanInit(dead=[7]).rows(table_of(weight, padding_idx=0), [NewToken("", tuple(ids)) for ids in pieces])
    live = [i for i in range(12) if i not in (0, 5, 7)]
    for row, origin, ids in zip(new.values, new.origins, pieces, strict=True):
        left = [i for i in ids if i in live]
        torch.testing.assert_close(row, weight[left or live].mean(0))
        assert (origin.method, origin.old_ids) == (("subword mean", tuple(left)) if left else ("mean", ()))


def test_copies_name_what_they_copy_and_random_rows_are_as_wide_as_trained_ones(trained) -> None:
    new = CopyInit(of=[4, 2]).rows(table_of(trained), TOKENS)
    assert torch.equal(new.values, trained[[4, 2]])
    assert [*map(str, new.origins)] == ["copy of 4", "copy of 2"]
    many = [NewToken(str(i)) for i in range(5000)]
    spread = RandomInit().rows(table_of(trained), many).values.std()
    assert abs(spread / (trained - trained.mean(0)).square().mean().sqrt() - 1) < 0.02
    assert abs(RandomInit(std=0.02).rows(table_of(trained), many).values.std() / 0.02 - 1) < 0.02


class Watched(el.TokenEmbedding):
    """A table that counts the rows that are read at once."""

    most = 0

    def rows(self, start, stop):
        Watched.most = max(Watched.most, stop - start)
        return super().rows(start, stop)


def test_a_large_table_is_read_in_blocks_and_never_whole() -> None:
    table = Watched(9000, 4)
    with torch.no_grad():
        table.weight[:8500] = 0  # which counts as not trained, so that what follows decides
    rows = table.weight.detach()[8500:].double()
    for start in (MeanInit(), SubwordMeanInit()):
        torch.testing.assert_close(start.rows(table, [NewToken("")]).values[0].double(), rows.mean(0))
    many = [NewToken(str(i)) for i in range(5000)]
    for random in (RandomInit(), MeanNoiseInit()):
        spread = random.rows(table, many, torch.Generator().manual_seed(0)).values.std(0).mean()
        assert abs(spread / rows.std(0).mean() - 1) < 0.05
    assert 8000 < Watched.most <= 8192


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (CopyInit(of=12), el.VocabularyError),
        (CopyInit(of=[1, 2, 3]), el.SizeError),
        (MeanInit(dead=[12]), el.VocabularyError),
        (MeanInit(dead=range(10)), el.VocabularyError),
        (SubwordMeanInit(dead=range(10)), el.VocabularyError),
        (VectorsInit(torch.zeros(3, 4)), el.ShapeError),
    ],
)
def test_what_cannot_be_is_an_error(start, error) -> None:
    with pytest.raises(error):
        start.rows(table_of(torch.ones(10, 4)), TOKENS)
