"""Tokens that the page appends to a text: as text where the tokenizer finds the same tokens, else as IDs."""

from embedlayer import train_tokenizer
from embedlayer.explorer.appended import longer_text


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
