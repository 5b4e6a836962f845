"""`embedlayer corpus build`, and a run on what it wrote."""

import json
import os
import pty

import numpy as np
import pytest
import torch
from commands import run
from processes import Program, run_program

from embedlayer import (
    RunDirectory,
    TextError,
    TokenCorpus,
    TokenizerError,
    TrainingOptions,
    load_tokenizer,
    train_tokenizer,
)
from embedlayer.cli.training_runs import LayerOptions, start_run
from embedlayer.data import build_in_shards
from embedlayer.tokenization.read import save_tokenizer
from embedlayer.vocab import edit_vocabulary

TEXT = "Dogs love dogs, and cats love naps in the sun. Who would not? " * 400


@pytest.fixture
def text(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    save_tokenizer(train_tokenizer(TEXT, vocab_size=300), tmp_path / "bpe.json")
    return tmp_path / "t.txt"


def test_a_corpus_is_built_and_told_to_people_and_programs(text, tmp_path, capsys):
    arguments = ("corpus", "build", text, "-o", tmp_path / "corpus", "--tokenizer", tmp_path / "bpe.json")
    assert run(*arguments, "--shards", 3, "--workers", 1) == 0
    shown = capsys.readouterr().out
    built = TokenCorpus.open(tmp_path / "corpus")
    assert f"{len(built):,} tokens of" in shown
    assert "1 document, 3 shards" in shown
    assert run(*arguments, "--shards", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(tmp_path / "corpus"),
        "shards": 3,
        "missing": [],
        "tokens": len(built),
        "bytes": len(TEXT),
        "documents": 1,
        "vocab_size": built.vocab_size,
        "dtype": "uint16",
    }
    assert run(*arguments, "--shards", 4) == 1
    assert "started with other arguments: it has shards 3, not 4" in capsys.readouterr().err


def test_parts_can_be_built_one_by_one(text, tmp_path, capsys):
    arguments = ("corpus", "build", text, "-o", tmp_path / "c", "--tokenizer", tmp_path / "bpe.json", "--shards", 2)
    assert run(*arguments, "--only", 1) == 0
    assert "Shard 1 is in" in (shown := capsys.readouterr().out)
    assert "1 of 2 are still to be built" in shown
    assert run(*arguments, "--only", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["missing"] == [0]
    assert run("train", tmp_path / "c", "-o", tmp_path / "run", "--length", 32) == 2
    assert "1 shards are not built yet, among them shard 0." in capsys.readouterr().err
    assert run(*arguments, "--only", 0) == 0
    assert "2 shards, in" in capsys.readouterr().out
    assert run(*arguments, "--only", 2) == 2
    assert "Shard 2 of 2 does not exist" in capsys.readouterr().err


def test_a_run_reads_a_corpus_where_it_lies(text, tmp_path):
    tokenizer = load_tokenizer(tmp_path / "bpe.json")
    corpus = build_in_shards([text], tokenizer, tmp_path / "corpus", shards=3, workers=1)
    save_tokenizer(train_tokenizer((), "byte"), tmp_path / "byte.json")
    directory = RunDirectory(tmp_path / "run")

    def start(*sources, tokenizer_from=None, weights=None):
        layer = LayerOptions(tokenizer_from=tokenizer_from, dim=8, heads=2, layers=1)
        options = TrainingOptions(steps=2, max_length=32, batch_size=4)
        rest = {"validation_fraction": 0.1, "probes": (), "device": "cpu", "quiet": True, "weights": weights}
        return start_run(directory, sources, layer, options, **rest)

    def batches(trainer):
        return [trainer.sampler.batch(step)[0].tolist() for step in range(30)]

    linked, told = start(tmp_path / "corpus")
    assert told.to_str() == tokenizer.to_str()
    assert directory.corpus.is_symlink()
    assert batches(directory.resume()[0]) == batches(linked)

    receipt = edit_vocabulary(directory.path, order=[*reversed(range(corpus.vocab_size))], out=tmp_path / "turned")
    turned = TokenCorpus.open(tmp_path / "turned" / "corpus")
    assert np.array_equal(turned.ids, receipt.remap(np.asarray(corpus.ids, dtype=np.int64)))
    assert (turned.num_bytes, turned.blocks.tolist()) == (corpus.num_bytes, corpus.blocks.tolist())

    start(text, tokenizer_from=tmp_path / "bpe.json")
    assert not directory.corpus.is_symlink()
    assert np.array_equal(TokenCorpus.open(directory.corpus).ids, corpus.ids)

    start(tmp_path / "corpus")
    assert directory.corpus.is_symlink()
    with pytest.raises(TextError, match="a run reads one alone"):
        start(tmp_path / "corpus", text)
    with pytest.raises(TokenizerError, match="built with another tokenizer"):
        start(tmp_path / "corpus", tokenizer_from=tmp_path / "byte.json")
    assert np.array_equal(TokenCorpus.open(tmp_path / "corpus").ids, corpus.ids)

    TokenCorpus.build([text], tokenizer, tmp_path / "built")
    alone, told = start(tmp_path / "built")
    assert told.to_str() == tokenizer.to_str()
    (tmp_path / "built" / "tokenizer.json").unlink()
    for weights in (None, (3, 1)):
        with pytest.raises(TokenizerError, match=r"built has no tokenizer\.json\. Pass .*: --tokenizer-from FILE"):
            start(tmp_path / "built", *([text] if weights else []), weights=weights)
    assert batches(start(tmp_path / "built", tokenizer_from=tmp_path / "bpe.json")[0]) == batches(alone)

    mixed, told = start(tmp_path / "corpus", text, weights=(3, 1))
    assert told.to_str() == tokenizer.to_str()
    assert batches(directory.resume()[0]) == batches(mixed) != batches(linked)
    edit_vocabulary(directory.path, order=[*reversed(range(corpus.vocab_size))], out=tmp_path / "turned mixture")
    turned_run = RunDirectory(tmp_path / "turned mixture")
    assert torch.equal(turned_run.open()[0].sampler.batch(7)[0], receipt.remap(mixed.sampler.batch(7)[0]))
    start(text, tokenizer_from=tmp_path / "bpe.json")
    assert not (directory.corpus / "0").exists()


def test_ctrl_c_stops_it_with_a_word_and_the_same_command_goes_on(text, tmp_path):
    code = (
        "import os, sys; from embedlayer.cli import progress\n"
        "def reading(quiet):\n"
        "    yield lambda read, total: os.kill(os.getpid(), 2) if read else None\n"
        "from contextlib import contextmanager; progress.reading = contextmanager(reading)\n"
        "from embedlayer.cli.main import main; main(sys.argv[1:])"
    )
    arguments = ["corpus", "build", text, "-o", tmp_path / "c", "--tokenizer", tmp_path / "bpe.json", "--shards", "3"]
    stopped, _, errors = run_program("-c", code, *arguments, "--workers", "2")
    assert stopped == 130, errors
    assert errors == "Stopped. The finished shards are kept; the same command builds the others.\n"
    assert run(*arguments, "--workers", "1") == 0


ON_TERMINAL = """
import os, sys
from embedlayer.cli.main import main
terminal = os.open(sys.argv[1], os.O_RDWR)
print("opened", flush=True)
os.dup2(terminal, 1)
os.dup2(terminal, 2)
os.close(terminal)
main(sys.argv[2:])
"""


def test_a_terminal_sees_a_bar(text, tmp_path):
    arguments = ["corpus", "build", text, "-o", tmp_path / "c", "--tokenizer", tmp_path / "bpe.json", "--shards", "2"]
    ours, theirs = pty.openpty()
    with Program("-c", ON_TERMINAL, os.ttyname(theirs), *arguments, TERM="xterm", COLUMNS="100") as program:
        assert program.stdout.readline() == "opened\n"
        os.close(theirs)
        seen = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # how a terminal ends
                break
            if not block:
                break
            seen += block
        os.close(ours)
        assert program.wait() == 0
    shown = seen.decode()
    assert "━" in shown
    assert "24.8/24.8 kB" in shown
    assert "2 shards, in" in shown
