"""First screens: where to begin, what the lists of the map say, examples, and views whose source lacks something."""

import threading
from collections.abc import Iterator

import pytest
import torch
from pages import until

from embedlayer import SizeError, TokenEmbedding
from embedlayer.explorer import table_map
from embedlayer.opening import OpenedModel

PHONE = {"width": 390, "height": 844}

COMPONENTS = "x=1&y=2"
"""The state of a map that needs no layout: that of the word table takes longer than a test."""

SHOWN = "[...document.querySelectorAll('.map-tools .field:not([hidden]) select')].map((list) => list.value).join()"
"""The values of the lists Colour, x axis and y axis, of those that are visible."""

PAINTED = """() => {
    const { prototype } = CanvasRenderingContext2D, paint = prototype.fillText;
    window.painted = [];
    prototype.fillText = function (text, ...rest) { window.painted.push(text); paint.call(this, text, ...rest); };
}"""


@pytest.fixture(scope="module")
def code() -> OpenedModel:
    """A table about code, which is no run and has no tokenizer."""
    texts = " class| function| list| string| error| number".split("|") + [f"part{row}" for row in range(40)]
    return OpenedModel("code", TokenEmbedding.from_pretrained(torch.randn(len(texts), 8)), tokens=texts)


@pytest.fixture(scope="module")
def url(serve, of_run, word_table, code):
    return serve(of_run, word_table, code)


def is_on_screen(page, locator) -> bool:
    """Whether an element is seen on a phone without scrolling."""
    locator.wait_for()
    box = locator.bounding_box()
    return (
        page.evaluate("scrollY") == 0
        and box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= PHONE["width"]
        and box["y"] + box["height"] <= PHONE["height"]
    )


# Where to begin


def test_a_newcomer_and_a_practitioner_find_their_first_click_on_map_and_learn(url, open_page):
    page = open_page(url, again=True)
    page.set_viewport_size(PHONE)
    start = page.get_by_label("Where to begin")
    for name in ("Learn", "Health"):
        assert is_on_screen(page, start.get_by_role("link", name=name))
        assert is_on_screen(page, page.get_by_role("searchbox", name="Find tokens"))
    assert is_on_screen(page, page.get_by_role("tab").first)
    assert page.get_by_role("tab").first.inner_text() == "Learn"
    assert is_on_screen(page, page.get_by_text("embedlayer", exact=True))
    assert is_on_screen(page, page.get_by_label("Source"))
    assert page.title() == "Map · small · embedlayer"
    start.get_by_role("link", name="Learn").click()
    page.locator("#view-learn .learn-picture input").first.wait_for()
    assert is_on_screen(page, page.get_by_role("tab", name="Map"))
    to_map = page.get_by_role("link", name="Go to the Map")
    assert is_on_screen(page, to_map)
    to_map.click()
    page.locator("#view-map .map-over").wait_for()


def test_the_start_block_goes_when_something_is_chosen_or_found_and_comes_back(url, open_page):
    page = open_page(f"{url}#map?{COMPONENTS}", again=True)
    start = page.get_by_label("Where to begin")
    start.wait_for()
    page.get_by_role("searchbox", name="Find tokens").fill("dog")
    start.wait_for(state="hidden")
    page.get_by_role("searchbox", name="Find tokens").press("Escape")
    start.wait_for()
    page.locator(".map-examples .token").first.click()
    start.wait_for(state="hidden")
    page.reload()
    page.locator(".near li").first.wait_for()
    assert start.is_hidden()


# What the lists say is what is drawn


@pytest.fixture
def waiting(monkeypatch, tmp_path):
    """Let layouts wait until the event is set; afterwards they fail if `waiting.fails` is set."""
    event, compute = threading.Event(), table_map.compute_layout
    event.fails = False

    def slow(*arguments, on_progress, **options):
        while not event.wait(0.05):
            on_progress("searching neighbours", 0.3)
        if event.fails:
            raise SizeError("No layout of this table.")
        return compute(*arguments, on_progress=on_progress, **options)

    monkeypatch.setattr(table_map, "compute_layout", slow)
    monkeypatch.setenv("EMBEDLAYER_CACHE", str(tmp_path))
    yield event
    event.set()


def table(rows: int = 60, dim: int = 6) -> OpenedModel:
    names = [f" name{'abcdefgh'[row % 8]}{'xyz'[row % 3]}{'pqrst'[row % 5]}" for row in range(rows)]
    return OpenedModel("table", TokenEmbedding.from_pretrained(torch.randn(rows, dim)), tokens=names)


@pytest.fixture(scope="module")
def addresses(serve) -> Iterator[str]:
    """The maps of equal tables, each of which is opened by one test only: all in one page."""
    address = serve(*(table() for _ in range(16)))
    return (f"{address}#map?source={number}" for number in range(16))


def draws_components(page, x: str = "1", y: str = "2", colour: str = "kind") -> None:
    """Wait until components are drawn; the lists and the legend must say so."""
    until(page, f"{SHOWN} === '{colour},{x},{y}'")
    page.evaluate("window.painted = []")
    page.get_by_role("button", name="Zoom in").click()
    for number in (x, y):
        until(page, f"window.painted.some((text) => text.startsWith('principal component {number} '))")
    assert page.evaluate("window.painted.filter((text) => text.startsWith('neighbours are close')).length") == 0
    assert page.locator('option[value="cluster"]').get_attribute("disabled") is not None
    if colour == "kind":
        assert page.locator(".map-legend").inner_text() == "word"


def draws_the_layout(page) -> None:
    until(page, f"{SHOWN} === 'cluster,n'")
    page.evaluate("window.painted = []")
    page.get_by_role("button", name="Zoom in").click()
    until(page, "window.painted.some((text) => text.startsWith('neighbours are close'))")
    assert page.evaluate("window.painted.filter((text) => text.startsWith('principal component')).length") == 0
    assert page.locator(".map-legend").inner_text() != "word"


def test_lists_and_legend_agree_with_the_points_while_the_layout_runs_after_cancel_and_when_it_is_there(
    addresses, open_page, waiting
):
    page = open_page(next(addresses), again=True)
    page.evaluate(PAINTED)
    page.get_by_text("Neighbour layout: searching").wait_for()
    draws_components(page)
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("The neighbour layout was cancelled.").wait_for()
    draws_components(page)
    page.get_by_label("x axis").select_option("3")
    draws_components(page, "3", "2")
    page.get_by_label("y axis").select_option("4")
    draws_components(page, "3", "4")
    page.get_by_label("Colour").select_option("norm")
    page.get_by_label("x axis").select_option("n")
    page.get_by_text("Neighbour layout: searching").wait_for()
    draws_components(page, "3", "4", "norm")
    page.get_by_label("Colour").select_option("kind")
    waiting.set()
    page.locator(".map-progress").wait_for(state="hidden")
    until(page, f"{SHOWN} === 'kind,n'")
    page.get_by_label("Colour").select_option("cluster")
    draws_the_layout(page)


def test_a_layout_that_fails_leaves_the_components_with_their_names(addresses, open_page, waiting):
    waiting.fails = True
    waiting.set()
    page = open_page(next(addresses), again=True)
    page.evaluate(PAINTED)
    page.get_by_text("No layout of this table.").wait_for()
    draws_components(page)


@pytest.mark.parametrize("c", ["along", "cluster"])
def test_a_colour_that_cannot_be_is_not_named(addresses, open_page, waiting, c):
    """The cosine with no selection is named, but nothing is drawn in its colours, and the legend says why."""
    page = open_page(f"{next(addresses)}&x=1&c={c}", again=True)
    until(page, f"{SHOWN} === '{'along' if c == 'along' else 'kind'},1,2'")
    legend = "Select a token first" if c == "along" else "word"
    until(page, f"document.querySelector('.map-legend').textContent.startsWith('{legend}')")


def test_a_file_without_a_layout_names_the_components(export, small_exports, open_page):
    page = open_page(export(table(rows=101)))
    page.evaluate(PAINTED)
    page.get_by_text("This file has no neighbour layout").wait_for()
    draws_components(page)


def test_rows_without_names_are_coloured_by_a_column_that_they_have(serve, open_page, waiting):
    address = serve(OpenedModel("rows", TokenEmbedding(40, 6)))
    page = open_page(address)
    until(page, f"{SHOWN} === 'norm,1,2'")
    page.locator(".map-legend").get_by_text("norm of the row").wait_for()


# Examples


def test_the_map_offers_words_that_people_know_and_sums_with_their_answer(ask, url, open_page, word_table):
    page = open_page(f"{url}#map?source=1&{COMPONENTS}", again=True)
    found, texts = ask(word_table, "examples"), word_table.token_texts
    chips = page.locator(".map-examples .chips .token")
    chips.first.wait_for()
    sums = [
        f"{texts[each['plus'][0]]} − {texts[each['minus'][0]]} + {texts[each['plus'][1]]}" for each in found["sums"]
    ]
    assert chips.all_inner_texts() == [*(texts[row] for row in found["words"]), *sums]
    field = page.get_by_label("Nearest rows of a token")
    typed, answer = sums[0], texts[found["sums"][0]["answer"]]
    field.fill(typed)
    field.press("Enter")
    until(page, f"document.querySelector('.near .token')?.textContent === '{answer}'")
    page.get_by_role("searchbox", name="Find tokens").press("Escape")
    chips.get_by_text(typed, exact=True).click()
    until(page, f"document.querySelector('.near .token')?.textContent === '{answer}'")
    assert field.input_value() == typed
    page.get_by_role("searchbox", name="Find tokens").press("Escape")
    assert field.get_attribute("placeholder") == sums[0]


def test_a_table_without_everyday_words_offers_its_own_and_leads_to_one_that_has_them(url, code, open_page):
    page = open_page(f"{url}#map?source=2&{COMPONENTS}", again=True)
    chips = page.locator(".map-examples .chips .token")
    chips.first.wait_for()
    assert {*chips.all_inner_texts()} == {f"·{text[1:]}" for text in code.tokens[:6]}
    assert page.get_by_label("Nearest rows of a token").get_attribute("placeholder") == "·class"
    page.get_by_text("Words of everyday language are in 4,000 words of MiniLM").wait_for()
    page.locator(".map-examples a").click()
    until(page, "document.querySelector('#source').value === '1'")
    until(page, "document.querySelector('.near .token')?.textContent === 'queen'")


def test_the_last_scene_shows_the_chosen_token_in_its_own_table(url, open_page, of_run):
    page = open_page(f"{url}#health?id=272", again=True)
    page.locator("#tab-learn").click()
    page.locator(".learn-rail button").last.click()
    page.locator(".learn-neighbors h3").get_by_text("in small").wait_for()
    assert page.locator(".learn-neighbors h3 small").inner_text() == "272"


# Views whose source lacks something


def test_training_without_a_run_says_what_it_would_show_and_how_to_make_a_run(url, open_page):
    page = open_page(f"{url}#training?source=1", again=True)
    message = page.locator("#view-training .empty")
    message.get_by_text("beside ln V").wait_for()
    assert message.locator("code").all_inner_texts() == ["embedlayer train FILE... -o DIR", "embedlayer explore DIR"]
    message.get_by_role("link", name="Train a table of twelve words").click()
    page.locator('.learn-rail [aria-current="step"]').wait_for()
    assert page.locator('.learn-rail [aria-current="step"]').get_attribute("aria-label").endswith("A table learns")
    assert page.get_by_label("Source").input_value() == "1"
    page.locator("#tab-training").click()
    message.get_by_role("link", name="Show the training of small").click()
    page.locator(".chart canvas").first.wait_for()


def test_no_view_of_a_table_alone_is_a_dead_end(serve, open_page):
    """Each view shows something to look at or to do, also of rows without names."""
    address = serve(OpenedModel("rows", TokenEmbedding(40, 6)))
    page = open_page(address)
    for tab in page.get_by_role("tab").all():
        tab.click()
        view = page.locator(".view-body")
        view.locator(":scope > .loading").wait_for(state="detached")
        view.locator("canvas, code, input, .empty").first.wait_for()
        message = view.locator(":scope > .empty")
        if message.count():
            assert message.locator("code, a").count(), tab.inner_text()
