"""Layouts that are refused: the reason, and that what the refusal advises works here."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_cases import NAME, StoredCase, bitsandbytes_case, refused, weights
from torch import Tensor


def refused_layout(tensors: dict[str, Tensor], settings: dict[str, object], message: str, **metadata: str) -> None:
    """Reading is one error that names the layout, the reason and an advice."""
    error = refused(StoredCase(tensors, settings, torch.zeros(0), metadata), message)
    assert re.search(r" which are not read: .*[^.]\. (Dequantise|Load) .*\.$", error)


def codes(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape).to(dtype)


@pytest.mark.parametrize(
    ("tensors", "settings", "part", "reason"),
    [
        (
            {"weight": codes(300, 256, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.ones(3, 2)},
            {"quant_method": "fp8"},
            "weight_scale_inv",
            r"128 rows share a scale.* Dequantise it with the package compressed-tensors",
        ),
        (  # compressed-tensors cannot save what it dequantises here
            {"weight": codes(300, 200, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.ones(3, 2)},
            {"quant_method": "fp8"},
            "weight_scale_inv",
            r"rows of a block share a scale.* Load the checkpoint in full precision",
        ),
        (
            {"weight": codes(300, 200, dtype=torch.float8_e4m3fn), "scale": torch.ones(3, 2)},
            {},
            "scale",
            "128 rows share a scale",
        ),
        ({"trellis": codes(4, 19, 64, dtype=torch.int16), "suh": torch.ones(64)}, {}, "trellis", "a trellis code"),
        ({"weight._data": codes(77, 64), "weight._scale": torch.ones(77, 1)}, {}, "weight._data", "quanto"),
        ({"W_q": codes(77, 32), "scale": torch.ones(77, 1), "zero": torch.ones(77, 1)}, {}, "W_q", "HQQ"),
        (
            {  # V 96, D 64 in groups of 32 tokens
                "qweight": codes(12, 64, dtype=torch.int32),
                "qzeros": codes(3, 8, dtype=torch.int32),
                "scales": torch.ones(3, 64).half(),
                "g_idx": torch.arange(96).int() // 32,
            },
            {"quant_method": "gptq", "bits": 4},
            "scales",
            "groups run along the vocabulary",
        ),
    ],
)
def test_a_layout_is_refused_by_name_with_the_reason(tensors, settings, part, reason) -> None:
    refused_layout(tensors, settings, f"{part} belongs to .*{reason}")


@pytest.mark.parametrize("kind", ["Int4Tensor", "MXTensor"])
def test_other_types_of_torchao_are_refused(kind: str) -> None:
    metadata = {f"{NAME}.weight": f'{{"_type": "{kind}", "_data": {{}}}}'}
    refused_layout({"_weight_qdata": codes(77, 32)}, {}, "_weight_qdata belongs to types of int4", **metadata)


def test_double_quantisation_and_blocks_across_rows_are_refused() -> None:
    nested = bitsandbytes_case(weights(192), "nf4", is_nested=True)
    refused_layout(dict(nested.tensors), {}, "weight.nested_absmax belongs to .*: absmax is itself quantised")
    crossing = bitsandbytes_case(weights(96), "nf4")
    refused_layout(
        dict(crossing.tensors),
        {},
        "weight.quant_state.bitsandbytes__nf4 belongs to .*: a block has columns of two rows",
    )


def test_blocks_of_fp8_are_dequantised_as_advised(tmp_path: Path) -> None:
    convert = pytest.importorskip("compressed_tensors.entrypoints.convert")
    folder, new_folder = tmp_path / "fp8", tmp_path / "dense"
    folder.mkdir()
    rows = weights(256, vocab_size=300)
    tensors = {f"{NAME}.weight": rows.to(torch.float8_e4m3fn), f"{NAME}.weight_scale_inv": torch.full((3, 2), 2.0)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    convert.convert_checkpoint(folder, new_folder, convert.FP8BlockDequantizer.from_pretrained(folder), device="cpu")
    (dense,) = load_file(new_folder / "model.safetensors").values()
    assert torch.equal(dense, (2 * tensors[f"{NAME}.weight"].float()).bfloat16())


def test_a_model_of_bitsandbytes_is_dequantised_as_advised(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["nothing"]
    )
    quantised = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=options)
    quantised.save_pretrained(tmp_path / "nf4")
    assert "lm_head.weight.nested_absmax" in load_file(tmp_path / "nf4" / "model.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "nf4").dequantize()
    try:
        model.save_pretrained(tmp_path / "again")
    except NotImplementedError:
        pytest.skip("transformers 5.23 does not save a model that it dequantised")
    tensors = load_file(tmp_path / "again" / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (64, 64)
    assert tensors["lm_head.weight"].is_floating_point()
