"""Building a corpus of rows: speed and memory beside plain text, and beside `datasets` with `tokenizers`.

The rows are 1,000 characters each of the Python standard library's source, repeated, as JSON lines, Parquet and an
Arrow stream; `text` is the same characters in one text file. The peer, `datasets`, loads the JSON lines, encodes them
by `map(batched=True)` in one process, with the threads of `tokenizers`, and writes its Arrow files.

The competitors run in turns, each in a process of its own. `of_text` is the time of `text` over that of the competitor
in the same turn, and `of_text_cpu` the same of CPU seconds. `peak_over_text_mib` is the peak memory beyond that of
`text`. `EMBEDLAYER_ROWS_MB=1000` measures a gigabyte, in one turn.
"""

import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain, islice, repeat
from pathlib import Path
from statistics import median

from benchmarks.harness import Case, Row, run_apart, spread

MEGABYTES = int(os.environ.get("EMBEDLAYER_ROWS_MB", "200"))
TURNS = 3 if MEGABYTES < 1000 else 1
ROW_CHARS = 1000
ROWS_AT_ONCE = 1000
VOCAB_SIZE = 8000

TEXT, PEER = "text", "datasets"
CODE = """
import os, sys, time
from tokenizers import Tokenizer
from benchmarks.harness import tell

def build(source, tokenizer, target):
    from embedlayer.data.corpus import TokenCorpus
    return len(TokenCorpus.build([source], tokenizer, target))

def build_with_datasets(source, tokenizer, target):
    import datasets
    def encoded(rows):
        return {"ids": [each.ids for each in tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)]}
    rows = datasets.load_dataset("json", data_files=source, split="train", cache_dir=target)
    rows.map(encoded, batched=True, remove_columns=["text"], load_from_cache_file=False).save_to_disk(target + "/ids")
    return 0

if __name__ == "__main__":
    source, tokenizer_file, target, is_peer = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_file)
    before = os.times()
    tokens = (build_with_datasets if int(is_peer) else build)(source, tokenizer, target)
    after = os.times()
    tell(
        time_ms=round(1000 * (after.elapsed - before.elapsed), 1),
        cpu_s=round(sum(after[:4]) - sum(before[:4]), 2),
        tokens=tokens,
    )
"""


def run() -> list[Row]:
    if find_spec("pyarrow") is None:
        raise SystemExit("pyarrow is not installed: pip install 'embedlayer[parquet]'")
    from embedlayer.tokenization.read import save_tokenizer
    from embedlayer.tokenization.train import train_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = _library()
        size = _write(folder, library)
        save_tokenizer(train_tokenizer(library[:2_000_000], "bpe", vocab_size=VOCAB_SIZE), folder / "bpe.json")
        sources = {TEXT: "t.txt", "JSON lines": "t.jsonl", "Parquet": "t.parquet", "Arrow stream": "t.arrow"}
        if find_spec("datasets") is not None:
            sources[PEER] = "t.jsonl"
        told: dict[str, list[Row]] = {competitor: [] for competitor in sources}
        for _ in range(TURNS):
            for competitor, file in sources.items():
                target, is_peer = folder / "target", str(int(competitor == PEER))
                words = (str(folder / file), str(folder / "bpe.json"), str(target), is_peer)
                told[competitor].append(run_apart(CODE, *words))
                shutil.rmtree(target)
        rows = [_row(competitor, told[competitor], told[TEXT], size) for competitor in sources]
    return rows if PEER in sources else [*rows, {"competitor": PEER, "note": "not installed"}]


def _library() -> str:
    """Return the source of the Python standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return "".join(source.read_text(encoding="utf-8") for source in sources)


def _batches(library: str) -> Iterator[list[str]]:
    """Yield lists of rows, about `MEGABYTES` in all."""
    starts = range(0, len(library), ROW_CHARS)
    rows = (library[start : start + ROW_CHARS] for start in chain.from_iterable(repeat(starts)))
    for _ in range(MEGABYTES * 1_000_000 // (ROW_CHARS * ROWS_AT_ONCE)):
        yield list(islice(rows, ROWS_AT_ONCE))


def _write(folder: Path, library: str) -> int:
    """Write the rows in each format, and return the number of bytes of their text."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema([("text", pyarrow.string())])
    with (
        (folder / "t.txt").open("w", encoding="utf-8", newline="") as text,
        (folder / "t.jsonl").open("w", encoding="utf-8") as lines,
        ParquetWriter(folder / "t.parquet", schema) as parquet,
        pyarrow.ipc.new_stream(str(folder / "t.arrow"), schema) as stream,
    ):
        for rows in _batches(library):
            text.write("".join(rows))
            lines.writelines(json.dumps({"text": row}) + "\n" for row in rows)
            table = pyarrow.table({"text": rows}, schema=schema)
            parquet.write_table(table)
            stream.write_table(table)
    return (folder / "t.txt").stat().st_size


def _row(competitor: str, told: list[Row], text: list[Row], size: int) -> Row:
    """Return the row of one competitor from what its processes told, and those of the text in the same turns."""

    def ratio(fact: str) -> float:
        return round(median(float(plain[fact]) / float(own[fact]) for own, plain in zip(told, text, strict=True)), 3)

    def peak(rows: list[Row]) -> float:
        return max(float(row["peak_mib"]) for row in rows)

    times = spread([float(one["time_ms"]) for one in told])
    return {
        "competitor": competitor,
        **times,
        "cpu_s": median(float(one["cpu_s"]) for one in told),
        "tokens": told[0]["tokens"],
        "bytes": size,
        "mb_per_s": round(size / float(times["time_ms"]) / 1000, 2),
        "of_text": ratio("time_ms"),
        "of_text_cpu": ratio("cpu_s"),
        "peak_mib": peak(told),
        "peak_over_text_mib": round(peak(told) - peak(text), 1),
        "dtype": "uint16",
    }


CASE = Case(f"Building a corpus of {MEGABYTES} MB of rows", run)
