"""Building a corpus: its speed beside that of `tokenizers` alone, which encodes equal pieces of the text on all cores.

The text is the Python standard library's source, repeated. The peer cuts it into pieces of equal length, wherever that
is, passes many of them at a time to `encode_batch_fast`, and writes the IDs to one file. Its IDs near the cuts are not
those of the whole text; ours are. `embedlayer, 1 shard` is `embedlayer corpus build` without options.

The competitors run in turns, each in a process of its own. `of_raw` is the peer's time over ours in the same turn, and
`of_raw_cpu` the same of CPU seconds, which are steadier on a busy machine: the median over the turns.
"""

import shutil
import sysconfig
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.harness import Case, Row, run_apart, spread

MEGABYTES = 24
TURNS = 3
TRAINED_ON = 4_000_000
KINDS = {"bpe": 32_000, "unigram": 8_000}
"""Kinds of tokenizers, and their numbers of tokens."""

RAW = "tokenizers alone"
CODE = """
import os, resource, sys, time
import numpy as np
from tokenizers import Tokenizer
from benchmarks.harness import tell
from embedlayer.data.sharded_build import build_in_shards

PIECE, AT_ONCE = 1 << 16, 64

def encode_pieces(text, tokenizer, target):
    with open(text, encoding="utf-8", newline="") as file, open(target, "wb") as ids:
        while characters := file.read(PIECE * AT_ONCE):
            pieces = [characters[at : at + PIECE] for at in range(0, len(characters), PIECE)]
            for encoding in tokenizer.encode_batch_fast(pieces, add_special_tokens=False):
                ids.write(np.array(encoding.ids, dtype="<u2").tobytes())
    return os.path.getsize(target) // 2

if __name__ == "__main__":
    text, tokenizer_file, target, shards = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_file)
    before = os.times()
    if int(shards):
        tokens = build_in_shards([text], tokenizer, target, shards=int(shards)).num_tokens
    else:
        tokens = encode_pieces(text, tokenizer, target)
    after = os.times()
    tell(
        time_ms=round(1000 * (after.elapsed - before.elapsed), 1),
        cpu_s=round(sum(after[:4]) - sum(before[:4]), 2),
        tokens=tokens,
        bytes=os.path.getsize(text),
        peak_of_a_worker_mib=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
    )
"""


def run() -> list[Row]:
    from embedlayer.data.process_pool import usable_cores

    shards = 2 * usable_cores()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        _write_text(text)
        for kind, vocab_size in KINDS.items():
            tokenizer = _trained(text, kind, vocab_size, folder)
            competitors = {RAW: 0, "embedlayer, 1 shard": 1}
            if kind == "bpe":
                competitors[f"embedlayer, {shards} shards"] = shards
            told: dict[str, list[Row]] = {competitor: [] for competitor in competitors}
            for _ in range(TURNS):
                for competitor, number in competitors.items():
                    target = folder / "target"
                    told[competitor].append(run_apart(CODE, str(text), str(tokenizer), str(target), str(number)))
                    shutil.rmtree(target) if target.is_dir() else target.unlink()
            rows += [_row(competitor, told[competitor], told[RAW], kind) for competitor in competitors]
    return rows


def _write_text(path: Path) -> None:
    """Write `MEGABYTES` of Python source."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    library = "".join(source.read_text(encoding="utf-8") for source in sources)
    with path.open("w", encoding="utf-8", newline="") as file:
        for _ in range(MEGABYTES * 1_000_000 // len(library.encode()) + 1):
            file.write(library)


def _trained(text: Path, kind: str, vocab_size: int, folder: Path) -> Path:
    """Train a tokenizer on the start of the text, and return its file."""
    from embedlayer.tokenization.read import save_tokenizer
    from embedlayer.tokenization.train import train_tokenizer

    with text.open(encoding="utf-8", newline="") as file:
        tokenizer = train_tokenizer(file.read(TRAINED_ON), kind, vocab_size=vocab_size)  # type: ignore[arg-type]
    save_tokenizer(tokenizer, folder / f"{kind}.json")
    return folder / f"{kind}.json"


def _row(competitor: str, told: list[Row], raw: list[Row], kind: str) -> Row:
    """Return the row of one competitor from what its processes told, and those of the peer in the same turns."""

    def ratio(fact: str) -> float:
        return round(median(float(peer[fact]) / float(own[fact]) for own, peer in zip(told, raw, strict=True)), 3)

    times = spread([float(one["time_ms"]) for one in told])
    return {
        "competitor": competitor,
        "kind": kind,
        **times,
        "cpu_s": median(float(one["cpu_s"]) for one in told),
        "tokens": told[0]["tokens"],
        "bytes": told[0]["bytes"],
        "mb_per_s": round(float(told[0]["bytes"]) / float(times["time_ms"]) / 1000, 2),
        "of_raw": ratio("time_ms"),
        "of_raw_cpu": ratio("cpu_s"),
        "peak_mib": max(float(one["peak_mib"]) for one in told),
        "peak_of_a_worker_mib": max(float(one["peak_of_a_worker_mib"]) for one in told),
        "dtype": "uint16",
    }


CASE = Case(f"Building a corpus of {MEGABYTES} MB of text", run)
