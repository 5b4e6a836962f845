"""Measure how many bytes a token encodes before and after tokens are added to a tokenizer or removed from it.

    python examples/suggested_tokens.py --data ../shared/data --write docs/vocabulary.md

adds 500 tokens to GPT-2's tokenizer for three texts: the sources of Python's asyncio, Shakespeare, and Wikipedia. Nine
tenths of each text choose the tokens, and the table shows the bytes per token of the other tenth. Without `--data` the
tokenizer is one that is trained on the Python language reference, and the text is asyncio's. If the package
`bpe-continue` is installed, its result is shown too.
"""

import argparse
import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tables import markdown_table, write_between_markers
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.data.text_chunks import split_text
from embedlayer.tokenization import TokenBytes
from embedlayer.vocab import AddedMerge, edit_tokenizer, suggest_removals, suggest_tokens


def parts(text: str, tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """Return the text to choose tokens by, and every tenth chunk of the text to measure on."""
    chunks = list(split_text([text], tokenizer))
    return "".join(chunk for i, chunk in enumerate(chunks) if i % 10 != 9), chunks[9::10]


def bytes_per_token(tokenizer: Tokenizer, chunks: list[str]) -> float:
    encodings = tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
    return sum(len(chunk.encode()) for chunk in chunks) / sum(len(encoding.ids) for encoding in encodings)


def frequent_words(text: str, tokenizer: Tokenizer, count: int, *, by_saving: bool) -> list[str]:
    """Return the most frequent words that are several tokens, or those that would save the most tokens."""
    words = Counter(re.findall(r" \w+", text))
    tokens = TokenBytes(tokenizer)
    saved = {word: len(tokens.encode(word.encode())) - 1 for word in words}
    several = [word for word in words if saved[word]]
    return sorted(several, key=lambda word: (-words[word] * (saved[word] if by_saving else 1), word))[:count]


def text_of(tokens: tuple[str | AddedMerge, ...], tokenizer: Tokenizer) -> list[str]:
    """Return the texts of merges that are whole characters, to add them as tokens that are found anywhere."""
    readings = el.vocab.edit_tokenizer(tokenizer, add=tokens).tokenizer
    decoded = [readings.decode([readings.get_vocab_size() - len(tokens) + i]) for i in range(len(tokens))]
    return list(dict.fromkeys(text for text in decoded if "\ufffd" not in text))


def continued(tokenizer: Tokenizer, text: str, count: int) -> Tokenizer | None:
    """Return the result of the package bpe-continue, or `None` if it is not installed."""
    try:
        from bpe_continue import continue_training
    except ImportError:
        return None
    size = tokenizer.get_vocab_size() + count
    return Tokenizer.from_str(continue_training(tokenizer, texts=[text], vocab_size=size, show_progress=False).to_str())


def rows(tokenizer: Tokenizer, text: str, count: int) -> dict[str, str]:
    """Return the bytes per token of each way to choose tokens."""
    training, held_out = parts(text, tokenizer)
    found: dict[str, str] = {}

    def measure(name: str, build: Callable[[], Tokenizer | None]) -> None:
        begun = time.perf_counter()
        edited = build()
        if edited is not None:
            found[name] = f"{bytes_per_token(edited, held_out):.3f}"
            print(f"{name}: {found[name]}, {time.perf_counter() - begun:.1f} s", flush=True)

    def added(tokens: object) -> Tokenizer:
        return edit_tokenizer(tokenizer, add=tokens).tokenizer

    def removed(number: int, from_: Tokenizer) -> Tokenizer:
        leaves = suggest_removals(from_, training, count=number, held_out=held_out).tokens
        return edit_tokenizer(from_, remove=leaves).tokenizer

    suggested = suggest_tokens(tokenizer, training, count=count, held_out=held_out).tokens
    measure("the tokenizer as it is", lambda: tokenizer)
    measure(
        f"{count} most frequent words of several tokens",
        lambda: added(frequent_words(training, tokenizer, count, by_saving=False)),
    )
    measure(
        f"{count} words that save the most tokens",
        lambda: added(frequent_words(training, tokenizer, count, by_saving=True)),
    )
    measure(f"{count} suggested tokens, added as texts instead", lambda: added(text_of(suggested, tokenizer)))
    measure(
        f"{count} suggested tokens, added as merges",
        lambda: added(suggest_tokens(tokenizer, training, count=count, held_out=held_out).tokens),
    )
    measure(f"{count} tokens of bpe-continue", lambda: continued(tokenizer, training, count))
    size = tokenizer.get_vocab_size()
    for share in (0.01, 0.1, 0.3):
        number = round(share * size)
        measure(f"{number:,} tokens removed with `--prune`", lambda number=number: removed(number, tokenizer))
    measure(f"{count} suggested tokens, {count} others removed", lambda: removed(count, added(suggested)))
    return found


def main(data: Path | None, count: int, page: Path | None) -> None:
    sources = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    texts = {"asyncio": "".join(file.read_text(encoding="utf-8") for file in sources)}
    if data is None:
        tokenizer = el.train_tokenizer(carried_text(), vocab_size=4096)
    else:
        tokenizer = el.load_tokenizer(data / "tokenizers" / "gpt2-encoder.json")
        files = {"Shakespeare": "tinyshakespeare.txt", "Wikipedia": "enwiki-plain.txt"}
        texts |= {name: (data / "text" / file).read_text(encoding="utf-8") for name, file in files.items()}
    columns = {name: rows(tokenizer, text, count) for name, text in texts.items()}
    names = next(iter(columns.values()))
    table = [{"tokenizer": name} | {text: column[name] for text, column in columns.items()} for name in names]
    result = markdown_table(table)
    print(result)
    if page is not None:
        write_between_markers(page, "suggested-tokens", result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with tokenizers/ and text/")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    main(arguments.data, arguments.count, arguments.write)
