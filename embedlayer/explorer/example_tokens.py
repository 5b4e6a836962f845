"""Examples for the first screens of the page: tokens that most people know, and sums that the table answers."""

import torch

from embedlayer.analysis.nearest import nearest_rows
from embedlayer.explorer.answers import AnsweredSum, Examples
from embedlayer.explorer.tokens import Params, nameless, sum_of_rows
from embedlayer.opening.opened_model import OpenedModel

# fmt: off
EVERYDAY_WORDS = [
    "cat", "piano", "red", "king", "mother", "summer", "paris", "doctor", "river", "bread", "dog", "queen", "green",
    "guitar", "father", "winter", "london", "teacher", "mountain", "water", "horse", "blue", "friday", "germany",
    "school", "house", "music", "happy", "japan", "garden", "brother", "sister", "seven", "window", "kitchen", "flower",
    "january", "football", "coffee", "train",
]
CODE_WORDS = [
    "class", "function", "list", "string", "error", "number", "file", "module", "method", "loop", "integer",
    "dictionary",
]
# fmt: on

EVERYDAY_SUMS = [
    ("king", "man", "woman", "queen"),
    ("paris", "france", "germany", "berlin"),
    ("walking", "walk", "run", "running"),
    ("husband", "man", "woman", "wife"),
    ("japanese", "japan", "china", "chinese"),
    ("cars", "car", "book", "books"),
]
CODE_SUMS = [
    ("lists", "list", "string", "strings"),
    ("classes", "class", "method", "methods"),
    ("values", "value", "type", "types"),
    ("functions", "function", "module", "modules"),
    ("returns", "return", "raise", "raises"),
]
"""Sums `a - b + c`, each with the token that must be the nearest."""

MOST_WORDS, MOST_SUMS = 10, 3

MARGIN = 0.02
"""An exported page, whose rows have 8 bits, computes cosines within about 0.01: its nearest row must be the same."""

FEWEST_EVERYDAY = 8  # a table with fewer of `EVERYDAY_WORDS` is about something else, such as code


def examples(source: OpenedModel, params: Params) -> Examples:
    """Return examples of a source; all are tokens of it."""
    return source.once("examples", lambda: _found(source))


def _found(source: OpenedModel) -> Examples:
    """Compute what `examples` returns."""
    ids = _ids_by_word(source)
    everyday = [ids[word] for word in EVERYDAY_WORDS if word in ids]
    is_everyday = len(everyday) >= FEWEST_EVERYDAY
    code = [ids[word] for word in CODE_WORDS if word in ids]
    words = everyday if is_everyday else code + everyday
    sums = _answered(source, ids, EVERYDAY_SUMS if is_everyday else CODE_SUMS)
    return {"words": words[:MOST_WORDS], "is_everyday": is_everyday, "sums": sums}


def _ids_by_word(source: OpenedModel) -> dict[str, int]:
    """Return the row of each word of the examples that is one token of the source.

    If tokens at the start of a word begin with a space, a token without it is a part of words, and does not count. A
    row that is zero or has NaN does not count either.
    """
    texts = source.token_texts
    starts = " " if any(text[:1] == " " and text[1:].isalpha() for text in texts) else ""
    sums = [word for terms in EVERYDAY_SUMS + CODE_SUMS for word in terms]
    wanted = {starts + word: word for word in (*EVERYDAY_WORDS, *CODE_WORDS, *sums)}
    rows: dict[str, int] = {}
    for row, text in enumerate(texts):
        if text in wanted:
            rows.setdefault(wanted[text], row)
    norms = source.rows[list(rows.values())].float().norm(dim=1).tolist()
    return {word: row for (word, row), norm in zip(rows.items(), norms, strict=True) if 0 < norm < float("inf")}


def _answered(source: OpenedModel, ids: dict[str, int], sums: list[tuple[str, str, str, str]]) -> list[AnsweredSum]:
    """Return those sums, at most `MOST_SUMS`, whose answer is the nearest row by more than `MARGIN`.

    The nearest rows are those of `neighbors`, of all sums at once.
    """
    known = [[ids[word] for word in terms] for terms in sums if all(word in ids for word in terms)]
    if not known:
        return []
    queries = torch.cat([sum_of_rows(source, [a, c], [b]) for a, b, c, _ in known])
    terms = torch.tensor(known)[:, :3]
    near = nearest_rows(source.rows, queries, 2, candidates=~nameless(source), exclude=terms)
    return [
        AnsweredSum(plus=[a, c], minus=[b], answer=answer)
        for (a, b, c, answer), nearest, cosines in zip(known, near.ids.tolist(), near.cosines.tolist(), strict=True)
        if nearest[0] == answer and cosines[0] > cosines[-1] + MARGIN
    ][:MOST_SUMS]
