"""A tokenizer that was extended while the table was not: an edit that adds tokens gives these tokens rows."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from commands import run
from safetensors.torch import load_file
from tokenizers import Tokenizer
from vocab_models import D
from vocab_models import checkpoint as write_checkpoint

import embedlayer as el
from embedlayer.tokenization import save_tokenizer

TEXT = "the small dog loved other small dogs. they barked. " * 20
NAMES = [" small dog", "<|call|>"]


def extended(kind: str) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer, and the same with two added tokens."""
    old = el.train_tokenizer(TEXT, vocab_size=280, kind=kind)
    new = Tokenizer.from_str(old.to_str())
    new.add_tokens(NAMES[:1])
    new.add_special_tokens(NAMES[1:])
    return old, new


def checkpoint(folder: Path, old: Tokenizer, new: Tokenizer) -> Path:
    size = old.get_vocab_size()
    torch.manual_seed(0)
    return write_checkpoint(folder, size, new, eos_token_id=size + 1)


def saved_layer(folder: Path, old: Tokenizer, new: Tokenizer) -> Path:
    torch.manual_seed(0)
    el.TokenEmbedding(old.get_vocab_size(), D).save_pretrained(folder, tokenizer=old)
    save_tokenizer(new, folder / "tokenizer.json")
    return folder


FOLDERS = {"checkpoint": checkpoint, "saved layer": saved_layer}


def rows_in(folder: Path) -> torch.Tensor:
    return next(rows for name, rows in load_file(folder / "model.safetensors").items() if "wpe" not in name)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "wordpiece", "word", "byte"])
@pytest.mark.parametrize("where", FOLDERS)
def test_tokens_that_lack_a_row_get_one_and_ids_stay(where: str, kind: str, tmp_path: Path) -> None:
    old, new = extended(kind)
    size = old.get_vocab_size()
    folder = FOLDERS[where](tmp_path / "old", old, new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        receipt = el.vocab.edit_vocabulary(folder, add=["zebra"], out=tmp_path / "new")
    assert list(receipt.added) == [size, size + 1, size + 2]
    assert list(receipt.added.values())[1] == NAMES[1]
    before, after = rows_in(folder), rows_in(tmp_path / "new")
    assert torch.equal(after[:size], before)
    ids = old.encode(NAMES[0], add_special_tokens=False).ids
    if old.token_to_id("<unk>") not in ids and old.token_to_id("[UNK]") not in ids:
        torch.testing.assert_close(after[size], before[ids].mean(0))
    assert receipt.tokenizer.encode(TEXT).ids == new.encode(TEXT).ids
    if where == "checkpoint":
        config = json.loads((tmp_path / "new" / "config.json").read_text())
        assert (config["vocab_size"], config["eos_token_id"]) == (size + 3, size + 1)


@pytest.mark.parametrize("where", FOLDERS)
def test_the_command_without_terms_does_what_the_error_says(where: str, tmp_path: Path, capsys) -> None:
    old, new = extended("bpe")
    folder = FOLDERS[where](tmp_path / "old", old, new)
    with pytest.raises(el.VocabularyError, match=re.escape(f"vocab add {folder} -o ...")):
        el.vocab.remove_tokens(folder, [280 - 1], out=tmp_path / "none")
    assert run("vocab", "add", folder, "-o", tmp_path / "new") == 0
    assert NAMES[1] in capsys.readouterr().out
    el.vocab.remove_tokens(tmp_path / "new", [" dogs"], out=tmp_path / "then")
    assert run("vocab", "add", tmp_path / "new", "-o", tmp_path / "again") == 2
    assert "There is nothing to add" in capsys.readouterr().err


def test_a_command_that_needs_text_says_once_that_tokens_have_no_row(tmp_path: Path, capsys) -> None:
    folder = checkpoint(tmp_path / "old", *extended("bpe"))
    assert run("neighbors", folder, " dogs") == 2
    said = capsys.readouterr().err
    assert said.count("2 tokens have none") == 1
    assert said.endswith("TokenizerError: the warning above says why this is not possible.\n")


def decoder(folder: Path, old: Tokenizer, new: Tokenizer) -> Path:
    size = old.get_vocab_size()
    el.DecoderLM(el.TokenEmbedding(size, D), "none", num_layers=1, num_heads=1).save_pretrained(folder, tokenizer=old)
    save_tokenizer(new, folder / "tokenizer.json")
    return folder


def gpt2(folder: Path, old: Tokenizer, new: Tokenizer) -> Path:
    from tiny_models import quiet
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": old.get_vocab_size(), "n_embd": D, "n_layer": 1, "n_head": 1, "n_positions": 64}
    with quiet():
        GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).save_pretrained(folder)
    save_tokenizer(new, folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize("make", [decoder, gpt2])
def test_training_on_text_comes_after_the_rows_as_the_error_says(make, tmp_path: Path, capsys, unchecked) -> None:
    folder, text = make(tmp_path / "old", *extended("bpe")), tmp_path / "text.txt"
    text.write_text(TEXT * 12)
    for terms in ([], [" barked. the"]):
        train = ["vocab", "add", folder, *terms, "-o", tmp_path / "none", "--train-on", text, "--steps", 2]
        assert run(*train) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "tokens without a row in the table" in said
        assert f"Give them rows first: embedlayer vocab add {folder} -o" in said
    assert run("vocab", "add", folder, "-o", tmp_path / "new") == 0
    train[2], train[train.index(tmp_path / "none")] = tmp_path / "new", tmp_path / "trained"
    assert run(*train) == 0
    model = el.open_model(tmp_path / "new").require_causal()
    el.vocab.train_only_rows(model, [280, 281])


def test_a_live_table_gets_the_rows_too(tmp_path: Path) -> None:
    old, new = extended("bpe")
    table = el.TokenEmbedding(old.get_vocab_size(), D)
    receipt = el.vocab.add_tokens(table, [], tokenizer=new)
    assert table.vocab_size == new.get_vocab_size()
    assert list(receipt.added.values())[1] == NAMES[1]
    receipt.undo(table)
    assert table.vocab_size == old.get_vocab_size()


def test_another_tokenizer_is_still_refused() -> None:
    old, new = extended("bpe")
    with pytest.raises(el.VocabularyError, match="do not belong together"):
        el.vocab.add_tokens(el.TokenEmbedding(old.get_vocab_size() - 1, D), [], tokenizer=new)
