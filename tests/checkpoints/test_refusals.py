"""Quantised checkpoints in the layouts that transformers and MLX write, and unknown families: right or refused."""

import json
import math
import re
from pathlib import Path
from typing import Any

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


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return ones in floating point, and numbers below 120 in other types."""
    if dtype.is_floating_point:
        return torch.ones(shape).to(dtype)
    return torch.arange(math.prod(shape)).remainder(120).view(shape).to(dtype)


FLOAT, HALF, FP8, U8, I8, I32 = torch.float, torch.half, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32
PARTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "bitsandbytes": {
        "weight": (U8, V * D // 2, 1), "weight.absmax": (FLOAT, V * D // 64), "weight.quant_map": (FLOAT, 16),
        "weight.nested_absmax": (FLOAT, 1), "weight.nested_quant_map": (FLOAT, 256),
        "weight.quant_state.bitsandbytes__nf4": (U8, 90),
    },
    "gptq": {"qweight": (I32, D // 8, V), "qzeros": (I32, 1, V // 8), "scales": (HALF, 1, V), "g_idx": (I32, D)},
    "fp8": {"weight": (FP8, V, D), "weight_scale_inv": (FLOAT, 1, 1)},
    "compressed-tensors, packed": {
        "weight_packed": (I32, V, D // 8), "weight_scale": (FLOAT, V, 1), "weight_shape": (torch.int64, 2)
    },
    "compressed-tensors": {"weight": (FLOAT, V, D), "weight_scale": (FLOAT, V, 1), "weight_zero_point": (I8, V, 1)},
    "fbgemm_fp8": {"weight": (FP8, V, D), "weight_scale": (FLOAT, V, 1)},
    "torchao": {"_weight_qdata": (I8, V, D), "_weight_scale": (FLOAT, V, 1)},
    "quanto": {
        "weight._data": (I8, V, D), "weight._scale": (FLOAT, V, 1), "input_scale": (FLOAT,), "output_scale": (FLOAT,)
    },
    "hqq": {"W_q": (U8, V, D // 2), "scale": (FLOAT, V, 1)},
    "aqlm": {"codes": (I8, V, 2, 1), "codebooks": (FLOAT, 1, 4, 1, 8)},
    "eetq": {"weight": (I8, D, V), "weight_scales": (HALF, V)},
    "mlx": {"weight": (torch.uint32, V, D // 8), "scales": (HALF, V, 1), "biases": (HALF, V, 1)},
    "metal": {"weight": (torch.uint32, V, D // 8), "scales": (HALF, V, 1), "qbiases": (HALF, V, 1)},
    "bitnet": {"weight": (U8, V // 4, D), "weight_scale": (FLOAT, 1)},
}  # fmt: skip
"""Layouts that are not read: rest of a tensor's name after its module -> dtype and shape; mxfp4 quantises experts."""

STATED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"load_in_4bit": True},
    "gptq": {"bits": 4},
    "fp8": {"weight_block_size": [128, 128]},
    "compressed-tensors, packed": {"format": "pack-quantized"},
    "compressed-tensors": {"quantization_status": "frozen"},
    "quanto": {"weights": "int8"},
    "metal": {"bits": 4},
}
LAYOUTS = {name: {"quant_method": name.partition(",")[0], **STATED.get(name, {})} for name in PARTS}
LAYOUTS["mlx"] = {"group_size": 64, "bits": 4}
"""What the methods write to `config.json`."""


def quantised(layout: str, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors with which a method stores the weight `name`."""
    module = name.removesuffix(".weight")
    return {f"{module}.{rest}": _tensor(*size) for rest, size in PARTS[layout].items()}


READ_IF_NOT_STATED = "fbgemm_fp8"
"""One whose tensors are those of compressed-tensors, with the name of another method in the configuration."""

FULL = {TABLE: torch.randn(V, D).bfloat16(), HEAD: torch.randn(V, D).bfloat16(), BLOCK: torch.randn(V, D).bfloat16()}


def write(folder: Path, layout: str, place: str, **config) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {**{name: tensor for name, tensor in FULL.items() if name != place}, **quantised(layout, place)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": LAYOUTS[layout]} | config))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantised_end_is_read_in_its_format_or_refused_by_name(tmp_path, layout) -> None:
    """`tests/checkpoints/test_stored_formats.py` compares what is read with the library of the format."""
    layer = el.load(write(tmp_path / "blocks", layout, BLOCK))
    assert torch.equal(layer.table.weight, FULL[TABLE])
    assert torch.equal(layer.head.weight, FULL[HEAD])
    for stated in (LAYOUTS[layout], None):
        is_read = layout == READ_IF_NOT_STATED and stated is None
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
        save_file(tensors | quantised(layout, "cls.predictions.transform.dense.weight"), tmp_path / "model.safetensors")
        config = {"model_type": "bert", "vocab_size": V, "hidden_size": D, "quantization_config": stated}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(el.CheckpointError, match=r"model\.safetensors: .*predictions\.transform\.dense"):
            el.load(tmp_path)


def test_integers_without_scales_are_read_only_on_request(tmp_path) -> None:
    for place in (TABLE, HEAD):
        folder = tmp_path / place
        folder.mkdir()
        save_file(FULL | {place: _tensor(I8, V, D)}, folder / "model.safetensors")
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
