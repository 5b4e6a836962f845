"""The scene about rotary positions: its numbers are those of `RotaryEmbedding`, and what it says of them holds."""

import re

import pytest
import torch

from embedlayer import RotaryEmbedding, TokenEmbedding
from embedlayer.opening import OpenedModel

PAIRS = [0, 8, 16]


def test_the_pairs_are_rotated_as_the_library_rotates_them(story):
    position = RotaryEmbedding(64)
    query, key = (torch.tensor(story(f"rotary.headVector('{part}')"), dtype=torch.float64) for part in "qk")
    assert query.nonzero().flatten().tolist() == [0, 8, 16, 32, 40, 48]
    for q, k in [(5, 4), (25, 24), (25, 15), (60, 0), (0, 60)]:
        rotated, _ = position.rotate(query.view(1, 1, 1, 64), query.view(1, 1, 1, 64), torch.tensor([q]))
        _, rotated_key = position.rotate(key.view(1, 1, 1, 64), key.view(1, 1, 1, 64), torch.tensor([k]))
        found = story("rotary.rotated({ q, k })", q=q, k=k)
        assert [each["pair"] for each in found] == PAIRS
        for each in found:
            channels = [each["pair"], each["pair"] + 32]
            assert each["after"]["q"] == pytest.approx(rotated.flatten()[channels].tolist(), abs=2e-5)
            assert each["after"]["k"] == pytest.approx(rotated_key.flatten()[channels].tolist(), abs=2e-5)
            assert each["unrotated"] == pytest.approx(float(query[channels] @ key[channels]))
        total = story("rotary.totalScore({ q, k })", q=q, k=k)
        assert total == pytest.approx(float(rotated.flatten() @ rotated_key.flatten()), abs=5e-5)
        moved = story("rotary.totalScore({ q: q + 20, k: k + 20 })", q=q, k=k)
        assert moved == pytest.approx(total, abs=1e-12)


@pytest.fixture(scope="module")
def url(serve):
    return serve(OpenedModel("table", TokenEmbedding(20, 4)))


def frequency_of(*, width, pair):
    """Radians per position of a pair in a head of the library."""
    cos, sin = RotaryEmbedding(width).cos_sin(torch.tensor([1]))
    return float(torch.atan2(sin, cos)[0, pair])


def test_the_numbers_of_the_claims_are_those_of_the_library(url, open_page):
    page = open_page(f"{url}#learn?s=rotary", again=True)
    page.locator(".rotary-table").wait_for()
    claims = page.locator(".learn-claims li").all_inner_texts()
    slowest, angle = frequency_of(width=128, pair=63), frequency_of(width=64, pair=16)
    assert f"{2 * torch.pi / slowest:,.0f}." in claims[4]
    assert f"at most {63 * angle:.2f} radians on 64 tokens, and by {511 * angle:.2f} on 512" in claims[3]
    assert list(RotaryEmbedding(64).parameters()) == []


def test_a_pocket_calculator_gets_the_scores_from_the_numbers_shown(url, open_page):
    page = open_page(f"{url}#learn?s=rotary&rotary.q=37&rotary.k=12", again=True)
    page.locator(".rotary-table").wait_for()
    scores = []
    for pair in PAIRS:
        cells = page.locator(f'.rotary-table tr[data-pair="{pair}"] td').all_inner_texts()
        _, query, key, unrotated, score = ([float(x) for x in re.split(", ", cell.replace("−", "-"))] for cell in cells)
        assert score == pytest.approx([query[0] * key[0] + query[1] * key[1]], abs=2e-4)
        assert unrotated[0] > 0
        assert sum(x * x for x in query) == pytest.approx(1, abs=2e-4)
        assert f"score {cells[-1]}" in page.locator(f'.rotary-dial[data-pair="{pair}"]').inner_text()
        scores += score
    total = page.locator('.rotary-table tr[data-pair="sum"] td').last.inner_text().replace("−", "-")
    assert float(total) == pytest.approx(sum(scores), abs=2e-4)


def test_both_tokens_stay_in_the_picture_when_they_move_together(url, open_page):
    page = open_page(f"{url}#learn?s=rotary&rotary.q=55&rotary.k=48", again=True)
    sliders = [page.get_by_role("slider", name=f"Position of the {name}") for name in ("query", "key")]
    page.get_by_role("button", name="Move both by 10").click()
    assert [each.input_value() for each in sliders] == ["60", "53"]
    for _ in range(6):
        page.get_by_role("button", name="Move both by -10").click()
    assert [each.input_value() for each in sliders] == ["7", "0"]
