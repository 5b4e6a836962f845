"""Each row has one verdict with its reason, and all places that state it agree."""

import pytest
import torch
from torch import Tensor

from embedlayer.analysis import table_health

VERDICTS = ("learned", "not learned", "never seen", "cannot tell")


def related(count: int, width: int) -> Tensor:
    """Rows that use some directions more than others, as trained ones do."""
    return torch.randn(count, 12) @ torch.randn(12, width) / 12**0.5 + 0.3 * torch.randn(count, width)


def test_each_kind_of_row_has_its_verdict_and_its_reason() -> None:
    rows = related(2000, 96)
    rows[100:200] = 0.02 * torch.randn(100, 96)
    rows[200:300] = torch.randn(96) + 0.1 * torch.randn(100, 96)
    rows[300], rows[301, 4] = 0.0, torch.nan
    rows[302:304] = rows[304]
    counts = torch.ones(2000, dtype=torch.int64)
    counts[250:300], counts[7] = 0, 0
    counts[200:250] = 0
    counts[240:250] = 1
    found = table_health(rows, counts=counts).verdicts
    expected = {
        7: ("never seen", "0 times in the training text"),
        260: ("never seen", "0 times"),
        245: ("not learned", "inside a narrow cone"),
        300: ("cannot tell", "zero, or holds NaN"),
        301: ("cannot tell", "zero, or holds NaN"),
        303: ("cannot tell", "equals another row"),
    }
    for row, (verdict, because) in expected.items():
        assert found.of(row).verdict == verdict
        assert because in found.of(row).because
    random = [found.of(row) for row in range(100, 200)]
    assert sum(each.verdict == "not learned" for each in random) >= 97
    assert any("as of random rows (" in each.because for each in random)
    assert sum(found.of(row).verdict == "learned" for row in range(400, 2000)) > 1580
    assert sum(map(found.count, VERDICTS)) == 2000
    assert "random rows have " in found.of(1000).because


def test_a_run_whose_rows_were_exchanged_is_not_sound() -> None:
    before = torch.randn(1000, 64)
    after = before + related(1000, 64)
    assert table_health(after, before=before).exchanged == pytest.approx(0.0, abs=0.02)
    after[::5] = after[::5].roll(1, 0)
    found = table_health(after, before=before)
    assert found.exchanged == pytest.approx(0.2, abs=0.05)
    assert "% of the rows were exchanged: they come from the rows that other tokens had" in found.summary()
    assert table_health(after.roll(1, 0), before=before).exchanged > 0.95
    assert table_health(related(1000, 64), before=before).exchanged is None  # nothing is left of the start
    assert [table_health(after[:v], before=before[:v]).exchanged is None for v in (63, 64)] == [True, False]
