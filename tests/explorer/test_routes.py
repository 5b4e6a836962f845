"""What the page can ask for."""

from dataclasses import replace

import pytest
import torch

from embedlayer import TokenEmbedding
from embedlayer.errors import SizeError
from embedlayer.explorer.routes import PAIRS, ROUTES, answer, manifest, others
from embedlayer.explorer.server import to_json
from embedlayer.explorer.user_columns import UserColumn, UserColumns, add_user_columns
from embedlayer.opening import OpenedModel


def test_every_kind_of_data_is_bytes_or_json_for_a_source_that_has_all(of_run):
    of_run = replace(of_run)
    add_user_columns(of_run, UserColumns((UserColumn("own", torch.zeros(of_run.table.vocab_size)),)))
    for name, route in ROUTES.items():
        asked = [dict(params) for params in route.baked(of_run)] or [{"plus": "40", "id": "40", "text": "the"}]
        for params in asked[:2]:
            found = answer([of_run], name, params)
            assert isinstance(found, bytes) or to_json(found)
    for name in PAIRS:
        found = answer([of_run], name, {"other": "before", "plus": "40"})
        assert isinstance(found, bytes) or to_json(found)


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
