"""Texts as token IDs, with a tokenizer and without one."""

import pytest
from tokenizers import Tokenizer, models

from embedlayer import TextError, TokenIdError, TokenizerError, train_tokenizer
from embedlayer.explorer.text_ids import NamedRows, longer_text, shown_tokens, text_ids


def test_a_text_is_split_at_the_longest_names_of_rows():
    named = NamedRows(["New", "York", "New_York", "don't", "cat", " dog", "", "dog", "Cat"])
    assert named.ids("In New  York, don't pet the cat or dog") == ([2, 3, 4, 7], ["In", ",", "pet", "the", "or"])
    assert named.ids("new york Cat DOG") == ([2, 8, 7], [])
    read = text_ids(named, "cats love the cat and the dog", 9)
    assert read.ids == [4, 7]
    assert read.how.endswith("no row has such a name: “cats”, “love”, “the”, “and”.")
    with pytest.raises(TextError, match="“zebra”: no row has such a name.*Type these: .*New_York"):
        text_ids(named, "zebra", 9)


@pytest.mark.parametrize("unknown", ["<unk>", "<UNK>", "[UNK]", "UNK"])
def test_an_unknown_word_becomes_the_row_of_unknown_words_if_the_table_has_one(unknown):
    named = NamedRows(["cat", unknown, "the", "<unk>"])
    assert named.ids(f"The zebra, the {unknown} cat") == ([2, 1, 1, 2, 1, 0], ["zebra", ","])
    read = text_ids(named, "zebra zebra", 4)
    assert read.ids == [1, 1]
    assert read.how.endswith(f"Replaced by {unknown}, row 1, because no row has such a name: “zebra”.")
    assert [token["kind"] for token in shown_tokens(named, [0, 1])] == ["text", "special"]
    assert longer_text(named, "the", [1, 0], 4) == (f"the {unknown} cat", ())
    with pytest.raises(TextError, match="has no words"):
        text_ids(named, " ", 4)


@pytest.mark.parametrize("vocabulary", [None, NamedRows(["a", "b", "c"])])
def test_ids_can_be_typed_where_there_is_no_tokenizer(vocabulary):
    assert text_ids(vocabulary, " #2 #0,#2 ", 3).ids == [2, 0, 2]
    with pytest.raises(TokenIdError, match="#3 is no row of this table: its rows are #0 to #2"):
        text_ids(vocabulary, "#3", 3)


def test_a_tokenizer_reads_the_text_and_says_what_it_cannot_read():
    words = train_tokenizer("I love dogs", kind="word")
    read = text_ids(words, "dogs love", 10)
    assert (read.ids, read.how) == (words.encode("dogs love").ids, "")
    with pytest.raises(TextError, match="no tokens"):
        text_ids(words, " ", 10)
    strict = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(TextError, match="cannot encode 'b'.*Missing"):
        text_ids(strict, "b", 1)
    with pytest.raises(TokenizerError, match="no tokenizer and no names"):
        text_ids(None, "dogs", 10)


def test_an_appended_token_becomes_text_where_the_tokenizer_agrees():
    tokenizer = train_tokenizer("the cat ate the cake and the cat sat " * 9, vocab_size=300)
    ids = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in (" cat", "é", "the cat")}
    assert longer_text(tokenizer, "the", ids[" cat"], 300) == ("the cat", ())
    first, second = ids["é"]  # two bytes of one character
    assert longer_text(tokenizer, "the", [first], 300) == ("the", (first,))
    assert longer_text(tokenizer, "the", [first, second], 300) == ("theé", ())
    assert longer_text(tokenizer, "the", [*ids[" cat"], first], 300) == ("the cat", (first,))
    line = tokenizer.encode("\n", add_special_tokens=False).ids
    assert longer_text(tokenizer, "the", [*ids[" cat"], *line, *ids["the cat"]], 300) == (
        "the cat",
        (*line, *ids["the cat"]),
    )
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end is not None
    assert longer_text(tokenizer, "the", [end], 300) == ("the", (end,))
    c, a = (tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "ca")
    assert longer_text(tokenizer, "the ", [c, a], 300) == ("the ", (c, a))  # the tokenizer would merge them


def test_without_a_tokenizer_they_are_written_as_ids():
    assert longer_text(None, "#3", [4, 1], 9) == ("#3 #4 #1", ())
