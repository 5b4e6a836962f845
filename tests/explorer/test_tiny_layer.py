"""The layer whose numbers can all be read."""

import itertools

import pytest
import torch

from embedlayer import SizeError
from embedlayer.explorer.tiny_layer import TEXTS, WORDS, tiny_layer

LAYERS = list(itertools.product(("learned", "sinusoidal", "rotary", "alibi"), (True, False)))


@pytest.mark.parametrize(("position", "tied"), LAYERS)
def test_all_layers_have_one_table_whose_numbers_are_shown_exactly(position, tied):
    model = tiny_layer(position, tied=tied)
    weight = model.table.weight
    assert weight.equal(tiny_layer("learned", tied=True).table.weight)
    assert (weight != 0).all()
    torch.testing.assert_close(weight * 100, (weight * 100).round())
    assert model.head.tied == tied
    assert model(torch.arange(10)).isfinite().all()


def test_its_words_are_those_of_its_texts_and_all_others_become_the_unknown_token():
    read = {text: WORDS.ids(text) for text in TEXTS}
    for text, (ids, unknown) in read.items():
        names = [WORDS.names[number] for number in ids]
        assert names == ["<unk>" if word in unknown else word for word in text.split()]
    assert [unknown for _, unknown in read.values()] == [[], [], [], ["me"]]
    assert {number for ids, _ in read.values() for number in ids} == set(range(10))


def test_the_tiny_layer_draws_nothing_from_the_programs_generator():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    tiny_layer.__wrapped__("learned", tied=False)
    assert torch.rand(4).equal(expected)
    with pytest.raises(SizeError, match="learned, sinusoidal, rotary, alibi"):
        tiny_layer("relative", tied=True)
