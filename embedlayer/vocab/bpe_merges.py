"""Byte-pair encoding of single tokens: which shorter tokens a token is built from."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from embedlayer.tokenization.model_steps import merged, merges_of

Pair = tuple[str, str]


class BPEMerges:
    """Find the shorter tokens from which byte-pair encoding (BPE) builds each token, by applying its merges.

    To encode a word, BPE starts from its letters. It repeatedly merges the neighbouring pair that comes first in the
    list of merges. Inside a longer text a token is built by the same merges in the same order as from its own letters
    alone, because a merge across the token's border would have prevented the token. So the shorter tokens that a token
    is built from do not depend on the text around it.

    Therefore a token can be removed if no token of a text is built from it: the text is still encoded as the same
    tokens.

    Args:
        model: The `model` of a `tokenizer.json`; it is not changed.

    Attributes:
        vocabulary: Names of the model's tokens.
        prefix: Prefix of tokens that continue a word, or "".
        suffix: Suffix of tokens that end a word, or "".
        ignores_merges: Whether a word that is a token is encoded as that token without merging.
        pairs: The merges in order, each a pair of the left and the right token.
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
        """Return the token that merging a pair gives: the left name, and the right one without its `prefix`."""
        return merged(pair, self.prefix)

    def parts_of(self, token: str) -> set[str] | None:
        """Return `token` and all shorter tokens from which the merges build it, single letters included.

        The result is `None` if a letter is no token, or if the merges do not lead to `token`.
        """
        symbols = self._letters(token)
        seen = {*symbols}
        if not seen <= self.vocabulary:
            return None
        seen |= {merge.result for merge in merges_of(symbols, self._rank, self.prefix)}
        return seen if symbols == [token] else None

    def with_parts(self, tokens: Iterable[str]) -> set[str]:
        """Return `tokens` and all shorter tokens that these are built from; see `parts_of`.

        A token that the merges do not build is returned without others.
        """
        parts = set(tokens)
        for token in list(parts):
            parts |= self.parts_of(token) or set()
        return parts

    def without(self, removed: AbstractSet[str]) -> "BPEMerges":
        """Return a copy without the tokens `removed`, and without each merge that joins or builds a removed token.

        Longer tokens that the merges can no longer build stay in the copy's vocabulary; `unreachable_without` returns
        them.
        """
        pairs = [pair for pair in self.pairs if removed.isdisjoint((*pair, self.result(pair)))]
        return BPEMerges({**self._model, "vocab": self.vocabulary - removed, "merges": pairs})

    def unreachable_without(self, removed: AbstractSet[str]) -> set[str]:
        """Return the other tokens that the merges build now, but not after the tokens `removed` are removed.

        The tokens in `removed` are not in the result. The result is empty for a tokenizer with `ignore_merges`, which
        encodes a word that is a token without merging.
        """
        if self.ignores_merges:
            return set()
        parts: dict[str, AbstractSet[str]] = {}
        lost: set[str] = set()
        while True:
            missing = removed | lost
            texts = {token.removeprefix(self.prefix).removesuffix(self.suffix) or token for token in missing}
            for token in self.vocabulary - removed - parts.keys():
                if not texts.isdisjoint(_substrings(token)):  # a part of a token is a substring of it
                    parts[token] = self.parts_of(token) or frozenset()
            suspects = [token for token, each in parts.items() if token not in lost and not missing.isdisjoint(each)]
            left = self.without(missing) if suspects else self
            more = {token for token in suspects if left.parts_of(token) is None}
            if not more:
                return lost
            lost |= more

    def _letters(self, token: str) -> list[str]:
        """Split a token into the single-letter tokens that merging starts from, in the order of the text.

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
