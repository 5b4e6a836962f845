"""The norm before the head and the windows of attention; tools/all_families.py compares those of every family."""

import pytest
import torch
from stored_folders import saved

import embedlayer as el


@pytest.mark.parametrize(("model_type", "name"), [("gemma3_text", "model.norm"), ("gpt2", "transformer.ln_f")])
def test_a_final_norm_is_that_of_the_model_and_is_saved_with_the_layer(model_type, name, tmp_path, unchecked) -> None:
    norm = saved(tmp_path / "model", model_type).get_submodule(name)
    layer, x = el.load(tmp_path / "model", final_norm=True), torch.randn(2, 5, 64)
    layer.save_pretrained(tmp_path / "layer")
    layer.write_into(tmp_path / "model", tmp_path / "copy")
    for folder in ("model", "layer", "copy"):
        torch.testing.assert_close(el.load(tmp_path / folder, final_norm=True).final_norm(x), norm(x))
    assert el.load(tmp_path / "model").final_norm is None


def test_a_model_whose_blocks_end_with_a_norm_has_none(tmp_path, unchecked) -> None:
    saved(tmp_path, "bert", "masked")
    assert el.load(tmp_path, final_norm=True).final_norm is None


def test_a_final_norm_that_is_not_known_is_refused_by_name(tmp_path, unchecked) -> None:
    saved(tmp_path / "model", "nemotron")
    with pytest.raises(el.CheckpointError, match="'nemotron'"):
        el.load(tmp_path / "model", final_norm=True)
    layer = el.load(tmp_path / "model")
    layer.save_pretrained(tmp_path / "layer")
    with pytest.raises(el.CheckpointError, match="saved without its final norm: leave out final_norm=True"):
        el.load(tmp_path / "layer", final_norm=True)


def test_a_window_that_a_configuration_does_not_state_is_an_error(tmp_path, unchecked) -> None:
    saved(tmp_path, "llama")
    with pytest.raises(el.SizeError, match="window of block 0 is not known"):
        el.load(tmp_path).window_of_block(0)


def test_a_norm_of_the_input_does_not_take_its_place(tmp_path, unchecked) -> None:
    norm = saved(tmp_path, "roberta-prelayernorm").roberta_prelayernorm.LayerNorm
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(el.load(tmp_path, final_norm=True).final_norm(x), norm(x))
