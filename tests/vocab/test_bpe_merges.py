"""What BPE makes its tokens from."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from embedlayer.tokenization.train import train_tokenizer
from embedlayer.vocab.bpe_merges import BPEMerges

TEXT = "low lower lowest, new newer newest, wide wider widest; slow slower slowest. " * 5
TOKENIZER = train_tokenizer(TEXT, vocab_size=300)


def of(vocabulary: list[str], merges: list[tuple[str, str]], **options) -> BPEMerges:
    return BPEMerges({"vocab": {name: i for i, name in enumerate(vocabulary)}, "merges": merges, **options})


def test_a_token_is_parts_of_its_letters_and_every_step_between() -> None:
    merges = of(["l", "o", "w", "lo", "ow", "low"], [("o", "w"), ("l", "ow"), ("lo", "w")])
    assert merges.parts_of("low") == {"l", "o", "w", "ow", "low"}
    assert merges.parts_of("lo") is None
    assert merges.with_parts(["low", "lo"]) == {"l", "o", "w", "ow", "lo", "low"}


@settings(max_examples=25)
@given(st.text(alphabet="lowernsti ,;.", min_size=1, max_size=40))
def test_a_token_in_a_text_was_made_as_if_it_stood_alone(text) -> None:
    merges = BPEMerges(json.loads(TOKENIZER.to_str())["model"])
    for token in TOKENIZER.encode(text).tokens:
        parts = merges.parts_of(token)
        assert parts is not None
        assert token in parts
        left = merges.without(merges.vocabulary - parts)
        alone = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(sorted(parts))}, merges=left.pairs))
        assert alone.encode(token).tokens == [token]


def test_what_is_made_only_from_a_lost_token_is_lost_and_what_has_another_way_is_not() -> None:
    names = ["l", "o", "w", "lo", "ow", "low", "lows", "s"]
    both_ways = of(names, [("l", "o"), ("lo", "w"), ("o", "w"), ("l", "ow"), ("low", "s")])
    assert both_ways.unreachable_without({"lo"}) == set()
    one_way = of(names, [("l", "o"), ("lo", "w"), ("o", "w"), ("low", "s")])
    assert one_way.unreachable_without({"lo"}) == {"low", "lows"}
    assert of(names, one_way.pairs, ignore_merges=True).unreachable_without({"lo"}) == set()


@pytest.mark.parametrize(
    ("options", "merges", "token"),
    [
        ({"continuing_subword_prefix": "##"}, [("a", "##b"), ("##c", "##d"), ("ab", "##cd")], "abcd"),
        ({"continuing_subword_prefix": "##"}, [("##c", "##d")], "##cd"),
        ({"end_of_word_suffix": "</w>"}, [("a", "b</w>")], "ab</w>"),
        ({"end_of_word_suffix": "</w>"}, [("a", "b")], "ab"),
    ],
)
def test_marks_of_word_beginnings_and_ends_are_understood(options, merges, token) -> None:
    vocabulary = ["a", "##b", "##c", "##d", "b", "b</w>", "ab", "##cd", "abcd", "ab</w>"]
    assert of(vocabulary, merges, **options).parts_of(token) is not None
