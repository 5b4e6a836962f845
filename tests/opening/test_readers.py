"""`open_model` on each kind of source."""

import json

import pytest
import torch
from covering import looped
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.core.errors import CheckpointError, EmbedLayerError, EmbedLayerWarning, FileError, SizeError
from embedlayer.opening import open_model

WORDS = ["cat", "dog", "naïve", "bird"]


@pytest.fixture
def tokenizer():
    return el.train_tokenizer((), "byte")


def open_with_rows(path, rows, tokenizer_from=None):
    """Open a source, and compare its rows."""
    opened = open_model(path, tokenizer_from)
    assert torch.allclose(opened.table.rows(0, len(rows)), rows, atol=1e-6)
    return opened


@looped("format", ["word2vec", "word2vec-binary", "glove", "fasttext", "npy", "projector"])
def test_files_of_vectors_have_tokens_and_from_them_a_vocabulary(tmp_path, format) -> None:
    names = {"word2vec-binary": "rows.bin", "fasttext": "rows.vec", "npy": "rows.npy", "projector": "rows"}
    rows = torch.randn(4, 3)
    el.checkpoints.write_vectors(tmp_path / names.get(format, "rows.txt"), WORDS, rows, format)
    opened = open_with_rows(tmp_path / names.get(format, "rows.txt"), rows)
    assert opened.kind == "file of vectors"
    assert opened.dtype == "float32"
    assert opened.tokens == opened.token_texts == WORDS
    assert opened.text_tokenizer is None
    assert opened.tokenizer.token_to_id("naïve") == 2
    assert opened.counts is opened.before() is opened.head is opened.untied_head is None


def test_of_equal_tokens_the_first_counts_and_broken_ones_are_replaced(tmp_path) -> None:
    el.checkpoints.write_vectors(tmp_path / "rows.npy", ["a", "b", "a"], torch.randn(3, 2))
    assert open_model(tmp_path / "rows.npy").tokenizer.get_vocab() == {"a": 0, "b": 1}
    (tmp_path / "cut.txt").write_bytes(b"2 2\n\xff 1 2\ncat 3 4\n")
    with pytest.warns(el.EmbedLayerWarning, match="holds 1 tokens that are not UTF-8"):
        opened = open_with_rows(tmp_path / "cut.txt", torch.tensor([[1.0, 2], [3, 4]]))
    assert opened.tokens == ["\ufffd", "cat"]


@looped("kind, named", ["table", "way in", "layer", "model"], [False, True])
def test_whatever_was_saved_and_has_a_table_is_opened(tmp_path, tokenizer, kind, named) -> None:
    table = el.TokenEmbedding(257, 8)
    layer = {
        "table": lambda: table,
        "way in": lambda: el.TransformerEmbedding(257, 8, 16),
        "layer": lambda: el.EmbeddingLayer(table),
        "model": lambda: el.DecoderLM(table, el.RotaryEmbedding(4), num_layers=1, num_heads=2),
    }[kind]()
    layer.save_pretrained(tmp_path, tokenizer=tokenizer if named else None)
    opened = open_with_rows(tmp_path, getattr(layer, "table", layer).weight.detach())
    assert opened.kind == f"saved {type(layer).__name__}"
    assert (opened.tokenizer is not None) == named
    assert (opened.position is not None) == (kind != "table")
    assert (opened.head is not None) == (kind == "model")


@looped("kind", ["model", "layer", "way in", "checkpoint"])
def test_the_table_alone_needs_no_other_tensor_and_no_tokenizer(tmp_path, tokenizer, kind) -> None:
    table = el.TokenEmbedding(257, 8)
    layer = {
        "model": lambda: el.DecoderLM(table, el.RotaryEmbedding(4), num_layers=1, num_heads=2),
        "layer": lambda: el.EmbeddingLayer(table, el.LearnedPositionalEmbedding(4, 8)),
        "way in": lambda: el.TransformerEmbedding(257, 8, 16),
        "checkpoint": lambda: None,
    }[kind]()
    rows, name = torch.randn(257, 8), "table.weight"
    if layer is not None:
        layer.save_pretrained(tmp_path)
        rows = layer.table.weight.detach()
    else:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 257, "hidden_size": 8}))
        name = "model.embed_tokens.weight"
    save_file({name: rows}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises((EmbedLayerError, EmbedLayerWarning)):
        open_model(tmp_path)
    opened = open_model(tmp_path, parts="table")
    assert torch.equal(opened.rows, rows)
    assert opened.model is None
    assert opened.kind == ("checkpoint of family llama" if layer is None else f"saved {type(layer).__name__}")
    with pytest.raises(CheckpointError, match="leave parts out"):
        opened.require_input()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert opened.require_tokenizer().get_vocab_size() == 257


def test_the_layer_of_a_checkpoint_has_no_transformer_blocks(shared_data) -> None:
    opened = open_model(shared_data / "models", parts="layer")
    assert isinstance(opened.model, el.EmbeddingLayer)
    assert torch.equal(opened.rows, open_model(shared_data / "models").rows)
    with pytest.raises(CheckpointError, match="leave parts out"):
        opened.require_decoder()
    with pytest.raises(SizeError, match="parts must be one of table, layer, model, not 'head'"):
        open_model(shared_data / "models", parts="head")


def test_a_free_head_is_found(tmp_path) -> None:
    head = el.OutputHead(vocab_size=257, embed_dim=8)
    model = el.DecoderLM(el.TokenEmbedding(257, 8), el.RotaryEmbedding(4), head, num_layers=1, num_heads=2)
    model.save_pretrained(tmp_path)
    assert torch.equal(open_model(tmp_path).untied_head, head.weight)


@looped("name", ["", "model.safetensors", "blob"])
def test_checkpoints_are_opened_as_folder_file_and_file_without_an_ending(tmp_path, tokenizer, name) -> None:
    tensors = {"wte.weight": torch.randn(257, 8), "wpe.weight": torch.randn(16, 8)}
    for file in ("model.safetensors", "blob"):
        save_file(tensors, tmp_path / file)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 257, "n_embd": 8, "n_positions": 16})
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    opened = open_with_rows(tmp_path / name, tensors["wte.weight"])
    assert opened.kind == "checkpoint of family gpt2"
    assert opened.tokenizer.get_vocab_size() == 257
    assert isinstance(opened.model, el.EmbeddingLayer)


def test_metas_layout_is_a_whole_model_and_without_sizes_still_a_table(shared_data, tmp_path) -> None:
    opened = open_model(shared_data / "models")
    assert (opened.kind, opened.table.vocab_size) == ("checkpoint", 512)
    assert isinstance(opened.model, el.DecoderLM)
    assert opened.tokenizer.id_to_token(1) == "<s>"
    tensors = {"tok_embeddings.weight": torch.randn(9, 8), "layers.0.attention.wq.weight": torch.randn(8, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(el.EmbedLayerWarning, match="Only the table of .* can be read"):
        open_with_rows(tmp_path, tensors["tok_embeddings.weight"])


def test_a_name_on_the_hub_is_its_embedding_layer(tmp_path, monkeypatch) -> None:
    layer = el.EmbeddingLayer(el.TokenEmbedding(5, 4), family="gpt2")
    monkeypatch.setattr("embedlayer.checkpoints.layer.load", lambda name, **_: {"someone/tiny": layer}[name])
    monkeypatch.chdir(tmp_path)
    opened = open_with_rows("someone/tiny", layer.table.weight.detach())
    assert (opened.source, opened.kind, opened.title) == ("someone/tiny", "checkpoint of family gpt2", "someone/tiny")


def make(kind, path):
    """Something that holds no table."""
    if kind == "position":
        el.LearnedPositionalEmbedding(4, 4).save_pretrained(path)
    elif kind == "n-grams":
        el.inputs.NgramEmbedding.dense(el.inputs.NgramHash.for_rows(20, 9, heads=1), 4).save_pretrained(path)
    elif kind == "other version":
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"format_version": 99, "kind": "token_embedding"}))
    elif kind == "unfinished":
        path.mkdir()
        (path / "run.json").write_text(json.dumps({"format_version": 1}))
    elif kind == "empty":
        path.mkdir()
    elif kind == "gguf":
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"GGUF\3" + bytes(40))
    elif kind != "nowhere":
        torch.save({"a": torch.ones(2)}, path)


@looped(
    "kind, name, error",
    [
        *((kind, "p", CheckpointError) for kind in ("position", "n-grams", "other version")),
        *((kind, "p", FileError) for kind in ("unfinished", "empty")),
        *(("pickle", name, CheckpointError) for name in ("pytorch_model.bin", "model.pt", "notes.md")),
        *(("gguf", name, CheckpointError) for name in ("model.gguf", "folder/model.gguf")),
        *(("nowhere", name, FileError) for name in ("nowhere", "nowhere.vec")),
    ],
)
def test_what_holds_no_table_is_refused(tmp_path, kind, name, error) -> None:
    make(kind, tmp_path / name)
    with pytest.raises(error, match=str(tmp_path)):
        open_model((tmp_path / name).parent if name.startswith("folder") else tmp_path / name)
