"""What BPE builds its tokens from: what goes and stays with a token, and which merges come next."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import embedlayer as el
from embedlayer.vocab import AddedMerge, edit_tokenizer, suggest_removals, suggest_tokens

Pair = tuple[str, str]


def of(vocabulary: list[str], merges: list[Pair], **options: Any) -> Tokenizer:
    built = Tokenizer(models.BPE({name: i for i, name in enumerate(vocabulary)}, merges, **options))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    return built


def kept_with(tokenizer: Tokenizer, *names: str) -> set[str]:
    return {*edit_tokenizer(tokenizer, keep=names).tokenizer.get_vocab()}


def lost_with(tokenizer: Tokenizer, name: str) -> set[str]:
    dropped = edit_tokenizer(tokenizer, remove=[name]).dropped
    return {each for i in dropped if (each := tokenizer.id_to_token(i)) is not None}


def test_a_token_keeps_its_letters_and_every_step_between() -> None:
    merges: list[Pair] = [("o", "w"), ("l", "ow"), ("l", "o"), ("lo", "w")]
    names = ["l", "o", "w", "x", "lo", "ow", "low"]
    assert kept_with(of(names, merges), "low") == {"l", "o", "w", "ow", "low"}
    assert kept_with(of(names, merges), "low", "lo") == {*names} - {"x"}


def test_what_is_made_only_from_a_lost_token_is_lost_and_what_has_another_way_is_not() -> None:
    names = ["l", "o", "w", "lo", "ow", "low", "lows", "s"]
    merges: list[Pair] = [("l", "o"), ("lo", "w"), ("o", "w"), ("low", "s")]
    assert lost_with(of(names, [*merges[:3], ("l", "ow"), merges[3]]), "lo") == {"lo"}
    assert lost_with(of(names, merges), "lo") == {"lo", "low", "lows"}
    assert lost_with(of(names, merges, ignore_merges=True), "lo") == {"lo"}


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
    vocabulary = ["a", "##b", "##c", "##d", "b", "b</w>", "ab", "##cd", "abcd", "ab</w>", "x"]
    assert kept_with(of(vocabulary, merges, **options), token) == {token}.union(*merges)


WORDS = st.dictionaries(st.text("abc", min_size=2, max_size=9).map(tuple), st.integers(1, 5), min_size=1, max_size=8)


def replaced(word: tuple, pair: tuple) -> tuple:
    marked, at = [], 0
    while at < len(word):
        step = 2 if word[at : at + 2] == pair else 1
        marked.append("".join(word[at : at + step]))
        at += step
    return tuple(marked)


def by_recounting(words: dict, count: int, taken: set) -> tuple[list, Counter]:
    """Count all pairs again at each step; return the merges, and how often each token then occurs."""
    merges: list = []
    while len(merges) < count:
        pairs: Counter[Pair] = Counter()
        for word, number in words.items():
            for pair in pairwise(word):
                pairs[pair] += number
        names = taken | {"".join(pair) for pair in merges}
        best = sorted((-number, pair) for pair, number in pairs.items() if number >= 2 and "".join(pair) not in names)
        if not best:
            break
        merges.append(best[0][1])
        merged: Counter[tuple[str, ...]] = Counter()
        for word, number in words.items():
            merged[replaced(word, best[0][1])] += number
        words = merged
    return merges, sum((Counter({s: n * word.count(s) for s in {*word}}) for word, n in words.items()), Counter())


@given(WORDS, st.sets(st.sampled_from(["ab", "ca", "abc"])))
@settings(max_examples=60, deadline=None)
def test_merges_are_those_of_counting_all_pairs_again_at_each_step(words, taken) -> None:
    tokenizer = of(["a", "b", "c", *sorted(taken)], [])  # names without a merge, which no new token may have
    text = " ".join("".join(word) for word, number in words.items() for _ in range(number))
    merges, symbols = by_recounting(words, 6, taken)
    if not merges:
        with pytest.raises(el.VocabularyError):
            suggest_tokens(tokenizer, f"{text}\n", count=6, held_out=f"{text}\n")
        return
    suggestion = suggest_tokens(tokenizer, f"{text}\n", count=6, held_out=f"{text}\n")
    assert suggestion.tokens == tuple(AddedMerge(*pair) for pair in merges)
    assert [score.count for score in suggestion.scores] == [symbols["".join(pair)] for pair in merges]
    assert suggestion.after.num_tokens == symbols.total()


def test_leaves_are_removed_from_the_cheapest_on_and_their_parts_become_leaves() -> None:
    pairs: list[Pair] = [("a", "b"), ("ab", "c"), ("b", "c"), ("bc", "d"), ("a", "bc")]  # the last one gives "abc" too
    tokenizer = of([*"abcd", *dict.fromkeys(a + b for a, b in pairs)], pairs)
    text = "ab " + "abc " * 3 + "bcd " + "bc " * 4 + "\n"

    def removed(tokenizer: Tokenizer, count: int) -> list[object]:
        return [*suggest_removals(tokenizer, text, count=count, held_out=text).tokens]

    assert removed(tokenizer, 9) == ["bcd", "abc", "ab", "bc"]  # "ab" then occurs 4 times, "bc" 5
    tokenizer.add_tokens([AddedToken("bcd", normalized=False)])  # which is never removed
    assert removed(tokenizer, 9) == ["abc", "ab"]
    assert removed(tokenizer, 1) == ["abc"]


def test_merges_end_where_a_word_starts_and_before_unknown_letters() -> None:
    """Also of a tokenizer that does not split words."""
    letters = ["?", "▁", *sorted({*"theotterdrinks"} - {"k"})]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(letters)}, [], unk_token="?"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    text = " the otter drinks" * 50 + "\n"
    names = {each.name() for each in suggest_tokens(tokenizer, text, count=99, held_out=text).tokens}
    assert {"▁the", "▁otter", "▁drin"} <= names
    assert all("▁" not in name[1:] and "?" not in name and "ks" not in name for name in names)
