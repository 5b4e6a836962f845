"""What new rows start from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.core.errors import ShapeError, SizeError, VocabularyError
from embedlayer.heads.output import OutputHead
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.vocab.init.auxiliary_init import FocusInit, OMPInit, WechselInit
from embedlayer.vocab.init.auxiliary_vectors import AuxiliaryVectors
from embedlayer.vocab.init.old_rows import WeightRows
from embedlayer.vocab.init.row_init import (
    CopyInit,
    MeanInit,
    MeanNoiseInit,
    NewToken,
    RandomInit,
    RowOrigin,
    SubwordMeanInit,
    VectorsInit,
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


def table_of(weight: torch.Tensor, **options) -> TokenEmbedding:
    table = TokenEmbedding(len(weight), weight.shape[1], dtype=weight.dtype, **options)
    with torch.no_grad():
        table.weight[: len(weight)] = weight
    return table


@pytest.fixture
def trained() -> torch.Tensor:
    """500 rows with a mean, and with numbers that go together: 16 wide, of rank 4."""
    return 3 + torch.randn(500, 4) @ torch.randn(4, 16)


@pytest.mark.parametrize("start", STARTS, ids=lambda start: type(start).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_tables_type_and_are_nobody_elses_memory(start, dtype, trained) -> None:
    table = table_of(trained.to(dtype), pad_to_multiple_of=64)
    before = table.weight.detach().clone()
    new = start.rows(table, TOKENS)
    assert new.values.shape == (2, 16)
    assert new.values.dtype == dtype
    assert not new.values.requires_grad
    assert len(new.origins) == 2
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
    assert new.origins == (RowOrigin("mean"), RowOrigin("mean"))
    marked = MeanInit(dead=lambda old: old.rows(0, old.vocab_size).norm(dim=1) > 1e5)
    assert torch.equal(marked.rows(table, TOKENS).values, new.values)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_mean_and_noise_have_the_distribution_of_trained_rows(trained, scale) -> None:
    drawn = MeanNoiseInit(scale).rows(WeightRows(trained), [NewToken(str(i)) for i in range(20_000)]).values.double()
    rows = trained.double()
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), atol=0.1 * scale, rtol=0)
    ours, theirs = drawn.T.cov(), scale**2 * rows.T.cov(correction=0)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()
    assert torch.linalg.matrix_rank(ours, rtol=1e-4) == 4


def test_noise_comes_from_the_generator(trained) -> None:
    for start in (MeanNoiseInit(), RandomInit()):
        rows = [
            start.rows(WeightRows(trained), TOKENS, torch.Generator().manual_seed(seed)).values for seed in (1, 1, 2)
        ]
        assert torch.equal(rows[0], rows[1])
        assert not torch.equal(rows[0], rows[2])
        torch.manual_seed(5)
        first = start.rows(WeightRows(trained), TOKENS).values
        torch.manual_seed(5)
        assert torch.equal(start.rows(WeightRows(trained), TOKENS).values, first)


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
        assert origin == (RowOrigin("subword mean", tuple(left)) if left else RowOrigin("mean"))


def test_copies_name_what_they_copy_and_random_rows_are_as_wide_as_trained_ones(trained) -> None:
    new = CopyInit(of=[4, 2]).rows(WeightRows(trained), TOKENS)
    assert torch.equal(new.values, trained[[4, 2]])
    assert new.origins == (RowOrigin("copy", (4,)), RowOrigin("copy", (2,)))
    many = [NewToken(str(i)) for i in range(5000)]
    spread = RandomInit().rows(WeightRows(trained), many).values.std()
    assert abs(spread / (trained - trained.mean(0)).square().mean().sqrt() - 1) < 0.02
    assert abs(RandomInit(std=0.02).rows(WeightRows(trained), many).values.std() / 0.02 - 1) < 0.02


def test_any_table_and_a_free_head_are_read() -> None:
    factorized = FactorizedEmbedding(20, 8, rank=3)
    whole = factorized.rows(0, 20).detach()
    torch.testing.assert_close(MeanInit().rows(factorized, TOKENS).values[0], whole.mean(0))
    head = OutputHead(vocab_size=20, embed_dim=8)
    new = SubwordMeanInit().rows(WeightRows(head.weight), TOKENS)
    torch.testing.assert_close(new.values[0], head.weight.detach()[[3, 7]].mean(0))


def test_a_table_is_read_in_blocks_and_never_whole(monkeypatch, trained) -> None:
    monkeypatch.setitem(TABLE_ROWS, "cpu", 64)
    read = []

    class Watched(WeightRows):
        def rows(self, start, stop):
            read.append(stop - start)
            return self.weight[start:stop]

    for start in (MeanInit(), MeanNoiseInit(), RandomInit(), SubwordMeanInit()):
        blocks = start.rows(Watched(trained), TOKENS, torch.Generator().manual_seed(0)).values
        monkeypatch.setitem(TABLE_ROWS, "cpu", 500)
        if not isinstance(start, MeanNoiseInit):  # whose draws are dealt by blocks
            whole = start.rows(WeightRows(trained), TOKENS, torch.Generator().manual_seed(0)).values
            torch.testing.assert_close(blocks, whole)
        monkeypatch.setitem(TABLE_ROWS, "cpu", 64)
    assert max(read) == 64


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (CopyInit(of=12), VocabularyError, r"no old row 12: the IDs are 0\.\.9"),
        (CopyInit(of=[1, 2, 3]), SizeError, "names 3 rows for 2 new tokens"),
        (MeanInit(dead=[12]), VocabularyError, "no old row 12"),
        (MeanInit(dead=range(10)), VocabularyError, "None of the 10 rows counts as trained"),
        (SubwordMeanInit(dead=range(10)), VocabularyError, "None of the 10 rows"),
        (VectorsInit(torch.zeros(3, 4)), ShapeError, r"rows of shape \(3, 4\); 2 new tokens .* need \(2, 4\)"),
    ],
)
def test_what_cannot_be_is_an_error(start, error, message) -> None:
    with pytest.raises(error, match=message):
        start.rows(WeightRows(torch.ones(10, 4)), TOKENS)
