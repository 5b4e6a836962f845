"""A million word vectors of width 300: one query, a compression and a report of a file, from the start of Python on.

The rows are a mixture of 500 normal clusters, and the words are `w0`, `w1`, ... The competitors of a query run in
turns, each in a process of its own, and answer with the ten nearest words of `w7`. gensim reads the file and asks
`most_similar`. The plain definition is NumPy: the array is mapped, and all cosines are one product of normalised rows.
`cpu_s` counts all threads; it is steadier than `time_ms` on a busy machine. Ours are the commands that a user types:
`embedlayer neighbors FILE w7`, `embedlayer compress FILE --to int8 -o DIR`, and `embedlayer inspect FILE`.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.harness import Case, Row, run_apart, spread

ROWS, WIDTH, CLUSTERS = 1_000_000, 300, 500
AT_ONCE, TURNS = 10_000, 3
QUERY, COMPRESS, INSPECT = "one query", "compress to int8", "inspect"

START = """
import sys, time
start = time.perf_counter()
"""
END = """
from benchmarks.harness import tell
tell(time_ms=round(1000 * (time.perf_counter() - start), 1), cpu_s=round(time.process_time(), 2), answer=str(answer))
"""
OURS = """
from click.testing import CliRunner
from embedlayer.cli.main import cli
result = CliRunner().invoke(cli, sys.argv[1:], catch_exceptions=False)
assert result.exit_code == 0, result.output
answer = [line.split()[1] for line in result.stdout.splitlines()] if sys.argv[1] == "neighbors" else ""
"""
GENSIM = """
from gensim.models import KeyedVectors
vectors = KeyedVectors.load_word2vec_format(sys.argv[1], binary=True)
answer = [word for word, _ in vectors.most_similar("w7")]
"""
NUMPY = """
import json
import numpy as np
with open(sys.argv[2]) as file:
    words = json.load(file)
rows = np.load(sys.argv[1], mmap_mode="r")
units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
cosines = units @ units[words.index("w7")]
answer = [words[row] for row in np.argsort(-cosines)[1:11]]
"""


def write_files(folder: Path) -> None:
    """Write the same table as `v.bin`, as `v.npy`, and as the folder `saved` of an embedding layer."""
    import torch

    from embedlayer.checkpoints.layer import EmbeddingLayer
    from embedlayer.checkpoints.vector_files import write_vectors
    from embedlayer.tables.dense import TokenEmbedding
    from embedlayer.tokenization.vocabulary_files import word_tokenizer

    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLUSTERS, WIDTH, generator=generator)
    rows = torch.empty(ROWS, WIDTH)
    for part in rows.split(AT_ONCE):
        part.normal_(generator=generator).add_(centres[torch.randint(CLUSTERS, (len(part),), generator=generator)])
    words = [f"w{row}" for row in range(ROWS)]
    write_vectors(folder / "v.bin", words, rows)
    write_vectors(folder / "v.npy", words, rows)
    layer = EmbeddingLayer(TokenEmbedding.from_pretrained(rows), family="vectors")
    layer.save_pretrained(folder / "saved", tokenizer=word_tokenizer(words))


def measured(what: str, competitors: dict[str, tuple[str, ...]], turns: int) -> Iterator[Row]:
    """Run competitors in turns, each given as its code and arguments, and yield one row for each."""
    told: dict[str, list[Row]] = {name: [] for name in competitors}
    for _ in range(turns):
        for name, (code, *arguments) in competitors.items():
            told[name].append(run_apart(START + code + END, *arguments))
    assert len({facts["answer"] for each in told.values() for facts in each}) == 1
    for name, each in told.items():
        yield {
            "what": what,
            "competitor": name,
            "vocab_size": ROWS,
            "embed_dim": WIDTH,
            **spread([float(facts["time_ms"]) for facts in each]),
            "cpu_s": median(float(facts["cpu_s"]) for facts in each),
            "peak_mib": max(float(facts["peak_mib"]) for facts in each),
            "turns": turns,
        }


def rows_of(folder: Path) -> Iterator[Row]:
    """Measure the files in a folder, and yield the rows of the queries, of the compression and of the report."""
    binary, array = str(folder / "v.bin"), str(folder / "v.npy")
    queries = {
        "NumPy, all cosines of a mapped array": (NUMPY, array, str(folder / "v.tokens.json")),
        "gensim, word2vec binary": (GENSIM, binary),
        "embedlayer, word2vec binary": (OURS, "neighbors", binary, "w7"),
        "embedlayer, .npy": (OURS, "neighbors", array, "w7"),
        "embedlayer, safetensors": (OURS, "neighbors", str(folder / "saved"), "w7"),
    }
    if importlib.util.find_spec("gensim") is None:
        del queries["gensim, word2vec binary"]
    yield from measured(QUERY, queries, TURNS)
    smaller = (OURS, "compress", binary, "--to", "int8", "-o", str(folder / "int8"))
    yield from measured(COMPRESS, {"embedlayer, word2vec binary": smaller}, 1)
    yield from measured(INSPECT, {"embedlayer, word2vec binary": (OURS, "inspect", binary)}, 1)


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        write_files(Path(name))
        return list(rows_of(Path(name)))


CASE = Case(f"{ROWS:,} word vectors of width {WIDTH}: one query, compression, report", run)
