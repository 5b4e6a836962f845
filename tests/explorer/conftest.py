"""A real browser, a server of the page, and a guard over what pages complain about."""

import functools
import importlib.metadata
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from email.message import Message
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import run as run_command
from explorer_requests import Server
from tokenizers import Tokenizer

import embedlayer
from embedlayer import (
    DecoderLM,
    RotaryEmbedding,
    RunDirectory,
    TokenCorpus,
    TokenEmbedding,
    Trainer,
    TrainingOptions,
    train_tokenizer,
)
from embedlayer.explorer.export import write_page
from embedlayer.explorer.server import make_server
from embedlayer.opening import OpenedModel, open_model
from embedlayer.tokenization.ids import table_size

VIEWPORT = {"width": 1280, "height": 800}
MEDIA = {"color_scheme", "reduced_motion"}
"""Options of a context that a page can have alone."""
AT_START = """
if (location.protocol !== "about:" && !sessionStorage.opened) {
    localStorage.clear();
    sessionStorage.opened = 1;
}
const { setTimeout } = window, WAIT = 350;
window.setTimeout = (run, delay, ...rest) => setTimeout(run, delay === WAIT ? 20 : delay, ...rest);
const { prototype } = CanvasRenderingContext2D, UNSET = "#000000";
for (const name of ["fillRect", "fillText", "fill", "strokeRect", "strokeText", "stroke", "rect", "arc", "lineTo"]) {
    const draw = prototype[name], style = `${/^(fill|stroke)/.exec(name)?.[0]}Style`;
    prototype[name] = function (...values) {
        const isNowhere = values.some((value) => typeof value === "number" && !Number.isFinite(value));
        const isOfPage = this.canvas.isConnected;  // axe measures letters on a canvas of its own
        const isWrong = isOfPage && (isNowhere || this[style] === UNSET);
        if (isWrong) console.error(name, String(values), "in no place or colour");
        return draw.apply(this, values);
    };
}
for (const name of ["fillStyle", "strokeStyle"]) {
    const { get, set } = Object.getOwnPropertyDescriptor(prototype, name);
    Object.defineProperty(prototype, name, { get, set(value) {
        if (!CSS.supports("color", value)) console.error(name, value);
        set.call(this, value);
    } });
}
const MISSING = /\\bundefined\\b|\\[object |Infinity|NaN[%p]|"NaN"|^NaN$/;
new MutationObserver((changes) => {
    for (const { addedNodes, target, type } of changes) {
        for (const { data, outerHTML, isConnected, parentNode } of type === "childList" ? addedNodes : [target]) {
            const written = parentNode?.closest?.("body :not(script)") ? outerHTML ?? data ?? "" : "";
            if (isConnected && MISSING.test(written)) console.error(written);
        }
    }
}).observe(document, { childList: true, subtree: true, characterData: true });
"""
"""Forget what pages before have stored; the scenes of learn/ids.js and learn/pieces.js wait less.

Nothing is drawn at a place that is no number or in no colour of the theme, and no text is that of a missing value.
"""


PAGE = Path(embedlayer.__file__).parent / "explorer" / "page"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test that opens a page."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")


@pytest.fixture(autouse=True)
def shapes_unchecked(request: pytest.FixtureRequest) -> None:
    """Check shapes in the tests of what the server calls, and here with `--all`."""
    if not request.config.getoption("--all"):
        request.getfixturevalue("unchecked")


@contextmanager
def served(*sources: OpenedModel, of: list[OpenedModel] | None = None) -> Iterator[str]:
    """The page's address while it is served, with some sources or those of a list that changes."""
    with make_server(list(sources) if of is None else of) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """Serve sources until the module's tests end: `serve(source, ...)` is the page's address, of equal sources one."""
    with ExitStack() as stack:
        yield functools.cache(lambda *sources: stack.enter_context(served(*sources)))


@pytest.fixture(scope="module")
def url(serve: Callable[..., str], of_run: OpenedModel) -> str:
    """The address of the page of the run."""
    return serve(of_run)


@pytest.fixture(scope="session")
def ask() -> Iterator[Server]:
    """Ask the server as the page does: `ask(source, "pipeline", text="#3")`, `ask([source, other], "tokens")`."""
    sources: list[OpenedModel] = []
    with served(of=sources) as url:
        yield Server(url, sources)


@pytest.fixture(scope="session")
def page_folder() -> Path:
    """The folder with the page's files."""
    return PAGE


@pytest.fixture(scope="session")
def by_command() -> Callable[..., tuple[int, list[OpenedModel]]]:
    """Run `embedlayer explore`: its code, and what it would serve."""

    def explore(*arguments: object) -> tuple[int, list[OpenedModel]]:
        sources: list[OpenedModel] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("embedlayer.explorer.server.serve", lambda opened, **_: sources.extend(opened))
            return run_command("explore", "--no-browser", *arguments), sources

    return explore


@pytest.fixture
def course_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the metadata of the package have these URLs, or the package none."""

    def describe(*urls: str, installed: bool = True) -> None:
        message = Message()
        for url in urls:
            message["Project-URL"] = url
        absent = None if installed else importlib.metadata.PackageNotFoundError("embedlayer")
        distribution = Mock(return_value=Mock(metadata=message), side_effect=absent)
        monkeypatch.setattr(importlib.metadata.Distribution, "from_name", distribution)

    return describe


@pytest.fixture
def small_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported pages hold vectors of 100 numbers at most, and nothing of each row of more than 100 rows.

    Of 50,000 rows, the numbers take longer than a test has.
    """
    monkeypatch.setattr("embedlayer.explorer.tokens.EXPORTED_NUMBERS", 100)
    for module in ("tokens", "table_map", "token_card"):
        monkeypatch.setattr(f"embedlayer.explorer.{module}.EXPORTED_ROWS", 100)


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Export the page of some sources: `export(source, ...)` is its address, of equal sources one."""

    @functools.cache
    def write(*sources: OpenedModel) -> str:
        path = tmp_path_factory.mktemp("exported") / "page.html"
        write_page(path, list(sources))
        return path.as_uri()

    return write


@pytest.fixture
def serving() -> Callable[..., AbstractContextManager[str]]:
    """Serve sources for a block: `with serving(source, ...) as address`."""
    return served


@pytest.fixture(scope="session")
def plain_context(browser: Any) -> Any:
    """A context that tests share one after another: a new one, with its renderer, costs as much as opening the page.

    What a page has stored is gone when the next one is opened: then nothing is marked as opened.
    """
    context = browser.new_context(viewport=VIEWPORT)
    context.set_default_timeout(60_000)
    context.add_init_script(AT_START)
    return context


def leave(page: Any) -> None:
    """Leave a page for an empty one, as a new tab is."""
    page.unroute_all()
    if page.url != "about:blank":
        page.evaluate("localStorage.clear(), sessionStorage.clear()")
        page.goto("about:blank")


@pytest.fixture
def open_page(browser: Any, plain_context: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; at the end of the test it must not have complained, nor asked anyone else.

    `open_page(url, again=True)` goes on in the page that the test before has opened, if it is of the same server: to
    load it costs a third of a test. Address, storage, media and the size of the window are then as of a fresh page;
    what the page's modules remember is not.
    """
    complaints: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []
    pages: list[tuple[Any, bool]] = []
    homes: set[str] = set()

    def note(line: Any) -> None:
        if line.type in ("error", "warning"):
            complaints.append(f"{line.text} {line.location['url']}")

    listeners: dict[str, Callable[[Any], None]] = {
        "console": note,
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }

    def open_(url: str, *, again: bool = False, **options: Any) -> Any:
        home = url.split("#")[0]
        media = {name: options.pop(name) for name in MEDIA & options.keys()}
        if options:
            context = browser.new_context(viewport=VIEWPORT, **options, **media)
            context.set_default_timeout(60_000)
            contexts.append(context)
        else:
            context = plain_context
        homes.add(home)
        last = context.pages[-1] if context.pages else None
        if again and last and last.url.split("#")[0] == home:
            page = last
            page.evaluate("localStorage.clear(), location.hash = '#training'")
            page.locator("#view-training > :not(.loading)").first.wait_for()  # what the test before has shown is gone
        elif last and last not in (page for page, _ in pages):
            page = last
            leave(page)
        else:
            page = context.new_page()
        if context is plain_context:
            page.set_viewport_size(VIEWPORT)
            page.emulate_media(**dict.fromkeys(MEDIA, "null") | media)
        pages.append((page, again))
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(url)
        return page

    yield open_
    for page, stays in pages:
        if not stays:
            leave(page)
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    for page in plain_context.pages[:-1]:  # the last one keeps the renderer
        page.close()
    for context in contexts:
        context.close()
    assert complaints == []
    allowed = ("data:", "blob:", *homes)
    assert [url for url in asked if not url.startswith(allowed)] == []


@pytest.fixture(scope="session")
def train_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDirectory]:
    """Train on a text, and leave the run as `embedlayer train` does: a decoder whose heads have 8 columns."""

    def train(
        text: str,
        tokenizer: Tokenizer,
        options: TrainingOptions,
        *,
        heads: int,
        validation_fraction: float,
        near: Sequence[object] = (),
        **of_table: Any,
    ) -> RunDirectory:
        directory = RunDirectory(tmp_path_factory.mktemp("explorer") / "small")
        directory.path.mkdir()
        (directory.path / "text.txt").write_text(text)
        corpus = TokenCorpus.build([directory.path / "text.txt"], tokenizer, directory.corpus)
        torch.manual_seed(options.seed)
        table = TokenEmbedding(table_size(tokenizer), 8 * heads, scale="sqrt_dim", **of_table)
        model = DecoderLM(table, RotaryEmbedding(8), num_layers=1, num_heads=heads)
        trainer = Trainer(model, *corpus.split(validation_fraction), options)
        notes = {"neighbors_before": [*near]}
        directory.start(trainer, tokenizer, validation_fraction=validation_fraction, notes=notes)
        for line in trainer.run():
            directory.add_metrics(line)
        directory.finish(trainer, tokenizer)
        return directory

    return train


@pytest.fixture(scope="session")
def run(train_run: Callable[..., RunDirectory]) -> RunDirectory:
    """A run of a few steps on a text with some rare words."""
    torch.manual_seed(0)
    text = ("the king and the queen love the dog . the dog loves naps , and the cat naps . " * 60) + "zebra zoo zinc"
    tokenizer = train_tokenizer(text, "bpe", vocab_size=330)
    options = TrainingOptions(
        steps=6, log_every=2, validate_every=1, batch_size=2, max_length=16, seed=3, monitor_every=2
    )
    near = [{"id": 40, "token": "x", "near": [["y", 0.5]]}]
    return train_run(text, tokenizer, options, heads=2, validation_fraction=0.2, near=near, pad_to_multiple_of=64)


@pytest.fixture(scope="session")
def of_run(run: RunDirectory) -> OpenedModel:
    """The run, opened."""
    return open_model(run.path)


@pytest.fixture(scope="session")
def exported_run(of_run: OpenedModel, export: Callable[..., str]) -> str:
    """The address of the run's exported page."""
    return export(of_run)


@pytest.fixture(scope="session")
def word_table(by_command: Callable[..., tuple[int, list[OpenedModel]]]) -> OpenedModel:
    """The table that comes with the package, opened."""
    _, (opened,) = by_command("--words")
    return opened


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """A tokenizer of a few words."""
    return train_tokenizer("I love dogs and dogs love me . . .", kind="word")


@pytest.fixture(scope="session")
def in_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Evaluate an expression with modules of the page: `in_page({"m": "math.js"}, "m.dot(a, b)", a=..., b=...)`."""

    def evaluate(modules: dict[str, str], expression: str, **values: Any) -> Any:
        imports = "".join(f'const {name} = await import("{url}{path}");' for name, path in modules.items())
        code = f"""async ({{ {", ".join(values)} }}) => {{
            {imports}
            const plain = (v) => ArrayBuffer.isView(v) ? Array.from(v) : Array.isArray(v) ? v.map(plain)
                : v && v.data ? {{ ...v, data: Array.from(v.data) }} : v;
            return plain({expression});
        }}"""
        return page.evaluate(code, values)

    with served(OpenedModel("table", TokenEmbedding(4, 4))) as url, browser.new_context(bypass_csp=True) as context:
        page = context.new_page()
        page.goto(url)
        yield evaluate


@pytest.fixture(scope="session")
def story(in_page: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluate an expression with the modules of the story that it names: `story("trainer.WORDS")`; `m` is math.js."""
    modules = {path.stem: f"learn/{path.name}" for path in (PAGE / "learn").glob("*.js")} | {"m": "math.js"}

    def evaluate(expression: str, **values: Any) -> Any:
        names = set(re.findall(r"\b(\w+)\.", expression)) - values.keys()
        return in_page({name: modules[name] for name in names & modules.keys()}, expression, **values)

    return evaluate


@pytest.fixture(scope="session")
def anything() -> OpenedModel:
    """A source of three rows, beside which the page has all that it has beside every source."""
    return OpenedModel("any", TokenEmbedding(3, 2))


@pytest.fixture(scope="session")
def tiny_choices(ask: Server, anything: OpenedModel) -> Any:
    """Texts, words and position schemes of the tiny layer."""
    return ask(anything, "pipeline-choices")["tiny"]


@pytest.fixture(scope="session")
def tiny(ask: Server, anything: OpenedModel, tiny_choices: Any) -> Callable[..., Any]:
    """The pipeline of a text in a tiny layer, by default the first one of its texts."""

    def walk(position: str = "learned", *, tied: bool = True, text: str = tiny_choices["texts"][0]) -> Any:
        return ask(anything, "pipeline", layer="tiny", position=position, tied=int(tied), text=text)

    return walk
