"""Print the words of a text that a tokenizer encodes with many subwords, as terms for `embedlayer vocab add --terms`.

    python examples/domain_terms.py out/demo > terms.txt

prints the 200 most frequent such words in the sources of Python's asyncio; `--text FOLDER` reads another text. Without
a run the tokenizer has one token per byte.
"""

import argparse
import asyncio
import re
from collections import Counter
from pathlib import Path

import embedlayer as el
from embedlayer.tokenization import TokenBytes


def domain_terms(text: str, tokenizer: object, count: int, *, subwords: int = 3) -> list[str]:
    """Return the `count` most frequent words of four letters or more that are `subwords` tokens or more."""
    words = [word for word, _ in Counter(re.findall(r"(?<= )[A-Za-z_]{4,}\b", text)).most_common(40 * count)]
    tokens = TokenBytes(tokenizer)
    return [word for word in words if len(tokens.encode(f" {word}".encode())) >= subwords][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a model's folder")
    parser.add_argument("--text", type=Path, default=Path(asyncio.__file__).parent, help="a folder of Python files")
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    tokenizer = el.train_tokenizer((), "byte") if options.run is None else el.load_tokenizer(options.run)
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(options.text.glob("*.py")))
    print(*domain_terms(text, tokenizer, options.count), sep="\n")


if __name__ == "__main__":
    main()
