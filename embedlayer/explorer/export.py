"""Write the explorer's page as one HTML file that opens without a server.

Browsers load no modules from `file://`, so the page has its one script and one style sheet in itself, and the server's
answers with them.
"""

import base64
import gzip
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from embedlayer.core.errors import EmbedLayerError
from embedlayer.explorer import table_map, tokens
from embedlayer.explorer.page_files import page_in_parts
from embedlayer.explorer.routes import EXPORTED_PAIRS, ROUTES, answer, check_tokenizers, manifest, others, page_facts
from embedlayer.explorer.server import to_json
from embedlayer.explorer.tokens import Params
from embedlayer.io.files import write_text
from embedlayer.opening.opened_model import OpenedModel

MAP_SHARE, NEAREST_SHARE = 0.5, 0.4  # shares of the time that the map of a table and its nearest rows take, about

OnProgress = Callable[[float, str], None]
"""Function of the share of the work that is done, from 0 to 1, and what is computed. It may raise an exception."""


def write_page(
    path: Path | str,
    sources: list[OpenedModel],
    on_progress: OnProgress = lambda share, text: None,
    *,
    course: str | None = None,
) -> None:
    """Write the page about `sources` as one file, atomically; an existing file is replaced."""
    write_text(path, page_html(sources, on_progress, course=course))


def page_html(
    sources: list[OpenedModel], on_progress: OnProgress = lambda share, text: None, *, course: str | None = None
) -> str:
    """Return the HTML text of the exported page: one document with its styles, its script and its data."""
    page, style, script = page_in_parts()
    content = exported_answers(sources, on_progress)
    if course is not None:
        content["manifest"]["json"]["course"] = course
    answers = to_json(content).decode().replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n</head>'
    tail = f'<script type="application/json" id="answers">{answers}</script>\n<script>{script}</script>\n</body>'
    return page.replace("</head>", head).replace("</body>", tail)


def exported_answers(sources: list[OpenedModel], on_progress: OnProgress = lambda share, text: None) -> dict[str, Any]:
    """Return the answers to all requests that an exported page can make: key from `_key` -> answer from `_packed`."""
    check_tokenizers(sources)
    content: dict[str, Any] = {}

    def add(name: str, params: Params) -> None:
        with suppress(EmbedLayerError):  # the page lacks what the server refuses; the view says so
            content[_key(name, params)] = _packed(answer(sources, name, params))

    for number, source in enumerate(sources):

        def report(share: float, what: str, number: int = number, title: str = source.title) -> None:
            on_progress((number + share) / len(sources), f"{title}: {what}")

        _prepare(source, report)
        has = page_facts(source)["has"]
        for place, (name, route) in enumerate(ROUTES.items()):
            report(MAP_SHARE + NEAREST_SHARE + (1 - MAP_SHARE - NEAREST_SHARE) * place / len(ROUTES), name)
            if not {*route.needs} <= {*has}:
                continue
            for params in route.exported(source):
                add(name, {**params, "source": str(number)})
        for other in others(sources, source):
            for name in EXPORTED_PAIRS:
                add(name, {"source": str(number), "other": other})
    notes = [sentence for source in sources for sentence in tokens.left_out(source)]
    facts = {"command": "embedlayer", "exported": True, "left_out": list(dict.fromkeys(notes))}
    content["manifest"] = {"json": {**manifest(sources), **facts}}
    return content


def _prepare(source: OpenedModel, report: OnProgress) -> None:
    """Compute what takes long, so that the progress can be shown: the map, and the nearest rows of all rows."""
    with suppress(EmbedLayerError):  # left out, as other answers are
        table_map.prepare(source, lambda stage, share: report(MAP_SHARE * share, f"map, {stage}"))
    if tokens.exported_nearest(source):
        tokens.nearest(source, {}, lambda share: report(MAP_SHARE + NEAREST_SHARE * share, "nearest rows"))


def _key(name: str, params: Params) -> str:
    """Return the key of an answer in an exported page: the request's name and sorted parameters."""
    # It must equal `keyOf` in the page's data.js.
    query = urlencode(sorted(params.items()), quote_via=quote, safe="-_.!~*'()")  # as encodeURIComponent
    return f"{name}?{query}" if query else name


def _packed(value: Any) -> dict[str, Any]:
    """Return an answer in a form that JSON can store."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(gzip.compress(value, mtime=0)).decode()}
    return {"json": value}


def _hash(text: str) -> str:
    """Return the SHA-256 hash of an inline script or style, as a content security policy lists it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
