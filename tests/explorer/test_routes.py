"""What the page can ask for."""

import pytest
import torch

from embedlayer import TokenEmbedding
from embedlayer.core.errors import SizeError
from embedlayer.explorer.routes import answer, manifest, others
from embedlayer.opening import OpenedModel


def test_a_source_is_asked_by_its_number(of_run):
    table = OpenedModel("four", TokenEmbedding(4, 2))
    assert answer([of_run, table], "tokens", {"source": "1"})["texts"] == ["#0", "#1", "#2", "#3"]
    assert [about["title"] for about in manifest([of_run, table])["sources"]] == [of_run.title, "four"]
    assert others([of_run, table], of_run) == ["before", "1"]
    assert others([of_run, table], table) == ["0"]


def test_what_a_source_lacks_is_said(of_run):
    table = OpenedModel("four", TokenEmbedding.from_pretrained(torch.randn(4, 2)))
    for name in ("metrics", "frequencies"):
        with pytest.raises(SizeError, match="four has no"):
            answer([table], name, {})
