"""The token card: its numbers beside plain PyTorch, and the card in a real browser, in every view."""

import json

import pytest
import torch
import torch.nn.functional as F
from covering import some
from explorer_requests import stored_answers
from pages import until

from embedlayer import TokenEmbedding, load_tokenizer, train_tokenizer
from embedlayer.analysis import table_health
from embedlayer.opening import OpenedModel


def test_numbers_are_those_of_plain_torch(ask, run, of_run):
    rows, before = of_run.rows.double(), of_run.before().rows.double()
    norms = rows.norm(dim=1)
    text = (run.path / "text.txt").read_text()
    ids = torch.tensor(of_run.tokenizer.encode(text, add_special_tokens=False).ids)
    counts = ids.bincount(minlength=len(rows))
    scores = table_health(of_run.table, of_run.tokenizer, counts=of_run.counts).under_trained.scores
    for token in (1, 40, int(ids[3]), 280, len(rows) - 1):
        facts = ask(of_run, "card", id=token)
        assert facts["id"] == token
        assert facts["norm"] == pytest.approx(float(norms[token]), rel=1e-5)
        assert facts["norm_share"] == pytest.approx(float((norms.float() < norms.float()[token]).double().mean()))
        assert facts["score"] == pytest.approx(float(scores[token]), abs=1e-5)
        assert facts["count"] == counts[token]
        assert facts["count_rank"] == 1 + int((counts > counts[token]).sum())
        assert facts["cosine_before"] == pytest.approx(float(F.cosine_similarity(rows[token], before[token], dim=0)))
        assert facts["norm_before"] == pytest.approx(float(before[token].norm()))
        assert (facts["verdict"] == "never seen") == (counts[token] == 0)
        expected = {other for other in range(len(rows)) if is_variant(of_run, token, other)}
        assert {other for other, _ in facts["variants"] or []} == expected
        for other, cosine in facts["variants"] or []:
            assert cosine == pytest.approx(float(F.cosine_similarity(rows[token], rows[other], dim=0)), abs=1e-5)


def is_variant(source, token, other):
    one, two = (source.token_texts[each].removeprefix(" ").casefold() for each in (token, other))
    return token != other and one == two and bool(one.strip()) and not {token, other} & {*source.special_ids}


def test_findings_name_every_fault(ask):
    rows = torch.randn(700, 32)
    rows[:200] = rows[0] + 0.05 * torch.randn(200, 32)
    rows[300] = 0.0
    rows[301, 4] = torch.nan
    rows[302:304] = rows[304]
    source = OpenedModel("faulty", TokenEmbedding.from_pretrained(rows))
    found = {token: ask(source, "card", id=token) for token in (7, 300, 301, 303, 500)}
    assert {token: facts["findings"] for token, facts in found.items()} == {
        7: ["not_learned"],
        300: ["zero"],
        301: ["broken"],
        303: ["duplicate"],
        500: ["not_learned"],
    }
    assert found[303]["equal_rows"] == {"rows": 2, "ids": [302, 304]}
    assert found[301]["norm"] is found[301]["norm_share"] is None
    assert "count" not in found[7]
    assert "cosine_before" not in found[7]


SAYS = {
    **dict.fromkeys(("not_learned", "never_seen", "cannot_tell"), "It is so."),
    "broken": "This row holds NaN",
    "zero": "are 0",
    "unchanged": "before training",
    "duplicate": "equal to t33t55 and 1,998 more.",
    "at_mean": "mean of the others",
    "near_duplicate": "1 % or less from t99.",
    "norm": "its norm",
    "unlike_variants": "spelling variants",
}


def test_a_card_says_a_sentence_of_its_own_about_each_fault_and_each_of_its_numbers(ask, in_page):
    facts = ask(OpenedModel("table", TokenEmbedding(40, 8)), "card", id=7) | {
        "equal_rows": {"rows": 2000, "ids": [3, 5]},
        "near_rows": {"rows": 1, "ids": [9]},
        "because": "It is so.",
        "table_state": "sound",
        "table_reasons": ["The reason."],
        "kind": "word",
        "norm": 1.5,
        "norm_share": 0.25,
        "count": 1234,
        "count_rank": 17,
        "cosine_before": -0.25,
        "norm_before": 3.5,
    }

    def said(**changes):
        code = "[c.verdict(facts, texts), c.factList(facts, { vocab_size: 40 })].map((each) => each.textContent)"
        values = {"facts": facts | changes, "texts": [f"t{row}" for row in range(40)]}
        summary = in_page({"c": "card/facts.js"}, "c.summaryOf(facts)", facts=facts | changes)
        return [summary, *in_page({"c": "card/facts.js"}, code, **values)]

    names = set()
    for fault, part in SAYS.items():
        summary, sentence, _ = said(findings=[fault])
        name, end = summary.split(" · ", 1)
        assert sentence.startswith(f"{name}. ")
        assert sentence.endswith("The table. The reason.")
        assert [other for other in set(SAYS.values()) if other in sentence] == [part]
        assert end == "norm above 25.0 % of the rows · frequency rank 17"
        names.add(name)
    assert len(names) == len(SAYS)
    sound = {"findings": None, "random": {"noise_share": 0.5, "nearest": 0.75}, "because": None, "nearest": 0.875}
    for noise, state, starts, measure in [
        (0.25, "sound", "Sound", "noise share is 0.25, and random rows have 0.50 or more."),
        (0.625, "faulty", "No fault of this row", "nearest cosine is 0.88, and random rows have at most 0.75."),
    ]:
        summary, sentence, listed = said(**sound, noise_share=noise, table_state=state, norm_share=0.9997)
        assert sentence == f"{starts}. Learned: its {measure}The table. The reason."
        assert summary.startswith("Sound" if state == "sound" else "Table not sound")
        assert listed == (
            "KindwordNorm1.500, above more than 99.9 % of the rowsFrequency1,234 times in the corpus, rank 17 of 40"
            "Before trainingnorm 3.500; cosine of the row before and after −0.250"
        )


def test_an_exported_page_stores_the_same_facts_of_all_tokens(ask, of_run, exported_run):
    stored = json.loads(stored_answers(exported_run)["cards?source=0"])
    for token in range(0, of_run.table.vocab_size, 7):
        facts = {name: column[token] for name, column in stored["numbers"].items()}
        some = {name: column.get(str(token)) for name, column in stored["some"].items()}
        position, text, at = some.pop("position"), some.pop("text"), some.pop("at")
        assert {"id": token, **facts, **some, **stored["all"]} == ask(of_run, "card", id=token)
        shown = ask(of_run, "card-places", id=token)
        assert position == shown["position"]
        assert text is None or (text, at) == (shown["text"], shown["at"])


def test_the_text_for_the_pipeline_contains_the_token(ask):
    words = "the Class and the class of classes, love dogs; naïve 日本 " * 40
    for kind, most_missing in (("bpe", 1 / 2), ("wordpiece", 1 / 10), ("unigram", 1 / 10)):
        tokenizer = train_tokenizer(words, kind, vocab_size=330)
        size = max(tokenizer.get_vocab().values()) + 1
        source, missing = OpenedModel("texts", TokenEmbedding(size, 4), tokenizer=tokenizer), []
        for token in range(0, size, 3):
            place = ask(source, "card-places", id=token)
            if place["text"] is None:
                missing.append(source.token_texts[token])
            else:
                shown = ask(source, "tokenization", text=place["text"])["tokens"]
                assert shown[place["at"]]["id"] == token
        assert len(missing) < size / 3 * most_missing, missing


def test_a_token_of_a_sentencepiece_table_is_found_in_an_example(ask, shared_data):
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "llama2-tokenizer.model")
    source = OpenedModel("llama", TokenEmbedding(32000, 2), tokenizer=tokenizer)
    dogs, cat = (tokenizer.token_to_id(text) for text in ("▁dogs", "▁cat"))
    found = {"text": "I love dogs and dogs love me.", "at": 2, "position": None}
    assert ask(source, "card-places", id=dogs) == found
    ids = tokenizer.encode("The cat", add_special_tokens=False).ids
    assert ask(source, "card-places", id=cat)["position"] == ids.index(cat)


# In a browser

TOKEN = " dog"
CHIPS = {
    "map": ("plus=40", ".near li button[data-token]"),
    "pipeline": ("step=head", ".next-list [data-token]"),
    "positions": ("", ".pos-wide [data-token]"),
    "compare": ("", ".near li button[data-token]"),
    "training": ("", ".neighbors [data-token]"),
    "learn": ("s=real", ".learn-near [data-token]"),
}


@pytest.fixture(scope="module")
def other(of_run) -> OpenedModel:
    """A table with a cone of under-trained rows; some of its tokens have the same texts as those of the run."""
    rows = torch.randn(700, 32)
    rows[:200] = rows[0] + 0.05 * torch.randn(200, 32)
    tokens = [f"word{row}" for row in range(700)]
    tokens[650] = TOKEN.lstrip()
    return OpenedModel("other", TokenEmbedding.from_pretrained(rows), tokens=tokens)


@pytest.fixture(scope="module")
def url(serve, of_run, other) -> str:
    return serve(of_run, other)


@pytest.fixture
def dog(of_run) -> int:
    return of_run.token_texts.index(TOKEN)


def chosen(page, token, source=None):
    """The token is that of the URL and of the card."""
    until(page, f"new URLSearchParams(location.hash.split('?')[1]).get('id') === '{token}'")
    until(page, f"document.querySelector('#card .card-name small')?.textContent === '#{token}'")
    if source is not None:
        until(page, f"new URLSearchParams(location.hash.split('?')[1]).get('source') === '{source}'")


@pytest.mark.parametrize("view", some(("pipeline",), CHIPS))
def test_a_chip_of_any_view_chooses_its_token_and_the_card_has_its_facts(ask, view, url, open_page, of_run):
    state, chips = CHIPS[view]
    page = open_page(f"{url}#{view}?{state}", again=True)
    chip = page.locator(f"#view-{view}").locator(chips).first
    chip.wait_for()
    token = int(chip.get_attribute("data-token"))
    opens = "opens-card" in chip.get_attribute("class") if chip.get_attribute("class") else False
    chip.click()
    chosen(page, token)
    if not opens:
        page.keyboard.press("c")
    body = page.locator("#card .card-body")
    body.get_by_text("See it in").wait_for()
    facts = ask(of_run, "card", id=token)
    body.get_by_text(f"rank {facts['count_rank']} of").wait_for()
    assert f"{facts['norm']:.3f}, above {100 * facts['norm_share']:.1f} % of the rows" in body.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_choice_survives_views_reload_and_source(url, open_page, of_run, other, dog):
    page = open_page(f"{url}#health?id={dog}", again=True)
    for view in ("learn", "compare"):
        page.locator(f"#tab-{view}").click()
        page.locator(f"#view-{view} .panel").first.wait_for()
        chosen(page, dog)
    page.get_by_text("Neighbours before training").wait_for()
    page.locator("#tab-map").click()
    page.locator(f"#view-map .map-card [data-token='{dog}']").wait_for()
    assert f"plus={dog}" in page.evaluate("location.href")
    page.locator("#tab-pipeline").click()
    page.locator(f".pipe-chips [data-token='{dog}'][aria-pressed='true']").wait_for()
    page.reload()
    page.locator(f".pipe-chips [data-token='{dog}'][aria-pressed='true']").wait_for()
    chosen(page, dog)
    page.locator("#tab-map").click()
    page.locator("#source").select_option("1")
    chosen(page, 650, source=1)
    page.locator("#view-map .map-card [data-token='650']").wait_for()
    page.locator("#source").select_option("0")
    chosen(page, dog)
    page.get_by_label("Nearest rows of a token").fill("#33")
    page.keyboard.press("Enter")
    chosen(page, 33)
    page.locator("#source").select_option("1")
    until(page, "location.hash.includes('source=1') && document.querySelector('#card').hidden")


LATE = """() => {
    const { fetch } = window;
    window.fetch = async (url, ...rest) => {
        const answer = await fetch(url, ...rest);
        if (String(url).includes("source=1")) await new Promise((resolve) => setTimeout(resolve, 100));
        return answer;
    };
}"""


def test_a_source_that_is_chosen_while_a_view_opens_is_shown(url, open_page, dog):
    page = open_page(f"{url}#health?id={dog}")
    page.locator("#view-health .panel").first.wait_for()
    page.evaluate(LATE)
    for view, number in (("map", "1"), ("pipeline", "0")):
        page.evaluate(
            "([view, number]) => { const source = document.getElementById('source');"
            "  document.getElementById(`tab-${view}`).click();"
            "  source.value = number; source.dispatchEvent(new Event('change')); }",
            [view, number],
        )
        until(page, f"(new URLSearchParams(location.hash.split('?')[1]).get('source') ?? '0') === '{number}'")
        page.locator(f"#view-{view} > :not(.loading)").first.wait_for()
        assert page.evaluate("document.getElementById('source').value") == number
        assert (f"source={number}" in page.evaluate("location.href")) == (number != "0")
    page.locator("#view-pipeline .pipe-chips button").first.wait_for()
    page.wait_for_timeout(150)  # what was requested for the other source arrives


def test_health_marks_the_token_and_the_card_says_what_is_wrong_with_it(url, open_page):
    page = open_page(url + "#health?source=1", again=True)
    page.locator(".figures > summary").click()
    page.evaluate("""() => {
        const { prototype } = CanvasRenderingContext2D, paint = prototype.fillText;
        window.painted = new Set();
        prototype.fillText = function (text, ...rest) { window.painted.add(text); paint.call(this, text, ...rest); };
    }""")
    chip = page.locator(".list-scroll [data-token]").first
    chip.click()
    token = int(chip.get_attribute("data-token"))
    chosen(page, token)
    page.locator(".card-faults").get_by_text("Not learned.").wait_for()
    assert page.evaluate(f"[...window.painted].filter((text) => text.startsWith('word{token} ')).length") == 2
    assert (
        page.locator(f"#view-health .list-scroll [data-token='{token}']").evaluate(
            "chip => getComputedStyle(chip).outlineStyle"
        )
        == "solid"
    )
    last = page.locator(".list-scroll [data-token]").last.get_attribute("data-token")
    page.locator(".list-scroll [data-token]").last.click()
    page.locator("#tab-map").click()
    page.locator(f"#view-map .map-card [data-token='{last}']").wait_for()
    page.locator("#tab-health").click()
    page.locator(f".list-scroll [data-token='{last}']").wait_for()
    until(page, "document.querySelector('.list-scroll').scrollTop > 500")
    neighbour = page.locator("#card .near").last.locator("button").first
    other = int(neighbour.get_attribute("data-token"))
    neighbour.click()
    chosen(page, other)
    page.locator("#card").get_by_role("link", name="Map").click()
    page.locator(f"#view-map .map-card [data-token='{other}']").wait_for()
    chosen(page, other, source=1)


def test_keys_open_and_close_the_card_and_removing_the_choice_clears_the_map(url, open_page, dog):
    page = open_page(f"{url}#map?id={dog}", again=True)
    page.locator("#view-map .near li").first.wait_for()
    body = page.locator("#card .card-body")
    assert body.is_hidden()
    page.keyboard.press("c")
    body.get_by_text("Spelling variants").wait_for()
    assert page.evaluate("document.activeElement.className") == "card-toggle"
    assert "card=open" in page.evaluate("location.href")
    page.keyboard.press("Escape")
    assert body.is_hidden()
    assert "card=open" not in page.evaluate("location.href")
    page.keyboard.press("?")
    assert "card of the chosen token" in page.locator("#help-dialog").inner_text()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Choose no token").click()
    until(page, "!location.hash.includes('plus=') && !location.hash.includes('id=')")
    assert page.locator("#card").is_hidden()
    page.locator("#view-map .map-side .chips [data-token]").first.click()
    until(page, "location.hash.includes('id=')")
    page.locator(".map-over").focus()
    page.keyboard.press("Escape")
    until(page, "!location.hash.includes('id=')")


def test_on_a_phone_the_card_is_one_line_until_it_is_opened_and_a_link_closes_it(url, open_page, dog):
    page = open_page(f"{url}#map?id={dog}", again=True, color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("#view-map .map-card [data-token]").click()
    body = page.locator("#card .card-body")
    assert body.is_hidden()
    box = page.locator("#card").bounding_box()
    assert box["height"] < 50
    assert box["y"] + box["height"] == pytest.approx(844, abs=1)
    page.locator("#card .card-toggle").click()
    body.get_by_role("link", name="Pipeline").click()
    page.locator(f".pipe-chips [data-token='{dog}']").first.wait_for()
    assert body.is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_exported_page_has_the_card_or_says_what_it_lacks(
    ask, of_run, export, exported_run, open_page, small_exports
):
    stored = json.loads(stored_answers(exported_run)["cards?source=0"])["some"]
    token = next(int(token) for token in stored["variants"] if token in stored["text"])
    page = open_page(f"{exported_run}#health?id={token}&card=open")
    facts = ask(of_run, "card", id=token)
    body = page.locator("#card .card-body")
    body.get_by_text(f"rank {facts['count_rank']} of").wait_for()
    assert f"cosine of the row before and after {facts['cosine_before']:.3f}".replace("-", "−") in body.inner_text()
    shown = body.locator(".near").first.locator("button").evaluate_all("all => all.map((each) => each.dataset.token)")
    assert [int(each) for each in shown] == [each for each, _ in facts["variants"]]
    body.get_by_role("link", name="Pipeline").click()
    page.locator(f".pipe-chips [data-token='{token}'][aria-pressed='true']").wait_for()
    page = open_page(export(OpenedModel("large", TokenEmbedding(101, 4))) + "#health?id=7&card=open")
    page.locator("#card").get_by_text("This file does not contain these numbers").first.wait_for()
