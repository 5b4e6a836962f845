"""What the tokens of byte-pair encoding are made from."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any

Pair = tuple[str, str]


class Merges:
    """Byte-pair encoding, replayed on single tokens.

    Encoding merges, as long as it can, the pair of neighbours that stands first in the list of merges. A token that
    occurs in a text was made inside its own letters, by the same merges in the same order as if it stood alone: a merge
    across its edge would have kept it from being made. So what a token is made from is known without any text.

    It follows that a vocabulary may lose every token that no token of a text was made from, and the text is encoded as
    before: at each step the merge that is taken is still there, and still the first.

    Args:
        model: The `model` of a `tokenizer.json`.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        self.vocabulary = set(model["vocab"])
        self.prefix: str = model.get("continuing_subword_prefix") or ""
        self.suffix: str = model.get("end_of_word_suffix") or ""
        self.whole_words: bool = model.get("ignore_merges", False)
        self.pairs: list[Pair] = [(left, right) for left, right in model["merges"]]
        self._rank = {pair: rank for rank, pair in enumerate(self.pairs)}

    def result(self, pair: Pair) -> str:
        """What a merge makes."""
        return pair[0] + pair[1][len(self.prefix) :]

    def made_from(self, token: str) -> set[str] | None:
        """All tokens on the way from letters to `token`, itself included; `None` if merges do not lead to it."""
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
        """The tokens and all that they are made from."""
        found = set(tokens)
        for token in list(found):
            found |= self.made_from(token) or set()
        return found

    def without(self, gone: AbstractSet[str]) -> "Merges":
        """The merges that are left when some tokens are gone."""
        pairs = [pair for pair in self.pairs if gone.isdisjoint((*pair, self.result(pair)))]
        left = {
            "vocab": self.vocabulary - gone,
            "merges": pairs,
            "continuing_subword_prefix": self.prefix,
            "end_of_word_suffix": self.suffix,
            "ignore_merges": self.whole_words,
        }
        return Merges(left)

    def lost_with(self, gone: AbstractSet[str]) -> set[str]:
        """The tokens that no text reaches any more when some are gone: every way to make them led through those.

        A tokenizer that looks up whole words before it merges (`ignore_merges`) loses none.
        """
        if self.whole_words:
            return set()
        made = {token: self.made_from(token) for token in self.vocabulary - gone}
        lost: set[str] = set()
        while True:
            missing = gone | lost
            suspects = [token for token, parts in made.items() if token not in lost and parts and parts & missing]
            left = self.without(missing) if suspects else self
            more = {token for token in suspects if left.made_from(token) is None}
            if not more:
                return lost
            lost |= more

    def _letters(self, token: str) -> list[str]:
        continues = self.prefix != "" and token.startswith(self.prefix)
        ends = self.suffix != "" and token.endswith(self.suffix)
        letters = list(token[len(self.prefix) if continues else 0 : len(token) - (len(self.suffix) if ends else 0)])
        if ends and letters:
            letters[-1] += self.suffix
        return [letter if i == 0 and not continues else self.prefix + letter for i, letter in enumerate(letters)]
