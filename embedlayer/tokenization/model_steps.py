"""How the models of tokenizers split a pre-token: BPE, WordPiece, Unigram and whole words, step by step.

The `tokenizers` library returns the tokens of a pre-token, not how they came about. These are plain definitions of its
models, which also record what was tried. Their IDs are the library's.
"""

import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from embedlayer.core.errors import TokenizerError

UNKNOWN_PENALTY = 10.0
"""The score of an unknown character is by so much below the lowest score of a Unigram vocabulary, in nats."""

_NO_MERGE = sys.maxsize  # in place of the rank of a pair that is not in the list of merges


@dataclass(frozen=True)
class Merge:
    """One merge of byte-pair encoding."""

    index: int  # place of the left symbol among the symbols before this merge
    rank: int  # place of the pair in the list of merges: the lowest of all adjacent pairs is merged first
    result: str  # the symbol that replaces the pair


class BpeTrace(NamedTuple):
    """How byte-pair encoding splits a pre-token; symbols are as they are written in the vocabulary."""

    ids: tuple[int, ...]
    symbols: tuple[str, ...]  # before the first merge
    merges: tuple[Merge, ...]
    pairs: Mapping[tuple[str, str], int]  # rank of each pair that was adjacent at some moment
    is_whole: bool  # the pre-token is an entry, so nothing is merged (`ignore_merges`)


class LookUp(NamedTuple):
    """One look-up of WordPiece: the entry for characters `start:stop` of the pre-token, and its ID, if it has one."""

    start: int
    stop: int
    entry: str
    id: int | None


class WordPieceTrace(NamedTuple):
    """How WordPiece splits a pre-token."""

    ids: tuple[int, ...]
    tries: tuple[LookUp, ...]
    is_too_long: bool  # it has more characters than are read, so nothing was looked up


class ScoredPart(NamedTuple):
    """A part of a pre-token with its score, a log-probability, and the IDs of its tokens."""

    text: str
    score: float
    ids: tuple[int, ...]


class UnigramPath(NamedTuple):
    """One segmentation of a pre-token; its score is the sum of those of the parts."""

    parts: tuple[ScoredPart, ...]
    score: float


class UnigramTrace(NamedTuple):
    """How a Unigram model splits a pre-token."""

    ids: tuple[int, ...]
    paths: tuple[UnigramPath, ...]  # the best segmentation, then the best of all others if there is one


class WholeTrace(NamedTuple):
    """A pre-token that is looked up whole."""

    ids: tuple[int, ...]
    is_known: bool


ModelTrace = BpeTrace | WordPieceTrace | UnigramTrace | WholeTrace


class BpeModel:
    """Byte-pair encoding: merge the leftmost adjacent pair of lowest rank until none is left."""

    def __init__(self, content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
        if content["dropout"]:
            raise TokenizerError(
                f"This tokenizer leaves out merges by chance (dropout {content['dropout']}): set model.dropout to None."
            )
        self.vocabulary = vocabulary
        self.prefix: str = content["continuing_subword_prefix"] or ""
        self.suffix: str = content["end_of_word_suffix"] or ""
        self.unknown: list[str] = [name for name in [content["unk_token"]] if name in vocabulary]
        self.fuses_unknown: bool = content["fuse_unk"]
        self.falls_back_to_bytes: bool = content["byte_fallback"]
        self.ignores_merges: bool = content["ignore_merges"]
        self.ranks = {(left, right): rank for rank, (left, right) in enumerate(content["merges"])}
        for pair in self.ranks:
            if (result := merged(pair, self.prefix)) not in vocabulary:
                raise TokenizerError(f"The merge of {pair[0]!r} and {pair[1]!r} has no entry {result!r}.")

    def trace(self, pre_token: str) -> BpeTrace:
        """Return how the model splits a pre-token; the time grows with the square of its length."""
        if self.ignores_merges and pre_token in self.vocabulary:
            return BpeTrace((self.vocabulary[pre_token],), (pre_token,), (), {}, is_whole=True)
        symbols = self._first_symbols(pre_token)
        first, merges = tuple(symbols), []
        adjacent = [*pairwise(symbols)]
        for merge in merges_of(symbols, self.ranks, self.prefix):
            merges.append(merge)
            adjacent += pairwise(symbols[max(merge.index - 1, 0) : merge.index + 2])
        pairs = {pair: self.ranks[pair] for pair in adjacent if pair in self.ranks}
        ids = tuple(self.vocabulary[symbol] for symbol in symbols)
        return BpeTrace(ids, first, tuple(merges), pairs, is_whole=False)

    def _first_symbols(self, pre_token: str) -> list[str]:
        """Return the symbols before the first merge.

        They are the entry of each character, or else the entries of its bytes, the unknown token, or nothing.
        """
        symbols: list[str] = []
        is_unknown = False  # whether an unknown token is to come before the next known character
        for place, character in enumerate(pre_token):
            entry = self.prefix * (place > 0) + character + self.suffix * (place == len(pre_token) - 1)
            of_bytes = byte_entries(entry, self.vocabulary) if self.falls_back_to_bytes else None
            if entry in self.vocabulary:
                symbols += [*self.unknown * is_unknown, entry]
                is_unknown = False
            elif of_bytes is not None:
                symbols += of_bytes
            else:
                symbols += self.unknown * (is_unknown and not self.fuses_unknown)
                is_unknown = True
        return symbols + self.unknown * is_unknown


def merges_of(symbols: list[str], ranks: Mapping[tuple[str, str], int], prefix: str = "") -> Iterator[Merge]:
    """Merge adjacent symbols in place until no pair has a rank, and yield each merge after it is done."""
    of_pairs = [ranks.get(pair, _NO_MERGE) for pair in pairwise(symbols)]
    while (rank := min(of_pairs, default=_NO_MERGE)) < _NO_MERGE:
        index = of_pairs.index(rank)
        result = merged((symbols[index], symbols[index + 1]), prefix)
        symbols[index : index + 2] = [result]
        del of_pairs[index]
        for left in (index - 1, index):
            if 0 <= left < len(of_pairs):
                of_pairs[left] = ranks.get((symbols[left], symbols[left + 1]), _NO_MERGE)
        yield Merge(index, rank, result)


def merged(pair: tuple[str, str], prefix: str) -> str:
    """Return the symbol that replaces a pair: the left one, then the right one without the bytes of the prefix."""
    left, right = pair
    return left + right.encode()[len(prefix.encode()) :].decode() if prefix else left + right


class WordPieceModel:
    """WordPiece: the longest entry that fits, from the start on; without one the pre-token is unknown."""

    def __init__(self, content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
        self.vocabulary = vocabulary
        self.prefix: str = content["continuing_subword_prefix"]
        self.unknown = tuple(vocabulary[name] for name in [content["unk_token"]] if name in vocabulary)
        self.max_chars: int = content["max_input_chars_per_word"]

    def trace(self, pre_token: str) -> WordPieceTrace:
        if len(pre_token) > self.max_chars:
            return WordPieceTrace(self.unknown, (), is_too_long=True)
        ids: list[int] = []
        tries: list[LookUp] = []
        start = 0
        while start < len(pre_token):
            for stop in range(len(pre_token), start, -1):
                entry = self.prefix * (start > 0) + pre_token[start:stop]
                tries.append(LookUp(start, stop, entry, self.vocabulary.get(entry)))
                if entry in self.vocabulary:
                    ids.append(self.vocabulary[entry])
                    start = stop
                    break
            else:
                return WordPieceTrace(self.unknown, tuple(tries), is_too_long=False)
        return WordPieceTrace(tuple(ids), tuple(tries), is_too_long=False)


class UnigramModel:
    """Unigram: of all segmentations into entries, the one whose log-probabilities have the largest sum (Viterbi).

    A character that is no entry scores `UNKNOWN_PENALTY` below the lowest score. Of segmentations with equal sums up to
    a place, the one whose last entry is longest wins.
    """

    def __init__(self, content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
        entries: Sequence[tuple[str, float]] = content["vocab"]
        self.ids = {entry: token_id for token_id, (entry, _) in enumerate(entries)}
        self.scores: dict[str, float] = dict(entries)
        self.longest = max(map(len, self.scores), default=0)
        self.unknown: int | None = content["unk_id"]
        self.unknown_score = min((score for _, score in entries), default=0.0) - UNKNOWN_PENALTY
        self.falls_back_to_bytes: bool = content["byte_fallback"]

    def trace(self, pre_token: str) -> UnigramTrace:
        # The two best paths to each place: score, start of the last part, and which of the two paths to there.
        best: list[list[tuple[float, int, int]]] = [[(0.0, 0, 0)], *([] for _ in pre_token)]
        for start in range(len(pre_token)):
            stops = range(start + 1, min(start + self.longest, len(pre_token)) + 1)
            texts = {stop: pre_token[start:stop] for stop in stops}
            scores = {stop: self.scores[text] for stop, text in texts.items() if text in self.scores}
            scores.setdefault(start + 1, self.unknown_score)
            for stop, score in scores.items():
                reached = [(score + before, start, which) for which, (before, _, _) in enumerate(best[start])]
                best[stop] = sorted(best[stop] + reached, key=lambda path: -path[0])[:2]  # earlier ones first
        paths = tuple(self._path(pre_token, best, which) for which in range(len(best[-1]))) if pre_token else ()
        return UnigramTrace(tuple(i for path in paths[:1] for part in path.parts for i in part.ids), paths)

    def _path(self, pre_token: str, best: Sequence[Sequence[tuple[float, int, int]]], which: int) -> UnigramPath:
        """Return the best or second-best path to the end of a pre-token; unknown characters in a row are one part."""
        stop, total = len(pre_token), best[-1][which][0]
        parts: list[tuple[str, float, bool]] = []  # from the last one on: text, score, whether it is unknown
        while stop > 0:
            _, start, which = best[stop][which]
            text = pre_token[start:stop]
            is_unknown = self.ids.get(text, self.unknown) == self.unknown
            score = self.scores.get(text, self.unknown_score)
            if is_unknown and parts and parts[-1][2]:
                later, later_score, _ = parts.pop()
                text, score = text + later, score + later_score
            parts.append((text, score, is_unknown))
            stop = start
        return UnigramPath(tuple(ScoredPart(text, score, self._ids(text)) for text, score, _ in reversed(parts)), total)

    def _ids(self, text: str) -> tuple[int, ...]:
        """Return the IDs of a part: its own, else those of its bytes, else that of the unknown token."""
        if text in self.ids:
            return (self.ids[text],)
        of_bytes = byte_entries(text, self.ids) if self.falls_back_to_bytes else None
        if of_bytes is not None:
            return tuple(self.ids[entry] for entry in of_bytes)
        return () if self.unknown is None else (self.unknown,)


class WordLevelModel:
    """Whole words: the entry that is the pre-token, or the unknown token."""

    def __init__(self, content: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
        self.vocabulary = vocabulary
        self.unknown = tuple(vocabulary[name] for name in [content["unk_token"]] if name in vocabulary)

    def trace(self, pre_token: str) -> WholeTrace:
        is_known = pre_token in self.vocabulary
        return WholeTrace((self.vocabulary[pre_token],) if is_known else self.unknown, is_known)


TracedModel = BpeModel | WordPieceModel | UnigramModel | WordLevelModel
MODELS: dict[str, type[TracedModel]] = {
    "BPE": BpeModel,
    "WordPiece": WordPieceModel,
    "Unigram": UnigramModel,
    "WordLevel": WordLevelModel,
}


def byte_entries(text: str, vocabulary: Container[str]) -> list[str] | None:
    """Return the entries of a text's bytes, such as `<0xE2>`; `None` if one is missing."""
    entries = [f"<0x{byte:02X}>" for byte in text.encode()]
    return entries if all(entry in vocabulary for entry in entries) else None


def traced_model(tokenizer: Tokenizer) -> TracedModel:
    """Return the plain definition of a tokenizer's model."""
    content = json.loads(tokenizer.model.__getstate__())
    if content["type"] not in MODELS:
        raise TokenizerError(f"A {content['type']} model is not traced; {', '.join(MODELS)} are.")
    if getattr(tokenizer.model, "alpha", None) is not None:
        raise TokenizerError(f"alpha {tokenizer.model.alpha} draws segmentations by chance: set model.alpha to None.")
    return MODELS[content["type"]](content, tokenizer.get_vocab(with_added_tokens=False))
