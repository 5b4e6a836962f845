"""Edits of models with per-layer tables, with transformers' Gemma 3n and 4 as the judge."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from gguf_models import WIDTH, write_file
from releases import per_layer_rows, skip_before
from tiny_models import VOCAB, build, quiet
from tokenizer_kinds import ENGLISH
from torch import nn

import embedlayer as el
from embedlayer.vocab import VectorsInit, edit_vocabulary, write_into

ROWS = {"gemma3n_text": 100, "gemma4_text": VOCAB}
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
SIZES |= {"hidden_size_per_layer_input": 8}
REMOVED = (7, 120)  # Gemma 3n's table has no row for the second
KEPT = [token for token in range(VOCAB) if token not in REMOVED]
OLD, NEW = torch.tensor([[5, 0, 99, 110, 130]]), torch.tensor([[5, 0, 98, 109, 128]])


def small(model_type: str) -> nn.Module:
    if model_type == "gemma3n_text":
        skip_before("token without a row in a per-layer table of Gemma 3n")
    return build(model_type, "causal", {**SIZES, "vocab_size_per_layer_input": ROWS[model_type]})[1]


def per_layer_inputs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    text = model.model
    return text.project_per_layer_inputs(text.embed_tokens(ids), per_layer_rows(text, ids))


def check(model: nn.Module, edited: nn.Module) -> None:
    """Check that kept tokens have the same per-layer inputs and logits, and that each token has a row now."""
    assert edited.config.vocab_size == edited.config.vocab_size_per_layer_input == 133
    assert len(edited.model.embed_tokens_per_layer.weight) == 133
    assert torch.equal(per_layer_inputs(edited, NEW), per_layer_inputs(model, OLD))
    logits = model(OLD).logits[..., KEPT].detach()
    assert torch.allclose(edited(NEW).logits[..., : len(KEPT)].detach(), logits, atol=1e-5)
    assert edited(torch.tensor([[129, 132]])).logits.isfinite().all()


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory) -> Path:
    """A saved Gemma 3n, which no test changes."""
    folder = tmp_path_factory.mktemp("gemma3n")
    with quiet():
        small("gemma3n_text").save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("model_type", "states_rows"), [("gemma3n_text", False), ("gemma4_text", True)])
def test_a_folder_is_edited(model_type, states_rows, tmp_path) -> None:
    model: Any = small(model_type)
    with quiet():
        model.save_pretrained(tmp_path / "old", max_shard_size="40KB")
    config = json.loads((tmp_path / "old/config.json").read_text()) | {"eoa_token_index": 130}
    if not states_rows:
        del config["vocab_size_per_layer_input"]
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    edit_vocabulary(tmp_path / "old", remove=REMOVED, add=4, out=tmp_path / "new")
    with quiet():
        check(model, type(model).from_pretrained(tmp_path / "new"))
    assert json.loads((tmp_path / "new/config.json").read_text())["eoa_token_index"] == 128
    new, old = el.load(tmp_path / "new").per_layer.table.weight, model.model.embed_tokens_per_layer.weight
    complete = torch.cat([old, old[:1].expand(VOCAB - len(old), -1)])
    assert torch.equal(new[: len(KEPT)], complete[KEPT])
    assert torch.allclose(new[len(KEPT) :], complete.double().mean(0).float())


def test_tokens_in_another_order_keep_the_row_that_stands_in_for_theirs(gemma3n, tmp_path) -> None:
    model = small("gemma3n_text")
    order = [*range(1, VOCAB), 0]  # the row of token 0 is that of tokens without one
    edit_vocabulary(gemma3n, order=order, out=tmp_path / "new")
    with quiet():
        edited = type(model).from_pretrained(tmp_path / "new")
    new = torch.tensor([[order.index(token) for token in OLD[0].tolist()]])
    assert torch.equal(per_layer_inputs(edited, new), per_layer_inputs(model, OLD))


@pytest.mark.parametrize("model_type", ROWS)
def test_a_patched_model_and_its_optimizer_are_edited_and_the_undo_restores_them(model_type) -> None:
    model, edited = small(model_type), el.patch(small(model_type))
    optimizer = torch.optim.AdamW(edited.parameters(), lr=0.0, weight_decay=0.0)
    edited(OLD, labels=OLD).loss.backward()
    optimizer.step()
    table = edited.model.embed_tokens_per_layer
    moments, grad = optimizer.state[table.weight]["exp_avg"].clone(), table.weight.grad.clone()
    receipt = edit_vocabulary(edited, remove=REMOVED, add=4, optimizer=optimizer)
    kept = [row for row in KEPT if row < len(grad)]
    assert torch.equal(table.weight.grad[: len(kept)], grad[kept])
    assert not table.weight.grad[len(kept) :].any()
    assert torch.equal(optimizer.state[table.weight]["exp_avg"][: len(kept)], moments[kept])
    check(model, edited)
    receipt.undo(edited, optimizer=optimizer)
    assert edited.config.vocab_size_per_layer_input == ROWS[model_type]
    assert torch.equal(optimizer.state[table.weight]["exp_avg"], moments)
    el.unpatch(edited)
    assert edited.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, edited.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_loaded_layer_is_edited_and_written_back_only_with_its_per_layer_table(gemma3n, tmp_path) -> None:
    model, layer = small("gemma3n_text"), el.load(gemma3n)
    rows = torch.randn(4, 48)
    receipt = edit_vocabulary(layer, remove=REMOVED, add=4, init=VectorsInit(rows))
    assert torch.equal(layer.table.weight[-4:], rows)
    layer.write_into(gemma3n, tmp_path / "new")
    with quiet():
        check(model, type(model).from_pretrained(tmp_path / "new"))
    receipt.undo(layer)
    assert layer.per_layer.table.vocab_size == 100
    assert torch.equal(layer.per_layer.table.weight, model.model.embed_tokens_per_layer.weight)


@pytest.mark.parametrize("options", [{"per_layer": False}, {"table_only": True}], ids=str)
@pytest.mark.parametrize("edit", [{"order": range(130, -1, -1)}, {"remove": REMOVED}, {"add": 3}], ids=str)
def test_a_part_of_a_checkpoint_is_put_back_only_in_its_old_order(edit, options, gemma3n, tmp_path) -> None:
    """Also a part that was saved, and one of a saved layer that was edited whole."""
    part = el.load(gemma3n, **options)
    part.write_into(gemma3n, tmp_path / "same")
    part.save_pretrained(tmp_path / "part")
    whole, saved = el.load(gemma3n), el.load(tmp_path / "part")
    receipts = [edit_vocabulary(each, **edit) for each in (part, saved, whole)]
    part.save_pretrained(tmp_path / "edited part")
    whole.save_pretrained(tmp_path / "edited")
    el.load(tmp_path / "edited").write_into(gemma3n, tmp_path / "whole")  # it has all rows of the checkpoint
    for each in (part, saved, el.load(tmp_path / "edited part"), el.load(tmp_path / "edited", **options)):
        assert each.is_part
        with pytest.raises(el.CheckpointError):
            each.write_into(gemma3n, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    for each, receipt in zip((part, saved, whole), receipts, strict=True):
        receipt.undo(each)
        each.write_into(gemma3n, tmp_path / "undone")
        shutil.rmtree(tmp_path / "undone")


def test_the_table_of_a_saved_layer_with_an_untied_head_remembers_an_edit_of_its_folder(tmp_path) -> None:
    with quiet():
        build("llama", "causal", {"tie_word_embeddings": False})[1].save_pretrained(tmp_path / "old")
    el.load(tmp_path / "old").save_pretrained(tmp_path / "layer")
    edit_vocabulary(tmp_path / "layer", order=range(130, -1, -1), out=tmp_path / "edited")
    el.load(tmp_path / "edited").write_into(tmp_path / "old", tmp_path / "whole")
    with pytest.raises(el.CheckpointError):
        el.load(tmp_path / "edited", table_only=True).write_into(tmp_path / "old", tmp_path / "new")


def test_a_table_without_a_rule_for_missing_tokens_must_have_all_of_them() -> None:
    table = el.TokenEmbedding(9, 8)
    inputs = el.inputs.PerLayerInputs(el.TokenEmbedding(7, 12), 8, 3)
    with pytest.raises(el.SizeError, match="share a vocabulary"):
        el.vocab.remove_tokens(nn.ModuleList([table, inputs]), [1])
    el.vocab.remove_tokens(inputs, [1])
    assert inputs.table.vocab_size == 6


def test_a_multimodal_model_that_finds_images_by_their_ids_is_refused(gemma3n, tmp_path) -> None:
    shutil.copytree(gemma3n, tmp_path / "old")
    text = json.loads((gemma3n / "config.json").read_text())
    config = {"model_type": "gemma3n", "text_config": text, "vision_config": {"vocab_offset": 100}}
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    with pytest.raises(el.VocabularyError, match="vocab_offset"):
        edit_vocabulary(tmp_path / "old", remove=[120], out=tmp_path / "new")
    for owner, key in (("part", "vocab_offset"), ("configuration", "image_token_offset")):
        edited = nn.ModuleDict({"vision": nn.Linear(1, 1), "table": el.TokenEmbedding(9, 2)})
        edited.vision.config = SimpleNamespace()
        setattr(edited.vision if owner == "part" else edited.vision.config, key, 6)
        with pytest.raises(el.VocabularyError, match=key):
            edit_vocabulary(edited, add=1)


def test_the_per_layer_table_of_a_gguf_file_is_moved_with_its_tokens(tmp_path) -> None:
    tokenizer = el.train_tokenizer(ENGLISH, "bpe", vocab_size=300)
    name = "per_layer_token_embd.weight"
    tensors = {name: torch.randn(300, 2 * WIDTH).half().numpy()}
    old = write_file(tmp_path / "old.gguf", "gemma3n", tokenizer=("gpt2", tokenizer), tensors=tensors)
    removed = tokenizer.id_to_token(280)
    assert removed is not None
    edit_vocabulary(old, remove=[removed], add=["zebra"], out=tmp_path / "new.gguf")
    [stored] = [each for each in gguf.GGUFReader(tmp_path / "new.gguf").tensors if each.name == name]
    new = torch.from_numpy(stored.data.copy())
    expected = torch.from_numpy(tensors[name])
    assert torch.equal(new[:-1], expected[[row for row in range(300) if row != 280]])
    assert new[-1].any()
    table = el.TokenEmbedding(300, WIDTH)
    with pytest.raises(el.CheckpointError):
        write_into(table, el.load_tokenizer(tmp_path / "new.gguf"), old, tmp_path / "x.gguf", head=None)
