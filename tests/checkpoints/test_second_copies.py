"""Second copies of a checkpoint's tensors are edited as it is; adapters with values of tokens are refused.

The rule is that of a checkpoint, of `write_into` with another vocabulary, and of a layer or run of this library.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from safetensors.torch import load_file
from stored_folders import save_tensors

import embedlayer as el

V, D = 20, 4
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COPIES = {
    "model.fp16.safetensors": {TABLE: TABLE, HEAD: HEAD},
    "other/model.safetensors": {TABLE: TABLE},
    "consolidated.safetensors": {"tok_embeddings.weight": TABLE, "output.weight": HEAD},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    old = tmp_path / "old"
    old.mkdir()
    torch.manual_seed(0)
    save_tensors(old / "model.safetensors", {TABLE: torch.randn(V, D), HEAD: torch.randn(V, D)})
    sizes = {"hidden_size": D, "num_attention_heads": 2}
    (old / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": V, **sizes}))
    (old / "params.json").write_text(json.dumps({"vocab_size": V, "dim": D}))
    return old


@pytest.mark.parametrize("file", COPIES)
def test_a_second_copy_has_the_rows_of_the_checkpoint(file: str, folder: Path, tmp_path: Path) -> None:
    main = load_file(folder / "model.safetensors")
    copy = {name: main[key].half() for name, key in COPIES[file].items()} | {"norm.weight": torch.randn(D)}
    (folder / file).parent.mkdir(exist_ok=True)
    save_tensors(folder / file, copy)
    el.vocab.edit_vocabulary(folder, remove=[3], add=2, init=el.vocab.RandomInit(), out=tmp_path / "new")
    new, copied = load_file(tmp_path / "new" / "model.safetensors"), load_file(tmp_path / "new" / file)
    assert copied.keys() == copy.keys()
    assert torch.equal(copied["norm.weight"], copy["norm.weight"])
    for name, key in COPIES[file].items():
        assert torch.equal(copied[name], new[key].half()), name
    assert json.loads((tmp_path / "new" / "params.json").read_text())["vocab_size"] == V + 1


def test_the_printed_bytes_of_an_edit_count_each_weight_once(folder: Path, tmp_path: Path, capsys) -> None:
    save_tensors(folder / "model.fp16.safetensors", {TABLE: load_file(folder / "model.safetensors")[TABLE].half()})
    assert run("vocab", "remove", folder, "#3", "-o", tmp_path / "new", "--json") == 0
    sizes = [(each / "model.safetensors").stat().st_size for each in (folder, tmp_path / "new")]
    assert json.loads(capsys.readouterr().out)["weight_bytes"] == sizes


ADAPTER, PEFT = "adapter_model.safetensors", "base_model.model"
REFUSED = {
    "a tensor of another name": ("extra.safetensors", "unknown.weight", (V, 2)),
    "a table of another size": ("extra.safetensors", TABLE, (V + 1, D)),
    "LoRA on the table": (ADAPTER, f"{PEFT}.model.embed_tokens.lora_embedding_A", (2, V)),
    "rows of tokens": (ADAPTER, f"{PEFT}.model.embed_tokens.token_adapter.trainable_tokens_delta", (2, D)),
    "LoRA on the head": (ADAPTER, f"{PEFT}.lm_head.lora_B.weight", (V, 2)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_whose_values_of_tokens_are_not_known_is_refused_by_name(
    case: str, folder: Path, tmp_path: Path
) -> None:
    file, name, shape = REFUSED[case]
    save_tensors(folder / file, {name: torch.zeros(shape)})
    with pytest.raises(el.CheckpointError, match=f"{file} .*{name}"):
        el.vocab.remove_tokens(folder, [3], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (folder / file).rename(tmp_path / file)
    el.vocab.remove_tokens(folder, [3], out=tmp_path / "new")


def test_an_adapter_of_other_layers_is_copied(folder: Path, tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_tensors(folder / "adapter_model.safetensors", {name: torch.zeros(V, D)})
    el.vocab.remove_tokens(folder, [3], out=tmp_path / "new")
    assert load_file(tmp_path / "new" / "adapter_model.safetensors")[name].shape == (V, D)


@pytest.mark.parametrize("rows", [V + 2, V])
def test_write_into_with_another_vocabulary_writes_copies_and_leaves_out_what_holds_state(
    rows: int, folder: Path, tmp_path: Path
) -> None:
    for file, names in COPIES.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_tensors(folder / file, {name: load_file(folder / "model.safetensors")[key] for name, key in names.items()})
    (folder / "optimizer.pt").write_bytes(b"moments of the old vocabulary")
    (folder / "scheduler.pt").write_bytes(b"steps")
    layer = el.load(folder)
    layer.write_into(folder, tmp_path / "same")
    assert (tmp_path / "same" / "optimizer.pt").exists()
    el.vocab.edit_vocabulary(layer, remove=[3], add=rows - V + 1, init=el.vocab.RandomInit())
    with pytest.warns(el.EmbedLayerWarning, match="optimizer.pt .state of an optimizer.*zero moments") as caught:
        receipt = layer.write_into(folder, tmp_path / "new")
    assert len(caught) == 1
    assert receipt.left_out == ("optimizer.pt",)
    assert not (tmp_path / "new" / "optimizer.pt").exists()
    assert (tmp_path / "new" / "scheduler.pt").exists()
    for file, names in COPIES.items():
        copied = load_file(tmp_path / "new" / file)
        for name, key in names.items():
            assert torch.equal(copied[name], layer.state_dict()["table.weight" if key == TABLE else "head.weight"])
    assert json.loads((tmp_path / "new" / "params.json").read_text())["vocab_size"] == rows
    save_tensors(folder / "extra.safetensors", {"unknown.weight": torch.zeros(V, 2)})
    with pytest.raises(el.CheckpointError, match="extra.safetensors has a tensor unknown.weight"):
        layer.write_into(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


OWN = {
    "a second copy": ("model.fp16.safetensors", "table.weight", (V, D)),
    "a table of another name": ("sub/other.safetensors", TABLE, (V, D)),
    "a padded table": ("other.safetensors", TABLE, (V + 4, D)),
    "LoRA on a head of transformers": (ADAPTER, f"{PEFT}.lm_head.lora_B.weight", (V, 2)),
}


@pytest.fixture
def layer_folder(tmp_path: Path) -> Path:
    table = el.TokenEmbedding(V, D, pad_to_multiple_of=8)
    el.EmbeddingLayer(table, None, el.OutputHead(table)).save_pretrained(tmp_path / "layer")
    return tmp_path / "layer"


@pytest.mark.parametrize("case", OWN)
def test_a_layer_of_this_library_is_not_edited_beside_a_file_with_values_of_tokens(
    case: str, layer_folder: Path, tmp_path: Path
) -> None:
    file, name, shape = OWN[case]
    (layer_folder / file).parent.mkdir(exist_ok=True)
    save_tensors(layer_folder / file, {name: torch.zeros(shape)})
    save_tensors(layer_folder / "positions.safetensors", {"weight": torch.zeros(9, D)})
    with pytest.raises(el.CheckpointError, match=f"{file} has a tensor {name}"):
        el.vocab.remove_tokens(layer_folder, [3], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (layer_folder / file).rename(tmp_path / "moved.safetensors")
    el.vocab.remove_tokens(layer_folder, [3], out=tmp_path / "new")
    assert (tmp_path / "new" / "positions.safetensors").exists()


def test_an_adapter_beside_a_layer_of_this_library_is_merged_first(layer_folder: Path, tmp_path: Path) -> None:
    layer: Any = el.EmbeddingLayer.from_pretrained(layer_folder)
    el.vocab.train_only_rows(layer, [5])
    with torch.no_grad():
        layer.table.delta += 1
    el.vocab.save_adapter(layer, layer_folder)
    with pytest.raises(el.CheckpointError) as caught:
        el.vocab.remove_tokens(layer_folder, [3], out=tmp_path / "new")
    call = f"embedlayer.vocab.merge_adapter(model, {str(layer_folder)!r})"
    assert call in str(caught.value)
    model = el.EmbeddingLayer.from_pretrained(layer_folder)
    el.vocab.merge_adapter(model, str(layer_folder))
    model.save_pretrained(tmp_path / "merged")
    el.vocab.remove_tokens(tmp_path / "merged", [3], out=tmp_path / "new")
    edited = el.EmbeddingLayer.from_pretrained(tmp_path / "new")
    assert torch.equal(edited.table.rows(4, 5), layer.table.rows(5, 6))


def test_a_model_in_a_folder_inside_is_refused_with_that_folder(folder: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    folder.rename(outer / "0_Transformer")
    modules = [{"idx": 0, "name": "0", "path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    (outer / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(el.CheckpointError, match="edit .*0_Transformer"):
        el.vocab.remove_tokens(outer, [3], out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    el.vocab.remove_tokens(outer / "0_Transformer", [3], out=tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors")[TABLE].shape == (V - 1, D)
