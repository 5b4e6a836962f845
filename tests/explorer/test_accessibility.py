"""axe-core finds no fault in any view, not even a moderate one; lists scroll by keyboard."""

import itertools

import pytest
from axe import AXE, WITH_ALL, faults

pytestmark = pytest.mark.browser

READY = {
    "map": ".map-over",
    "pipeline": ".tok-table",
    "pipeline?step=block": ".block-line",
    "pipeline?step=block&layer=tiny": ".block-matrices",
    "positions": "canvas",
    "compare": ".verdict",
    "health": ".verdict",
    "training": ".chart canvas",
    "learn": ".learn-picture input",
}


@pytest.fixture(scope="module")
def url(serve, of_run):
    return serve(of_run)


def test_axe_finds_no_fault_in_any_view_and_scene(url, browser, pytestconfig) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: npm ci")
    context = browser.new_context(bypass_csp=True)
    has_all = pytestconfig.getoption("--all")
    appearances = itertools.cycle([WITH_ALL] if has_all else [[each] for each in WITH_ALL])  # of one style sheet
    found = []
    try:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        page.add_script_tag(path=AXE)
        for view, mark in READY.items():
            page.goto(f"{url}#{view}")
            page.locator(mark).first.wait_for()
            found += faults(page, view, next(appearances))
        scenes = page.locator(".learn-rail button")
        for number in range(1, scenes.count()):
            scenes.nth(number).click()
            page.locator(".learn-picture:not([aria-busy])").wait_for()
            found += faults(page, f"scene {number + 1}", next(appearances))
    finally:
        context.close()
    assert not found, "\n".join(found)


def test_every_region_that_scrolls_is_reached_by_the_keyboard(url, open_page) -> None:
    page = open_page(url, again=True)
    for view, mark in READY.items():
        page.goto(f"{url}#{view}")
        page.locator(mark).first.wait_for()
        unreached = page.evaluate("""() => [...document.querySelectorAll("main *")].filter((each) => {
            const style = getComputedStyle(each);
            const scrolls = each.scrollHeight > each.clientHeight + 1 && /auto|scroll/.test(style.overflowY)
                || each.scrollWidth > each.clientWidth + 1 && /auto|scroll/.test(style.overflowX);
            return scrolls && !each.querySelector("button, a[href], input") && each.tabIndex < 0
                    && each.localName !== "canvas";
        }).map((each) => each.localName + "." + each.className)""")
        assert unreached == [], view
