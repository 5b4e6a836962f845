"""Faults that axe-core sees in a page, light and dark, on a desktop and on a phone."""

from pathlib import Path
from typing import Any

AXE = Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"
FAULTS = ("moderate", "serious", "critical")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
DESKTOP, PHONE = (1280, 800), (390, 844)
ALL = {"type": "tag", "values": RULES}
OF_APPEARANCE = {"type": "rule", "values": ["color-contrast", "scrollable-region-focusable", "target-size"]}
APPEARANCES = [("light", DESKTOP, ALL), ("dark", PHONE, OF_APPEARANCE)]
WITH_ALL = [("light", DESKTOP, ALL), ("dark", PHONE, ALL), ("dark", DESKTOP, ALL), ("light", PHONE, ALL)]
"""What `make test-all` looks at; always both colour schemes and both widths, with all rules once."""


NEXT_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""Waits until the page's observers of sizes have answered."""


def faults(page: Any, name: str, appearances: list[Any], *, where: Any = None) -> list[str]:
    """What axe finds in the page as it is, in these appearances, or in the part that axe.run knows as `where`.

    Minor faults are left out. The page's policy forbids a script of another place, not what is evaluated.
    """
    found = []
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    for scheme, (width, height), rules in appearances:
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": height})
        page.evaluate("scrollTo(0, document.body.scrollHeight)")  # where a bar that stays on the screen covers nothing
        page.evaluate(NEXT_FRAMES)
        options = {"runOnly": rules, "resultTypes": ["violations"]}
        found += [
            f"{name}, {scheme}, {width} wide: {fault['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for fault in page.evaluate("([where, options]) => axe.run(where ?? document, options)", [where, options])[
                "violations"
            ]
            if fault["impact"] in FAULTS
            for node in fault["nodes"]
        ]
    return found
