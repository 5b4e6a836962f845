"""Examples of the page: tokens that most people know, sums that the table answers, and texts for the view Pipeline."""

import re
from itertools import islice

import torch
from tokenizers import Tokenizer

from embedlayer.analysis.nearest import nearest_rows
from embedlayer.data.mixture import corpora_of
from embedlayer.explorer.answers import AnsweredSum, Examples
from embedlayer.explorer.text_ids import NamedRows, vocabulary_of
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.explorer.tokens import Params, nameless, sum_of_rows
from embedlayer.io.files import recover_folder
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.tokenization.tokenizer_calls import decode, encode

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
    return source.once("examples", lambda: _found(source))


def _found(source: OpenedModel) -> Examples:
    ids = _ids_by_word(source)
    everyday = [ids[word] for word in EVERYDAY_WORDS if word in ids]
    is_everyday = len(everyday) >= FEWEST_EVERYDAY
    code = [ids[word] for word in CODE_WORDS if word in ids]
    words = everyday if is_everyday else code + everyday
    sums = _answered(source, ids, EVERYDAY_SUMS if is_everyday else CODE_SUMS)
    return {"words": words[:MOST_WORDS], "is_everyday": is_everyday, "sums": sums}


def _ids_by_word(source: OpenedModel) -> dict[str, int]:
    """Return the row of each word of the examples that is one token of the source."""
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
    """Return those sums, at most `MOST_SUMS`, whose answer is the nearest row by more than `MARGIN`."""
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


TEXTS = (
    "I love dogs and dogs love me.",
    "The cat sat on the mat.",
    "To be, or not to be, that is the question.",
    "A naïve café ☕ in Zürich",
    "for i in range(10): print(i)",
)
"""Texts for every source; the last two show how a tokenizer splits rare words, accents, emoji and code."""

OWN = 3  # number of sentences from a run's own text
EXAMPLE_NAMES = 4  # number of names in the example of a table of which no other is known
READ_IDS = 200_000  # sentences are searched in so many tokens from the start of the text

_SENTENCE = re.compile(r"(?<=[.!?] )[A-Z][^.!?:;()\[\]'\"“”]{15,60}[.!?](?= )")
_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
SHORTEST_REPEATED = 4  # letters of a word that counts as repeated


def example_texts(source: OpenedModel) -> list[str]:
    """Return short texts that a source can read."""
    vocabulary = vocabulary_of(source)
    if isinstance(vocabulary, Tokenizer):
        fixed = [text for text in TEXTS if encode(vocabulary, text).ids]
        own = source.once("sentences of its text", lambda: _own_sentences(source, vocabulary))
        return [*own, *fixed]
    if vocabulary is not None:
        plain = [text.strip(".") for text in (*TEXTS[:2], *TINY_TEXTS)]
        different = {text.casefold(): text for text in reversed(plain)}
        known = [text for text in reversed(different.values()) if _is_known(vocabulary, text)]
        names = (name for name in vocabulary.names if name.isprintable() and _is_known(vocabulary, name))
        first = [name.strip() for name in islice(names, EXAMPLE_NAMES)]
        if known or first:
            return known or [" ".join([*first, first[0]])]
    last = source.table.vocab_size - 1
    return [f"#0 #{min(1, last)} #{last} #{min(1, last)}"]


def _is_known(vocabulary: NamedRows, text: str) -> bool:
    ids, unknown = vocabulary.ids(text)
    return ids != [] and unknown == []


def _own_sentences(source: OpenedModel, tokenizer: Tokenizer) -> list[str]:
    """Return up to `OWN` sentences of the run's text, or of the first of a mixture, of which each word is one token."""
    if source.run is None or not recover_folder(source.run.corpus).exists():
        return []
    ids = corpora_of(source.run.open_corpus())[0].ids[:READ_IDS]
    text = " ".join(decode(tokenizer, ids.tolist()).split())
    sentences = [
        sentence
        for sentence in dict.fromkeys(_SENTENCE.findall(text))
        if len(encode(tokenizer, sentence).ids) == len(_WORD_OR_MARK.findall(sentence))
    ]
    return sorted(sentences, key=lambda sentence: not _repeats_a_word(sentence))[:OWN]


def _repeats_a_word(sentence: str) -> bool:
    """Return whether a word of at least `SHORTEST_REPEATED` letters occurs twice, in the same spelling."""
    words = [word for word in re.findall(r"\w+", sentence) if len(word) >= SHORTEST_REPEATED]
    return len(set(words)) < len(words)
