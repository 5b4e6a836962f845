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


@pytest.mark.parametrize(("model_type", "name"), [("gemma3_text", "model.norm"), ("gpt2", "transformer.ln_f")])
def test_a_final_norm_is_that_of_the_model_and_is_saved_with_the_layer(model_type, name, tmp_path, unchecked) -> None:
    norm = saved(model_type, tmp_path / "model").get_submodule(name)
    layer, x = el.load(tmp_path / "model", final_norm=True), torch.randn(2, 5, 64)
    layer.save_pretrained(tmp_path / "layer")
    layer.write_into(tmp_path / "model", tmp_path / "copy")
    for folder in ("model", "layer", "copy"):
        torch.testing.assert_close(el.load(tmp_path / folder, final_norm=True).final_norm(x), norm(x))
    assert el.load(tmp_path / "model").final_norm is None


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


def test_a_window_that_a_configuration_does_not_state_is_an_error(tmp_path, unchecked) -> None:
    saved("llama", tmp_path)
    with pytest.raises(el.SizeError, match="window of block 0 is not known"):
        el.load(tmp_path).window_of_block(0)


def test_a_norm_of_the_input_does_not_take_its_place(tmp_path, unchecked) -> None:
    norm = saved("roberta-prelayernorm", tmp_path).roberta_prelayernorm.LayerNorm
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(el.load(tmp_path, final_norm=True).final_norm(x), norm(x))
