"""Changed tensors back into a whole checkpoint."""

import json
import resource
from pathlib import Path

import pytest
import torch
from covering import cases
from safetensors.torch import load_file, save_file
from tiny_models import VARIANTS, VOCAB, quiet
from transformers_probe import ends

import embedlayer as el


def save_model(name: str, folder: Path, **options: object) -> torch.nn.Module:
    _, model = VARIANTS[name].build()
    with quiet():
        model.save_pretrained(folder, **options)
    return model


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@cases("name, shards", ["BERT", "OPT 350M's projections", "T5 1.1", "LLaMA 2"], ["1GB", "10KB"])
def test_the_changed_checkpoint_is_transformers_model_with_that_change(name, shards, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    save_model(name, tmp_path / "old", max_shard_size=shards)
    layer = el.load(tmp_path / "old")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5)
    receipt = layer.write_into(tmp_path / "old", tmp_path / "new")
    assert set(receipt.changed) == {name for names in layer.tensor_names.values() for name in names}

    before, after = tensors_of(tmp_path / "old"), tensors_of(tmp_path / "new")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor * 1.5 if key in receipt.changed else tensor)

    auto = {"BERT": AutoModelForMaskedLM, "T5 1.1": AutoModelForSeq2SeqLM}.get(name, AutoModelForCausalLM)
    with quiet():
        changed = auto.from_pretrained(tmp_path / "new").eval()
    ids = torch.randint(2, VOCAB, (2, 12))
    block, hidden, logits = ends(changed, ids)
    assert torch.equal(layer.input(ids), block)
    assert (layer.head(hidden) - logits).abs().max() < 1e-6


def test_without_a_change_every_file_is_the_same_to_the_byte(tmp_path) -> None:
    save_model("GPT-2", tmp_path / "old", max_shard_size="10KB")
    (tmp_path / "old" / "1_Pooling").mkdir()
    (tmp_path / "old" / "1_Pooling" / "config.json").write_text("{}")
    receipt = el.load(tmp_path / "old").write_into(tmp_path / "old", tmp_path / "new")
    assert (receipt.changed, receipt.rewritten) == ((), ())
    old = {file.relative_to(tmp_path / "old"): file for file in (tmp_path / "old").rglob("*") if file.is_file()}
    assert {str(file) for file in old} == set(receipt.copied)
    for name, file in old.items():
        assert (tmp_path / "new" / name).read_bytes() == file.read_bytes()


def test_only_the_shard_with_the_change_is_rewritten(tmp_path) -> None:
    save_model("LLaMA 2", tmp_path / "old", max_shard_size="10KB")
    layer = el.load(tmp_path / "old")
    with torch.no_grad():
        layer.table.weight[5] += 1
    receipt = layer.write_into(tmp_path / "old", tmp_path / "new")
    assert receipt.changed == ("model.embed_tokens.weight",)
    assert len(receipt.rewritten) == 1
    index = "model.safetensors.index.json"
    old, new = (json.loads((tmp_path / folder / index).read_text()) for folder in ("old", "new"))
    assert old == new


def test_another_number_of_rows_changes_the_configuration_and_the_index(tmp_path) -> None:
    from transformers import LlamaForCausalLM

    model = save_model("LLaMA 2", tmp_path / "old", max_shard_size="10KB")
    layer = el.load(tmp_path / "old")
    rows, head = (torch.cat([weight.detach(), torch.ones(6, 64)]) for weight in (layer.table.weight, layer.head.weight))
    wider = el.EmbeddingLayer(
        el.TokenEmbedding.from_pretrained(rows, freeze=False),
        layer.position,
        el.OutputHead(vocab_size=VOCAB + 6, embed_dim=64),
        family=layer.family,
        tensor_names=layer.tensor_names,
    )
    with torch.no_grad():
        wider.head.weight.copy_(head)
    assert wider.write_into(tmp_path / "old", tmp_path / "new").vocab_size == VOCAB + 6
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == VOCAB + 6
    old, new = (
        json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())["metadata"]
        for folder in ("old", "new")
    )
    assert new["total_size"] - old["total_size"] == 2 * 6 * 64 * 4
    with quiet():
        changed = LlamaForCausalLM.from_pretrained(tmp_path / "new")
    assert torch.equal(changed.lm_head.weight, head)
    assert torch.equal(changed.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)

    wider.head = el.OutputHead(vocab_size=VOCAB + 7, embed_dim=64)
    with pytest.raises(el.CheckpointError, match=r"needs \[137, 64\], not \[138, 64\]"):
        wider.write_into(tmp_path / "old", tmp_path / "other")
    assert not (tmp_path / "other").exists()


GPT2 = {"model_type": "gpt2", "vocab_size": 20, "n_embd": 8}


def small(folder: Path, dtype: torch.dtype = torch.float32, **others: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    tensors = {"wte.weight": torch.randn(20, 8).to(dtype), "wpe.weight": torch.randn(9, 8).to(dtype), **others}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "note": "kept"})
    return folder


def test_types_and_metadata_of_the_checkpoint_stay(tmp_path) -> None:
    old = small(tmp_path / "old", torch.bfloat16, odd=torch.arange(5, dtype=torch.uint8), scalar=torch.tensor(3))
    layer = el.load(old, dtype=torch.float32)
    assert layer.write_into(old, tmp_path / "same").changed == ()
    with torch.no_grad():
        layer.table.weight[3] = 0.1
    layer.write_into(old, tmp_path / "new")
    before, after = load_file(old / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    before["wte.weight"][3] = 0.1
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert b'"note":"kept"' in (tmp_path / "new" / "model.safetensors").read_bytes()[:400]


def test_every_name_of_a_tied_table_is_written(tmp_path) -> None:
    rows = torch.randn(20, 8)
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2))
    tensors = {
        "transformer.wte.weight": rows,
        "lm_head.weight": rows.clone(),
        "transformer.wpe.weight": torch.randn(9, 8),
    }
    save_file(tensors, folder / "model.safetensors")
    layer = el.load(folder)
    with torch.no_grad():
        layer.table.weight.neg_()
    receipt = layer.write_into(folder, tmp_path / "new")
    assert receipt.changed == ("lm_head.weight", "transformer.wte.weight")
    assert el.load(tmp_path / "new").head.tied


def test_a_layer_that_was_saved_alone_still_finds_its_place(tmp_path) -> None:
    old = small(tmp_path / "old")
    el.load(old).save_pretrained(tmp_path / "layer")
    layer = el.load(tmp_path / "layer")
    with torch.no_grad():
        layer.position.weight.zero_()
    assert layer.write_into(old, tmp_path / "new").changed == ("wpe.weight",)


def test_a_folder_with_something_in_it_is_not_replaced(tmp_path) -> None:
    old = small(tmp_path / "old")
    layer = el.load(old)
    for target, what in ((old, "is not empty"), (old / "config.json", "is a file, not a folder")):
        with pytest.raises(el.FileError, match=what):
            layer.write_into(old, target)
    with pytest.raises(el.FileError, match="There is no folder"):
        layer.write_into(tmp_path / "nowhere", tmp_path / "new")
    (tmp_path / "new").mkdir()
    layer.write_into(old, tmp_path / "new")
    assert el.load(tmp_path / "new").family == "gpt2"


def test_another_checkpoint_is_refused(tmp_path) -> None:
    layer = el.load(small(tmp_path / "old"))
    save_model("GPT-2", tmp_path / "other")
    with pytest.raises(el.CheckpointError, match=r"no tensor 'wte\.weight'"):
        layer.write_into(tmp_path / "other", tmp_path / "new")
    save_file(
        {"wte.weight": torch.randn(20, 9), "wpe.weight": torch.randn(9, 8)}, tmp_path / "old" / "model.safetensors"
    )
    with pytest.raises(el.CheckpointError, match=r"needs \[20, 9\], not \[20, 8\]"):
        layer.write_into(tmp_path / "old", tmp_path / "new")


def test_a_layer_without_a_tensor_of_tokens_is_not_written_with_another_vocabulary(tmp_path) -> None:
    """The layer of an untied BERT has one of its two biases: the other one would keep its old size."""
    from tiny_models import build

    with quiet():
        build("bert", "masked", {"tie_word_embeddings": False})[1].save_pretrained(tmp_path / "old")
    layer = el.load(tmp_path / "old")
    layer.write_into(tmp_path / "old", tmp_path / "same")
    el.vocab.add_tokens(layer, 2)
    with pytest.raises(el.CheckpointError, match=r"cls\.predictions\.bias .*edit the vocabulary of the folder instead"):
        layer.write_into(tmp_path / "old", tmp_path / "new")
    el.vocab.add_tokens(tmp_path / "old", 2, out=tmp_path / "new")
    sizes = {name: tensor.shape for name, tensor in tensors_of(tmp_path / "new").items()}
    assert sizes["cls.predictions.bias"] == sizes["cls.predictions.decoder.bias"] == (VOCAB + 2,)


def test_the_other_tensors_are_never_in_memory(tmp_path) -> None:
    old = small(tmp_path / "old", h=torch.zeros(100 << 20, dtype=torch.uint8))
    layer = el.load(old)
    with torch.no_grad():
        layer.table.weight.neg_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layer.write_into(old, tmp_path / "new")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB
    assert (tmp_path / "new" / "model.safetensors").stat().st_size == (old / "model.safetensors").stat().st_size
