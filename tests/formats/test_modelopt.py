"""ModelOpt's own functions, where they are installed, and what is refused. Laws of all: `test_stored_formats.py`."""

import pytest
import torch
from stored_cases import CASES, NAME, StoredCase, load, read, refused, weights


@pytest.fixture
def nvfp4() -> StoredCase:
    return CASES["ModelOpt NVFP4"]()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_those_of_modelopt(dtype: torch.dtype) -> None:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    rows, settings = weights(192), {"quant_method": "modelopt"}
    codes, scale, second = qtensor.NVFP4QTensor.quantize(rows.clone(), 16)
    tensors = {"weight": codes._quantized_data, "weight_scale": scale, "weight_scale_2": second}
    expected = codes.dequantize(dtype, scale=scale, double_scale=second, block_sizes={-1: 16})
    assert torch.equal(load(StoredCase(tensors, settings, rows)).to(dtype).rows(0, 99), expected)
    for axis in (None, 0):
        codes, scale = qtensor.FP8QTensor.quantize(rows.clamp(min=1e-3), axis=axis)
        tensors = {"weight": codes._quantized_data, "weight_scale": scale.squeeze()}
        found = load(StoredCase(tensors, settings, rows)).to(dtype).rows(0, 99)
        assert torch.equal(found, codes.dequantize(dtype, scale=scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_rows_have_the_bytes_of_modelopt(dtype: torch.dtype) -> None:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    rows = 0.03 * torch.randn(50, 192, generator=torch.Generator().manual_seed(1))
    rows[7, 5], rows[8], rows[9] = 0.5, 1e-6 * rows[8], 0.25
    rows = rows.to(dtype)
    for name in ("ModelOpt NVFP4", "ModelOpt FP8", "ModelOpt FP8 by row"):
        stored = read(CASES[name]())
        new = stored.quantised(rows)
        if name == "ModelOpt NVFP4":
            second = stored.shared["weight_scale_2"].squeeze()
            codes, scale, _ = qtensor.NVFP4QTensor.quantize(rows.clone(), 16, weights_scaling_factor_2=second)
        else:
            whole = stored.shared.get("weight_scale")
            codes, scale = qtensor.FP8QTensor.quantize(rows.float(), whole, axis=None if whole is not None else 0)
        assert torch.equal(new.rows["weight"].view(torch.uint8), codes._quantized_data.view(torch.uint8))
        if "weight_scale" in new.rows:
            assert torch.equal(new.rows["weight_scale"].float(), scale.float())


def test_the_tensors_decide_and_not_the_list_of_excluded_modules(nvfp4: StoredCase) -> None:
    assert nvfp4.settings["ignore"] == ["lm_head*", NAME]
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}
    for settings in (nvfp4.settings, {}, {"quant_method": "modelopt", **mixed}):
        assert torch.equal(load(nvfp4._replace(settings=settings)).rows(0, 99), nvfp4.rows)


def test_an_algorithm_that_the_tensors_contradict_is_refused(nvfp4: StoredCase) -> None:
    layers = {NAME: {"quant_algo": "FP8"}}
    for settings in ({"quant_algo": "FP8"}, {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}):
        refused(nvfp4._replace(settings=settings), "weight .*is NVFP4, and the configuration states FP8")
    fp8 = CASES["ModelOpt FP8"]()
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    refused(fp8._replace(settings=settings), "weight .*is FP8, and the configuration states NVFP4")


def test_a_factor_on_the_hidden_states_is_refused(nvfp4: StoredCase) -> None:
    for case in (nvfp4, CASES["ModelOpt FP8"]()):
        refused(case.changed(pre_quant_scale=torch.ones(192)), "pre_quant_scale .*rows alone do not give the logits")


def test_groups_that_do_not_divide_the_width_and_scales_of_blocks_are_refused(nvfp4: StoredCase) -> None:
    refused(nvfp4.changed(weight_scale=nvfp4.tensors["weight_scale"][:, :-1]), "weight .*192 columns and 11 scales")
    fp8 = CASES["ModelOpt FP8"]()
    refused(fp8.changed(weight_scale=torch.ones(1, 2)), r"weight_scale .*has shape \[1, 2\] for 77 rows")
    refused(fp8.changed(weight_scale=None), "weight_scale .*is missing")
