"""Checkpoint folders whose table is converted to the codes of another library, opened by this library."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from covering import cases, some
from releases import skip_without
from safetensors.torch import load_file, save_file
from stored_cases import compressed_case, mlx_case, weights
from stored_folders import model_of, write_folder
from tiny_models import SAMPLE, build
from torch import Tensor, nn

import embedlayer as el
from embedlayer.compress import compare_compression, compress_table, write_checkpoint
from embedlayer.tables.stored_embedding import StoredEmbedding

TABLE = "model.embed_tokens"
KINDS = {
    "mlx-int4": lambda rows: mlx_case(rows.float(), _name(rows), bits=4, group_size=64),
    "mlx-int8-g32": lambda rows: mlx_case(rows.float(), _name(rows), bits=8, group_size=32),
    "ct-int4-g32": lambda rows: compressed_case(
        rows, "pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=True
    ),
    "ct-int8": lambda rows: compressed_case(rows, "pack-quantized", num_bits=8, strategy="channel", symmetric=True),
}
"""Kind -> the same rows quantised by the library itself."""


def _name(rows: Tensor) -> str:
    return str(rows.dtype).removeprefix("torch.")


def source_of(folder: Path, dtype: torch.dtype, *, tied: bool) -> nn.Module:
    """Save a small LLaMA of transformers, and return it."""
    rows = weights(128, dtype)
    model = model_of(rows, None if tied else rows.roll(1, 0))
    model.save_pretrained(folder)
    el.train_tokenizer("t1 t2 t3", "word").save(str(folder / "tokenizer.json"))
    return model


def opened_by_transformers(model_class: Any, folder: Path) -> Any:
    """Return a model that transformers opens with compressed-tensors, without a missing or unexpected tensor."""
    skip_without("compressed_tensors")
    from transformers import CompressedTensorsConfig

    with warnings.catch_warnings(action="ignore"):  # transformers warns of the option that it needs
        model, report = model_class.from_pretrained(
            folder, quantization_config=CompressedTensorsConfig(dequantize=True), output_loading_info=True
        )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def opened_by_library(kind: str, folder: Path, ids: Tensor) -> Tensor:
    """Return the logits of the model that the library of a kind opens, in evaluation mode."""
    if kind.startswith("mlx"):
        mx = pytest.importorskip("mlx.core")
        model = pytest.importorskip("mlx_lm.utils").load_model(folder)[0]
        return torch.tensor(model(mx.array(ids.tolist())).astype(mx.float32).tolist())
    from transformers import LlamaForCausalLM

    model = opened_by_transformers(LlamaForCausalLM, folder)
    with torch.no_grad():
        logits: Tensor = model.eval()(ids).logits
    return logits


@cases("kind, dtype, tied", KINDS, (torch.float32, torch.bfloat16), (True, False), pairs=["kind, tied"])
def test_a_folder_has_the_tensors_of_the_library_and_keeps_all_others(
    tmp_path, capsys, kind, dtype, tied, unchecked
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source_of(source, dtype, tied=tied)
    assert run("compress", source, "--to", kind, "-o", out) == 0
    library = "mlx_lm.load(" if kind.startswith("mlx") else "CompressedTensorsConfig(dequantize=True)"
    assert library in capsys.readouterr().out
    old, new = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    case = KINDS[kind](weights(128, dtype))
    table = {name.removeprefix(f"{TABLE}."): new.pop(name) for name in [*new] if name.startswith(f"{TABLE}.")}
    assert table.keys() == case.tensors.keys()
    for name, tensor in case.tensors.items():
        assert tensor.dtype == table[name].dtype
        assert torch.equal(tensor.view(torch.uint8), table[name].view(torch.uint8))
    del old[f"{TABLE}.weight"]
    assert old.keys() == new.keys()
    assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())
    layer = el.load(out)
    assert isinstance(layer.table, StoredEmbedding)
    assert (layer.table.dtype, layer.head.tied) == (dtype, tied)
    assert torch.equal(layer.table.rows(0, len(case.rows)), case.rows)
    changed = {"config.json", "model.safetensors"}
    files = {path.name for path in source.iterdir()}
    assert {path.name for path in out.iterdir()} == files > changed
    assert all((source / name).read_bytes() == (out / name).read_bytes() for name in files - changed)


@cases("kind, dtype, tied", KINDS, (torch.float32, torch.bfloat16), (True, False), pairs=["kind, tied"])
def test_the_library_opens_the_folder_as_the_model_with_dequantised_rows(
    tmp_path, kind, dtype, tied, unchecked
) -> None:
    model, ids = source_of(tmp_path / "source", dtype, tied=tied), torch.tensor([[5, 70, 7, 0, 3]])
    table = compress_table(el.load(tmp_path / "source").table, kind)
    write_checkpoint(table, tmp_path / "source", tmp_path / "out")
    model.get_input_embeddings().weight.data.copy_(table.rows(0, table.vocab_size))
    with torch.no_grad():
        expected = model(ids).logits.float()
    error = (opened_by_library(kind, tmp_path / "out", ids).float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 4e-2)  # bfloat16 has 8 bits


@pytest.mark.parametrize("kind", ["mlx-int4", "ct-int4-g32"])
def test_shards_and_an_equal_copy_of_the_table_become_one_stored_table(tmp_path, kind, unchecked) -> None:
    rows = weights(128)
    model = model_of(rows, rows)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "one")
    tensors = {**model.state_dict(), "lm_head.weight": rows.clone()}
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_bytes((tmp_path / "one" / "config.json").read_bytes())
    places: dict[str, str] = {}
    for number, end in enumerate(("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")):
        file = f"model-0000{number + 1}-of-00003.safetensors"
        part = {end: tensors.pop(end)} if number < 2 else tensors
        save_file(part, source / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    size = sum(each.nbytes for each in model.state_dict().values())
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": places})
    )
    (source / "pytorch_model.bin").write_bytes(b"the same weights")
    table = compress_table(el.load(source).table, kind)
    with pytest.warns(el.EmbedLayerWarning, match="Left out of the new folder.*pytorch_model.bin"):
        assert write_checkpoint(table, source, out) == ("pytorch_model.bin",)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    stored = {file.name: load_file(file) for file in out.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, own in stored.items() for name in own}
    assert index["metadata"]["total_size"] == sum(each.nbytes for own in stored.values() for each in own.values())
    assert not any(name.startswith("lm_head") for name in index["weight_map"])
    assert not (out / "pytorch_model.bin").exists()
    layer = el.load(out)
    assert layer.head.tied
    assert torch.equal(layer.table.rows(0, len(rows)), table.rows(0, len(rows)))


def test_a_table_is_converted_again_and_other_modules_keep_their_settings(tmp_path, unchecked) -> None:
    source = tmp_path / "source"
    write_folder(source, weights(128), mlx_case(weights(128), "float32", bits=8, group_size=64))
    write_checkpoint(compress_table(el.load(source).table, "mlx-int4"), source, tmp_path / "mlx")
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    own = {"mode": "affine", "bits": 4, "group_size": 64}
    assert config["quantization"] == {**own, "bits": 8, TABLE: own}
    layer = el.load(tmp_path / "mlx")
    assert (layer.table.stored_format.bits, layer.head.own_rows.stored_format.bits) == (4, 8)
    write_checkpoint(compress_table(layer.table, "mlx-int8-g32"), tmp_path / "mlx", tmp_path / "again")
    assert el.load(tmp_path / "again").table.stored_format.group_size == 32
    with pytest.raises(el.CheckpointError, match=r"states another quantisation \(MLX\)"):
        write_checkpoint(compress_table(layer.table, "ct-int4-g32"), tmp_path / "mlx", tmp_path / "ct")
    source_of(tmp_path / "dense", torch.float32, tied=True)
    write_checkpoint(compress_table(el.load(tmp_path / "dense").table, "ct-int8"), tmp_path / "dense", tmp_path / "ct8")
    write_checkpoint(compress_table(el.load(tmp_path / "ct8").table, "ct-int4-g32"), tmp_path / "ct8", tmp_path / "ct4")
    assert el.load(tmp_path / "ct4").table.stored_format.bits == 4
    write_folder(tmp_path / "head", weights(128), KINDS["ct-int4-g32"](weights(128)))
    write_checkpoint(
        compress_table(el.load(tmp_path / "head").table, "ct-int4-g32"), tmp_path / "head", tmp_path / "two"
    )
    for folder in ("ct4", "two"):
        logits = [opened_by_library("ct-int4-g32", tmp_path / folder, torch.tensor([[1, 2]]))]
        logits.append(el.load_llama(tmp_path / folder)(torch.tensor([[1, 2]])))
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_what_no_library_would_open_is_refused_and_leaves_nothing(tmp_path, unchecked) -> None:
    eight_bits = compressed_case(weights(128), "pack-quantized", num_bits=8, strategy="channel", symmetric=True)
    write_folder(tmp_path / "head", weights(128), eight_bits)
    table = compress_table(el.load(tmp_path / "head").table, "ct-int4-g32")
    with pytest.raises(el.CheckpointError, match="another quantisation"):
        write_checkpoint(table, tmp_path / "head", tmp_path / "out")
    source_of(tmp_path / "dense", torch.float32, tied=True)
    with pytest.raises(el.SizeError, match=r"is \[77, 128\], and the table \[9, 128\]"):
        write_checkpoint(compress_table(el.TokenEmbedding(9, 128), "mlx-int4"), tmp_path / "dense", tmp_path / "out")
    for to in ("mlx-int4-g48", "mlx-int7", "ct-int4-g48"):
        assert run("compress", tmp_path / "dense", "--to", to, "-o", tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["mixtral", "llama4_text"])
def test_experts_in_full_precision_are_refused_beside_compressed_tensors(tmp_path, model_type, unchecked) -> None:
    build(model_type, "causal")[1].save_pretrained(tmp_path / "source")
    table = compress_table(el.load(tmp_path / "source").table, "ct-int4-g32")
    with pytest.raises(el.CheckpointError, match="choose mlx-int4"):
        write_checkpoint(table, tmp_path / "source", tmp_path / "out")
    write_checkpoint(compress_table(table, "mlx-int4"), tmp_path / "source", tmp_path / "out")


FAMILIES = [
    (model_type, kind)
    for kind, types in SAMPLE.items()
    for model_type in types
    if model_type not in ("opt", "deepseek_v3", "llama4_text", "jamba", "gpt_oss")  # 24 columns; experts
]


@pytest.mark.parametrize(
    ("model_type", "kind"), some([("t5", "seq2seq"), ("bert", "masked"), ("qwen2_vl", "image-text")], FAMILIES)
)
def test_transformers_finds_the_table_of_every_family(tmp_path, model_type, kind, unchecked) -> None:
    model = build(model_type, kind)[1]
    model.save_pretrained(tmp_path / "source")
    with warnings.catch_warnings(action="ignore", category=el.EmbedLayerWarning):  # of what a layer lacks
        table = compress_table(el.load(tmp_path / "source").table, "ct-int4-g32")
        write_checkpoint(table, tmp_path / "source", tmp_path / "out")
        rows = table.rows(0, table.vocab_size)
        assert torch.equal(el.load(tmp_path / "out").table.rows(0, table.vocab_size), rows)
    opened = opened_by_transformers(type(model), tmp_path / "out")
    assert torch.equal(opened.get_input_embeddings().weight[: table.vocab_size], rows)


def test_the_model_is_measured_and_a_tokenizer_written_where_the_folder_has_none(tmp_path, capsys) -> None:
    source = tmp_path / "source"
    source_of(source, torch.float32, tied=True)
    (source / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    (tmp_path / "text.txt").write_text("t1 t2 t3 t1 " * 20)
    arguments = ["--tokenizer", tmp_path / "tokenizer.json", "--text", tmp_path / "text.txt", "--json"]
    assert run("compress", source, "--to", "mlx-int4", "-o", tmp_path / "out", *arguments) == 0
    own, small = json.loads(capsys.readouterr().out)["rows"]
    assert small["loss_change"] == pytest.approx(small["loss"] - own["loss"])
    assert (own["bytes"], small["bytes"]) == (77 * 128 * 4, 77 * (64 + 16))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    for command in (["generate", tmp_path / "out", "t1", "--tokens", 3], ["vocab", "add", tmp_path / "out", "x"]):
        assert run(*command, *(["-o", tmp_path / "edited"] if command[0] == "vocab" else [])) == 0


def test_the_kinds_that_suit_a_width_are_compared() -> None:
    own = ["int8", "int4"]
    compared = {width: compare_compression(el.TokenEmbedding(300, width)) for width in (32, 48, 64)}
    named = {width: [row.to for row in rows[1:]] for width, rows in compared.items()}
    assert named[32] == [*own, "ct-int4-g32"]
    assert named[48] == [*own, "int4-g32", "q8_0", "q4_0"]
    assert len(named[64]) == len({*named[64]} | {*named[32], *named[48], "mlx-int4"})
    rows = compared[64]
    by_kind = {row.to: row for row in rows}
    assert by_kind["mlx-int4"].bytes == 300 * (32 + 8)
    assert by_kind["ct-int4-g32"].bytes == 300 * (32 + 8)
    assert 0 < by_kind["int4-g32"].row_error < by_kind["ct-int4-g32"].row_error < 0.13


def test_a_run_gets_such_a_table_too(tmp_path, capsys) -> None:
    model = el.DecoderLM(el.TokenEmbedding(20, 64), el.RotaryEmbedding(32), num_layers=1, num_heads=2)
    model.save_pretrained(tmp_path / "run")
    assert run("compress", tmp_path / "run", "--to", "mlx-int4", "-o", tmp_path / "out") == 0
    assert "The whole model" not in capsys.readouterr().out
    table = el.open_model(tmp_path / "out").table
    assert torch.equal(table.rows(0, 20), compress_table(model.table, "mlx-int4").rows(0, 20))
