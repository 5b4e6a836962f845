"""Every kind of data that teams have gives the corpus of its texts, or an error that names its kind; from stdin too."""

import io
import random
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from commands import run
from corpus_inputs import BYTES, INPUTS, arrow, assert_is
from covering import some
from processes import run_program

import embedlayer as el
from embedlayer import TokenCorpus

CALLS = list(product(INPUTS, ["corpus build", "train"]))
BUILDS = [call for call in CALLS if call[1] == "corpus build"]  # `train` reads rows, token IDs and archives as it does


@pytest.mark.parametrize(
    ("name", "command"), some([*BUILDS, *((name, "train") for name in ("jsonl", "npy", "tar"))], CALLS)
)
def test_each_input_gives_its_documents_or_is_refused_by_its_kind(name, command, tmp_path, capsys) -> None:
    make, expected = INPUTS[name]
    el.tokenization.save_tokenizer(BYTES, tmp_path / "tokenizer.json")
    folder = tmp_path / "input"
    folder.mkdir()
    source, tokenizer = make(folder), tmp_path / "tokenizer.json"
    if command == "train":
        small = ("--dim", 8, "--heads", 2, "--layers", 1, "--length", 8, "--steps", 1)
        code = run("train", source, "-o", tmp_path / "out", "--tokenizer-from", tokenizer, *small)
    else:
        code = run("corpus", "build", source, "-o", tmp_path / "out", "--tokenizer", tokenizer, "--workers", 1)
    if isinstance(expected, str):
        assert code == 2
        said = capsys.readouterr().err
        assert str(source) in said
        assert expected in said
        return
    assert code == 0
    corpus = TokenCorpus.open(tmp_path / "out" / "corpus" if command == "train" else tmp_path / "out")
    assert_is(corpus, expected, BYTES)


STDIN = [call for call in CALLS if call[0] in ("txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "parquet", "Arrow")]


@pytest.mark.parametrize(("name", "command"), some([*{*STDIN} & {*BUILDS}, ("parquet", "train")], STDIN))
def test_standard_input_is_recognised_as_a_file_is(name, command, tmp_path, monkeypatch, capsys) -> None:
    make, expected = INPUTS[name]
    source = make(tmp_path)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(source.read_bytes())))
    kind = ("--tokenizer", "byte", "--dim", 8, "--heads", 2, "--layers", 1, "--length", 8, "--steps", 1)
    out = tmp_path / "out"
    if command == "train":
        assert run("train", "-", "-o", out, *kind) == 0
    else:
        assert run("corpus", "build", "-", "-o", out) == 0
    corpus = TokenCorpus.open(out / "corpus" if command == "train" else out)
    tokenizer = el.load_tokenizer(out / "corpus" if command == "train" else out)
    assert_is(corpus, expected, tokenizer)
    assert not [path for path in [*tmp_path.iterdir(), *out.iterdir()] if path.name.startswith(".")]


def test_standard_input_is_not_built_in_shards_and_an_older_corpus_stays(tmp_path, capsys) -> None:
    assert run("corpus", "build", "-", "-o", tmp_path / "c", "--shards", 2) == 1
    assert (
        "Standard input can be read only once: leave --shards and --only out, or pass files" in capsys.readouterr().err
    )
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x").touch()
    assert run("corpus", "build", "-", "-o", tmp_path / "c") == 1
    assert "FileError" in capsys.readouterr().err


MEMORY = """
import resource, sys
from embedlayer.data import build_in_shards
from embedlayer.data.corpus import TokenCorpus
from embedlayer.tokenization.train import train_tokenizer
import pyarrow.parquet, pyarrow.ipc
small, source, target, shards = sys.argv[1:]
tokenizer = train_tokenizer((), "byte")
def peak(path, name):
    if int(shards):
        build_in_shards([path], tokenizer, target + name, shards=int(shards), workers=1)
    else:
        TokenCorpus.build([path], tokenizer, target + name)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak(small, "small")
print(peak(source, "large") - before)
"""


def write_rows(path: Path, megabytes: int) -> None:
    """Rows of a text, 1,000 bytes on average, a part at a time."""
    import json
    import math

    pyarrow = arrow()
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema([("text", pyarrow.string())])
    parts, rows = math.ceil(megabytes / 2), min(2000, round(1000 * megabytes))
    if path.suffix == ".jsonl":
        with path.open("wb") as file:
            for number in range(parts):
                for row in range(rows):
                    file.write(json.dumps({"text": f"{number} {row} " + "Dogs nap. " * 99}).encode() + b"\n")
        return
    make = ParquetWriter if path.suffix == ".parquet" else pyarrow.ipc.new_stream
    digits = random.Random(0)  # which no file compresses much
    with make(str(path), schema) as writer:
        for _ in range(parts):
            texts = [digits.randbytes(500).hex() for _ in range(rows)]
            writer.write_table(pyarrow.table({"text": texts}, schema=schema))


@pytest.mark.parametrize(("megabytes", "most"), [(4, 16), pytest.param(200, 64, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet", "t.arrow"])
def test_memory_does_not_grow_with_the_rows(name, megabytes, most, tmp_path) -> None:
    """At most `most` megabytes more than for a part, in one process; all IDs as int64 would be eight times the text."""
    for folder, size in (("small", 0.1), ("large", megabytes)):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / name, size)
    files = [str(tmp_path / folder / name) for folder in ("small", "large")]
    code, out, errors = run_program("-c", MEMORY, *files, str(tmp_path / "out"), "0")
    assert code == 0, errors
    assert int(out) <= most, out
    assert np.asarray(TokenCorpus.open(tmp_path / "outlarge").documents).size == 2000 * -(-megabytes // 2)
