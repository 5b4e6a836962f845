"""Checkpoints whose table and head a library quantised: read, used, and compared with the dequantised model."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from commands import run
from safetensors.torch import load_file, save_file
from stored_folders import one_of_each, words, write_folder
from stored_formats import CASES, mlx_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import embedlayer as el
from embedlayer.tables.stored_embedding import StoredEmbedding

READ = [*one_of_each(), "MLX 4 bits, groups of 64, bfloat16", "pack-quantized 4 bits, group, asymmetric, bfloat16"]


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_computes_what_its_dequantised_model_computes(tmp_path, name, tied) -> None:
    table = CASES[name]()
    head = None if tied else CASES.get(f"{name}, head", CASES[name])()
    model = write_folder(tmp_path, table, head)
    layer = el.load(tmp_path)
    assert isinstance(layer.table, StoredEmbedding)
    assert (layer.head.tied, layer.table.dtype) == (tied, table.rows.dtype)
    ids = torch.randint(0, len(table.rows), (2, 9))
    hidden = torch.randn(2, 9, table.rows.shape[1])
    assert torch.equal(layer.input(ids), model.get_input_embeddings()(ids))
    for dtype in (torch.float32, torch.bfloat16):
        head_rows = (table if head is None else head).rows_in(dtype)
        rows, states = layer.to(dtype).table.rows(0, 99), hidden.to(dtype)
        assert torch.equal(rows, table.rows_in(dtype))
        torch.testing.assert_close(layer.head(states), F.linear(states, head_rows))
        loss = F.cross_entropy(F.linear(states.float(), head_rows.float()).flatten(0, 1), ids.flatten())
        torch.testing.assert_close(layer.head.loss(states, ids).float(), loss, rtol=1e-2, atol=1e-5)
    decoder, model = el.load_llama(tmp_path, dtype=torch.float32), model.float()
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_((table if head is None else head).rows_in(torch.float32))
        model.get_input_embeddings().weight.copy_(table.rows_in(torch.float32))
    torch.testing.assert_close(decoder(ids), model(ids).logits, rtol=1e-4, atol=1e-4)
    generated = model.generate(ids[:1], attention_mask=torch.ones(1, 9), max_new_tokens=8, do_sample=False)
    assert torch.equal(el.generate(decoder, ids[:1], max_new_tokens=8, temperature=0.0), generated)


MLX = "MLX 4 bits, groups of 64, bfloat16"


def test_equal_copies_are_tied_and_others_are_read_as_untied_with_a_warning(tmp_path) -> None:
    table = CASES[MLX]()
    write_folder(tmp_path / "equal", table, table, tied=True)
    layer = el.load(tmp_path / "equal")
    assert layer.head.tied
    assert layer.tensor_names["table.parts.scales"] == ("model.embed_tokens.scales", "lm_head.scales")
    assert el.load_llama(tmp_path / "equal").head.tied
    changed = table.changed(scales=2 * table.tensors["scales"])
    for name, head in {"scales": changed, "dense": table.rows.clone()}.items():
        write_folder(tmp_path / name, table, head, tied=True)
        with pytest.warns(el.EmbedLayerWarning, match="hold other numbers: the head is read as untied"):
            layer = el.load(tmp_path / name)
        assert not layer.head.tied
        assert (layer.head.own_rows is None) == (name == "dense")


class LargestFloat(TorchDispatchMode):
    """Notes the size of the largest floating-point result of an operator, views left out."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each._base is None:
                self.numel = max(self.numel, each.numel())
        return result


def test_stored_tensors_are_mapped_and_no_table_is_whole_in_floating_point(tmp_path) -> None:
    table = mlx_case(torch.randn(6000, 192), "bfloat16", group_size=64, bits=4)
    write_folder(tmp_path, table, table)
    layer = el.load(tmp_path)
    assert str(tmp_path / "model.safetensors") in Path("/proc/self/maps").read_text()
    hidden = torch.randn(3, 192, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.tensor([1, 2, 3])
    with LargestFloat() as largest:
        layer.input(torch.tensor([[1, 5999]]))
        layer.head(hidden).float().sum().backward()
        layer.head.loss(hidden, targets).backward()
        layer.head.token_statistics(hidden, targets)
    assert 0 < largest.numel < 6000 * 192 // 2


def test_a_quantised_head_beside_a_dense_table_follows_the_dtype_of_the_table(tmp_path) -> None:
    head = CASES["nvfp4-pack-quantized"]()
    rows = torch.randn(head.rows.shape).bfloat16()
    write_folder(tmp_path, rows, head)
    layer = el.load(tmp_path)
    assert type(layer.table) is el.TokenEmbedding
    assert layer.head.own_rows.dtype == torch.bfloat16
    hidden = torch.randn(4, rows.shape[1]).bfloat16()
    torch.testing.assert_close(layer.head(hidden), F.linear(hidden, head.rows_in(torch.bfloat16)))
    opened = el.open_model(tmp_path)
    assert opened.untied_head is opened.head.own_rows
    assert torch.equal(el.load(tmp_path, table_only="lm_head.weight").table.rows(0, 99), head.rows)


def test_a_loaded_layer_is_saved_moved_and_cast_without_a_change_of_its_stored_tensors(tmp_path) -> None:
    table = CASES[MLX]()
    write_folder(tmp_path / "source", table, table)
    layer = el.load(tmp_path / "source")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    parts = {f"{end}.parts.{part}" for end in ("table", "head.rows") for part in ("weight", "scales", "biases")}
    assert parts == before.keys() == layer.tensor_names.keys()
    ids = torch.tensor([[3, 0, 11]])
    layer.save_pretrained(tmp_path / "saved")
    for other in (el.load(tmp_path / "saved"), copy.deepcopy(layer), layer.float(), layer.to("cpu").bfloat16()):
        assert torch.equal(other.input(ids).float(), table.rows[ids].float())
        for name, tensor in other.state_dict().items():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
    empty = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    assert all(tensor.dtype == before[name].dtype for name, tensor in empty.state_dict().items())


def test_stored_tensors_are_frozen_and_a_copy_in_floating_point_is_not(tmp_path) -> None:
    table = CASES[MLX]()
    write_folder(tmp_path, table, None)
    layer = el.load(tmp_path)
    with pytest.raises(el.SizeError, match="is frozen"):
        layer.table.requires_grad_()
    rows = el.TokenEmbedding.from_pretrained(layer.table.rows(0, layer.table.vocab_size), freeze=False)
    dense = el.compress.replace_table(layer, rows)
    el.vocab.add_tokens(dense, 2)
    assert dense.table.vocab_size == len(table.rows) + 2
    assert dense.head.tied


def test_a_model_with_quantised_blocks_opens_as_its_embedding_layer(tmp_path) -> None:
    table = CASES[MLX]()
    write_folder(tmp_path, table, None)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.mlp.up_proj.{rest}": tensor.contiguous() for rest, tensor in table.tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    opened = el.open_model(tmp_path)
    assert "its blocks are quantised (U32)" in opened.no_decoder
    assert isinstance(opened.model.table, StoredEmbedding)
    assert opened.stored_type.startswith("MLX")


@pytest.mark.parametrize("tied", [True, False])
def test_every_command_reads_a_quantised_folder(tmp_path, capsys, tied) -> None:
    table = CASES[MLX]()
    source = tmp_path / "source"
    write_folder(source, table, None if tied else table)
    words(len(table.rows)).save(str(source / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("t1 t2 t3 t4 t5 t6 new " * 400)
    for arguments in (
        ("inspect", source, "--json"),
        ("embed", source, "t1 t2"),
        ("neighbors", source, "t5"),
        ("export", source, "-o", tmp_path / "vectors.txt", "--format", "word2vec"),
        ("generate", source, "t1", "--tokens", 3),
        ("evaluate", source, "--text", text),
        ("compress", source, "--to", "int8", "-o", tmp_path / "small"),
        ("explore", source, "--export", tmp_path / "page.html"),
    ):
        assert run(*arguments) == 0, (arguments, capsys.readouterr().err)
    capsys.readouterr()
    assert run("vocab", "add", source, "new", "-o", tmp_path / "added") == 0
    assert f"Kept     {len(table.rows)}, unchanged bit for bit" in capsys.readouterr().out
    edits: tuple[tuple[object, ...], ...] = (
        ("vocab", "add", source, "new", "-o", tmp_path / "trained", "--train-on", text, "--steps", 2),
        ("vocab", "remove", tmp_path / "added", "t5", "-o", tmp_path / "removed"),
        ("vocab", "trim", tmp_path / "removed", text, "-o", tmp_path / "trimmed"),
        ("vocab", "undo", tmp_path / "trimmed", "-o", tmp_path / "undone"),
        ("inspect", tmp_path / "trimmed", "--json"),
    )
    for edit in edits:
        assert run(*edit) == 0, (edit, capsys.readouterr().err)
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("removed", "undone")]
    assert weights[0] == weights[1]


def test_two_statements_of_the_quantisation_that_differ_are_refused(tmp_path) -> None:
    write_folder(tmp_path, CASES["MLX 4 bits, groups of 64, bfloat16"](), None)
    config = json.loads((tmp_path / "config.json").read_text())
    stated = next(config[key] for key in ("quantization_config", "quantization") if key in config)
    config |= {"quantization_config": stated, "quantization": {**stated, "bits": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(el.CheckpointError, match="says bits 4 and quantization says 2: correct one of them"):
        el.load(tmp_path)
