"""Longer context of folders, GGUF files and live models, with a receipt that undoes the edit."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from gguf_models import write_file

import embedlayer as el
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.io.files import write_json
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.positions import LinearScaling, RotaryEmbedding, YarnScaling
from embedlayer.vocab import ContextReceipt, extend_positions, last_context_receipt, last_receipt, remove_tokens

LLAMA = {"model_type": "llama", "rope_theta": 1e4, "max_position_embeddings": 64, "vocab_size": 20}
LLAMA |= {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
BERT = {"model_type": "bert", "max_position_embeddings": 8, "vocab_size": 20, "hidden_size": 16}


def contents(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def llama(tmp_path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    save_tensors(folder / "model.safetensors", {"model.embed_tokens.weight": torch.randn(20, 16)})
    write_json(folder / "config.json", LLAMA)
    write_json(folder / "generation_config.json", {"max_length": 64, "temperature": 0.7})
    (folder / "tokenizer_config.json").write_text('{"model_max_length":64,"x":[1,2]}')
    (folder / "model.onnx").write_text("angles as they were")
    return folder


@pytest.fixture
def bert(tmp_path) -> Path:
    """A folder with what older checkpoints of BERT store: numbers of positions, and weights in a second form."""
    folder = tmp_path / "bert"
    folder.mkdir()
    names = ("word_embeddings", "token_type_embeddings", "position_embeddings")
    tensors = {
        f"bert.embeddings.{name}.weight": torch.randn(rows, 16) for name, rows in zip(names, (20, 2, 8), strict=True)
    }
    tensors |= {f"bert.embeddings.LayerNorm.{name}": torch.ones(16) for name in ("weight", "bias")}
    tensors |= {"bert.embeddings.position_ids": torch.arange(8)[None], "bert.encoder.x": torch.randn(8, 8)}
    save_tensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", BERT)
    (folder / "pytorch_model.bin").write_bytes(b"the same weights")
    return folder


def test_lengths_beside_the_configuration_follow_and_exported_graphs_are_left_out(llama, tmp_path) -> None:
    with pytest.warns(el.EmbedLayerWarning, match="model.onnx"):
        receipt = extend_positions(llama, 256, out=tmp_path / "new")
    read = {file.name: json.loads(file.read_text()) for file in (tmp_path / "new").glob("*.json")}
    assert read["generation_config.json"] == {"max_length": 256, "temperature": 0.7}
    assert read["tokenizer_config.json"] == {"model_max_length": 256, "x": [1, 2]}
    assert receipt.left_out == ("model.onnx",)
    with pytest.warns(el.EmbedLayerWarning, match="Not restored: model.onnx"):
        receipt.undo(tmp_path / "new", out=tmp_path / "back")
    (llama / "model.onnx").unlink()
    assert contents(tmp_path / "back") == contents(llama)


def test_stored_numbers_of_positions_follow_the_table(bert, tmp_path) -> None:
    with pytest.warns(el.EmbedLayerWarning, match="pytorch_model.bin"):
        receipt = extend_positions(bert, 12, method="repeat", out=tmp_path / "new")
    old, new = (load_tensors(folder / "model.safetensors")[0] for folder in (bert, tmp_path / "new"))
    assert torch.equal(new["bert.embeddings.position_ids"], torch.arange(12)[None])
    assert torch.equal(new["bert.encoder.x"], old["bert.encoder.x"])
    with pytest.warns(el.EmbedLayerWarning, match="Not restored"):
        receipt.undo(tmp_path / "new", out=tmp_path / "back")
    (bert / "pytorch_model.bin").unlink()
    assert contents(tmp_path / "back") == contents(bert)


def test_a_receipt_is_what_was_saved(bert, tmp_path) -> None:
    with pytest.warns(el.EmbedLayerWarning):
        receipt = extend_positions(bert, 12, out=tmp_path / "new")
    again = last_context_receipt(tmp_path / "new")
    assert str(again) == str(receipt)
    assert (again.files, again.hashes, again.left_out) == (receipt.files, receipt.hashes, receipt.left_out)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in receipt.tensors.items())
    with pytest.raises(el.CheckpointError, match="vocabulary-receipt"):
        el.vocab.Receipt.load(tmp_path / "new" / "positions-1.receipt")
    (tmp_path / "broken").write_bytes(b"x")
    with pytest.raises(el.CheckpointError):
        ContextReceipt.load(tmp_path / "broken")


def test_edits_are_undone_in_reverse(llama, tmp_path) -> None:
    (llama / "model.onnx").unlink()
    names = [tmp_path / name for name in ("1", "2", "3")]
    remove_tokens(llama, [7], out=names[0])
    extend_positions(names[0], 256, out=names[1])
    remove_tokens(names[1], [7], out=names[2])
    assert sorted(file.name for file in names[2].glob("*.receipt")) == [
        "positions-2.receipt",
        "vocabulary-1.receipt",
        "vocabulary-3.receipt",
    ]
    with pytest.raises(el.CheckpointError, match=r"vocabulary-3\.receipt: use the folder before it"):
        last_context_receipt(names[2])
    assert last_receipt(names[1]).row_map.size == last_receipt(names[0]).row_map.size
    last_context_receipt(names[1]).undo(names[1], out=tmp_path / "1 again")
    assert contents(tmp_path / "1 again") == contents(names[0])


def test_a_folder_that_was_changed_since_is_not_undone(llama, tmp_path) -> None:
    (llama / "model.onnx").unlink()
    receipt = extend_positions(llama, 256, out=tmp_path / "new")
    write_json(tmp_path / "new" / "config.json", LLAMA)
    with pytest.raises(el.CheckpointError, match="not what this edit wrote"):
        receipt.undo(tmp_path / "new", out=tmp_path / "back")
    assert not (tmp_path / "back").exists()
    with pytest.raises(el.FileError, match="name it with out="):
        extend_positions(llama, 256)


@pytest.mark.parametrize("method", ["linear", "yarn", "base"])
def test_a_gguf_file_is_read_back_with_the_scaling_and_undone_byte_for_byte(method, tmp_path) -> None:
    old = write_file(tmp_path / "old.gguf")
    content = old.read_bytes()
    old.write_bytes(content[:-3] + b"end")  # what follows the last tensor stays too
    receipt = extend_positions(old, 256, method=method, out=tmp_path / "new.gguf")
    config = Checkpoint.open(tmp_path / "new.gguf").config
    assert config["max_position_embeddings"] == 256
    scheme = RotaryEmbedding.from_config(config)
    expected = {"linear": LinearScaling(4.0), "yarn": YarnScaling(4.0, 64), "base": None}[method]
    assert scheme.scaling == expected
    assert scheme.base == pytest.approx(1e4 if method != "base" else 1e4 * 4 ** (64 / 62))
    assert receipt.lengths == (64, 256)
    if expected is not None:
        with pytest.raises(el.CheckpointError, match="already"):
            extend_positions(tmp_path / "new.gguf", 512, out=tmp_path / "more.gguf")
    last_context_receipt(tmp_path / "new.gguf").undo(tmp_path / "new.gguf", out=tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == old.read_bytes()
    with pytest.raises(el.CheckpointError, match="not what this edit wrote"):
        receipt.undo(old, out=tmp_path / "other.gguf")


def test_methods_that_need_tensors_are_refused_for_a_gguf_file(tmp_path) -> None:
    old = write_file(tmp_path / "old.gguf")
    for method in ("dynamic", "llama3"):
        with pytest.raises(el.CheckpointError, match="use linear, yarn or base"):
            extend_positions(old, 256, method=method, out=tmp_path / "new.gguf")
    write_file(old, "gpt2")
    with pytest.raises(el.CheckpointError, match="no rotary positions.*extend the folder that it was converted from"):
        extend_positions(old, 256, out=tmp_path / "new.gguf")
    assert [file.name for file in tmp_path.iterdir()] == ["old.gguf"]


POSITIONS = {"rotary": lambda: RotaryEmbedding(8), "learned": lambda: el.LearnedPositionalEmbedding(32, 16)}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_live_model_and_its_folder_get_the_same_positions(name, tmp_path) -> None:
    model = el.DecoderLM(el.TokenEmbedding(20, 16), POSITIONS[name](), num_layers=1, num_heads=2).eval()
    model.save_pretrained(tmp_path / "old")
    method, original = ("yarn", 32) if name == "rotary" else ("interpolate", None)
    ids = torch.randint(0, 20, (1, 32))
    before = model(ids).detach()
    receipt = extend_positions(model, 128, method=method, original_length=original)
    extend_positions(tmp_path / "old", 128, method=method, original_length=original, out=tmp_path / "new")
    again = el.DecoderLM.from_pretrained(tmp_path / "new").eval()
    assert repr(again.position) == repr(model.position)
    long = torch.randint(0, 20, (1, 128))
    assert torch.equal(model(long), again(long))
    receipt.undo(model)
    assert torch.equal(model(ids), before)
    last_context_receipt(tmp_path / "new").undo(tmp_path / "new", out=tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "old")
    with pytest.raises(el.CheckpointError, match="other positions than this edit left"):
        receipt.undo(model)


@pytest.mark.parametrize(
    ("position", "known"),
    [
        (el.AlibiBias(2), "at any distance"),
        (el.RelativePositionBias(2, bidirectional=False), "share the last bucket"),
        (el.Position(), "no longest sequence"),
        (el.SinusoidalPositionalEmbedding(32, 16), "computed from the position"),
    ],
)
def test_live_schemes_without_trained_lengths_are_refused(position, known) -> None:
    model = el.DecoderLM(el.TokenEmbedding(20, 16), position, num_layers=1, num_heads=2)
    with pytest.raises(el.CheckpointError, match=known):
        extend_positions(model, 128)
    assert model.position is position


def test_options_that_do_not_fit_are_refused(bert, tmp_path) -> None:
    learned = el.DecoderLM(el.TokenEmbedding(20, 16), "learned", num_layers=1, num_heads=2, max_seq_len=32)
    rotary = el.DecoderLM(el.TokenEmbedding(20, 16), "rotary", num_layers=1, num_heads=2)
    for model, options, message in (
        (learned, {"method": "yarn"}, "use one of interpolate, extend, repeat"),
        (learned, {"length": 32}, "has 32 positions: sequences of 32 need no edit"),
        (learned, {"length": 64.5}, "length must be a whole number of at least 2, not 64.5"),
        (rotary, {"original_length": 0}, "original_length must be a whole number of at least 1, not 0"),
        (learned, {"out": tmp_path / "new"}, "changed in place"),
        (learned.position, {}, "pass the model, or its folder"),
        (rotary, {"method": "extend", "original_length": 32}, "have no table"),
        (rotary, {"original_length": 128}, "trained on 128"),
        (rotary, {}, "pass original_length"),
        (bert, {"length": 8, "out": tmp_path / "new"}, "has 8 positions"),
    ):
        with pytest.raises((el.SizeError, el.CheckpointError), match=message):
            extend_positions(model, **{"length": 128, **options})
    write_json(bert / "config.json", {**BERT, "max_position_embeddings": None})
    with pytest.raises(el.CheckpointError, match="states none of"):
        extend_positions(bert, 12, out=tmp_path / "new")
