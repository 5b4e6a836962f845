"""Checkpoints whose table and head a library quantised: read, used, and compared with the dequantised model."""

import ast
import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from commands import run
from covering import cases, some
from safetensors.torch import load_file
from stored_cases import StoredCase, built, built_head, mlx_case
from stored_folders import one_of_each, save_tensors, words, write_folder
from tiny_models import build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import embedlayer as el
from embedlayer.tables.stored_embedding import StoredEmbedding

MLX = "MLX 4 bits, groups of 64, bfloat16"
READ = [*one_of_each(), MLX, "pack-quantized 4 bits, group, asymmetric, bfloat16"]


@cases("name, tied", READ, (True, False))
def test_a_folder_computes_what_its_dequantised_model_computes(tmp_path, name, tied) -> None:
    table = built(name)
    head = None if tied else built_head(name)
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
    expected: Any = model.float()
    with torch.no_grad():
        expected.get_output_embeddings().weight.copy_((table if head is None else head).rows_in(torch.float32))
        expected.get_input_embeddings().weight.copy_(table.rows_in(torch.float32))
    decoder = el.load_llama(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(decoder(ids), expected(ids).logits, rtol=1e-4, atol=1e-4)


def test_equal_copies_are_tied_and_others_are_read_as_untied_with_a_warning(tmp_path) -> None:
    table = built(MLX)
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


@cases(
    "name, config",
    ["ModelOpt NVFP4", "ModelOpt FP8", "Gemma 4 bits", "bitsandbytes int8"],
    [{"dtype": "bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}],
)
def test_vectors_have_the_dtype_of_the_model_where_the_stored_tensors_have_none(tmp_path, name, config) -> None:
    table = built(name)
    write_folder(tmp_path, table, None, config=config)
    layer = el.load(tmp_path)
    assert torch.equal(layer.table.rows(0, 99), table.rows_in(torch.bfloat16))
    assert torch.equal(el.load(tmp_path, dtype=torch.float32).table.rows(0, 99), table.rows_in(torch.float32))


def test_a_quantised_head_beside_a_dense_table_follows_the_dtype_of_the_table(tmp_path) -> None:
    head = built("nvfp4-pack-quantized")
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
    table = built(MLX)
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
    table = built(MLX)
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
    table = built(MLX)
    write_folder(tmp_path, table, None)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.mlp.up_proj.{rest}": tensor.contiguous() for rest, tensor in table.tensors.items()}
    save_tensors(tmp_path / "model.safetensors", tensors)
    opened = el.open_model(tmp_path)
    assert "its blocks are quantised (U32)" in opened.no_decoder
    assert isinstance(opened.model.table, StoredEmbedding)
    assert opened.stored_type.startswith("MLX")


@pytest.mark.parametrize("tied", some([False], (True, False)))
def test_every_command_reads_a_quantised_folder(tmp_path, capsys, tied) -> None:
    table = built(MLX)
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
        ("inspect", tmp_path / "trimmed", "--json"),
    )
    for edit in edits:
        assert run(*edit) == 0, (edit, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["ModelOpt NVFP4", "ModelOpt FP8", "ModelOpt FP8 by row"])
def test_a_folder_of_modelopt_may_state_its_quantisation_in_a_file_of_its_own(tmp_path, name) -> None:
    table = built(name)
    settings = {"quant_algo": table.settings["quant_algo"], "exclude_modules": ["lm_head"]}
    write_folder(tmp_path, table._replace(settings={}), None, config={"dtype": "bfloat16"})
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    layer = el.load(tmp_path)
    assert layer.table.stored_format.library == "ModelOpt"
    assert torch.equal(layer.table.rows(0, 99), table.rows_in(torch.bfloat16))
    file.write_text(json.dumps({"quantization": {**settings, "quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(el.CheckpointError, match="the configuration states W4A8_AWQ"):
        el.load(tmp_path)


def damages() -> dict[str, StoredCase]:
    """What makes an end unreadable: damaged scales, codes cut short, and layouts that are not read."""
    case, fp8 = built(MLX), torch.zeros(77, 384).to(torch.float8_e4m3fn)
    return {
        "a scale is NaN": case.changed(scales=case.tensors["scales"].clone().fill_(math.nan)),
        "codes are cut short": case.changed(weight=case.tensors["weight"][:, :-1].contiguous()),
        "biases are missing": case.changed(biases=None),
        "FP8 blocks": case._replace(tensors={"weight": fp8, "weight_scale_inv": torch.ones(1, 3)}, settings={}),
        "EXL3": case._replace(tensors={"trellis": torch.zeros(4, 24, 64).short()}, settings={}),
        "words that are not known": case._replace(tensors={"weight": fp8, "absmax": torch.ones(77)}, settings={}),
    }


def advised(folder: Path) -> list[tuple[str, str]]:
    """Option and value of each call that the refusal of a folder recommends, after the call."""
    with pytest.raises(el.CheckpointError) as refused:
        el.load(folder)
    calls = re.findall(r"load\(\.\.\., (\w+)=([^)]+)\)", str(refused.value))
    for option, value in calls:
        el.load(folder, **{option: ast.literal_eval(value)})
    return calls


@cases("damage, end", damages(), ["table", "head", "tied table", "both"])
def test_the_advice_of_every_refusal_of_an_end_works(tmp_path, damage, end) -> None:
    bad, good = damages()[damage], built(MLX)
    head = {"table": good, "head": bad, "tied table": None, "both": bad}[end]
    write_folder(tmp_path, good if end == "head" else bad, head)
    assert advised(tmp_path) == ([("table_only", "True")] if end == "head" else [])
    if end == "head":
        with pytest.warns(el.EmbedLayerWarning, match="^Only the table of ") as warned:
            assert el.open_model(tmp_path).table.vocab_size == 77
        assert "load(" not in str(warned[0].message)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (MLX, {"bits": 2}),
        ("MLX nvfp4", {"mode": "mxfp4"}),
        ("pack-quantized 4 bits, group, asymmetric, bfloat16", {"config_groups": {"0": {"weights": {"num_bits": 3}}}}),
        ("ModelOpt NVFP4", {"quant_algo": "FP8"}),
        ("Gemma 4 bits", {"module_quant_configs": {"embed": {"num_bits": 8}}}),
        ("GPTQ 4 bits, float16", {"bits": 8}),
    ],
)
def test_a_configuration_that_does_not_fit_the_tensors_is_to_be_corrected(tmp_path, name, wrong) -> None:
    table = built(name)
    write_folder(tmp_path, table._replace(settings={**table.settings, **wrong}), None)
    with pytest.raises(el.CheckpointError, match=r"and the configuration states .* or correct the configuration\.$"):
        el.load(tmp_path, table_only=True)
    write_folder(tmp_path, table, None)
    assert torch.equal(el.load(tmp_path).table.rows(0, 99), table.rows)


def test_two_statements_of_the_quantisation_that_differ_are_refused(tmp_path) -> None:
    write_folder(tmp_path, built(MLX), None)
    config = json.loads((tmp_path / "config.json").read_text())
    stated = next(config[key] for key in ("quantization_config", "quantization") if key in config)
    config |= {"quantization_config": stated, "quantization": {**stated, "bits": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(el.CheckpointError, match="bits is 4 in .*, 2 in quantization"):
        el.load(tmp_path)


@cases("model_type, dtype", ["gemma3n_text", "gemma4_text"], [torch.float32, torch.bfloat16])
def test_a_quantised_gemma_computes_the_inputs_of_its_blocks_as_transformers_does(tmp_path, model_type, dtype) -> None:
    quant = pytest.importorskip("transformers.integrations.gemma_quant")
    from transformers.utils.quantization_config import GemmaQuantizationConfig

    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "vocab_size": 70}
    sizes |= {"hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 70}  # no powers of 4: factors round
    model = build(model_type, "causal", sizes)[1].to(dtype)
    bits = {"embed_tokens$": {"num_bits": 2}, "embed_tokens_per_layer": {"num_bits": 4}}
    options = {"quantize_embeddings": True, "num_bits": 8, "module_quant_configs": bits}
    skipped = ["layers", "altup", "laurel", "lm_head", "vision", "audio"]
    quant.replace_with_quant_layers(model, GemmaQuantizationConfig(**options), skipped)
    for name, tensor in model.named_parameters():
        if not tensor.is_floating_point():
            low, high = (0, 256) if tensor.dtype == torch.uint8 else (-128, 128)
            tensor.data = torch.randint(low, high, tensor.shape).to(tensor.dtype)
        elif name.endswith(("embedding_scale", "weight_scale")):
            tensor.data = 0.01 * torch.rand_like(tensor) + 0.001
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_tensors(tmp_path / "model.safetensors", tensors)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config |= {"dtype": str(dtype).removeprefix("torch."), "tie_word_embeddings": True}
    config["quantization_config"] = {"quant_method": "gemma", **options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer, inner = el.load(tmp_path), model.model
    ids = torch.arange(70).view(2, 35)
    x = layer.input(ids)
    assert (layer.table.dtype, x.dtype, type(layer.per_layer.table)) == (dtype, dtype, StoredEmbedding)
    assert torch.equal(x, inner.embed_tokens(ids))
    assert torch.equal(layer.table(ids), inner.embed_tokens(ids))
    assert torch.equal(layer.per_layer.look_up(ids), inner.get_per_layer_inputs(ids))
    expected = inner.project_per_layer_inputs(x, inner.get_per_layer_inputs(ids))
    assert torch.equal(layer.per_layer(ids, x), expected)
    layer.save_pretrained(tmp_path / "saved")
    again = el.load(tmp_path / "saved")
    assert torch.equal(again.per_layer(ids, again.input(ids)), expected)
    assert el.load(tmp_path, per_layer=False).per_layer is None
    codes = "model.embed_tokens_per_layer.embedding_quantized"
    damaged = {"model.embed_tokens_per_layer.embedding_scale": torch.full((70, 1), math.nan), codes: None}
    damaged["model.per_layer_model_projection.trellis"] = torch.zeros(4, 24, 64).short()
    for name, damage in damaged.items():
        changed = {key: each for key, each in {**tensors, name: damage}.items() if each is not None}
        if name.endswith("trellis"):
            changed.pop("model.per_layer_model_projection.weight")
        save_tensors(tmp_path / "model.safetensors", changed)
        assert {*advised(tmp_path)} == {("per_layer", "False"), ("table_only", "True")}


@pytest.mark.parametrize("quantised", some(["predictions.dense"], ["word_embeddings", "predictions.dense"]))
def test_a_head_with_columns_of_its_own_is_refused_if_either_part_is_quantised(tmp_path, quantised) -> None:
    model = build("mobilebert", "masked", {"vocab_size": 96})[1]
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(f"{quantised}.weight"))
    case = mlx_case(tensors.pop(name), group_size=32, bits=4)
    tensors |= {f"{name.removesuffix('.weight')}.{rest}": tensor for rest, tensor in case.tensors.items()}
    save_tensors(tmp_path / "model.safetensors", tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization": case.settings}))
    with pytest.raises(
        el.CheckpointError, match=rf"the head is computed from .*: \S+{quantised}.weight is quantised, MLX"
    ):
        el.load(tmp_path)
    assert advised(tmp_path) == [("table_only", "True")]


def test_a_table_that_is_computed_from_a_quantised_one_is_refused(tmp_path) -> None:
    table = built(MLX)
    tensors = {f"embedding.{rest}": tensor.contiguous() for rest, tensor in table.tensors.items()}
    save_tensors(tmp_path / "model.safetensors", {**tensors, "mapping": torch.arange(77)})
    modules = [{"path": "", "type": "sentence_transformers.models.StaticEmbedding"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "config.json").write_text(json.dumps({"quantization": table.settings}))
    with pytest.raises(el.CheckpointError, match="table is computed from embedding.weight and mapping"):
        el.load(tmp_path)
    assert advised(tmp_path) == [("table_only", "'embedding.weight'")]


@pytest.mark.parametrize("end", ["table", "head"])
def test_a_row_whose_codes_are_nan_is_counted_in_the_report(tmp_path, end) -> None:
    case = built("float-quantized group, symmetric, bfloat16")
    codes = case.tensors["weight"].view(torch.uint8).clone()
    codes[5, 3] = 0x7F
    broken = case.changed(weight=codes.view(torch.float8_e4m3fn))
    write_folder(tmp_path, *((broken, case) if end == "table" else (case, broken)))
    with pytest.warns(el.EmbedLayerWarning, match=f"1 of 77 rows of the {end} hold NaN or infinity"):
        assert el.load(tmp_path).report().nonfinite_rows == {end: 1}
