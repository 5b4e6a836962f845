"""Texts as token IDs, with a tokenizer and without one."""

import pytest
from tokenizers import Tokenizer, models

from embedlayer import TextError, TokenIdError, TokenizerError, train_tokenizer
from embedlayer.explorer.text_ids import NamedRows, text_ids


def test_a_text_is_split_at_the_longest_names_of_rows():
    named = NamedRows(["New", "York", "New_York", "don't", "cat", " dog", "", "dog", "Cat"])
    assert named.ids("In New  York, don't pet the cat or dog") == ([2, 3, 4, 7], ["In", ",", "pet", "the", "or"])
    assert named.ids("new york Cat DOG") == ([2, 8, 7], [])
    read = text_ids(named, "cats love the cat and the dog", 9)
    assert read.ids == [4, 7]
    assert read.how.endswith("no row has such a name: “cats”, “love”, “the”, “and”.")
    with pytest.raises(TextError, match="“zebra”: no row has such a name.*Type these: .*New_York"):
        text_ids(named, "zebra", 9)


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
