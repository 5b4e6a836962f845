"""Streams of codes beside the tokens of a text: added to them, or in their place."""

import pytest
import torch

import embedlayer as el
from embedlayer.heads import OutputHead, StreamHead
from embedlayer.inputs import CodeStreams
from embedlayer.tables import StreamTable

IDS = torch.tensor([[5, 3, 5]])
CODES = torch.tensor([[[7, 11], [0, 1], [2, 4]]])


def table() -> StreamTable:
    return StreamTable(el.TokenEmbedding(20, 8), (8, 12))


def test_codes_are_added_to_every_token() -> None:
    streams, x = CodeStreams(table()), torch.randn(1, 3, 8)
    assert torch.equal(streams(x, IDS, CODES), streams.table(CODES) + x)


def test_codes_stand_in_the_place_of_placeholders_alone() -> None:
    streams, x = CodeStreams(table(), placeholders=[5, 9]), torch.randn(1, 3, 8)
    result, sums = streams(x, IDS, CODES), streams.table(CODES)
    assert torch.equal(result[:, ::2], sums[:, ::2])
    assert torch.equal(result[:, 1], x[:, 1])


@pytest.mark.parametrize("is_tied", [True, False])
def test_saved_streams_have_equal_heads(tmp_path, is_tied) -> None:
    rows = table()
    output = OutputHead(rows.rows) if is_tied else OutputHead(8, 20)
    streams = CodeStreams(rows, head=StreamHead(output, (8, 12)), placeholders=[5], delays=[0, 1], text_stream=1)
    streams.save_pretrained(tmp_path)
    again = CodeStreams.from_pretrained(tmp_path)
    assert again.config == streams.config
    assert again.head is not None
    assert again.head.tied == is_tied
    assert again.state_dict().keys() == streams.state_dict().keys()
    if is_tied:
        [inner] = [each for each in again.head.modules() if isinstance(each, OutputHead)]
        assert inner.weight is again.rows.weight


def test_what_does_not_fit_is_refused(unchecked) -> None:
    for options in ({"delays": [0]}, {"delays": [0, -1]}, {"text_stream": 2}):
        with pytest.raises(el.SizeError):
            CodeStreams(table(), **options)
    streams, x = CodeStreams(table()), torch.zeros(1, 3, 8)
    with pytest.raises(el.ShapeError):
        streams(x, IDS, CODES[:, :2])
    with pytest.raises(el.TokenIdError):
        streams(x, IDS, CODES + 1)
    with pytest.raises(el.ShapeError):
        el.EmbeddingLayer(None, codes=CodeStreams(table())).input(IDS[0])
    with pytest.raises(el.SizeError):
        el.EmbeddingLayer(el.TokenEmbedding(10, 8), recipe=["norm"])
