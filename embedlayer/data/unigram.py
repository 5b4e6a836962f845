"""Training of Unigram tokenizers (SentencePiece's second kind), such that the same text gives the same result.

The trainer of the `tokenizers` library sums its expectations in parallel and in the order of a randomly seeded hash
table, so its scores differ from run to run. This one follows the same recipe over sorted arrays: candidates are the
frequent substrings of words; expectation maximisation gives each its probability; the pieces that the text would miss
least are dropped; and so on until few enough are left.

Reference: Kudo, "Subword Regularization", 2018, and SentencePiece's `unigram_model_trainer.cc`. Different: candidates
are counted in words, not in a suffix array of the text; a piece is dropped by what its uses lose when written in the
best other way, which takes no pass over the text; and probabilities are plain relative frequencies.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

_LONGEST_PIECE = 16
_LONGEST_WORD = 64
_CANDIDATES_PER_PIECE = 20
_KEPT_EACH_ROUND = 0.75
_EM_STEPS = 2
_LEAST_USES = 0.5
_UNKNOWN_PENALTY = 10.0
_IMPOSSIBLE = -1e30

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int32]


def train_pieces(words: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """The `size` best pieces (fewer if there are not so many) with their log probabilities, best first.

    Args:
        words: How often each word occurs.
        size: Pieces wanted. Single characters are kept before all others, the frequent ones first.
    """
    weights: Counter[str] = Counter()
    for word, count in words.items():
        for at in range(0, len(word), _LONGEST_WORD):
            weights[word[at : at + _LONGEST_WORD]] += count
    words = dict(sorted(weights.items()))
    pieces, counts = _candidates(words, size)
    text = _Lattices(list(words), pieces, np.array(list(words.values()), np.float64))
    inside = _Lattices(pieces, pieces, np.ones(len(pieces)))
    letter = np.array([len(piece) == 1 for piece in pieces])
    alive, scores = np.ones(len(pieces), bool), _log_shares(counts)
    while True:
        for _ in range(_EM_STEPS):
            uses = text.expected_uses(scores)
            alive &= letter | (uses >= _LEAST_USES)
            scores = _log_shares(np.where(alive, np.maximum(uses, _LEAST_USES), 0.0))
        number = int(alive.sum())
        if number <= size:
            break
        missed = np.where(letter, np.inf, uses * (scores - inside.best_otherwise(scores)))
        order = np.argsort(np.where(alive, -missed, np.inf), kind="stable")
        alive[order[max(size, int(_KEPT_EACH_ROUND * number)) :]] = False
        scores = np.where(alive, scores, _IMPOSSIBLE)
    best = np.argsort(-scores, kind="stable")[:number]
    # Ten digits survive being written to tokenizer.json and read again; all seventeen do not.
    return [(pieces[i], round(float(scores[i]), 10)) for i in best]


def _candidates(words: Mapping[str, int], size: int) -> tuple[list[str], Floats]:
    letters: Counter[str] = Counter()
    longer: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(len(word)):
            letters[word[start]] += count
            for stop in range(start + 2, min(len(word), start + _LONGEST_PIECE) + 1):
                longer[word[start:stop]] += count
    frequent = sorted(letters, key=lambda piece: (-letters[piece], piece))[:size]
    worth = sorted((piece for piece in longer if longer[piece] > 1), key=lambda p: (-longer[p] * len(p), p))
    kept = worth[: _CANDIDATES_PER_PIECE * size]
    counts = [letters[piece] for piece in frequent] + [longer[piece] for piece in kept]
    return frequent + kept, np.array(counts, np.float64)


def _log_shares(counts: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        shares: Floats = np.log(counts) - np.log(counts.sum())
    return np.maximum(shares, _IMPOSSIBLE)


class _Lattices:
    """All ways to write each string with pieces, strings of one length in one array.

    `ids[n, i, k]` is the piece that covers characters `i` to `i + k` of string `n`; one number past the pieces stands
    for no such piece, the next for an unknown character.
    """

    def __init__(self, strings: Sequence[str], pieces: Sequence[str], weights: Floats) -> None:
        numbers = {piece: number for number, piece in enumerate(pieces)}
        self.num_pieces = len(pieces)
        self.weights = weights
        members: dict[int, list[int]] = {}
        for at, string in enumerate(strings):
            members.setdefault(len(string), []).append(at)
        self.groups = [
            (np.array(rows), self._ids([strings[at] for at in rows], numbers)) for _, rows in sorted(members.items())
        ]

    def _ids(self, strings: Sequence[str], numbers: Mapping[str, int]) -> Numbers:
        length, none, unknown = len(strings[0]), self.num_pieces, self.num_pieces + 1
        ids = np.full((len(strings), length, min(length, _LONGEST_PIECE)), none, np.int32)
        for row, string in enumerate(strings):
            for start in range(length):
                ids[row, start, 0] = numbers.get(string[start], unknown)
                for stop in range(start + 2, min(length, start + _LONGEST_PIECE) + 1):
                    ids[row, start, stop - start - 1] = numbers.get(string[start:stop], none)
        return ids

    def expected_uses(self, scores: Floats) -> Floats:
        """How often each piece is used, over all ways to write the strings by their probabilities."""
        scores = self._padded(scores)
        uses = np.zeros(len(scores))
        for rows, ids in self.groups:
            edges = scores[ids]
            before, after = _forward(edges, np.logaddexp.reduce), _backward(edges)
            for k in range(ids.shape[2]):
                share = before[:, : ids.shape[1] - k] + edges[:, : ids.shape[1] - k, k] + after[:, k + 1 :]
                share = np.exp(share - before[:, -1:]) * self.weights[rows][:, None]
                uses += np.bincount(ids[:, : ids.shape[1] - k, k].ravel(), share.ravel(), len(uses))
        return uses[: self.num_pieces]

    def best_otherwise(self, scores: Floats) -> Floats:
        """Log probability of the best way to write each string with two pieces or more."""
        scores = self._padded(scores)
        best = np.empty(len(self.weights))
        for rows, ids in self.groups:
            edges = scores[ids]
            edges[:, 0, -1] = _IMPOSSIBLE
            best[rows] = _forward(edges, np.max)[:, -1]
        return best

    def _padded(self, scores: Floats) -> Floats:
        possible = scores[scores > _IMPOSSIBLE]
        return np.concatenate([scores, [_IMPOSSIBLE, possible.min() - _UNKNOWN_PENALTY]])


def _forward(edges: Floats, reduce: Callable[..., Floats]) -> Floats:
    """`(n, length + 1)`: log probability of everything up to each place."""
    n, length, longest = edges.shape
    before = np.zeros((n, length + 1))
    for stop in range(1, length + 1):
        ways = [before[:, stop - k - 1] + edges[:, stop - k - 1, k] for k in range(min(stop, longest))]
        before[:, stop] = reduce(np.stack(ways), axis=0)
    return before


def _backward(edges: Floats) -> Floats:
    """`(n, length + 1)`: log probability of everything from each place on."""
    n, length, longest = edges.shape
    after = np.zeros((n, length + 1))
    for start in range(length - 1, -1, -1):
        ways = [edges[:, start, k] + after[:, start + k + 1] for k in range(min(length - start, longest))]
        after[:, start] = np.logaddexp.reduce(np.stack(ways), axis=0)
    return after
