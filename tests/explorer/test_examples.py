"""Words, sums and texts that the page offers of a source: those that people know, and that the source answers."""

import re

import pytest
import torch
from real_tables import minilm

from embedlayer import TokenEmbedding, TrainingOptions, train_tokenizer
from embedlayer.analysis import TokenVectors
from embedlayer.opening import OpenedModel, open_model

FUNCTION_WORDS = set(
    "the a an and or but if of to in on at by for with from into as is are was were be been he she it they them their "
    "his her its this that these those not no so than then there here when where which who what will would can could "
    "may might must shall should do does did has have had about over under more most some any all each".split()
)


@pytest.mark.parametrize("name", ["words", "MiniLM"])
def test_a_table_of_english_shows_everyday_words_and_sums_that_it_answers(name, ask, word_table):
    source = word_table
    if name == "MiniLM":
        layer = minilm()
        source = OpenedModel("MiniLM", layer.table, tokenizer=layer.tokenizer, model=layer)
    found = ask(source, "examples")
    texts = [source.token_texts[row] for row in found["words"]]
    assert found["is_everyday"]
    assert (len({*texts}), len(found["sums"])) == (10, 3)
    sums = [source.token_texts[row] for each in found["sums"] for row in (*each["plus"], *each["minus"])]
    assert all(re.fullmatch("[a-z]{3,}", word) for word in (*texts, *sums))
    assert not {*texts, *sums} & FUNCTION_WORDS
    vectors = TokenVectors(source.table, source.tokenizer)
    for each in found["sums"]:
        ((nearest, _),) = vectors.most_similar(each["plus"], each["minus"], topn=1)
        assert nearest == source.token_texts[each["answer"]]


def test_a_table_of_code_shows_words_of_code_as_they_begin_and_the_sums_that_it_answers(ask):
    texts = " class|class| the| list| lists| string| strings| value| values| type| types".split("|")
    rows = torch.eye(11) + 0.01
    rows[6] = rows[4] - rows[3] + rows[5]  # lists - list + string = strings
    found = ask(OpenedModel("code", TokenEmbedding.from_pretrained(rows), tokens=texts), "examples")
    assert not found["is_everyday"]
    assert [texts[row] for row in found["words"]] == [" class", " list", " string"]
    assert found["sums"] == [{"plus": [4, 5], "minus": [3], "answer": 6}]


def test_rows_without_a_direction_or_a_name_are_no_examples(ask):
    nothing = {"words": [], "is_everyday": False, "sums": []}
    for value in (0.0, float("nan"), float("inf")):
        rows = torch.randn(3, 4)
        rows[1] = value
        source = OpenedModel("three", TokenEmbedding.from_pretrained(rows), tokens=["class", "list", "string"])
        assert ask(source, "examples") == nothing | {"words": [0, 2]}
    names = [f"{start}{word}" for start in ("", " ") for word in FUNCTION_WORDS]
    for tokens in (None, names):
        assert ask(OpenedModel("rows", TokenEmbedding(len(names), 4), tokens=tokens), "examples") == nothing


OWN = "A man likes dogs and other dogs."
TEXT = "The first words. Rarely does a zyzzyva xylograph occur. A man (that is, a person) walks: he walks. Short. " + (
    f"A cat sleeps on the mat. {OWN} " * 60
)


def test_sentences_of_a_run_whose_words_are_tokens_come_before_the_fixed_texts(ask, train_run):
    tokenizer = train_tokenizer(TEXT, "bpe", vocab_size=420)
    options = TrainingOptions(steps=1, batch_size=1, max_length=8)
    directory = train_run(TEXT, tokenizer, options, heads=1, validation_fraction=0.5)
    texts = ask(open_model(directory.path), "pipeline-choices")["texts"]
    fixed = ask(OpenedModel("bytes", TokenEmbedding(300, 4), tokenizer=train_tokenizer((), "byte")), "pipeline-choices")
    assert texts[-5:] == fixed["texts"]
    own = texts[:-5]
    assert own[0] == OWN  # a word occurs twice in it
    assert "A cat sleeps on the mat." in own
    for sentence in own:
        assert len(tokenizer.encode(sentence).ids) == len(sentence[:-1].split()) + 1
    rows = ask(OpenedModel("no tokenizer", TokenEmbedding(300, 4)), "pipeline-choices")["texts"]
    assert all(text.startswith("#0 #1 ") for text in rows)
