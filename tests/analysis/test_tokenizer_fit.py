"""Whether a tokenizer belongs to a table."""

import pytest
import torch

from embedlayer.analysis.row_reader import RowReader
from embedlayer.analysis.tokenizer_fit import SHIFTS, tokenizer_fit

LETTERS = "bcdfghjklm"
STEMS = [f"{a}a{b}e{c}" for a in LETTERS for b in LETTERS for c in LETTERS][:300]
TEXTS = [text for stem in STEMS for text in (stem, f" {stem.capitalize()}", f"{stem}s")]


def related(noise: float = 0.5) -> torch.Tensor:
    return torch.randn(300, 24).repeat_interleave(3, 0) + noise * torch.randn(900, 24) + 2 * torch.randn(24)


@pytest.mark.parametrize("shift", range(-SHIFTS, SHIFTS + 1))
def test_a_shift_of_the_rows_against_the_tokens_is_found(shift) -> None:
    order = torch.randperm(900)
    texts = [TEXTS[row] for row in order.tolist()]
    found = tokenizer_fit(RowReader(related()[order].roll(shift, 0)), texts)
    assert found.shift == shift
    assert found.shifted_cosine == pytest.approx(0.8, abs=0.05)
    assert (abs(found.cosine) < 0.1) == (shift != 0)


def test_random_and_broken_rows_show_no_shift_and_few_pairs_show_nothing() -> None:
    assert tokenizer_fit(RowReader(torch.randn(900, 24)), TEXTS).shift == 0
    rows = related()
    rows[::7] = torch.nan
    assert tokenizer_fit(RowReader(rows), TEXTS).cosine > 0.7
    assert tokenizer_fit(RowReader(torch.full((900, 4), torch.nan)), TEXTS).shift == 0
    assert tokenizer_fit(RowReader(rows), ["x"] * 900) is None
