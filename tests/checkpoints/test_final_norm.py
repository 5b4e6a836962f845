"""The norm before the head and the windows of attention; tools/all_families.py compares those of every family."""

import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import build, quiet
from torch import nn

import embedlayer as el


def saved(model_type: str, folder: Path, kind: str = "causal", **settings: object) -> nn.Module:
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, model = build(model_type, kind, settings)
        model.save_pretrained(folder)
    return model


KINDS = {
    "llama": ("RMSNorm", "model.norm"),
    "gemma3_text": ("OffsetRMSNorm", "model.norm"),
    "gpt2": ("LayerNorm", "transformer.ln_f"),
    "cohere": ("LayerNorm", "model.norm"),
    "olmo": ("LayerNorm", "model.norm"),
    "nanochat": ("RMSNorm", "model.norm"),
}


@pytest.mark.parametrize("model_type", KINDS)
def test_a_final_norm_is_that_of_the_model_and_is_saved_with_the_layer(model_type, tmp_path, unchecked) -> None:
    kind, name = KINDS[model_type]
    norm = saved(model_type, tmp_path / "model").get_submodule(name)
    layer, x = el.load(tmp_path / "model", final_norm=True), torch.randn(2, 5, 64)
    assert type(layer.final_norm).__name__ == kind
    torch.testing.assert_close(layer.final_norm(x), norm(x))
    layer.save_pretrained(tmp_path / "layer")
    again = el.load(tmp_path / "layer", final_norm=True)
    assert torch.equal(again.final_norm(x), layer.final_norm(x))
    assert el.load(tmp_path / "model").final_norm is None
    layer.write_into(tmp_path / "model", tmp_path / "copy")
    assert torch.equal(el.load(tmp_path / "copy", final_norm=True).final_norm(x), layer.final_norm(x))


def test_a_model_whose_blocks_end_with_a_norm_has_none(tmp_path, unchecked) -> None:
    saved("bert", tmp_path, "masked")
    assert el.load(tmp_path, final_norm=True).final_norm is None


def test_a_final_norm_that_is_not_known_is_refused_by_name(tmp_path, unchecked) -> None:
    saved("nemotron", tmp_path / "model")
    with pytest.raises(el.CheckpointError, match="'nemotron'"):
        el.load(tmp_path / "model", final_norm=True)
    layer = el.load(tmp_path / "model")
    layer.save_pretrained(tmp_path / "layer")
    with pytest.raises(el.CheckpointError, match="saved without its final norm: leave out final_norm=True"):
        el.load(tmp_path / "layer", final_norm=True)


def test_the_windows_are_those_of_the_blocks(tmp_path, unchecked) -> None:
    for model_type in ("gemma3_text", "gpt_oss", "mistral"):
        model = saved(model_type, tmp_path / model_type)
        layer = el.load(tmp_path / model_type)
        all_blocks = model.config.sliding_window  # Mistral's attention reads it from the configuration
        windows = [getattr(block.self_attn, "sliding_window", all_blocks) for block in model.model.layers]
        assert [layer.window_of_block(i) for i in range(len(windows))] == windows
        assert len(set(windows)) == (1 if model_type == "mistral" else 2)
        layer.save_pretrained(tmp_path / "layer")
        assert el.load(tmp_path / "layer").layer_types == layer.layer_types


def test_a_window_that_a_configuration_does_not_state_is_an_error(tmp_path, unchecked) -> None:
    saved("llama", tmp_path)
    with pytest.raises(el.SizeError, match="window of block 0 is not known"):
        el.load(tmp_path).window_of_block(0)


def test_a_norm_of_the_input_does_not_take_its_place(tmp_path, unchecked) -> None:
    norm = saved("roberta-prelayernorm", tmp_path).roberta_prelayernorm.LayerNorm
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(el.load(tmp_path, final_norm=True).final_norm(x), norm(x))
