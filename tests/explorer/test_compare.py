"""Two tables laid over one another."""

import pytest
import torch
from explorer_requests import numbers

from embedlayer import TokenEmbedding
from embedlayer.analysis import row_movement
from embedlayer.opening import OpenedModel


@pytest.fixture
def compared(ask):
    """What is said of two tables, and their places: five rows of float32, and the IDs in both."""

    def both(ours, theirs):
        content = ask([ours, theirs], "compare-places", other=1)
        found = ask([ours, theirs], "compare", other=1)
        cut = 20 * found["shared"]
        return found, numbers(content[:cut], 5, -1), numbers(content[cut:], 2, -1, dtype=torch.int32).tolist()

    return both


def source_of(rows: torch.Tensor, tokens: list[str], title: str = "table") -> OpenedModel:
    return OpenedModel(title, TokenEmbedding.from_pretrained(rows), tokens=tokens)


def words(count: int) -> list[str]:
    return [f"w{i}" for i in range(count)]


def test_a_turned_copy_lies_on_the_table_but_for_the_row_that_moved(compared):
    rows = torch.randn(50, 6)
    moved = rows @ torch.linalg.qr(torch.randn(6, 6)).Q
    moved[17] = -moved[17]
    found, _, _ = compared(source_of(rows, words(50)), source_of(moved, words(50)))
    assert found["shared"] == 50
    assert found["moved_most"][0][:2] == [17, 17]
    assert found["moved_most"][0][2] < -0.9
    assert all(cosine > 0.95 for _, _, cosine, _ in found["moved_most"][1:])
    assert found["mean_cosine"] > 0.9
    assert 0 < found["residual"] < 0.3


def test_places_are_the_first_tables_components(compared):
    rows = torch.randn(30, 5)
    turned = rows @ torch.linalg.qr(torch.randn(5, 5)).Q
    _, places, ids = compared(source_of(rows, words(30)), source_of(turned, words(30)))
    torch.testing.assert_close(places[:2], places[2:4], rtol=0, atol=1e-4)
    torch.testing.assert_close(places[4], torch.ones(30), rtol=0, atol=1e-5)
    assert ids == [[*range(30)]] * 2


def test_tables_of_other_tokenizers_and_widths_meet_at_the_tokens_they_share(compared):
    ours = source_of(torch.randn(5, 4), [" dog", " cat", "dog", "", "naps"])
    theirs = source_of(torch.randn(4, 7), ["cat", "fish", "dog", "naps"])
    found, _, ids = compared(ours, theirs)
    assert found["only"] == [
        {"title": "table", "rows": 2, "tokens": [" dog", ""]},
        {"title": "table", "rows": 1, "tokens": ["fish"]},
    ]
    assert found["relation"]["details"].endswith("1 row only in table, 2 rows only in table.")
    assert dict(zip(*ids, strict=True)) == {1: 0, 2: 2, 4: 3}  # "dog" is compared with "dog", so " dog" with none


def test_a_run_is_compared_with_itself_before_training(ask, of_run):
    before, found = of_run.before(), ask(of_run, "compare", other="before")
    assert found["shared"] <= of_run.table.vocab_size
    assert found["moved_most"][0][2] < found["moved_least"][0][2]
    assert found["residual"] is None
    assert found["relation"]["verdict"] == "changed"
    moved, occurs = row_movement(before.table, of_run.table), of_run.counts > 0
    assert 0 < occurs.sum() < len(occurs)
    assert found["moved_never"] is not None
    for cells, among in ((found["moved_most"], occurs), (found["moved_never"], ~occurs)):
        expected = moved.among(among & ~moved.cosines.isnan()).most(1)[0]
        assert cells[0][:2] == [expected.after, expected.before]
        ratio = expected.norm_after / expected.norm_before / found["scale"]
        assert cells[0][3] == pytest.approx(ratio, abs=1e-3)
    near = ask(of_run, "compare-neighbors", other="before", plus=40, topn=3)
    assert [type(text) for text, _ in near] == [str, str, str]


def test_weight_decay_alone_moves_no_row(compared):
    rows = torch.randn(60, 6)
    found, places, _ = compared(source_of(0.7 * rows, words(60)), source_of(rows, words(60)))
    assert found["scale"] == pytest.approx(0.7)
    assert found["residual"] is None
    assert found["moved_most"] == []
    assert found["moved_least"][0][2:] == [pytest.approx(1.0), pytest.approx(1.0)]
    torch.testing.assert_close(places[:2], places[2:4], rtol=0, atol=1e-5)


def test_the_page_shows_a_figure_if_it_was_measured(ask, serve, open_page):
    rows = torch.randn(300, 12)
    turned = source_of(
        rows @ torch.linalg.qr(torch.randn(12, 12))[0] + 0.1 * torch.randn(300, 12), words(300), "turned"
    )
    for other in (turned, source_of(rows + 0.1 * torch.randn(300, 12), words(300), "moved")):
        sources = [source_of(rows, words(300)), other]
        found = ask(sources, "compare", other=1)["relation"]
        page = open_page(serve(*sources) + "#compare?other=1", again=True)
        page.locator("#view-compare .map-figures summary").click()
        shown = dict(zip(*(page.locator(f".map-figures {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
        measured = {"Mean cosine": (found["as_stored"], found["as_stored_shuffled"])}
        if found["verdict"] == "related":
            measured["Rotated, held out"] = (found["held_out"], found["shuffled"])
        for name, cosines in measured.items():
            texts = [f"{cosine:.3f}".replace("-", "−") for cosine in cosines]
            assert shown.pop(name) == "; shuffled tokens ".join(texts)
        assert shown.keys() == {"Common tokens", "Norms"} | ({"Rotated, all rows"} if len(measured) > 1 else set())
