"""Every view fits a phone, scrolls by keyboard and has a dark scheme; axe-core finds not even a moderate fault."""

import itertools

import pytest
from axe import AXE, WITH_ALL, faults
from pages import until

READY = {
    "map": ".map-over",
    "pipeline": ".tok-table",
    "pipeline?step=block&layer=tiny": ".block-matrices",
    "positions": "canvas",
    "compare": ".verdict",
    "health": ".verdict",
    "training": ".chart canvas",
    "learn": ".learn-picture input",
}


SCENES = (3, 13, 17)
"""Those that have what others lack (batch, waves, inside); `--all` adds the rest."""


UNREACHED = """() => [...document.querySelectorAll("main *")].filter((each) => {
    const style = getComputedStyle(each);
    const scrolls = each.scrollHeight > each.clientHeight + 1 && /auto|scroll/.test(style.overflowY)
        || each.scrollWidth > each.clientWidth + 1 && /auto|scroll/.test(style.overflowX);
    return scrolls && !each.querySelector("button, a[href], input") && each.tabIndex < 0
            && each.localName !== "canvas";
}).map((each) => each.localName + "." + each.className)"""


BRIGHTNESS = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"


def test_every_view_opens_and_fits_a_phone_and_axe_finds_no_fault(url, open_page, pytestconfig) -> None:
    """Nor is there what scrolls and is not reached by the keyboard: a view's own lists, which axe knows less well."""
    has_all = pytestconfig.getoption("--all")
    appearances = itertools.cycle([WITH_ALL] if has_all else [[each] for each in WITH_ALL])  # of one style sheet
    page = open_page(url, again=True)
    found = []
    for view, mark in READY.items():
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(f"{url}#{view}")
        page.locator(mark).first.wait_for()
        assert page.evaluate(UNREACHED) == [], view
        assert page.locator(".view-head p").inner_text().endswith(".")
        assert page.title().startswith(page.locator("h1").inner_text())
        assert page.locator(f"#tab-{view.partition('?')[0]}").get_attribute("aria-selected") == "true"
        page.set_viewport_size({"width": 390, "height": 844})
        until(page, "document.documentElement.scrollWidth <= 390")  # charts follow the width of the window
        if AXE.exists():
            found += faults(page, view, next(appearances))
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(BRIGHTNESS) < 300
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci")
    scenes = page.locator(".learn-rail button")
    for number in range(2, scenes.count() + 1) if has_all else SCENES:
        scenes.nth(number - 1).click()
        page.locator(".learn-picture:not([aria-busy])").wait_for()
        found += faults(page, f"scene {number}", next(appearances), where={"exclude": [".learn-index"]})
    assert not found, "\n".join(found)
