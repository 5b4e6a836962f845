"""Every kind of data that teams have gives the corpus of its texts, or an error that names its kind; from stdin too."""

import io
import random
import sys
from itertools import product
from types import SimpleNamespace

import pytest
from commands import run
from corpus_inputs import BYTES, INPUTS, WRITERS, assert_is
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
    assert "Standard input can be read only once" in capsys.readouterr().err
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x").touch()
    assert run("corpus", "build", "-", "-o", tmp_path / "c") == 1
    assert "FileError" in capsys.readouterr().err


MEMORY = """
import resource, sys
from pathlib import Path
from embedlayer.data.corpus import TokenCorpus
from embedlayer.tokenization.train import train_tokenizer
import pyarrow.parquet, pyarrow.ipc
tokenizer = train_tokenizer((), "byte")
def peak(folder):
    for path in sorted(Path(folder).iterdir()):
        TokenCorpus.build([path], tokenizer, path.with_suffix(".out"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak(sys.argv[1])
print(peak(sys.argv[2]) - before)
"""


def test_memory_does_not_grow_with_the_rows(tmp_path) -> None:
    """At most 16 megabytes more than for a part, in one process; all IDs as int64 would take 32."""
    digits = random.Random(0)  # which no file compresses much
    texts = [digits.randbytes(500).hex() for _ in range(4000)]
    for folder, part in (("small", texts[:100]), ("large", texts)):
        (tmp_path / folder).mkdir()
        for name in ("t.jsonl", "t.parquet", "t.arrow"):
            WRITERS[name](tmp_path / folder / name, part)
    code, out, errors = run_program("-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large"))
    assert code == 0, errors
    assert int(out) <= 16, out
