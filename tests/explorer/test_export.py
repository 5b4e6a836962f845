"""The page as one file, and as the one script and style sheet that the server sends."""

import re
from urllib.request import urlopen

import pytest
import torch
from explorer_requests import stored_answers

from embedlayer import TokenEmbedding
from embedlayer.opening import OpenedModel


@pytest.fixture(scope="module")
def files(page_folder):
    """The texts of the page's files, by name."""
    return {file.relative_to(page_folder).as_posix(): file.read_text() for file in page_folder.rglob("*.*")}


def text_of(address):
    with urlopen(address) as page:
        return page.read().decode()


def test_the_file_asks_the_network_for_nothing_and_has_the_answers(exported_run):
    page, answers = text_of(exported_run), stored_answers(exported_run)
    assert not re.search(r'(src|href)="(?!data:,|#)', page)
    assert "script-src 'sha256-" in page
    assert "unsafe" not in page.partition("</head>")[0].partition("<style>")[0]
    assert page.count("<script") == 2
    assert answers["manifest"]["exported"]
    assert answers["manifest"]["left_out"]
    assert {"tokens?source=0", "coordinates?count=3&source=0", "compare?other=before&source=0"} <= answers.keys()


def test_texts_cannot_break_out_of_the_data(export):
    nasty = ["</script><script>alert(1)</script>", "<!--", "&amp;", "\ud800", "\u2028", "a"]
    address = export(OpenedModel("<b>nasty</b>", TokenEmbedding(6, 4), tokens=nasty))
    assert text_of(address).count("</script>") == 2
    assert stored_answers(address)["tokens?source=0"]["texts"] == nasty


def test_two_sources_are_exported_with_their_comparison(of_run, export):
    copy = OpenedModel("turned", TokenEmbedding.from_pretrained(of_run.rows.flip(1)), tokens=of_run.token_texts)
    held = stored_answers(export(of_run, copy)).keys()
    assert {"compare?other=1&source=0", "compare?other=0&source=1", "norms?source=1"} <= held
    assert not {"compare?other=0&source=0", "compare?other=before&source=1"} & held


def test_how_much_of_a_table_is_exported_follows_from_its_size(export, small_exports):
    def held(rows):
        content = stored_answers(export(OpenedModel("t", TokenEmbedding.from_pretrained(torch.randn(rows, 8)))))
        of_rows = {"vectors?source=0", "nearest?source=0", "layout?source=0", "cards?source=0"} & content.keys()
        return {name.removesuffix("?source=0") for name in of_rows}, content["manifest"]["left_out"][0]

    small, medium, large = (held(rows) for rows in (10, 20, 101))
    assert (small[0], "rounded to 8 bits" in small[1]) == ({"vectors", "layout", "cards"}, True)
    assert (medium[0], "Sums of tokens are not" in medium[1]) == ({"nearest", "layout", "cards"}, True)
    assert (large[0], "too large" in large[1]) == (set(), True)


# The page's files


def test_every_module_of_the_page_keeps_to_what_the_exporter_reads(files):
    for name, text in files.items():
        if name.endswith(".js"):
            plain = re.findall(
                r'^import \{[^}]*\} from "\./[^"]+";$|^import \{[^}]*\} from "\.\./[^"]+";$', text, flags=re.M
            )
            assert len(plain) == len(re.findall(r"^import\b", text, flags=re.M)), name
            assert not re.search(
                r"^export (default|\{|\*|const [\[{])|(?<!\{)\bimport\(|^await |<!--", text, flags=re.M
            ), name


def test_the_served_page_loads_one_script_of_all_modules_and_one_style_sheet(serve, anything, files):
    address = serve(anything)
    assert re.findall(r'(?:href|src)="([^#d][^"]*)"', text_of(address)) == ["page.css", "page.js"]
    script = text_of(f"{address}page.js")
    modules = re.findall(r"^(?:const \$\d+ = )?\(\(\) => \{$", script, flags=re.M)
    assert len(modules) == sum(name.endswith(".js") for name in files)
    assert "</script" not in script
