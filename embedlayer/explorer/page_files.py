"""The files of the page, and the page in three parts: its document, one style sheet and one script.

One script opens faster than a hundred modules, and from `file://` too. Each module becomes a function that returns its
exports, placed after the modules that it imports.
"""

import posixpath
import re
from functools import cache
from pathlib import Path

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_SHEET = re.compile(r'<link rel="stylesheet" href="([^"]+)">\n')
_SCRIPT = '<script type="module" src="app.js"></script>\n'
_IMPORT = re.compile(r'^import \{([^}]*)\} from "([^"]+)";\n', flags=re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|let|class) (\w+)", flags=re.M)


def page_files() -> dict[str, bytes]:
    """Read the files of the page from the package, and return path -> content; a path is like `views/map.js`."""
    page = Path(__file__).parent / "page"
    return {path.relative_to(page).as_posix(): path.read_bytes() for path in page.rglob("*") if path.suffix in TYPES}


def served_files() -> dict[str, bytes]:
    """Return the files of the page as the server has them: `index.html` takes all from `page.css` and `page.js`."""
    files = page_files()
    page, style, script = page_in_parts()
    links = '<link rel="stylesheet" href="page.css">\n<script src="page.js" defer></script>\n</head>'
    index = page.replace("</head>", links)
    return {**files, "index.html": index.encode(), "page.css": style.encode(), "page.js": script.encode()}


@cache
def page_in_parts() -> tuple[str, str, str]:
    """Return the page's document without style and script, its style sheets as one and its modules as one script."""
    files = page_files()
    page = files["index.html"].decode()
    style = "\n".join(files[name].decode() for name in _SHEET.findall(page))
    script = one_script({name: text.decode() for name, text in files.items() if name.endswith(".js")}, "app.js")
    return _SHEET.sub("", page).replace(_SCRIPT, ""), style, script


def one_script(modules: dict[str, str], entry: str) -> str:
    """Return ES modules as one classic script that runs the module `entry`."""
    # It understands only `import { a, b as c } from "./x.js";` and `export function|const|let|class`, at the start of a
    # line.
    numbers: dict[str, int] = {}
    parts = ['"use strict";']

    def add(name: str) -> int:
        if name in numbers:
            return numbers[name]

        def bind(match: re.Match[str]) -> str:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2]))
            names = re.sub(r"(\w+) as (\w+)", r"\1: \2", match[1]).strip().rstrip(",")
            return f"const {{ {' '.join(names.split())} }} = ${add(target)};\n"

        text = _IMPORT.sub(bind, modules[name])
        exported = ", ".join(_EXPORT.findall(text))
        text = re.sub(r"^export ", "", text, flags=re.M)
        numbers[name] = len(numbers)
        parts.append(f"const ${numbers[name]} = (() => {{\n{text.rstrip()}\nreturn {{ {exported} }};\n}})();")
        return numbers[name]

    add(entry)
    return "\n".join(parts).replace("</", "<\\/")
