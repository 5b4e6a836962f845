"""What compressed-tensors' configuration adds to its tensors, and what is refused.

That rows are those of the library is a law of `test_stored_formats.py`.
"""

import warnings
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stored_cases import CASES, StoredCase, compressed_case, load, read, refused, weights, write

import embedlayer as el

INTEGERS = {"strategy": "group", "group_size": 32, "symmetric": False}


@pytest.fixture
def case() -> StoredCase:
    return compressed_case(weights(96), "pack-quantized", num_bits=4, **INTEGERS)


def stating(case: StoredCase, *schemes: dict[str, Any]) -> StoredCase:
    groups = {f"group_{place}": {"targets": ["Linear"], "weights": scheme} for place, scheme in enumerate(schemes)}
    return case._replace(settings={"quant_method": "compressed-tensors", "config_groups": groups})


def test_the_tensors_decide_which_group_of_modules_they_belong_to(case):
    schemes = {"num_bits": 8, "strategy": "channel"}, {"num_bits": 4, **INTEGERS}
    for same in (case, case._replace(settings={}), stating(case, *schemes)):
        assert torch.equal(load(same).rows(0, 99), case.rows)


@pytest.mark.parametrize("bits", [3, 4, 5, 8])
def test_few_rows_have_their_packed_zero_points(bits: int) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    options = QuantizationArgs(num_bits=bits, **INTEGERS)
    scheme = QuantizationScheme(targets=["Embedding"], weights=options)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    for vocab_size in (1, 7, 8, 9, 31, 33):
        rows, half = weights(64, vocab_size=vocab_size), 2 ** (bits - 1)
        scale, zero = torch.rand(vocab_size, 2) / 50, torch.randint(-half, half, (vocab_size, 2), dtype=torch.int8)
        state = {"weight": rows, "weight_scale": scale, "weight_zero_point": zero}
        stored = read(StoredCase(compressor.compress(state, scheme), {}, torch.zeros(0)))
        assert torch.equal(stored.rows["weight_zero_point"], zero)
        assert torch.equal(stored.dequantise(torch.float32), fake_quantize(rows, scale, zero, options))


def test_tensors_are_written_in_the_shapes_and_types_that_the_file_has(tmp_path):
    whole = CASES["pack-quantized tensor, float32"]()
    scalar = whole.changed(weight_scale=whole.tensors["weight_scale"].reshape(()))
    for folder, case in ((tmp_path / "one", whole), (tmp_path / "scalar", scalar)):
        write(folder, case.changed(weight_shape=case.tensors["weight_shape"].int()))
        layer = el.load(folder)
        el.vocab.edit_vocabulary(layer, order=[*range(76, -1, -1)])
        layer.write_into(folder, folder / "new")
        old, new = (load_file(each / "model.safetensors") for each in (folder, folder / "new"))
        kinds = [{name: (tensor.dtype, tensor.shape) for name, tensor in each.items()} for each in (old, new)]
        assert kinds[0] == kinds[1]


def test_fp8_with_integers_as_zero_points_is_not_quantised():
    case = CASES["float-quantized group, symmetric, float32"]()
    stored = read(case.changed(weight_zero_point=torch.zeros(77, 6, dtype=torch.int8)))
    assert not stored.format.can_quantise
    with pytest.raises(el.CheckpointError, match="no function of its library"):
        stored.quantised(torch.zeros(1, 192))


@pytest.mark.parametrize(
    "scheme",
    [
        {"num_bits": 8, **INTEGERS},
        {"num_bits": 4, **INTEGERS, "group_size": 16},
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        {"num_bits": 4, **INTEGERS, "symmetric": True},
        {"num_bits": 4, **INTEGERS, "type": "float"},
    ],
)
def test_a_configuration_that_the_tensors_contradict_is_refused(case: StoredCase, scheme: dict[str, Any]):
    refused(
        stating(case, scheme),
        "weight_packed has 12 words for 96 columns: 4 bits in groups of 32 columns, with .*states num_bits",
    )


def test_a_number_of_bits_that_a_short_row_does_not_tell_is_stated_by_the_configuration():
    case = compressed_case(weights(3), "pack-quantized", num_bits=3, strategy="channel", symmetric=True)
    assert read(case).format.bits == 3
    refused(case._replace(settings={}), "weight_packed has 1 words for 3 columns: 1 or 2 or 3 .* or 8 bits")


@pytest.mark.parametrize("shape", [[78, 96], [77, 0], [77, 95]])
def test_a_shape_that_the_codes_contradict_is_refused(case, shape):
    part = "weight_shape" if shape != [77, 95] else "weight_scale"
    refused(case.changed(weight_shape=torch.tensor(shape)), f"{part} ")


def test_columns_in_an_order_of_their_own_are_refused(case):
    refused(case.changed(weight_g_idx=torch.arange(96)), "weight_g_idx .* columns of a group must be neighbours")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_of_blocks_of_rows_are_refused(dtype):
    tensors = {"weight": torch.zeros(300, 200).to(dtype), "weight_scale": torch.ones(3, 2)}
    refused(StoredCase(tensors, {}, torch.zeros(0)), "weight_scale has 3 rows for 300 rows of codes: .* block")


def test_a_group_that_does_not_divide_the_width_is_refused():
    tensors = {"weight": torch.zeros(5, 10, dtype=torch.int8), "weight_scale": torch.ones(5, 3)}
    refused(StoredCase(tensors, {}, torch.zeros(0)), "weight_scale has 3 scales a row, .* 10 columns")


def test_codes_of_another_library_are_not_read_by_this_rounding():
    case = CASES["float-quantized channel, symmetric, float32"]()
    assert load(case._replace(settings={"quant_method": "modelopt"})).stored_type.startswith("ModelOpt")
    with pytest.raises(el.CheckpointError, match="F8_E4M3"):
        load(case.changed(weight_scale=None)._replace(settings={}))


def test_zero_points_beside_floating_point_codes_are_refused():
    case = CASES["mxfp4-pack-quantized"]()
    refused(case.changed(weight_zero_point=torch.zeros(77, 6)), "weight_zero_point is not read")


def test_4_bit_floats_contradict_a_configuration_of_integers():
    case = CASES["nvfp4-pack-quantized"]()
    refused(stating(case, {"num_bits": 4, **INTEGERS}), "weight_packed is nvfp4, and the configuration states")


def test_the_advice_for_blocks_dequantises_a_folder(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=80, tie_word_embeddings=False, **sizes))
    blocks = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[16, 16])
    scheme = QuantizationScheme(targets=["Linear"], weights=blocks)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, format="float-quantized"))
    model.lm_head.weight_scale.data.fill_(0.01)  # not initialised
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "blocks")
    compressor.update_config(tmp_path / "blocks")
    stored = load_file(tmp_path / "blocks/model.safetensors")
    tensors = {name: stored[f"lm_head.{name}"] for name in ("weight", "weight_scale")}
    error = refused(StoredCase(tensors, {}, torch.zeros(0)), "weight_scale has 5 rows for 80 rows of codes: .* block")

    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "CompressedTensorsConfig": CompressedTensorsConfig}
    with warnings.catch_warnings(action="ignore"):
        exec(
            error[error.index("model = ") :], names | {"folder": tmp_path / "blocks", "new_folder": tmp_path / "dense"}
        )
    dense = load_file(tmp_path / "dense/model.safetensors")["lm_head.weight"]
    numbers = stored["lm_head.weight_scale"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(dense, stored["lm_head.weight"].to(numbers.dtype) * numbers)
