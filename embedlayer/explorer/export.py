"""Write the explorer's page as one HTML file that opens without a server.

Browsers load no modules from `file://`. Therefore all modules become one classic script: each is a function that
returns its exports, placed after the modules that it imports. The server's answers are stored in the page.
"""

import base64
import gzip
import hashlib
import posixpath
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from embedlayer.errors import EmbedLayerError
from embedlayer.explorer import table_map, tokens
from embedlayer.explorer.routes import BAKED_PAIRS, ROUTES, answer, manifest, others
from embedlayer.explorer.server import page_files, to_json
from embedlayer.explorer.source_facts import check_tokenizers, page_facts
from embedlayer.explorer.tokens import Params
from embedlayer.io.files import write_text
from embedlayer.sources import OpenedModel

_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";\n', flags=re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|let|class) (\w+)", flags=re.M)


MAP_SHARE, NEAREST_SHARE = 0.5, 0.4
"""Shares of the time that the map of a table and its nearest rows take, about."""

OnProgress = Callable[[float, str], None]
"""Function of the share of the work that is done, from 0 to 1, and what is computed. It may raise an exception."""


def write_page(
    path: Path | str, sources: list[OpenedModel], on_progress: OnProgress = lambda share, text: None
) -> None:
    """Write the page about `sources` as one file, atomically: if it is interrupted, there is no file.

    Args:
        path: File to write.
        sources: What the page shows.
        on_progress: Function that is called often.

    Raises:
        FileError: The file cannot be written.
    """
    write_text(path, page_html(sources, on_progress))


def page_html(sources: list[OpenedModel], on_progress: OnProgress = lambda share, text: None) -> str:
    """Return the HTML text of the exported page: one document with its styles, its script and its data."""
    static = page_files()
    page = static["index.html"].decode()
    baked = to_json(bake(sources, on_progress)).decode().replace("<", "\\u003c")
    script = one_script({name: text.decode() for name, text in static.items() if name.endswith(".js")}, "app.js")
    sheets = re.findall(r'<link rel="stylesheet" href="([^"]+)">\n', page)
    style = "\n".join(static[name].decode() for name in sheets)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = re.sub(r'<link rel="stylesheet" href="[^"]+">\n', "", page)
    page = page.replace('<script type="module" src="app.js"></script>\n', "")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n</head>'
    tail = f'<script type="application/json" id="baked">{baked}</script>\n<script>{script}</script>\n</body>'
    return page.replace("</head>", head).replace("</body>", tail)


def bake(sources: list[OpenedModel], on_progress: OnProgress = lambda share, text: None) -> dict[str, Any]:
    """Return the answers to all requests that an exported page can make: key from `_key` -> answer from `_packed`.

    An answer that the server would refuse is left out, and the page says so in its place. The key `"manifest"` has what
    the page reads first.

    Raises:
        TokenizerError: A tokenizer has IDs outside its table.
    """
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
            for params in route.baked(source):
                add(name, {**params, "source": str(number)})
        for other in others(sources, source):
            for name in BAKED_PAIRS:
                add(name, {"source": str(number), "other": other})
    notes = [sentence for source in sources for sentence in tokens.left_out(source)]
    facts = {"command": "embedlayer", "exported": True, "left_out": list(dict.fromkeys(notes))}
    content["manifest"] = {"json": {**manifest(sources), **facts}}
    return content


def _prepare(source: OpenedModel, report: OnProgress) -> None:
    """Compute what takes long, so that the progress can be shown: the map, and the nearest rows of all rows."""
    with suppress(EmbedLayerError):  # left out, as other answers are
        table_map.prepare(source, lambda stage, share: report(MAP_SHARE * share, f"map, {stage}"))
    if tokens.baked_nearest(source):
        tokens.nearest_of_all(source, lambda share: report(MAP_SHARE + NEAREST_SHARE * share, "nearest rows"))


def one_script(modules: dict[str, str], entry: str) -> str:
    r"""Return ES modules as one classic script that runs the module `entry`.

    A module may contain `import { a, b as c } from "./x.js";` and `export function|const|let|class name`, each at the
    start of a line.

    Args:
        modules: Text of each module by its path, such as `views/map.js`.
        entry: Path of the module to run, such as `app.js`.

    Raises:
        KeyError: A module imports one that is missing.

    Example:
        >>> modules = {"a.js": 'import { x as y } from "./b.js";\nlog(y);', "b.js": "export const x = 1;"}
        >>> print(one_script(modules, "a.js"))
        "use strict";
        const $0 = (() => {
        const x = 1;
        return { x };
        })();
        const $1 = (() => {
        const { x: y } = $0;
        log(y);
        return {  };
        })();
    """
    numbers: dict[str, int] = {}
    parts = ['"use strict";']

    def add(name: str) -> int:
        if name in numbers:
            return numbers[name]

        def bind(found: re.Match[str]) -> str:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), found[2]))
            names = re.sub(r"(\w+) as (\w+)", r"\1: \2", found[1]).strip().rstrip(",")
            return f"const {{ {' '.join(names.split())} }} = ${add(target)};\n"

        text = _IMPORT.sub(bind, modules[name])
        exported = ", ".join(_EXPORT.findall(text))
        text = re.sub(r"^export ", "", text, flags=re.M)
        numbers[name] = len(numbers)
        parts.append(f"const ${numbers[name]} = (() => {{\n{text.rstrip()}\nreturn {{ {exported} }};\n}})();")
        return numbers[name]

    add(entry)
    return "\n".join(parts).replace("</", "<\\/")


def _key(name: str, params: Params) -> str:
    """Return the key under which an exported page stores the answer to a request: the name and the sorted parameters.

    It must be the same as that of `keyOf` in the page's data.js.
    """
    query = urlencode(sorted(params.items()), quote_via=quote, safe="-_.!~*'()")  # as encodeURIComponent
    return f"{name}?{query}" if query else name


def _packed(value: Any) -> dict[str, Any]:
    """Return an answer in a form that JSON can store.

    Returns:
        `{"base64": text}` for bytes, which are compressed with gzip first; `{"json": value}` for any other value.
    """
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(gzip.compress(value, mtime=0)).decode()}
    return {"json": value}


def _hash(text: str) -> str:
    """Return the SHA-256 hash of an inline script or style, as a content security policy lists it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
