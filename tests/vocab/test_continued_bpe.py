"""Continued BPE training, and leaves: beside definitions that count everything again at each step."""

from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from embedlayer.vocab.bpe_merges import BPEMerges, cheapest_leaves, continue_merges, cut_words

WORDS = st.dictionaries(st.text("abc", min_size=2, max_size=9).map(tuple), st.integers(1, 5), min_size=1, max_size=8)


def replaced(word: tuple, pair: tuple) -> tuple:
    marked, at = [], 0
    while at < len(word):
        step = 2 if word[at : at + 2] == pair else 1
        marked.append("".join(word[at : at + step]))
        at += step
    return tuple(marked)


def by_recounting(words: dict, count: int, taken: set) -> tuple[list, Counter]:
    merges: list = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
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
    merges, used = continue_merges(words, 6, join="".join, taken=taken)
    expected, symbols = by_recounting(words, 6, taken)
    assert merges == expected
    assert used == symbols


def test_leaves_are_removed_from_the_cheapest_on_and_their_parts_become_leaves() -> None:
    pairs = [("a", "b"), ("ab", "c"), ("b", "c"), ("bc", "d"), ("a", "bc")]  # the last one gives "abc" too
    merges = BPEMerges({"vocab": {*"abcd"} | {a + b for a, b in pairs}, "merges": pairs})
    counts = {"ab": 1, "abc": 3, "bcd": 1, "bc": 4}
    assert cheapest_leaves(merges, counts, 9, kept=()) == ["bcd", "abc", "ab", "bc"]  # "ab" then occurs 4 times, "bc" 5
    assert cheapest_leaves(merges, counts, 9, kept={"bcd"}) == ["abc", "ab"]
    assert cheapest_leaves(merges, counts, 1, kept={"bcd"}) == ["abc"]


def test_words_end_before_what_is_never_merged_and_where_a_word_starts() -> None:
    parts = cut_words("a b <x> c d e".split(), {"<x>"}, lambda left, right: right == "d")
    assert [list(part) for part in parts] == [["a", "b"], ["d", "e"]]
