"""Texts as token IDs, with a tokenizer and without one."""

import pytest
from explorer_requests import Refused, ids_of
from tokenizers import Tokenizer, models

from embedlayer import TokenEmbedding, train_tokenizer
from embedlayer.opening import OpenedModel


def named(*names):
    return OpenedModel("named", TokenEmbedding(len(names), 2), tokens=[*names])


@pytest.fixture
def read(ask):
    """IDs of a text, and what is said about it."""

    def ids(source, text):
        answer = ask(source, "pipeline", text=text)
        return ids_of(answer).tolist(), answer["how"]

    return ids


def test_a_text_is_split_at_the_longest_names_of_rows(ask, read):
    source = named("New", "York", "New_York", "don't", "cat", " dog", "", "dog", "Cat")
    assert read(source, "In New  York, don't pet the cat or dog")[0] == [2, 3, 4, 7]
    assert read(source, "new york Cat DOG")[0] == [2, 8, 7]
    ids, how = read(source, "cats love the cat and the dog, dear")
    assert ids == [4, 7]
    assert (
        how.endswith("no row has such a name: “cats”, “love”, “the”, “and”, “,” and 1 more.") or "“cats”, “love”" in how
    )
    with pytest.raises(Refused, match="“zebra”: no row has such a name.*Type these: .*New_York"):
        read(source, "zebra")


@pytest.mark.parametrize("unknown", ["<unk>", "<UNK>", "[UNK]", "UNK"])
def test_an_unknown_word_becomes_the_row_of_unknown_words_if_the_table_has_one(ask, read, unknown):
    source = named("cat", unknown, "the", "<unk>")
    assert read(source, f"The zebra, the {unknown} cat")[0] == [2, 1, 1, 2, 1, 0]
    ids, how = read(source, "zebra zebra")
    assert ids == [1, 1]
    assert how.endswith(f"Replaced by {unknown}, row 1, because no row has such a name: “zebra”.")
    longer = ask(source, "pipeline", text="the", appended="1,0")
    assert [longer["text"], longer["appended"]] == [f"the {unknown} cat", []]
    assert [token["kind"] for token in longer["tokens"]] == ["text", "special", "text"]
    with pytest.raises(Refused, match="has no words"):
        read(source, " ")


def test_ids_can_be_typed_where_there_is_no_tokenizer(ask, read):
    rows = OpenedModel("rows", TokenEmbedding(3, 2))
    for source in (rows, named("a", "b", "c")):
        assert read(source, " #2 #0,#2 ")[0] == [2, 0, 2]
        with pytest.raises(Refused, match="#3 is no row of this table: its rows are #0 to #2"):
            read(source, "#3")
    longer = ask(rows, "pipeline", text="#0", appended="2,1")
    assert (longer["text"], longer["appended"]) == ("#0 #2 #1", [])
    with pytest.raises(Refused, match="no tokenizer and no names"):
        read(rows, "dogs")


def test_a_tokenizer_reads_the_text_and_says_what_it_cannot_read(read):
    words = train_tokenizer("I love dogs", kind="word")
    source = OpenedModel("words", TokenEmbedding(10, 2), tokenizer=words)
    assert read(source, "dogs love") == (words.encode("dogs love").ids, "")
    with pytest.raises(Refused, match="no tokens"):
        read(source, " ")
    strict = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    with pytest.raises(Refused, match="cannot encode 'b'.*Missing"):
        read(OpenedModel("strict", TokenEmbedding(1, 2), tokenizer=strict), "b")


def test_an_appended_token_becomes_text_where_the_tokenizer_agrees(ask):
    tokenizer = train_tokenizer("the cat ate the cake and the cat sat " * 9, vocab_size=300)
    source = OpenedModel("cats", TokenEmbedding(300, 2), tokenizer=tokenizer)

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    def longer(text, appended):
        answer = ask(source, "pipeline", text=text, appended=",".join(map(str, appended)))
        return answer["text"], answer["appended"]

    cat, line, the_cat, end = ids(" cat"), ids("\n"), ids("the cat"), [tokenizer.token_to_id("<|endoftext|>")]
    first, second = ids("é")  # two bytes of one character
    assert longer("the", cat) == ("the cat", [])
    assert longer("the", [first]) == ("the", [first])
    assert longer("the", [first, second]) == ("theé", [])
    assert longer("the", [*cat, first]) == ("the cat", [first])
    assert longer("the", [*cat, *line, *the_cat]) == ("the cat", [*line, *the_cat])
    assert longer("the", end) == ("the", end)
    letters = [ids(letter)[0] for letter in "ca"]
    assert longer("the ", letters) == ("the ", letters)  # the tokenizer would merge them
