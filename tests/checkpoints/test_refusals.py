"""Quantised checkpoints in the layouts that transformers and MLX write, and unknown families: right or refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.tables import StoredEmbedding

V, D = 24, 16
CONFIG = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "rope_theta": 1e4,
}
BLOCK = "model.layers.0.mlp.up_proj.weight"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = dict[str, torch.Tensor]


def _integers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(int(torch.tensor(shape).prod())).remainder(120).view(*shape).to(dtype)


def _fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.float8_e4m3fn)


def bnb_4bit(name: str) -> Tensors:
    return {
        name: _integers(torch.uint8, V * D // 2, 1),
        f"{name}.absmax": torch.ones(V * D // 64),
        f"{name}.quant_map": torch.ones(16),
        f"{name}.nested_absmax": torch.ones(1),
        f"{name}.nested_quant_map": torch.ones(256),
        f"{name}.quant_state.bitsandbytes__nf4": _integers(torch.uint8, 90),
    }


def gptq(name: str) -> Tensors:
    module = name.removesuffix(".weight")
    return {
        f"{module}.qweight": _integers(torch.int32, D // 8, V),
        f"{module}.qzeros": _integers(torch.int32, 1, V // 8),
        f"{module}.scales": torch.ones(1, V).half(),
        f"{module}.g_idx": _integers(torch.int32, D),
    }


def fine_grained_fp8(name: str) -> Tensors:
    return {name: _fp8(V, D), f"{name}_scale_inv": torch.ones(1, 1)}


def compressed_int4(name: str) -> Tensors:
    shape = _integers(torch.int64, 2)
    return {
        f"{name}_packed": _integers(torch.int32, V, D // 8),
        f"{name}_scale": torch.ones(V, 1),
        f"{name}_shape": shape,
    }


def compressed_but_not_packed(name: str) -> Tensors:
    return {
        name: torch.randn(V, D),
        f"{name}_scale": torch.ones(V, 1),
        f"{name}_zero_point": _integers(torch.int8, V, 1),
    }


def fbgemm_fp8(name: str) -> Tensors:
    return {name: _fp8(V, D), f"{name}_scale": torch.ones(V, 1)}


def torchao(name: str) -> Tensors:
    module = name.removesuffix(".weight")
    return {f"{module}._weight_qdata": _integers(torch.int8, V, D), f"{module}._weight_scale": torch.ones(V, 1)}


def quanto(name: str) -> Tensors:
    module = name.removesuffix(".weight")
    scales = {f"{module}.input_scale": torch.ones(()), f"{module}.output_scale": torch.ones(())}
    return {f"{name}._data": _integers(torch.int8, V, D), f"{name}._scale": torch.ones(V, 1), **scales}


def hqq(name: str) -> Tensors:
    module = name.removesuffix(".weight")
    return {f"{module}.W_q": _integers(torch.uint8, V, D // 2), f"{module}.scale": torch.ones(V, 1)}


def aqlm(name: str) -> Tensors:
    module = name.removesuffix(".weight")
    return {f"{module}.codes": _integers(torch.int8, V, 2, 1), f"{module}.codebooks": torch.ones(1, 4, 1, 8)}


def eetq(name: str) -> Tensors:
    return {name: _integers(torch.int8, D, V), f"{name}_scales": torch.ones(V).half()}


def mlx(name: str) -> Tensors:
    module = name.removesuffix(".weight")
    rest = {f"{module}.scales": torch.ones(V, 1).half(), f"{module}.biases": torch.ones(V, 1).half()}
    return {name: _integers(torch.int64, V, D // 8).to(torch.uint32), **rest}


def metal(name: str) -> Tensors:
    return {key.replace(".biases", ".qbiases"): tensor for key, tensor in mlx(name).items()}


def bitnet(name: str) -> Tensors:
    return {name: _integers(torch.uint8, V // 4, D), f"{name}_scale": torch.ones(1)}


LAYOUTS = {
    bnb_4bit: {"quant_method": "bitsandbytes", "load_in_4bit": True},
    gptq: {"quant_method": "gptq", "bits": 4},
    fine_grained_fp8: {"quant_method": "fp8", "weight_block_size": [128, 128]},
    compressed_int4: {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    compressed_but_not_packed: {"quant_method": "compressed-tensors", "quantization_status": "frozen"},
    fbgemm_fp8: {"quant_method": "fbgemm_fp8"},
    torchao: {"quant_method": "torchao"},
    quanto: {"quant_method": "quanto", "weights": "int8"},
    hqq: {"quant_method": "hqq"},
    aqlm: {"quant_method": "aqlm"},
    eetq: {"quant_method": "eetq"},
    mlx: {"group_size": 64, "bits": 4},
    metal: {"quant_method": "metal", "bits": 4},
    bitnet: {"quant_method": "bitnet"},
}
"""Layouts that are not read, and what their methods write to `config.json`; mxfp4 quantises experts only."""

READ_IF_NOT_STATED = {fbgemm_fp8}
"""One whose tensors are those of compressed-tensors, with the name of another method in the configuration."""

FULL = {TABLE: torch.randn(V, D).bfloat16(), HEAD: torch.randn(V, D).bfloat16(), BLOCK: torch.randn(V, D).bfloat16()}


def write(folder: Path, layout, place: str, **config) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {**{name: tensor for name, tensor in FULL.items() if name != place}, **layout(place)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": LAYOUTS[layout]} | config))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_a_quantised_end_is_read_in_its_format_or_refused_by_name(tmp_path, layout) -> None:
    """`tests/checkpoints/test_stored_formats.py` compares what is read with the library of the format."""
    layer = el.load(write(tmp_path / "blocks", layout, BLOCK))
    assert torch.equal(layer.table.weight, FULL[TABLE])
    assert torch.equal(layer.head.weight, FULL[HEAD])
    for stated in (LAYOUTS[layout], None):
        is_read = layout in READ_IF_NOT_STATED and stated is None
        for place, end in ((TABLE, "table"), (HEAD, "head")):
            folder = write(tmp_path / end, layout, place, quantization_config=stated)
            if is_read:
                layer = el.load(folder)
                assert isinstance(layer.table if end == "table" else layer.head.own_rows, StoredEmbedding)
                continue
            module = place.removesuffix(".weight").replace(".", r"\.")
            remedy = "(Load|Dequantise|Copy)" + (r".*table_only=True\)\.$" if end == "head" else "")
            for dtype in (None, torch.float32):
                with pytest.raises(el.CheckpointError, match=rf"(?s){module}\..*{remedy}"):
                    el.load(folder, dtype=dtype)
        assert torch.equal(el.load(tmp_path / "head", table_only=True).table.weight, FULL[TABLE])
        if not is_read:
            with pytest.raises(el.CheckpointError, match=r"model\.embed_tokens\."):
                el.load(tmp_path / "table", table_only=True)


def test_a_quantised_step_of_the_head_is_refused(tmp_path) -> None:
    """BERT's head has a projection, which quantisers convert as every other linear layer."""
    names = {f"bert.embeddings.{part}_embeddings.weight": (V, D) for part in ("word", "position", "token_type")}
    norms = ("bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm")
    tensors = {name: torch.randn(shape) for name, shape in names.items()}
    tensors |= {f"{norm}.{part}": torch.ones(D) for norm in norms for part in ("weight", "bias")}
    tensors |= {"cls.predictions.transform.dense.bias": torch.ones(D), "cls.predictions.bias": torch.ones(V)}
    for layout, stated in LAYOUTS.items():
        save_file(tensors | layout("cls.predictions.transform.dense.weight"), tmp_path / "model.safetensors")
        config = {"model_type": "bert", "vocab_size": V, "hidden_size": D, "quantization_config": stated}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(el.CheckpointError, match=r"model\.safetensors: .*predictions\.transform\.dense"):
            el.load(tmp_path)


def test_integers_without_scales_are_read_only_on_request(tmp_path) -> None:
    for place in (TABLE, HEAD):
        folder = tmp_path / place
        folder.mkdir()
        save_file(FULL | {place: _integers(torch.int8, V, D)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CONFIG))
        with pytest.raises(el.CheckpointError, match=f"{place}, is stored as I8: without scales those are no vectors"):
            el.load(folder)
        table = el.load(folder, dtype=torch.float32).table.weight
        assert (table.dtype, place != TABLE or table.max() > 50) == (torch.float32, True)


BERT = {"model_type": "bert", "vocab_size": V, "hidden_size": D}
"""A BERT whose file lacks its positions, as that of a model with rotations instead."""


def test_a_model_with_code_of_its_own_is_named_as_such(tmp_path) -> None:
    save_file({"embeddings.word_embeddings.weight": torch.randn(V, D)}, tmp_path / "model.safetensors")
    for config, reason in (
        (BERT, "Copy the checkpoint again"),
        (BERT | {"auto_map": {"AutoModel": "m.M"}}, "auto_map"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(el.CheckpointError, match=rf"has no .*{reason}.*table_only=True\)\.$") as caught:
            el.load(tmp_path)
        assert ("Copy the checkpoint" in str(caught.value)) == ("auto_map" not in config)
        assert el.load(tmp_path, table_only=True).table.vocab_size == V


def test_tables_of_two_sizes_are_named_with_their_sizes_and_each_is_read_by_its_name(tmp_path) -> None:
    names = ("first.embed_tokens.weight", "second.embed_tokens.weight")
    save_file({name: torch.randn(V + 8 * i, D - 8 * i) for i, name in enumerate(names)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel"}))
    with pytest.raises(
        el.CheckpointError, match=r"first\S+ \(24 x 16\), second\S+ \(32 x 8\)\. Which of them"
    ) as caught:
        el.load(tmp_path, table_only=True)
    calls = re.findall(r"table_only='([^']+)'", str(caught.value))
    assert calls == [*names]
    assert [el.load(tmp_path, table_only=name).table.weight.shape for name in calls] == [(24, 16), (32, 8)]


REFUSED_FAMILIES = {
    "no config.json": None,
    "no model_type": {"vocab_size": V},
    "a model_type of null": {"model_type": None},
    "refused": {"model_type": "blt"},
    "unknown": {"model_type": "novel"},
    "newer": {"model_type": "novel", "transformers_version": "99.0.0"},
    "of a wrong type": CONFIG | {"num_hidden_layers": "two"},
    "not computed": {"model_type": "xlm", "asm": True},
}
"""What is refused -> the configuration; the advice of each is carried out."""


@pytest.mark.parametrize("name", REFUSED_FAMILIES)
def test_the_advice_of_a_refused_family_works(tmp_path, name) -> None:
    config = REFUSED_FAMILIES[name]
    tensors = FULL | {"embeddings.weight": FULL[TABLE]} if name == "not computed" else FULL
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        el.CheckpointError, match=r"To read the table alone: load\(\.\.\., table_only=True\)\.$"
    ) as caught:
        el.load(tmp_path)
    assert torch.equal(el.load(tmp_path, table_only=True).table.weight, FULL[TABLE])
    if re.search(r"Copy the\s+model's (own )?config\.json there", str(caught.value)):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        assert el.load(tmp_path).head is not None


def test_scales_of_one_module_are_not_those_of_another(tmp_path) -> None:
    names = ("model.embed_tokens_per_layer.scales", "model.embed_tokens.norm.scale", "lm_head.bias", "norm.scale")
    save_file(FULL | {name: torch.ones(V) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert torch.equal(el.load(tmp_path).table.weight, FULL[TABLE])
