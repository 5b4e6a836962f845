"""Write docs/explorer.png, the picture in README: `python docs/explorer_picture.py FOLDER` with all-MiniLM-L6-v2.

It needs chromium and the extra `browser`.
"""

import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright

from embedlayer import open_model
from embedlayer.explorer.server import address, make_server

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
TOKEN = "king"

if __name__ == "__main__":
    opened = open_model(sys.argv[1])
    opened.title = "all-MiniLM-L6-v2"
    token = opened.require_tokenizer().token_to_id(TOKEN)
    with make_server([opened]) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=OPTIONS)
        page = browser.new_page(viewport={"width": 1240, "height": 760})
        page.goto(f"{address(server)}#map?plus={token}")
        page.get_by_text("kings").first.wait_for(timeout=120_000)
        page.locator(".map-progress").wait_for(state="visible")
        page.locator(".map-progress").wait_for(state="hidden", timeout=120_000)
        page.wait_for_timeout(3_000)  # the points have moved
        page.screenshot(path=Path(__file__).with_name("explorer.png"))
        browser.close()
        server.shutdown()
