"""The page of a run: complete, escaped, offline."""

import math
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest
import torch

from embedlayer.analysis.geometry import pca, position_values
from embedlayer.errors import EmbedLayerWarning, FileError
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.report import NeighborRow, RunReport, TableMap, report_html, write_report

NASTY = ['<b>"x"</b>', "&amp;", "'", "\n", "\x00\x1b", "\u202e", "\ud800", "$title", "</script>", "日本"]
SECTIONS = ["summary", "loss", "neighbors", "map", "positions", "options"]


@pytest.fixture(scope="module")
def report() -> RunReport:
    rows = torch.randn(4096, 24, generator=torch.Generator().manual_seed(0))
    found = pca(rows)
    near = [(token, 0.9 - 0.1 * rank) for rank, token in enumerate(NASTY)]
    return RunReport(
        title="A <run> & its\u00a0$table\x00",
        summary={"First loss": "8.34\nln V = 8.32", "Steps": "1,180"},
        metrics=[{"step": step, "loss": 8.3 - step / 200, "lr": 1e-3, "validation_loss": None} for step in range(300)],
        baseline=math.log(4096),
        neighbors=[NeighborRow(token, near[:3], near) for token in NASTY] + [NeighborRow(" new", [], near)],
        table=TableMap(found.coordinates, dict(enumerate(NASTY)), found.explained_variance_ratio),
        position=position_values(RotaryEmbedding(48), 128),
        options={"seed": "1234", "text": "<stdin>"},
    )


class Page(HTMLParser):
    """What is open, what was named, and all text."""

    void = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def test_the_page_is_well_formed_and_every_id_stands_once(report):
    page = Page(report_html(report))
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert [name for name in SECTIONS if name not in ids] == []
    assert "A <run> & its\u00a0$table\ufffd" in page.words


def test_the_page_asks_the_network_for_nothing_and_runs_nothing(report):
    page = Page(report_html(report))
    for tag, attributes in page.tags:
        assert tag not in {"script", "iframe", "object", "embed"}
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attributes)
    assert "@import" not in report_html(report)


def test_tokens_are_escaped_and_what_cannot_be_seen_is_shown(report):
    text = report_html(report)
    assert "<b>" not in text
    assert "&lt;b&gt;&quot;x&quot;&lt;/b&gt;" in text
    for shown in ("<i>⏎</i>", r"<i>\x00</i><i>\x1b</i>", r"<i>\u202e</i>", r"<i>\ud800</i>", "&amp;amp;", "日本"):
        assert shown in text
    assert '<span class="token"><i>·</i>new</span>' in text
    assert "not recorded" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", text)


def test_the_numbers_behind_the_curve_are_thinned_and_end_with_the_last(report):
    text = report_html(report)
    assert "100 of 300 measurements" in text
    assert re.findall(r"<tr><td>(\d+)</td>", text)[-1] == "299"
    assert Page(text).words.count("validation loss") >= 1


def test_parts_that_are_empty_leave_their_sections_out():
    ids = {attributes.get("id") for _, attributes in Page(report_html(RunReport(title="bare"))).tags}
    assert ids.isdisjoint(SECTIONS)


def test_the_file_is_small_and_replaces_an_older_one(report, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, report)
    assert path.read_text(encoding="utf-8") == report_html(report)
    assert path.stat().st_size < 1_500_000
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_a_clear_error(report, tmp_path):
    with pytest.raises(FileError, match="Cannot write"):
        write_report(tmp_path / "missing" / "report.html", report)


def test_without_matplotlib_the_page_is_written_and_says_how_to_get_pictures(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(EmbedLayerWarning, match=r"pip install 'embedlayer\[plots\]'") as caught:
        write_report(tmp_path / "report.html", report)
    assert len(caught) == 1
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert Page(text).words.count("pip install 'embedlayer[plots]'") == 3
    assert "<svg" not in text


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 400)])
def test_a_browser_opens_the_page_offline_without_a_complaint(report, tmp_path, scheme, width):
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser extra (playwright) is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Debian's chromium is not installed")
    path = tmp_path / "report.html"
    write_report(path, report)
    complaints: list[str] = []
    asked: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        assert all(page.locator(f"#{name}").is_visible() for name in SECTIONS)
        assert page.locator("figure svg").count() == 3
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        ink = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
        browser.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert (sum(map(int, re.findall(r"\d+", ink))) > 3 * 128) == (scheme == "dark")
