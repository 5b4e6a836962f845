"""Whether two tables are related."""

import pytest
import torch

from embedlayer.analysis.geometry import align_tables, row_movement
from embedlayer.analysis.relation import MARGIN, table_relation


def rotation(width: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(width, width)).Q


@pytest.mark.parametrize(("rows", "width"), [(400, 16), (1000, 200), (3000, 300)])
@pytest.mark.parametrize("offset", [0.0, 2.0], ids=["centred", "with a common direction"])
def test_random_tables_are_unrelated_though_their_alignment_looks_like_one(rows, width, offset) -> None:
    one, other = (torch.randn(rows, width) + offset * torch.randn(width) for _ in range(2))
    found = table_relation(one, other)
    assert found.verdict == "unrelated"
    assert found.held_out is not None
    assert found.shuffled is not None
    assert abs(found.held_out - found.shuffled) < MARGIN * (1 - found.shuffled)
    fitted = row_movement(one, other, alignment=align_tables(one, other)).cosines.mean()
    assert fitted > found.held_out + 0.02
    assert found.sentence().startswith("Unrelated: after a rotation")


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_a_rotated_table_is_related_and_one_that_moved_is_the_same(noise) -> None:
    rows = torch.randn(2000, 48)
    moved = 3 * (rows + noise * torch.randn(2000, 48))
    assert table_relation(rows, moved).verdict == "same"
    turned = table_relation(rows, moved @ rotation(48))
    assert turned.verdict == "related"
    assert turned.held_out == pytest.approx(1 / (1 + noise**2) ** 0.5, abs=0.03)
    wider = table_relation(rows, torch.cat([moved, torch.zeros(2000, 8)], 1) @ rotation(56))
    assert (wider.verdict, wider.as_stored) == ("related", None)


def test_few_tokens_are_too_few_to_say_unrelated() -> None:
    assert table_relation(torch.randn(10, 4), torch.randn(10, 4)).verdict == "unknown"
    found = table_relation(torch.randn(80, 64), torch.randn(80, 64))
    assert found.verdict == "unknown"
    assert "80 tokens are too few for 64 dimensions" in found.sentence()
    pairs = torch.stack([torch.arange(500), torch.arange(500).flip(0)], dim=1)
    rows = torch.randn(500, 8)
    assert table_relation(rows, rows.flip(0), pairs=pairs).verdict == "same"
    broken = rows.clone()
    broken[:20], broken[20:40] = 0.0, torch.nan
    assert table_relation(rows, broken).tokens == 460


def test_rows_that_are_equal_exchanged_or_overwritten_are_counted() -> None:
    rows = torch.randn(3000, 24)
    assert table_relation(rows, rows.clone()).sentence() == "The same table: all 3,000 rows are equal."
    spoiled = rows.clone()
    spoiled[500:530] = spoiled[7]
    spoiled[900:910] *= 8
    found = table_relation(rows, spoiled)
    assert (found.verdict, found.equal, found.exchanged, found.shift) == ("same", 2960, 30, 0)
    assert found.sentence().startswith(
        "The same table, changed in part: 2,960 of 3,000 rows are equal. 40 differ, with a mean cosine of "
    )
    assert found.sentence().endswith("; 30 of them equal the row of another token.")
    spoiled[5] = torch.nan
    assert table_relation(rows, spoiled).shared == 3000
    order = torch.randperm(3000)
    assert table_relation(rows, rows[order]).verdict == "same"  # though cosines are as those of shuffled tokens
    rolled = table_relation(rows, rows.roll(2, 0))
    assert rolled.shift == 2
    assert "3,000 of them equal the row of another token, 2 later in nearly all cases." in rolled.sentence()
    assert table_relation(rows, rows @ rotation(24)).sentence().startswith("The same table, rotated: ")
