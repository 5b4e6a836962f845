"""Example texts of the view Pipeline: sentences of a run's own text whose words are tokens, then fixed texts."""

import re
from itertools import islice

from tokenizers import Tokenizer

from embedlayer.data.mixture import corpora_of
from embedlayer.explorer.text_ids import NamedRows, vocabulary_of
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.io.files import recover_folder
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.tokenization.tokenizer_calls import decode, encode

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
    """Return short texts that a source can read.

    With a tokenizer, first are up to `OWN` sentences of a run's text whose words and punctuation marks are one token
    each. Sentences in which a word occurs twice come before others, so that one token can be compared at two positions.
    `TEXTS` follow.
    With names of rows, they are the texts of which all words are known; if none is, the first names. Otherwise the
    result is one text that lists IDs.
    """
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
    """Return whether a text has words and each is the name of a row."""
    ids, unknown = vocabulary.ids(text)
    return ids != [] and unknown == []


def _own_sentences(source: OpenedModel, tokenizer: Tokenizer) -> list[str]:
    """Return up to `OWN` sentences of the run's text, or of the first of a mixture, of which each word is one token.

    There are none without a run, or if its corpus is missing.
    """
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
