"""The page in a real browser: every view, from the server and from a file."""

import math
import re
import time
import unicodedata
from functools import partial

import numpy as np
import pytest
import torch
from explorer_requests import numbers
from pages import faults, until

from embedlayer import TokenEmbedding
from embedlayer.analysis import NeighborLayout, TokenVectors
from embedlayer.checkpoints import write_vectors
from embedlayer.opening import OpenedModel
from embedlayer.plots.style import usual_range

VIEWS = {
    "map": ".map-over",
    "pipeline": ".pipe-head h2",
    "positions": "canvas",
    "compare": ".map-over",
    "health": ".list-scroll, .panel",
    "training": ".chart canvas",
    "learn": ".learn-picture input",
}
SHOWN = "[...document.querySelectorAll('.map-tools select')].map((list) => list.value).join()"
"""The values of the lists Colour, x axis and y axis."""

TOKENS = [" dog", " dogs", "dog", "hotdog", " cat", "Zürich", "日本", "<0xE2><0x96>", "</s>", "", " 42", "##ing"]


@pytest.fixture(scope="module")
def words() -> OpenedModel:
    """A few tokens whose rows are known: the neighbours of dogs are dogs."""
    rows = torch.randn(len(TOKENS), 6)
    rows[1] = rows[0] + 0.05 * torch.randn(6)
    rows[4] = rows[5] - rows[6] + rows[7]
    return OpenedModel("words", TokenEmbedding.from_pretrained(rows), tokens=TOKENS)


PYTHON = " def|def|class| class|Class|+|#2|king| king|·def|two words|⏎|\n|king".split("|")
"""Words that are written as several tokens are, in another order than one would guess."""


@pytest.fixture(scope="module")
def sources(of_run, words, by_command, tmp_path_factory) -> dict[str, OpenedModel]:
    """All that is open in the page of this file, by names."""
    without_place = torch.randn(300, 8)
    without_place[:2] = 0
    without_place[2] = torch.nan
    own, table = tmp_path_factory.mktemp("own") / "own.csv", tmp_path_factory.mktemp("own") / "own.npy"
    animals = [f"{row},{'animal' if row in (0, 1, 2, 4) else 'other'},{row}\n" for row in range(len(TOKENS))]
    own.write_text("".join(["id,topic,size\n", *animals]))
    write_vectors(table, TOKENS, words.table, format="npy")
    code, (with_columns,) = by_command(table, "--columns", own)
    assert code == 0
    many = TokenEmbedding.from_pretrained(torch.randn(400, 24))
    return {
        "run": of_run,
        "words": words,
        "python": OpenedModel("python", TokenEmbedding.from_pretrained(torch.randn(len(PYTHON), 6)), tokens=PYTHON),
        "planted": OpenedModel("planted", TokenEmbedding.from_pretrained(without_place)),
        "own": with_columns,
        "many": OpenedModel("many", many, tokens=[f"t{row}" for row in range(400)]),
    }


@pytest.fixture(scope="module")
def url(serve, sources):
    return serve(*sources.values())


def listed(page):
    return page.locator(".near li .token").all_inner_texts()


def test_the_training_view_draws_what_the_monitor_read(url, open_page):
    page = open_page(f"{url}#training", again=True)
    page.get_by_role("heading", name="Loss by token frequency").wait_for()
    page.get_by_text("of the tokens occurred in no input so far. All rows and gradients").wait_for()
    chart = page.get_by_role("img", name="Logits over steps")
    chart.hover()
    page.get_by_text(re.compile(r"step \d+: log Z [\d.]+, largest logit [\d.]+, standard deviation")).wait_for()


STATES = {
    **{f"pipeline?step={step}": ".pipe-stage" for step in ("rotation", "block", "head", "lens")},
    "compare": "#view-compare",
    "training": "#view-training",
    "health?figures=open": "#view-health",
}


CLOUD = "Map of the rows, in the colours of their verdicts"
"""The chart whose points say nothing."""


def test_every_control_changes_its_view_and_every_chart_answers_a_touch(url, open_page):
    page = open_page(f"{url}#training", again=True)
    for state, place in STATES.items():
        page.goto(f"{url}#{state}")
        page.locator(place).locator("canvas, table, .next-list").first.wait_for()
        found = faults(page, place, besides=(CLOUD,), keeps=state.startswith("pipeline?step"))
        assert found == [], state


def test_keys_switch_views_and_theme_and_reach_the_search(url, open_page):
    page = open_page(f"{url}#map", again=True)
    page.locator(".map-over").wait_for()
    page.keyboard.press("7")
    page.locator("#view-training .chart canvas").first.wait_for()
    page.keyboard.press("1")
    page.locator("#view-learn .learn-picture").wait_for()
    page.keyboard.press("2")
    page.locator(".map-over").wait_for()
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.press("Escape")
    page.locator("#tab-map").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#view-pipeline").wait_for()
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    page.go_back()
    page.locator("#view-map .map-over").wait_for()


def test_the_help_explains_each_view_and_leads_to_the_story_and_the_course(of_run, serving, open_page, course_at):
    def links(page):
        page.get_by_role("button", name="Help").click()
        shown = page.get_by_role("dialog", name="Help")
        sentences = shown.locator(".views dd").all_inner_texts()
        assert shown.locator(".views dt").all_inner_texts() == page.locator("[role=tab]").all_inner_texts()
        assert page.locator(".view-head p").inner_text() == sentences[1]
        return shown

    with serving(of_run) as url:
        course_at()
        page = open_page(url)
        page.locator(".map-over").wait_for()
        shown = links(page)
        shown.get_by_text("The course (docs/course/index.md in the source of embedlayer)").wait_for()
        shown.get_by_role("link", name="Pipeline").click()
        page.locator("#view-pipeline").wait_for()
        assert shown.is_hidden()
        page.keyboard.press("?")
        shown.get_by_role("link", name="The story").click()
        page.locator("#view-learn .learn-picture").wait_for()
        lesson = page.locator(".learn-lesson-of").inner_text()
        assert lesson == "The same as code: lesson 1, From text to vectors (docs/course/01-text-to-vectors.md)."
        course_at("Documentation, https://example.org/")
        page = open_page(f"{url}#map")
        page.locator(".map-over").wait_for()
        assert (
            links(page).get_by_role("link", name="The course").get_attribute("href")
            == "https://example.org/course/index.md"
        )


FOUND = {
    "dog": ["dog", "·dog", "·dogs", "hotdog"],
    "#4": ["·cat"],
    " dog": ["·dog", "·dogs"],
    "0xE2 96": ["<0xE2><0x96>"],
    "·dog": ["·dog", "·dogs"],
    "\\xc3\\xbc": ["Zürich"],
    "/^ ?d.gs?$/": ["·dog", "·dogs", "dog"],
    "ZÜRICH": ["Zürich"],
    "#4-6": ["·cat", "Zürich", "日本"],
    "本": ["日本"],
    "zebra": [],
}


def test_search_finds_by_text_pattern_id_and_bytes(in_page, url, open_page):
    code = "typed.map((text) => [...s.search(s.parseQuery(text), tokens, tokens.map((each) => each.toLowerCase()))])"
    found = in_page({"s": "map/search.js"}, code, typed=[*FOUND], tokens=TOKENS)
    for ids, (typed, expected) in zip(found, FOUND.items(), strict=True):
        assert [TOKENS[token].replace(" ", "·") for token in ids] == expected, typed
    page = open_page(url + "#map?source=1", again=True)
    search = page.get_by_role("searchbox", name="Find tokens")
    search.fill("dog")
    page.get_by_text("4 found", exact=True).first.wait_for()
    until(page, "document.querySelectorAll('.near li').length === 4")
    assert sorted(listed(page)) == sorted(FOUND["dog"])
    search.fill("zebra")
    page.get_by_text("0 found", exact=True).first.wait_for()
    page.locator(".near li").first.wait_for(state="detached")


def test_enter_selects_what_is_typed_now(url, open_page):
    page = open_page(url + "#map?source=1&x=1", again=True)
    page.locator(".map-side .chips, .map-side .note").first.wait_for()
    search, card = page.get_by_role("searchbox", name="Find tokens"), page.locator("#card")
    search.fill("dog")
    page.get_by_text("4 found", exact=True).first.wait_for()
    search.fill(" dogs")  # the results shown are still those of the text before
    search.press("Enter")
    assert f"plus={TOKENS.index(' dogs')}" in page.evaluate("location.href")
    card.get_by_text("·dogs").wait_for()
    search.fill("/(/")
    search.press("Enter")
    page.get_by_text("not a pattern").wait_for()
    assert card.is_visible()  # nothing was searched for


def test_neighbours_and_sums_are_the_librarys(url, open_page, of_run):
    vectors = TokenVectors(of_run.table, of_run.tokenizer)
    page = open_page(url + "#map?plus=270", again=True)
    page.locator(".near li").first.wait_for()
    scores = [float(text) for text in page.locator(".near .score").all_inner_texts()]
    assert scores == pytest.approx([score for _, score in vectors.most_similar(270, topn=20)], abs=6e-4)
    page.get_by_label("Nearest rows of a token").fill("#270 + #271 − #272")
    page.keyboard.press("Enter")
    page.locator(".terms .term").nth(2).wait_for()
    until(page, "document.querySelectorAll('.near li').length === 20")
    expected = vectors.most_similar([270, 271], [272], topn=20)
    until(page, f"document.querySelector('.near .score').textContent === '{expected[0][1]:.3f}'")
    assert "minus=272" in page.evaluate("location.href")
    assert "plus=270%2C271" in page.evaluate("location.href")


OFFERED = {
    "class": [2, 3, 4],
    " class": [3, 2, 4],
    "two words": [],
}


def test_a_typed_text_offers_every_token_written_so_the_exact_one_first(url, open_page):
    page = open_page(f"{url}#map?source=2", again=True)
    field = page.get_by_label("Nearest rows of a token")
    offers = page.get_by_role("group", name="Tokens with this text").get_by_role("button")
    for typed, ids in OFFERED.items():
        field.fill(f"king + {typed}")
        assert [int(text) for text in offers.locator("small").all_inner_texts()] == ids, typed
        for place, token in enumerate(ids if typed == "class" else ids[:1]):
            field.fill(f"king − {typed}")
            offers.nth(place).click()
            until(page, f"location.hash.includes('minus={token}') && location.hash.includes('plus=7')")
        if ids:
            field.fill(typed)
            field.press("Enter")
            until(page, f"/plus={ids[0]}(&|$)/.test(location.hash)")


def test_a_sum_is_parsed_with_the_leading_spaces_of_its_terms(in_page):
    for typed, terms in [
        ("king - man + woman", ["+king", "-man", "+woman"]),
        (" king −  man ", ["+ king", "- man"]),
        ("− man + king", ["-man", "+king"]),
        ("+ king", ["+king"]),
        ("+", ["++"]),
        (" ", []),
    ]:
        found = in_page({"search": "map/search.js"}, "search.parseExpression(typed)", typed=typed)
        assert ["+-"[each["sign"] < 0] + each["text"] for each in found] == terms


def test_a_message_about_unknown_terms_names_each_and_stands_without_the_earlier_sum(url, open_page):
    page = open_page(url + "#map?source=1&plus=0", again=True)
    page.locator(".near li").first.wait_for()
    field = page.get_by_label("Nearest rows of a token")
    field.fill("king - dog + queen")
    field.press("Enter")
    page.get_by_role("status").get_by_text("No single token is “queen”").wait_for()
    assert page.get_by_role("status").get_by_text("No single token is “king”").is_visible()
    assert page.locator(":is(.near, .map-card, .terms)").count() == 0
    assert page.locator("#card").is_hidden()  # no card of the token before
    assert not re.search(r"\b(plus|minus|id)=", page.evaluate("location.href"))
    assert field.input_value() == "king - dog + queen"
    field.fill("dog")
    field.press("Enter")
    page.locator(".map-card").wait_for()
    assert page.get_by_text("No single token").count() == 0
    assert page.locator("#card").is_visible()


SELECTED = {
    " dog": (" dog", ""),
    "·dog": (" dog", ""),
    " Dog": (" dog", ""),  # another case, but with its space
    " hotdog": ("hotdog", "No token is “·hotdog” with its space, so “hotdog” is selected."),
    "hotdog": ("hotdog", ""),
    " #3": ("hotdog", ""),
}


def test_a_token_typed_with_its_space_is_the_one_with_a_space(url, open_page):
    page = open_page(url + "#map?source=1", again=True)
    page.locator(".map-side .chips, .map-side .note").first.wait_for()
    field = page.get_by_label("Nearest rows of a token")
    for typed, (selected, said) in SELECTED.items():
        field.press_sequentially(typed)
        field.press("Enter")
        page.locator(".near li").first.wait_for()
        assert f"plus={TOKENS.index(selected)}" in page.evaluate("location.href"), typed
        assert page.locator(".map-answer [role=status]").all_inner_texts() == ([said] if said else []), typed
        page.evaluate("location.hash = '#map?source=1'")
        page.locator(".near li").first.wait_for(state="detached")
        until(page, "document.querySelector('#expression').value === ''")


def test_what_is_typed_while_neighbours_are_searched_stays(url, open_page):
    page = open_page(url + "#map?source=1")
    field = page.get_by_label("Nearest rows of a token")
    waiting = []
    page.route("**/neighbors*", lambda route: waiting.append(route))
    field.fill(TOKENS[0])
    field.press("Enter")
    page.get_by_text("Searching all rows").wait_for()
    field.press("End")
    field.press_sequentially(" + no token")
    typed = field.input_value()
    assert typed.endswith("dog + no token")
    waiting[0].continue_()
    page.locator(".near li").first.wait_for()
    assert field.input_value() == typed
    field.press("Enter")
    page.get_by_role("status").get_by_text("No single token").wait_for()
    assert field.input_value() == typed
    assert page.evaluate("document.activeElement.id") == "expression"


def test_the_address_brings_back_what_one_saw(url, open_page):
    page = open_page(url + "#map?source=1&plus=0&c=norm&x=2&y=e&v=density&q=dog", again=True)
    page.locator(".near li").first.wait_for()
    until(page, f"{SHOWN} === 'norm,2,e'")
    assert page.get_by_role("searchbox", name="Find tokens").input_value() == "dog"
    assert page.get_by_role("button", name="Density").get_attribute("aria-pressed") == "true"
    page.locator("#tab-health").click()
    page.locator("#view-health .panel").first.wait_for()
    page.go_back()
    page.locator("#view-map .near li").first.wait_for()
    assert "q=dog" in page.evaluate("location.href")


def check_legend(page):
    """Each group has a colour of its own, and together they have all tokens."""
    colours = page.locator(".map-legend i").evaluate_all("dots => dots.map((dot) => dot.style.background)")
    assert len({*colours}) == len(colours) > 1
    titles = page.locator(".map-legend button").evaluate_all("all => all.map((each) => each.title)")
    assert sum(int(title.split()[0]) for title in titles) == len(TOKENS)


def test_the_map_is_drawn_moved_and_chosen_from_by_keyboard_and_pointer(url, open_page):
    page = open_page(url + "#map?source=1", again=True)
    over = page.locator(".map-over")
    over.wait_for()
    page.locator(".map-side .chips, .map-side .note").first.wait_for()
    colours = """(() => {
        const canvas = document.querySelector(".map-stage canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    })()"""
    until(page, f"{colours} > 3")
    over.focus()
    page.keyboard.press("Enter")
    for _ in range(20):  # the layout, when it arrives, shows all points again
        page.keyboard.press("+")
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(500)
        if "at=" in page.evaluate("location.href"):
            break
    until(page, "location.hash.includes('at=')")
    page.keyboard.press("0")
    until(page, "!location.hash.includes('at=')")
    page.keyboard.press("Escape")
    box = over.bounding_box()
    page.get_by_role("button", name="Lasso").click()
    corners = [(0.01, 0.01), (0.99, 0.01), (0.99, 0.99), (0.01, 0.99)]
    page.mouse.move(box["x"] + box["width"] * 0.01, box["y"] + box["height"] * 0.01)
    page.mouse.down()
    for across, down in corners:
        page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down, steps=4)
    page.mouse.up()
    page.get_by_text("12 inside").wait_for()
    page.get_by_role("button", name="Isolate").click()
    for option in ("script", "length", "norm", "trained"):
        page.get_by_label("Colour").select_option(option)
        if option == "script":
            page.locator(".map-legend").get_by_text("Latin").wait_for()
            check_legend(page)
    page.locator(".map-legend").get_by_text(re.compile("learned|never seen|cannot tell")).first.wait_for()


def test_late_rows_do_not_cover_early_ones_on_the_map(in_page):
    count, expression = (
        10_000,
        """(() => {
            const side = 60;
            const [xs, ys, colours] = [new Float32Array(count), new Float32Array(count), new Uint32Array(count)];
            for (let i = 0; i < count; i++) {
                xs[i] = (i * 7919) % side;
                ys[i] = Math.floor(((i * 104729) % (side * side)) / side);
                colours[i] = i < count / 2 ? 0xff0000ff : 0xffff0000;
            }
            const picture = { pixels: new Uint32Array(side * side), width: side, height: side };
            const order = s.drawingOrder(count);
            const viewport = { x: side / 2, y: side / 2, zoom: 1 };
            s.splat(picture, { xs, ys, only: null, order }, viewport, colours, s.disc(1, 1));
            const red = picture.pixels.filter((pixel) => (pixel & 0xff) > 128).length;
            return [new Set(order).size, String(order) === String(s.drawingOrder(count)), red / (side * side)];
        })()""",
    )
    distinct, is_same, red = in_page({"s": "map/splat.js"}, expression, count=count)
    assert (distinct, is_same) == (count, True)
    assert 0.4 < red < 0.6


def test_of_points_at_one_place_the_pointer_chooses_the_one_on_top_and_else_the_nearest(in_page):
    expression = """(() => {
        const [xs, ys, order] = [new Float32Array(xs_), new Float32Array(ys_), new Uint32Array([3, 2, 0, 1, 4])];
        const grid = g.makeGrid(xs, ys, order);
        return [g.nearest(grid, [0, 0], 1, () => true), g.nearest(grid, [0, 0], 1, (i) => i !== 1),
            g.nearest(grid, [4.9, 5], 1, () => true), g.inside(grid, [[-1, -1], [1, -1], [1, 1], [-1, 1]])];
    })()"""
    xs, ys = [0.0, 0.0, 0.0, 5.0, 9.0], [0.0, 0.0, 0.0, 5.0, 9.0]
    assert in_page({"g": "map/grid.js"}, expression, xs_=xs, ys_=ys) == [1, 0, 3, [0, 1, 2]]


def test_outliers_do_not_squash_the_map_and_are_those_of_the_figures(in_page):
    for outliers in [[], [1000.0], [-1000.0, math.nan], [1000.0] * 30, [1.0] * 200]:
        values = [*torch.rand(99, generator=torch.Generator().manual_seed(0)).tolist(), *outliers]
        finite = [value if value == value else "NaN" for value in values]
        found = in_page({"v": "map/viewport.js"}, "v.spread(new Float32Array(values.map(Number)), 0)", values=finite)
        assert found == pytest.approx(usual_range(np.array(values)))
        code = """(() => {
            const xs = new Float32Array(values.map(Number));
            const viewport = v.fitViewport(xs, xs, 400, 400);
            return v.countOutside(xs, xs, viewport, 400, 400);
        })()"""
        assert in_page({"v": "map/viewport.js"}, code, values=finite) == (len(outliers) > 0 and len(outliers) < 3)


def test_the_map_says_how_many_rows_have_no_place(url, open_page):
    page = open_page(f"{url}#map?source=3&x=1&y=2", again=True)
    inset = page.locator(".map-folded")
    until(page, "document.querySelector('.map-folded')?.textContent === '1 row with NaN, not on the map →'")
    page.get_by_label("x axis").select_option("n")
    until(page, "document.querySelector('.map-folded')?.textContent === '2 rows all zero, 1 with NaN →'")
    assert inset.get_attribute("href") == "#health"


def test_the_end_of_a_scale_says_that_there_are_values_beyond_it(url, open_page, of_run):
    page = open_page(url + "#map?c=frequency", again=True)
    page.locator(".map-legend").get_by_text("occurrences in the corpus").wait_for()
    low, high = page.locator(".map-legend output").all_inner_texts()
    shown, says = high.removesuffix(" or more"), high.endswith(" or more")
    assert low == str(int(of_run.counts.min()))
    assert says == (int(shown.replace(",", "")) < of_run.counts.max())
    assert says
    page.get_by_label("Largest value shown").fill("100")
    assert "or more" not in page.locator(".map-legend").inner_text()


SCRIPTS = {
    0: ["LATIN"],
    1: ["CYRILLIC", "GREEK"],
    2: ["CJK", "HIRAGANA", "KATAKANA", "HANGUL"],
    3: ["ARABIC LETTER", "HEBREW"],
}
WRITTEN = " dog|naïve| Привет|λόγος|日本|かな|カナ|한국|العربية|שלום|हिन्दी|42| ７|½|!?|…| |⏎|##ing|hot dog|a1".split(
    "|"
)


def test_scripts_lengths_and_bytes_of_tokens_are_those_of_unicode(in_page):
    def script(text: str) -> int:
        names = [unicodedata.name(each, "") for each in text if unicodedata.category(each)[0] in "LM"]
        known = [group for group, starts in SCRIPTS.items() if any(name.startswith(tuple(starts)) for name in names)]
        numbers = any(unicodedata.category(each)[0] == "N" for each in text)
        return known[0] if known else 4 if names else 5 if numbers else 6

    code = """(() => {
        const kinds = g.kinds([...texts, "<0xE2>", "", "[CLS]"], [texts.length + 2]);
        const scripts = g.scripts([...texts, "<0xE2>", "", "[CLS]"], kinds);
        return [[...kinds.of], [...scripts.of], [...g.lengths(texts)], texts.map(g.hex), scripts.names.length];
    })()"""
    kinds, scripts, lengths, codes, groups = in_page({"g": "map/groups.js"}, code, texts=WRITTEN)
    assert scripts == [*map(script, WRITTEN), 7, 7, 7]
    assert groups == 8
    assert lengths == [*map(len, WRITTEN)]
    assert codes == [text.encode().hex(" ").upper() for text in WRITTEN]
    letters = [any(unicodedata.category(each)[0] in "LM" for each in text) for text in WRITTEN]
    digits = [
        text.strip() != "" and all(unicodedata.category(each)[0] == "N" for each in text.strip()) for text in WRITTEN
    ]
    word = [1 if text.startswith("##") else 0 for text in WRITTEN]
    expected = [2 if d else word[i] if has else 3 for i, (d, has) in enumerate(zip(digits, letters, strict=True))]
    assert kinds == [*expected, 4, 6, 5]


def test_clusters_of_one_colour_are_far_apart(in_page):
    colours = partial(in_page, {"clusters": "map/clusters.js"}, "clusters.distantColours(places, count)")
    places = [{"x": x, "y": 0} for x in (0, 10, 20, 1, 21, 11)]
    assert colours(places=places, count=6) == [0, 1, 2, 3, 4, 5]
    assert colours(places=places, count=3) == [0, 1, 2, 5, 3, 6], "shades of hues 2, 0 and 0"


LATE = """() => {
    const { fetch } = window;
    window.fetch = async (url, ...rest) => {
        if (String(url).includes("frequencies")) await new Promise((resolve) => setTimeout(resolve, 200));
        return fetch(url, ...rest);
    };
}"""


def test_a_word_that_is_no_token_offers_its_subwords_also_when_typed_at_once(url, open_page, of_run):
    page = open_page(url + "#positions")
    page.locator("#view-positions .panel").first.wait_for()
    page.evaluate(LATE)
    page.locator("#tab-map").click()
    page.locator("#expression").fill("thedogma")
    page.keyboard.press("Enter")
    page.wait_for_timeout(400)  # what the map still waits for has arrived
    offered = page.locator(".map-subwords .chips").first
    offered.wait_for()
    ids = of_run.tokenizer.encode("thedogma", add_special_tokens=False).ids
    assert [int(text) for text in offered.locator("small").all_inner_texts()] == ids
    offered.get_by_role("button", name="their sum").click()
    until(page, f"new URLSearchParams(location.hash.split('?')[1]).get('plus') === '{','.join(map(str, ids))}'")
    page.get_by_role("searchbox", name="Find tokens").fill("thedogma")
    page.locator(".map-subwords").wait_for()


def test_own_columns_colour_and_filter_and_a_list_downloaded_as_tsv_is_such_a_file(
    ask, by_command, url, sources, tmp_path, open_page
):
    source = sources["own"]
    page = open_page(f"{url}#map?source=4&c=own:topic&lasso=-99,-99,99,-99,99,99,-99,99&x=1", again=True)
    page.get_by_role("button", name="other", exact=True).click()
    page.get_by_label("Colour").select_option("own:size")
    page.get_by_text("topic (own): 1 group hidden").wait_for()
    page.get_by_label("Largest value shown").fill("20")
    page.get_by_label("Colour").select_option("kind")
    page.get_by_text("size (own): to 1").wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="TSV").click()
    download.value.save_as(tmp_path / "found.tsv")
    code, (found,) = by_command(source.source, "--columns", tmp_path / "found.tsv")
    assert (code, ask(found, "columns")) == (0, [{"name": "norm", "groups": None}])
    torch.testing.assert_close(numbers(ask(found, "column", name="norm")), source.rows.norm(dim=1))


def test_one_finger_scrolls_the_page_until_the_map_is_tapped_twice(url, browser):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(url + "#map?source=1")
    page.locator(".map-over").wait_for()
    box = page.locator(".map-over").bounding_box()
    across, down = box["x"] + 150, box["y"] + 250
    touches = context.new_cdp_session(page)

    def touch(kind, *points, **more):
        at = [{"x": x, "y": y} for x, y in points]
        touches.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": at, **more})

    def drag():
        touch("Start", (across, down))
        for step in range(1, 9):
            touch("Move", (across, down - 20 * step))
        touch("End")

    drag()
    until(page, "scrollY > 100")
    page.get_by_text("Tap twice to move the map").wait_for()
    assert "at=" not in page.evaluate("location.hash")
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(400)
    start = time.time() - 0.2  # seconds: a tap lasts 0.05 however busy the machine is
    for number in range(2):
        touch("Start", (across, down), timestamp=start + number / 10)
        touch("End", timestamp=start + number / 10 + 0.05)
    page.locator(".map-over.is-active").wait_for()
    page.evaluate("scrollTo(0, 0)")
    drag()
    until(page, "location.hash.includes('at=')")
    assert page.evaluate("scrollY") == 0
    page.locator("h1").tap()
    page.locator(".map-over:not(.is-active)").wait_for()
    context.close()


def test_the_map_shows_the_recall_of_an_approximate_layout(monkeypatch, url, open_page):
    approximate = NeighborLayout(torch.randn(400, 2), 0.875)
    monkeypatch.setattr("embedlayer.explorer.table_map.compute_layout", lambda *_, **__: approximate)
    page = open_page(f"{url}#map?source=5&x=1")
    page.locator(".map-over").wait_for()
    page.evaluate("""() => {
        const { prototype } = CanvasRenderingContext2D, paint = prototype.fillText;
        window.painted = new Set();
        prototype.fillText = function (text, ...rest) { window.painted.add(text); paint.call(this, text, ...rest); };
    }""")
    page.get_by_label("x axis").select_option("n")
    page.locator(".map-progress").wait_for(state="hidden")
    until(page, "[...window.painted].some((text) => text.startsWith('neighbours are close (87.5 % recall)'))")


def test_health_and_compare_open_with_a_sentence(ask, url, open_page, of_run):
    page = open_page(f"{url}#health", again=True)
    assert page.locator(".verdict").text_content().strip() == ask(of_run, "health")["summary"]
    page.locator("#tab-compare").click()
    sentence = page.locator("#view-compare .verdict")
    sentence.wait_for()
    assert "changed: " in sentence.inner_text().lower()
    never = page.locator("#view-compare details:not(.map-figures)")
    figures = page.locator("#view-compare .map-figures")
    figures.locator("summary").click()
    assert "As stored, the two rows of " in figures.inner_text()
    assert not never.locator("li").first.is_visible()
    never.locator("summary").click()
    row = never.locator("li button").first
    assert of_run.counts[int(row.get_attribute("data-token"))] == 0
    shown = page.locator("#view-compare .map-side > div .near button").first
    assert of_run.counts[int(shown.get_attribute("data-token"))] > 0


def test_a_file_shows_the_same_without_a_server(of_run, exported_run, open_page):
    page = open_page(f"{exported_run}#map?plus=270,271&minus=272")
    page.locator(".near li").nth(19).wait_for()
    exact = TokenVectors(of_run.table, of_run.tokenizer).most_similar([270, 271], [272], topn=20)
    scores = [float(text) for text in page.locator(".near .score").all_inner_texts()]
    assert scores == pytest.approx([score for _, score in exact], abs=0.02)
    for view, mark in VIEWS.items():
        page.locator(f"#tab-{view}").click()
        page.locator(f"#view-{view}").locator(mark).first.wait_for()
        assert page.locator(".empty").count() == 0, view
    page.goto(f"{exported_run}#learn?s=inside")
    page.get_by_text("the model: small").wait_for()
    assert "read from the file" in page.locator('[data-value="lookup"]').inner_text()
