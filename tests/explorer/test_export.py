"""The page as one file."""

import json
import re

import pytest
import torch

from embedlayer import TokenEmbedding
from embedlayer.core.errors import FileError
from embedlayer.explorer import tokens
from embedlayer.explorer.export import exported_answers, page_html, write_page
from embedlayer.opening import OpenedModel


def test_the_file_asks_the_network_for_nothing(of_run):
    page = page_html([of_run])
    assert not re.search(r'(src|href)="(?!data:,|#)', page)
    assert "script-src 'sha256-" in page
    assert "unsafe" not in page.partition("</head>")[0].partition("<style>")[0]
    assert page.count("<script") == 2
    answers = json.loads(re.search(r'id="answers">(.*?)</script>', page, flags=re.S)[1])
    assert answers["manifest"]["json"]["exported"]
    assert answers["manifest"]["json"]["left_out"]
    assert {"tokens?source=0", "coordinates?count=3&source=0", "compare?other=before&source=0"} <= answers.keys()


def test_texts_cannot_break_out_of_the_data(tmp_path):
    nasty = ["</script><script>alert(1)</script>", "<!--", "&amp;", "\ud800", "\u2028", "a"]
    source = OpenedModel("<b>nasty</b>", TokenEmbedding(6, 4), tokens=nasty)
    page = page_html([source])
    assert page.count("</script>") == 2
    answers = json.loads(re.search(r'id="answers">(.*?)</script>', page, flags=re.S)[1])
    assert answers["tokens?source=0"]["json"]["texts"] == nasty
    write_page(tmp_path / "page.html", [source])
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page


def test_two_sources_are_exported_with_their_comparison(of_run):
    copy = OpenedModel("turned", TokenEmbedding.from_pretrained(of_run.rows.flip(1)), tokens=of_run.token_texts)
    content = exported_answers([of_run, copy])
    assert {"compare?other=1&source=0", "compare?other=0&source=1", "norms?source=1"} <= content.keys()


def test_a_large_table_leaves_out_what_makes_a_file_large(monkeypatch):
    source = OpenedModel("large", TokenEmbedding.from_pretrained(torch.randn(300, 8)))
    monkeypatch.setattr(tokens, "EXPORTED_NUMBERS", 100)
    monkeypatch.setattr(tokens, "EXPORTED_ROWS", 100)
    content = exported_answers([source])
    assert not {"vectors?source=0", "nearest?source=0"} & content.keys()
    assert "too large" in content["manifest"]["json"]["left_out"][0]


def test_an_unwritable_place_is_a_clear_error(tmp_path):
    with pytest.raises(FileError, match="Cannot write"):
        write_page(tmp_path / "missing" / "page.html", [OpenedModel("two", TokenEmbedding(2, 2))])
