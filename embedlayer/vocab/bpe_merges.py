"""Byte-pair encoding of single tokens: which shorter tokens a token is built from."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any

Pair = tuple[str, str]


class BPEMerges:
    """Apply the merges of byte-pair encoding to single tokens.

    Encoding merges the neighbouring pair that is first in the list of merges, as long as there is one. A token in a
    text was built inside its own letters, by the same merges in the same order as if it were the whole text: a merge
    across its border would have prevented it. So the tokens that it is built from do not depend on the text.

    A vocabulary may therefore lose every token that no token of a text was built from, and the text is still encoded in
    the same way: each merge that was applied is still the first one.

    Args:
        model: The `model` of a `tokenizer.json`.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.vocabulary = set(model["vocab"])
        self.prefix: str = model.get("continuing_subword_prefix") or ""
        self.suffix: str = model.get("end_of_word_suffix") or ""
        self.ignores_merges: bool = model.get("ignore_merges", False)
        self.pairs: list[Pair] = [(left, right) for left, right in model["merges"]]
        self._rank = {pair: rank for rank, pair in enumerate(self.pairs)}
        self._model = model

    def result(self, pair: Pair) -> str:
        """Return the token that results from merging a pair: the right token loses its continuation prefix."""
        return pair[0] + pair[1][len(self.prefix) :]

    def parts_of(self, token: str) -> set[str] | None:
        """Return `token` and all tokens that the merges pass through on the way to it, from its letters on.

        Returns:
            The tokens, letters included; `None` if a letter is no token or the merges do not lead to `token`.
        """
        symbols = self._letters(token)
        seen = {*symbols}
        if not seen <= self.vocabulary:
            return None
        while len(symbols) > 1:
            neighbours = list(pairwise(symbols))
            at = min(range(len(neighbours)), key=lambda i: self._rank.get(neighbours[i], len(self._rank)))
            if neighbours[at] not in self._rank:
                return None
            symbols[at : at + 2] = [self.result(neighbours[at])]
            seen.add(symbols[at])
        return seen if symbols == [token] else None

    def with_parts(self, tokens: Iterable[str]) -> set[str]:
        """Return `tokens` and all tokens that each is built from; a token that no merges build stays alone."""
        found = set(tokens)
        for token in list(found):
            found |= self.parts_of(token) or set()
        return found

    def without(self, removed: AbstractSet[str]) -> "BPEMerges":
        """Return a copy without the tokens `removed`, and without each merge that joins or builds a removed token.

        Longer tokens that can no longer be built stay in the copy's vocabulary; `unreachable_without` lists them.
        """
        pairs = [pair for pair in self.pairs if removed.isdisjoint((*pair, self.result(pair)))]
        return BPEMerges({**self._model, "vocab": self.vocabulary - removed, "merges": pairs})

    def unreachable_without(self, removed: AbstractSet[str]) -> set[str]:
        """Return the kept tokens that merges can no longer build once the tokens `removed` are gone.

        The tokens in `removed` are not in the result. It is empty for a tokenizer that looks up whole words before
        merging (`ignore_merges`).
        """
        if self.ignores_merges:
            return set()
        parts: dict[str, AbstractSet[str]] = {}
        lost: set[str] = set()
        while True:
            missing = removed | lost
            texts = {self._without_marks(token) for token in missing}
            for token in self.vocabulary - removed - parts.keys():
                if not texts.isdisjoint(_substrings(token)):  # a part of a token is a substring of it
                    parts[token] = self.parts_of(token) or frozenset()
            suspects = [token for token, each in parts.items() if token not in lost and not missing.isdisjoint(each)]
            left = self.without(missing) if suspects else self
            more = {token for token in suspects if left.parts_of(token) is None}
            if not more:
                return lost
            lost |= more

    def _without_marks(self, token: str) -> str:
        """Return a token without continuation prefix and end-of-word suffix, or `token` if nothing would be left."""
        return token.removeprefix(self.prefix).removesuffix(self.suffix) or token

    def _letters(self, token: str) -> list[str]:
        """Split a token into the single-letter tokens that merging starts from, in order.

        The last letter keeps the end-of-word suffix. Letters that continue a word get the continuation prefix.
        """
        continues = self.prefix != "" and token.startswith(self.prefix)
        ends = self.suffix != "" and token.endswith(self.suffix)
        letters = list(token[len(self.prefix) if continues else 0 : len(token) - (len(self.suffix) if ends else 0)])
        if ends and letters:
            letters[-1] += self.suffix
        return [letter if i == 0 and not continues else self.prefix + letter for i, letter in enumerate(letters)]


def _substrings(text: str) -> Iterator[str]:
    """Yield all substrings of a text that are not empty."""
    return (text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1))
