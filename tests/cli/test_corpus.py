"""`embedlayer corpus build`, and a run on what it wrote."""

import numpy as np
import pytest
import torch
from commands import answer, printed, refused, run
from processes import run_program

from embedlayer import RunDirectory, TokenCorpus, load_tokenizer, open_model, train_tokenizer
from embedlayer.data import build_in_shards
from embedlayer.tokenization import save_tokenizer
from embedlayer.vocab import edit_vocabulary

TEXT = "Dogs love dogs, and cats love naps in the sun. Who would not? " * 400


@pytest.fixture
def text(tmp_path):
    (tmp_path / "t.txt").write_text(TEXT)
    save_tokenizer(train_tokenizer(TEXT, vocab_size=300), tmp_path / "bpe.json")
    return tmp_path / "t.txt"


def test_a_corpus_is_built_and_told_to_people_and_programs(text, tmp_path):
    arguments = ("corpus", "build", text, "-o", tmp_path / "corpus", "--tokenizer", tmp_path / "bpe.json")
    shown = printed(*arguments, "--shards", 3, "--workers", 1)
    built = TokenCorpus.open(tmp_path / "corpus")
    assert f"{len(built):,} tokens of" in shown
    assert "1 document, 3 shards" in shown
    assert "24.8 of 24.8 kB" in shown
    facts = {"directory": str(tmp_path / "corpus"), "shards": 3, "missing": [], "documents": 1, "dtype": "uint16"}
    sizes = {"tokens": len(built), "bytes": len(TEXT), "vocab_size": built.vocab_size}
    assert answer(*arguments, "--shards", 3) == facts | sizes
    assert "started with other arguments: it has shards 3, not 4" in refused(*arguments, "--shards", 4, code=1)


def test_parts_can_be_built_one_by_one(text, tmp_path, capsys):
    arguments = ("corpus", "build", text, "-o", tmp_path / "c", "--tokenizer", tmp_path / "bpe.json", "--shards", 2)
    assert "Shard 1 is in" in (shown := printed(*arguments, "--only", 1))
    assert "1 of 2 are still to be built" in shown
    assert answer(*arguments, "--only", 1)["missing"] == [0]
    assert run("train", tmp_path / "c", "-o", tmp_path / "run", "--length", 32) == 2
    assert "shards [0] of 2 are missing" in capsys.readouterr().err
    assert "2 shards, in" in printed(*arguments, "--only", 0)
    assert "Shard 2 of 2 does not exist" in refused(*arguments, "--only", 2)


@pytest.fixture
def train(tmp_path, capsys):
    """Train a run of two steps again, or return why it cannot be."""
    sizes = "--steps 2 --length 32 --batch-size 4 --dim 8 --heads 2 --layers 1 --overwrite --vocab-size 100".split()

    def again(*arguments):
        code = run("train", *arguments, "-o", tmp_path / "run", *sizes)
        said = capsys.readouterr().err
        return "" if code == 0 else said

    return again


def batches(directory):
    sampler = directory.resume()[0].sampler
    return [sampler.batch(step)[0].tolist() for step in range(30)]


def test_a_run_reads_a_corpus_where_it_lies(text, tmp_path, train):
    tokenizer = load_tokenizer(tmp_path / "bpe.json")
    corpus = build_in_shards([text], tokenizer, tmp_path / "corpus", shards=3, workers=1)
    save_tokenizer(train_tokenizer((), "byte"), tmp_path / "byte.json")
    directory = RunDirectory(tmp_path / "run")
    assert train(tmp_path / "corpus") == ""
    assert open_model(directory.path).tokenizer.to_str() == tokenizer.to_str()
    assert directory.corpus.is_symlink()
    linked = batches(directory)
    receipt = edit_vocabulary(directory.path, order=[*reversed(range(corpus.vocab_size))], out=tmp_path / "turned")
    turned = TokenCorpus.open(tmp_path / "turned" / "corpus")
    assert np.array_equal(turned.ids, receipt.remap(np.asarray(corpus.ids, dtype=np.int64)))
    assert (turned.num_bytes, turned.blocks.tolist()) == (corpus.num_bytes, corpus.blocks.tolist())

    assert train(text, "--tokenizer-from", tmp_path / "bpe.json") == ""
    assert not directory.corpus.is_symlink()
    assert np.array_equal(TokenCorpus.open(directory.corpus).ids, corpus.ids)
    assert train(tmp_path / "corpus") == ""
    assert directory.corpus.is_symlink()
    assert "a run reads one" in train(tmp_path / "corpus", text)
    assert "built with another tokenizer" in train(tmp_path / "corpus", "--tokenizer-from", tmp_path / "byte.json")
    assert np.array_equal(TokenCorpus.open(tmp_path / "corpus").ids, corpus.ids)

    TokenCorpus.build([text], tokenizer, tmp_path / "built")
    assert train(tmp_path / "built") == ""
    alone = batches(directory)
    (tmp_path / "built" / "tokenizer.json").unlink()
    for more in ([], [text, "--weights", "3,1"]):
        said = train(tmp_path / "built", *more)
        assert "built has no tokenizer.json. Pass " in said
        assert ": --tokenizer-from FILE" in said
    assert train(tmp_path / "built", "--tokenizer-from", tmp_path / "bpe.json") == ""
    assert batches(directory) == alone

    assert train(tmp_path / "corpus", text, "--weights", "3,1") == ""
    assert open_model(directory.path).tokenizer.to_str() == tokenizer.to_str()
    mixed = directory.open()[0].sampler.batch(7)[0]
    assert batches(directory) != linked
    edit_vocabulary(directory.path, order=[*reversed(range(corpus.vocab_size))], out=tmp_path / "turned mixture")
    turned_run = RunDirectory(tmp_path / "turned mixture")
    assert torch.equal(turned_run.open()[0].sampler.batch(7)[0], receipt.remap(mixed))
    assert train(text, "--tokenizer-from", tmp_path / "bpe.json") == ""
    assert not (directory.corpus / "0").exists()


def test_a_tokenizer_of_a_mixture_is_trained_on_each_text_in_its_share(tmp_path, train, monkeypatch):
    texts = {"dogs": "Dogs love dogs, as they say. " * 160, "cats": "Cats nap in warm sunlight. " * 160}
    for name, content in texts.items():
        (tmp_path / f"{name}.txt").write_text(content)
    files = [tmp_path / f"{name}.txt" for name in texts]
    monkeypatch.setattr("embedlayer.cli.texts.TOKENIZER_BYTES", 2000)

    def vocabulary(*options):
        assert train(*files, "--tokenizer", "word", *options) == ""
        return " ".join(open_model(tmp_path / "run").tokenizer.get_vocab())

    assert ["Dogs" in vocabulary(), "Cats" in vocabulary()] == [True, False], "in order: the first fills the bytes"
    mixed = vocabulary("--weights", "3,1")
    assert ["Dogs" in mixed, "Cats" in mixed] == [True, True]
    tokenizer = open_model(tmp_path / "run").tokenizer
    for number, content in enumerate(texts.values()):
        ids = TokenCorpus.open(tmp_path / "run" / "corpus" / str(number)).ids
        assert np.array_equal(ids, TokenCorpus.from_text(content, tokenizer).ids)
    for name, kind in (("a", "byte"), ("b", "word")):
        build_in_shards(files, train_tokenizer(texts["dogs"], kind), tmp_path / name, shards=1, workers=1)
    said = train(tmp_path / "a", tmp_path / "b", "--weights", "1,1")
    assert f"{tmp_path / 'a'} and {tmp_path / 'b'} were built with different " in said
    assert f"corpus build FILE --tokenizer {tmp_path / 'a'} -o NEW" in said


def test_ctrl_c_stops_it_with_a_word_and_the_same_command_goes_on(text, tmp_path):
    code = (
        "import os, runpy, sys; from tokenizers import Tokenizer\n"
        "Tokenizer.encode_batch_fast = lambda *_, **__: os.kill(os.getpid(), 2)\n"
        "runpy.run_module('embedlayer', run_name='__main__', alter_sys=True)"
    )
    arguments = ["corpus", "build", text, "-o", tmp_path / "c", "--tokenizer", tmp_path / "bpe.json", "--shards", "3"]
    stopped, _, errors = run_program("-c", code, *arguments, "--workers", "1")
    assert stopped == 130, errors
    assert errors == "Stopped. The finished shards are kept; the same command builds the others.\n"
    assert run(*arguments, "--workers", "1") == 0
