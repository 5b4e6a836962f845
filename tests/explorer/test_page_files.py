"""The page's modules become one script; `page_in_parts` is tested by the pages that the server and the file show."""

import re

import pytest

from embedlayer.explorer.page_files import one_script, page_files, served_files


def test_modules_become_one_script_each_behind_those_it_imports():
    script = one_script(
        {
            "app.js": 'import { a, b as c } from "./lib/x.js";\nimport { d } from "./d.js";\nrun(a, c, d);',
            "lib/x.js": 'import { d } from "../d.js";\nexport const a = 1;\nexport async function b() {}',
            "d.js": "export class d {}\nexport let e = '</script>';",
        },
        "app.js",
    )
    assert script.index("class d") < script.index("const a = 1") < script.index("run(a, c, d)")
    assert script.count("class d") == 1
    assert "const { a, b: c } = $1;" in script
    assert "return { d, e };" in script
    assert "</script" not in script
    with pytest.raises(KeyError):
        one_script({"a.js": 'import { x } from "./missing.js";\n'}, "a.js")


def test_every_module_of_the_page_keeps_to_what_the_exporter_reads():
    for name, content in page_files().items():
        if name.endswith(".js"):
            text = content.decode()
            plain = re.findall(
                r'^import \{[^}]*\} from "\./[^"]+";$|^import \{[^}]*\} from "\.\./[^"]+";$', text, flags=re.M
            )
            assert len(plain) == len(re.findall(r"^import\b", text, flags=re.M)), name
            assert not re.search(
                r"^export (default|\{|\*|const [\[{])|(?<!\{)\bimport\(|^await |<!--", text, flags=re.M
            ), name


def test_the_served_page_loads_one_script_and_one_style_sheet() -> None:
    files = served_files()
    assert re.findall(rb'(?:href|src)="([^#d][^"]*)"', files["index.html"]) == [b"page.css", b"page.js"]
    assert all(files[name] == content for name, content in page_files().items() if name != "index.html")
    assert files["page.js"].count(b"(() => {\n") > 100


def test_every_class_of_a_style_sheet_is_that_of_an_element_of_the_page() -> None:
    files = {name: content.decode() for name, content in page_files().items()}
    sheets = re.sub(
        r"/\*.*?\*/|\{[^{}]*\}", " ", "".join(files[name] for name in files if name.endswith(".css")), flags=re.S
    )
    code = "".join(files[name] for name in files if not name.endswith(".css"))
    code = re.sub(r"^\s*(/\*\*|\* ).*$", "", code, flags=re.M)
    written, starts = {*re.findall(r"[\w-]+", code)}, tuple(re.findall(r"([\w-]+-)\$\{", code))
    classes = {*re.findall(r"\.([a-z][\w-]+)", sheets)}
    assert len(classes) > 300
    assert {name for name in classes - written if not name.startswith(starts)} == set()
