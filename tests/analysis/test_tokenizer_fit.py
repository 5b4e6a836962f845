"""Whether a tokenizer belongs to a table."""

import math

import pytest
import torch

from embedlayer.analysis.row_reader import RowReader
from embedlayer.analysis.tokenizer_fit import SHIFTS, TokenizerFit, tokenizer_fit

LETTERS = "bcdfghjklm"
STEMS = [f"{a}a{b}e{c}" for a in LETTERS for b in LETTERS for c in LETTERS][:300]
TEXTS = [text for stem in STEMS for text in (stem, f" {stem.capitalize()}", f"{stem}s")]


def related(noise: float = 0.5) -> torch.Tensor:
    return torch.randn(300, 24).repeat_interleave(3, 0) + noise * torch.randn(900, 24) + 2 * torch.randn(24)


def fit_of(rows: torch.Tensor, texts: list[str], usable: torch.Tensor | None = None) -> TokenizerFit:
    found = tokenizer_fit(RowReader(rows), texts, usable=usable)
    assert found is not None
    return found


@pytest.mark.parametrize("shift", range(-SHIFTS, SHIFTS + 1))
def test_a_shift_of_the_rows_against_the_tokens_is_found(shift) -> None:
    order = torch.randperm(900)
    texts = [TEXTS[row] for row in order.tolist()]
    found = fit_of(related()[order].roll(shift, 0), texts)
    assert found.shift == shift
    assert found.shifted_cosine == pytest.approx(0.8, abs=0.05)
    assert (abs(found.cosine) < 0.1) == (shift != 0)


def test_random_and_broken_rows_show_no_shift_and_few_pairs_show_nothing() -> None:
    assert fit_of(torch.randn(900, 24), TEXTS).shift == 0
    rows = related()
    rows[::7] = torch.nan
    assert fit_of(rows, TEXTS).cosine > 0.7
    assert fit_of(torch.full((900, 4), torch.nan), TEXTS).shift == 0
    assert tokenizer_fit(RowReader(rows), ["x"] * 900) is None


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_share_of_exchanged_rows_is_measured(share) -> None:
    rows = torch.randn(300, 96).repeat_interleave(3, 0) + 0.5 * torch.randn(900, 96) + 2 * torch.randn(96)
    chosen = torch.randperm(900)[: int(900 * share)]
    rows[chosen] = rows[chosen[torch.randperm(len(chosen))]]
    found = fit_of(rows, TEXTS)
    assert found.is_mixed
    assert found.misplaced == pytest.approx(share, abs=0.12)
    assert found.alike_cosine == pytest.approx(0.8, abs=0.1)
    assert len(found.odd_rows) > 20
    assert sum(row in set(chosen.tolist()) for row in found.odd_rows) > 0.9 * len(found.odd_rows)
    assert found.to_json(5)["odd_rows"]["rows"] == len(found.odd_rows)


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0, 5.0, 100.0])
def test_a_table_that_was_trained_little_is_not_called_mixed(noise) -> None:
    found = fit_of(related(noise), TEXTS)
    assert not found.is_mixed
    assert found.odd_rows == ()
    assert 0 <= found.unlike <= 1
    faint = torch.rand(300, 1).square().repeat_interleave(3, 0)  # from not similar at all to very similar
    assert not fit_of(faint * related() + noise * torch.randn(900, 24), TEXTS).is_mixed
    unused = torch.ones(900, dtype=torch.bool)
    unused[:890] = False
    assert not fit_of(related(noise), TEXTS, usable=unused).is_mixed


def test_numbers_that_json_lacks_are_null() -> None:
    fit = TokenizerFit(30, 0.0, math.inf, 0, 0.0, ("dog", "dogs"), 0.0, math.nan, False, ("dog", "dogs"), (4, 7))
    values = fit.to_json(1)
    assert values["error"] is values["alike_cosine"] is None
    assert values["odd_rows"] == {"rows": 2, "ids": [4]}
