"""Building a `TokenCorpus` from 200 MB of text: time and peak memory, in a process of its own.

The text is the Python language reference (`pydoc_data.topics`), repeated.
"""

import tempfile
from pathlib import Path

from benchmarks.harness import Case, Row, run_apart

MEGABYTES = 200
BUILD = """
import sys, time
from embedlayer.text.corpus import TokenCorpus
from embedlayer.text.tokenizer import load_tokenizer
from benchmarks.harness import tell

text, tokenizer, corpus = sys.argv[1:]
start = time.perf_counter()
built = TokenCorpus.build([text], load_tokenizer(tokenizer), corpus)
tell(time_ms=round(1000 * (time.perf_counter() - start), 1), tokens=built.num_tokens, bytes=built.num_bytes)
"""


def run() -> list[Row]:
    from pydoc_data.topics import topics

    from embedlayer.text.tokenizer import save_tokenizer, train_tokenizer

    reference = "\n".join(topics[name] for name in sorted(topics))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        with text.open("w", encoding="utf-8", newline="") as file:
            for _ in range(MEGABYTES * 1_000_000 // len(reference.encode()) + 1):
                file.write(reference)
        for kind in ("bpe", "unigram"):
            tokenizer = Path(folder) / f"{kind}.json"
            save_tokenizer(train_tokenizer(reference, kind), tokenizer)
            told = run_apart(BUILD, str(text), str(tokenizer), str(Path(folder) / kind))
            rate = float(told["bytes"]) / float(told["time_ms"]) / 1000
            rows.append(
                {"competitor": "embedlayer", "kind": kind, **told, "mb_per_s": round(rate, 2), "dtype": "uint16"}
            )
    return rows


CASE = Case(f"Building a corpus of {MEGABYTES} MB of text", run)
