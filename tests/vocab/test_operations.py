"""The public edits, with real tokenizers: what is kept, what is lost, what is refused."""

import argparse
import inspect
import json
import shutil
from typing import Any

import pytest
import torch
from covering import some
from hidden_calls import SYSTEMS
from safetensors.torch import save_file
from vocab_models import close, same, state_of

import embedlayer as el
from embedlayer.vocab import used_tokens

on_each_system = pytest.mark.parametrize("system", some(("Linux", "POSIX"), SYSTEMS), indirect=True)
"""For what reads or writes files."""

TEXT = inspect.getsource(argparse)[:30_000]


@pytest.fixture(scope="module")
def tokenizers() -> dict:
    kinds = {kind: el.train_tokenizer(TEXT, kind, vocab_size=500) for kind in ("bpe", "wordpiece", "unigram", "word")}
    return {**kinds, "byte": el.train_tokenizer((), "byte")}


def model(tokenizer, *, tied=True) -> el.DecoderLM:
    torch.manual_seed(3)
    size = tokenizer.get_vocab_size()
    table = el.TokenEmbedding(size, 16, scale="sqrt_dim", pad_to_multiple_of=64)
    head = None if tied else el.OutputHead(vocab_size=size, embed_dim=16, bias=True)
    return el.DecoderLM(table, el.RotaryEmbedding(8), head, num_layers=1, num_heads=2).eval()


@pytest.mark.parametrize(
    ("kind", "tied"), [("bpe", True), ("bpe", False), ("wordpiece", True), ("unigram", True), ("word", False)]
)
def test_trimming_to_a_corpus_leaves_its_ids_and_the_models_outputs_on_it(kind, tied, tokenizers) -> None:
    tokenizer = tokenizers[kind]
    made, part = model(tokenizer, tied=tied), TEXT[:3000]
    ids = torch.tensor(tokenizer.encode(part).ids)
    before, described, state = made(ids[:100]), made.config, state_of(made)
    receipt = el.vocab.trim_vocabulary(made, part, tokenizer=tokenizer)
    assert receipt.dropped
    new_ids = receipt.remap(ids)
    assert receipt.tokenizer.encode(part).ids == new_ids.tolist()
    assert made.table.vocab_size == receipt.num_tokens[1] == receipt.tokenizer.get_vocab_size()
    assert made.table.num_rows % 64 == 0
    close(made(new_ids[:100]), before[:, receipt.row_map.sources])
    receipt.undo(made)
    assert same(state_of(made), state)
    assert made.config == described


def test_to_another_tokenizer_and_back_keeps_what_both_have(tokenizers) -> None:
    old, new = tokenizers["bpe"], tokenizers["word"]
    made = model(old)
    rows = made.table.rows(0, old.get_vocab_size()).clone()
    receipt = el.vocab.transplant(made, new, tokenizer=old)
    assert made.table.vocab_size == new.get_vocab_size()
    shared = (receipt.row_map.sources >= 0).nonzero().squeeze(1)
    assert len(shared) > 20
    assert torch.equal(made.table.weight[shared], rows[receipt.row_map.sources[shared]])
    word, (token, origin) = next(
        (receipt.added[token], (token, words)) for token, words in receipt.origins.items() if " of " in words
    )
    pieces = [int(piece) for piece in origin.removeprefix("subword mean of ").split(", ")]
    assert "".join(old.decode([piece]) for piece in pieces).strip() == word
    torch.testing.assert_close(made.table.weight[token], rows[pieces].mean(0))
    receipt.undo(made)
    assert torch.equal(made.table.rows(0, old.get_vocab_size()), rows)


@on_each_system
def test_a_corpus_of_ids_files_and_texts_ask_for_the_same_tokens(tokenizers, tmp_path, system) -> None:
    tokenizer = tokenizers["bpe"]
    (tmp_path / "a.txt").write_text(TEXT[:5000])
    corpus = el.TokenCorpus.build([tmp_path / "a.txt"], tokenizer, tmp_path / "corpus")
    wanted = [
        el.vocab.trim_vocabulary(model(tokenizer), source, tokenizer=tokenizer).row_map.sources.tolist()
        for source in (TEXT[:5000], [TEXT[:5000]], tmp_path / "a.txt", [tmp_path / "a.txt"], corpus)
    ]
    assert all(one == wanted[0] for one in wanted)
    often = used_tokens(tokenizer, TEXT[:5000], keep_special=True, min_count=5)
    assert len(often) < len(used_tokens(tokenizer, TEXT[:5000], keep_special=True, min_count=1))
    with pytest.raises(el.VocabularyError):
        el.vocab.trim_vocabulary(model(tokenizer), corpus, tokenizer=tokenizers["word"])


@on_each_system
def test_a_layer_that_was_loaded_edits_its_own_tokenizer(shared_data, tmp_path, system) -> None:
    shutil.copy(shared_data / "tokenizers" / "bert-base-cased-vocab.txt", tmp_path / "vocab.txt")
    names = {
        "embeddings.word_embeddings.weight": torch.randn(28996, 4),
        "embeddings.position_embeddings.weight": torch.randn(16, 4),
        "embeddings.token_type_embeddings.weight": torch.randn(2, 4),
        "embeddings.LayerNorm.weight": torch.ones(4),
        "embeddings.LayerNorm.bias": torch.zeros(4),
    }
    names["embeddings.word_embeddings.weight"][0] = 0
    save_file(names, tmp_path / "model.safetensors")
    config = {"model_type": "bert", "vocab_size": 28996, "hidden_size": 4, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = el.load(tmp_path)
    old, before = layer.tokenizer, layer.input(torch.tensor([[5, 6]]))
    receipt = el.vocab.add_tokens(layer, ["otterly"], pad_to_multiple_of=64)
    assert layer.tokenizer is receipt.tokenizer
    assert layer.tokenizer.encode("otterly", add_special_tokens=False).ids == [28996]
    assert (layer.table.vocab_size, layer.table.padding_idx) == (29056, 0)  # in a checkpoint all rows are looked up
    assert torch.equal(layer.input(torch.tensor([[5, 6]])), before)
    layer.write_into(tmp_path, tmp_path / "new")
    assert el.load(tmp_path / "new").table.vocab_size == 29056
    receipt.undo(layer)
    assert layer.tokenizer.to_str() == old.to_str()
    assert torch.equal(layer.table.weight, names["embeddings.word_embeddings.weight"])
    with pytest.raises(el.VocabularyError):
        el.vocab.add_tokens(layer, ["otterly"], tokenizer=el.train_tokenizer((), "byte"))


def test_what_cannot_be_done_is_said_and_nothing_is_half_done(tokenizers) -> None:
    tokenizer = tokenizers["word"]
    made = model(tokenizer)
    state, described = state_of(made), made.config
    for refused in (
        lambda: el.vocab.remove_tokens(made, ["otterly"], tokenizer=tokenizer),
        lambda: el.vocab.remove_tokens(made, ["<unk>"], tokenizer=tokenizer),
        lambda: el.vocab.trim_vocabulary(made, "Ωμέγα ψψψψ", tokenizer=tokenizer),
        lambda: el.vocab.add_tokens(el.TokenEmbedding(9, 4), ["x y"], tokenizer=tokenizer),
        lambda: el.vocab.trim_vocabulary(made, TEXT),
        lambda: el.vocab.transplant(made, tokenizer),
        lambda: el.vocab.add_tokens(made, 3, tokenizer=tokenizer),
    ):
        with pytest.raises(el.VocabularyError):
            refused()
    assert same(state_of(made), state)
    assert made.config == described


def test_an_option_that_no_edit_has_is_refused() -> None:
    table = el.TokenEmbedding(257, 4)
    misspelt: dict[str, Any] = {"optimiser": None}
    for edit, *arguments in (
        (el.vocab.add_tokens, ["x"]),
        (el.vocab.remove_tokens, [3]),
        (el.vocab.edit_vocabulary,),
        (el.vocab.trim_vocabulary, "text"),
    ):
        with pytest.raises(el.SizeError, match="has no option optimiser. Its options: init, "):
            edit(table, *arguments, **misspelt)
    assert table.vocab_size == 257
