"""Building a `TokenCorpus` from 200 MB of text: time and peak memory, by one process and by several.

The text is the Python language reference (`pydoc_data.topics`), repeated.
"""

import os
import shutil
import tempfile
from pathlib import Path

from benchmarks.harness import Case, Row, run_apart

MEGABYTES = 200
WORKERS = {"bpe": (2, 4, 8), "unigram": ()}
BUILD = """
import resource, sys, time
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.sharded_build import build_in_shards
from embedlayer.data.tokenizer import load_tokenizer
from benchmarks.harness import tell

text, tokenizer, corpus, workers = sys.argv[1:]
start = time.perf_counter()
if int(workers):
    loaded = load_tokenizer(tokenizer)
    built = build_in_shards([text], loaded, corpus, shards=2 * int(workers), workers=int(workers))
else:
    built = TokenCorpus.build([text], load_tokenizer(tokenizer), corpus)
tell(
    time_ms=round(1000 * (time.perf_counter() - start), 1),
    tokens=built.num_tokens,
    bytes=built.num_bytes,
    peak_of_a_worker_mib=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
)
"""


def run() -> list[Row]:
    from pydoc_data.topics import topics

    from embedlayer.data.tokenizer import save_tokenizer, train_tokenizer

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
            for workers in (0, *(number for number in WORKERS[kind] if number <= (os.cpu_count() or 1))):
                corpus = Path(folder) / f"{kind}-{workers}"
                told = run_apart(BUILD, str(text), str(tokenizer), str(corpus), str(workers))
                shutil.rmtree(corpus)
                rate = float(told["bytes"]) / float(told["time_ms"]) / 1000
                competitor = f"in shards, {workers} workers" if workers else "embedlayer"
                rows.append(
                    {"competitor": competitor, "kind": kind, **told, "mb_per_s": round(rate, 2), "dtype": "uint16"}
                )
    return rows


CASE = Case(f"Building a corpus of {MEGABYTES} MB of text", run)
