"""Merges of byte-pair encoding: which shorter tokens a token is built from, and which merges a text needs next.

Continued training starts from the tokens with which the tokenizer encodes the text, not from letters. It repeatedly
merges the most frequent pair of neighbouring tokens inside a pre-token. The merges come after those of the tokenizer,
so they only join tokens that it would have used anyway.

Reference:
    Purason et al., "Teaching Old Tokenizers New Words", https://arxiv.org/abs/2512.03989: continued training, and the
    removal of leaf tokens by frequency.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations, pairwise
from typing import Any

from embedlayer.tokenization.model_steps import merged, merges_of

Pair = tuple[str, str]


class BPEMerges:
    """Find the shorter tokens from which byte-pair encoding (BPE) builds each token, by applying its merges."""

    # Inside a longer text a token is built by the same merges as from its own letters: a merge across its border would
    # have prevented it. So a token from which no token of a text is built can be removed without changing that text's
    # tokens.

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.vocabulary = set(model["vocab"])
        self.prefix: str = model.get("continuing_subword_prefix") or ""
        self.suffix: str = model.get("end_of_word_suffix") or ""
        self.ignores_merges: bool = model.get("ignore_merges", False)
        self.pairs: list[Pair] = [(left, right) for left, right in model["merges"]]
        self._rank = {pair: rank for rank, pair in enumerate(self.pairs)}
        self._model = model

    def result(self, pair: Pair) -> str:
        """Return the token that merging a pair gives: the left name, and the right one without its `prefix`."""
        return merged(pair, self.prefix)

    def parts_of(self, token: str) -> set[str] | None:
        """Return `token` and all shorter tokens from which the merges build it, single letters included."""
        symbols = self._letters(token)
        seen = {*symbols}
        if not seen <= self.vocabulary:
            return None
        seen |= {merge.result for merge in merges_of(symbols, self._rank, self.prefix)}
        return seen if symbols == [token] else None

    def with_parts(self, tokens: Iterable[str]) -> set[str]:
        """Return `tokens` and all shorter tokens that these are built from; see `parts_of`."""
        parts = set(tokens)
        for token in list(parts):
            parts |= self.parts_of(token) or set()
        return parts

    def without(self, removed: AbstractSet[str]) -> "BPEMerges":
        """Return a copy without the tokens `removed`, and without each merge that joins or builds a removed token."""
        pairs = [pair for pair in self.pairs if removed.isdisjoint((*pair, self.result(pair)))]
        return BPEMerges({**self._model, "vocab": self.vocabulary - removed, "merges": pairs})

    def unreachable_without(self, removed: AbstractSet[str]) -> set[str]:
        """Return the other tokens that the merges build now, but not after the tokens `removed` are removed."""
        if self.ignores_merges:
            return set()
        parts: dict[str, AbstractSet[str]] = {}
        lost: set[str] = set()
        while True:
            missing = removed | lost
            texts = {token.removeprefix(self.prefix).removesuffix(self.suffix) or token for token in missing}
            for token in self.vocabulary - removed - parts.keys():
                spans = combinations(range(len(token) + 1), 2)
                if not texts.isdisjoint(token[i:j] for i, j in spans):  # a part of a token is a substring of it
                    parts[token] = self.parts_of(token) or frozenset()
            suspects = [token for token, each in parts.items() if token not in lost and not missing.isdisjoint(each)]
            left = self.without(missing) if suspects else self
            more = {token for token in suspects if left.parts_of(token) is None}
            if not more:
                return lost
            lost |= more

    def _letters(self, token: str) -> list[str]:
        """Split a token into the single-letter tokens that merging starts from, in the order of the text."""
        continues = self.prefix != "" and token.startswith(self.prefix)
        ends = self.suffix != "" and token.endswith(self.suffix)
        letters = list(token[len(self.prefix) if continues else 0 : len(token) - (len(self.suffix) if ends else 0)])
        if ends and letters:
            letters[-1] += self.suffix
        return [letter if i == 0 and not continues else self.prefix + letter for i, letter in enumerate(letters)]


Words = Mapping[tuple[str, ...], int]
"""How often each sequence of tokens occurs that may become one token, such as a pre-token."""


def continue_merges(
    words: Words, count: int, *, join: Callable[[Pair], str], taken: Container[str] = ()
) -> tuple[list[Pair], Counter[str]]:
    """Return the next merges of byte-pair encoding on a text, most frequent pair first."""
    symbols, counts = [list(word) for word in words], list(words.values())
    pairs, places = Counter[Pair](), defaultdict[Pair, set[int]](set)
    for place, word in enumerate(symbols):
        for pair in pairwise(word):
            pairs[pair] += counts[place]
            places[pair].add(place)
    heap = [(-number, pair) for pair, number in pairs.items()]
    heapq.heapify(heap)
    merges: dict[str, Pair] = {}
    while heap and len(merges) < count:
        number, pair = heapq.heappop(heap)
        if -number != pairs[pair]:  # its count has changed since it was put there
            if pairs[pair] > 1:
                heapq.heappush(heap, (-pairs[pair], pair))
            continue
        if -number < 2:
            break
        name = join(pair)
        if name in taken or name in merges:
            continue
        merges[name] = pair
        changed = set[Pair]()
        for place in places.pop(pair):
            for each in pairwise(symbols[place]):
                pairs[each] -= counts[place]
            symbols[place] = _merged(symbols[place], pair, name)
            for each in pairwise(symbols[place]):
                pairs[each] += counts[place]
                if name in each:
                    places[each].add(place)
                    changed.add(each)
        for each in changed:
            heapq.heappush(heap, (-pairs[each], each))
    used = Counter[str]()
    for word, number in zip(symbols, counts, strict=True):
        for symbol in word:
            used[symbol] += number
    return list(merges.values()), used


def _merged(word: Sequence[str], pair: Pair, name: str) -> list[str]:
    """Return a sequence of tokens with each occurrence of `pair`, from the left, replaced by `name`."""
    merged, at = list[str](), 0
    while at < len(word):
        is_pair = (*word[at : at + 2],) == pair
        merged.append(name if is_pair else word[at])
        at += 2 if is_pair else 1
    return merged


def cheapest_leaves(merges: BPEMerges, counts: Mapping[str, int], count: int, *, kept: Container[str]) -> list[str]:
    """Return the tokens whose removal adds the fewest tokens to a text, one after another, the cheapest first."""
    giving, needed, cost = defaultdict[str, list[int]](list), Counter[str](), Counter(counts)
    for rank, pair in enumerate(merges.pairs):
        giving[merges.result(pair)].append(rank)
        needed.update(pair)
    free = (name for name in giving if not needed[name] and name not in kept)
    heap = [(cost[name], -giving[name][0], name) for name in free]
    heapq.heapify(heap)
    leaves: list[str] = []
    while heap and len(leaves) < count:
        number, _, leaf = heapq.heappop(heap)
        leaves.append(leaf)
        cost.update(dict.fromkeys(merges.pairs[giving[leaf][0]], number))
        for rank in giving[leaf]:
            for part in merges.pairs[rank]:
                needed[part] -= 1
                if not needed[part] and part in giving and part not in kept:
                    heapq.heappush(heap, (cost[part], -giving[part][0], part))
    return leaves


def cut_words(
    word: Sequence[str], apart: Container[str], starts: Callable[[str, str], bool]
) -> Iterable[Sequence[str]]:
    """Yield the parts of a sequence of tokens inside which tokens may be merged, without those of a single token."""
    begin = 0
    for at in range(1, len(word) + 1):
        if at == len(word) or word[at] in apart or word[at - 1] in apart or starts(word[at - 1], word[at]):
            if at - begin > 1:
                yield word[begin:at]
            begin = at
