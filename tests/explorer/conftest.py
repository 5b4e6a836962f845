"""A real browser, a server of the page, and a guard over what pages complain about."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from embedlayer.explorer.server import address, make_server
from embedlayer.explorer.source import Source

SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium, headless, with a profile of its own that is thrown away."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser extra (playwright) is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Debian's chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=list(SWITCHES))
        yield launched
        launched.close()


@contextmanager
def serving(*sources: Source) -> Iterator[str]:
    """The page's address while it is served."""
    with make_server(list(sources)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield address(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """Serve sources until the module's tests end: `serve(source, ...)` is the page's address."""
    with ExitStack() as stack:
        yield lambda *sources: stack.enter_context(serving(*sources))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; at the end of the test it must not have complained, nor asked anyone else."""
    complaints: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []
    homes: set[str] = set()

    def open_(url: str, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        context.set_default_timeout(60_000)
        contexts.append(context)
        homes.add(url.split("#")[0])
        page = context.new_page()
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []
    allowed = ("data:", "blob:", *homes)
    assert [url for url in asked if not url.startswith(allowed)] == []
