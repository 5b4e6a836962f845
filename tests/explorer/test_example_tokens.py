"""Examples are words that people know, and sums that the table answers."""

import re

import pytest
import torch
from real_tables import minilm

from embedlayer import TokenEmbedding
from embedlayer.analysis import TokenVectors
from embedlayer.explorer import example_tokens
from embedlayer.opening import OpenedModel

FUNCTION_WORDS = set(
    "the a an and or but if of to in on at by for with from into as is are was were be been he she it they them their "
    "his her its this that these those not no so than then there here when where which who what will would can could "
    "may might must shall should do does did has have had about over under more most some any all each".split()
)


@pytest.fixture(params=["words", "MiniLM"])
def english(request, word_table) -> OpenedModel:
    if request.param == "words":
        return word_table
    layer = minilm()
    return OpenedModel("MiniLM", layer.table, tokenizer=layer.tokenizer, model=layer)


def test_a_table_of_english_shows_everyday_words_and_sums_that_it_answers(english):
    found = example_tokens.examples(english, {})
    texts = [english.token_texts[row] for row in found["words"]]
    assert found["is_everyday"]
    assert len(texts) == len(set(texts)) == example_tokens.MOST_WORDS
    assert set(texts) <= set(example_tokens.EVERYDAY_WORDS)
    vectors = TokenVectors(english.table, english.tokenizer)
    assert len(found["sums"]) == example_tokens.MOST_SUMS
    for each in found["sums"]:
        ((nearest, _),) = vectors.most_similar(each["plus"], each["minus"], topn=1)
        assert nearest == english.token_texts[each["answer"]]


def test_no_example_is_a_function_word():
    sums = [*example_tokens.EVERYDAY_SUMS, *example_tokens.CODE_SUMS]
    words = {*example_tokens.EVERYDAY_WORDS, *example_tokens.CODE_WORDS, *(word for terms in sums for word in terms)}
    assert all(re.fullmatch("[a-z]{3,}", word) for word in words)
    assert not words & FUNCTION_WORDS


def test_a_table_of_code_shows_words_of_code_as_they_begin_and_the_sums_that_it_answers():
    texts = [
        " class",
        "class",
        " the",
        " list",
        " lists",
        " string",
        " strings",
        " value",
        " values",
        " type",
        " types",
    ]
    rows = torch.eye(11) + 0.01
    rows[6] = rows[4] - rows[3] + rows[5]  # lists - list + string = strings
    source = OpenedModel("code", TokenEmbedding.from_pretrained(rows), tokens=texts)
    found = example_tokens.examples(source, {})
    assert not found["is_everyday"]
    assert [texts[row] for row in found["words"]] == [" class", " list", " string"]
    assert found["sums"] == [{"plus": [4, 5], "minus": [3], "answer": 6}]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_rows_without_a_direction_are_no_examples(value):
    rows = torch.randn(3, 4)
    rows[1] = value
    source = OpenedModel("three", TokenEmbedding.from_pretrained(rows), tokens=["class", "list", "string"])
    assert example_tokens.examples(source, {}) == {"words": [0, 2], "is_everyday": False, "sums": []}


def test_rows_without_names_have_no_examples():
    found = example_tokens.examples(OpenedModel("rows", TokenEmbedding(50, 4)), {})
    assert found == {"words": [], "is_everyday": False, "sums": []}
