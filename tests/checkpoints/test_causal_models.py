"""A checkpoint folder is loaded as the whole causal language model that transformers has of it, or refused by name."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from stored_folders import save_tensors, saved

import embedlayer as el

pytest.importorskip("transformers", reason="the hf extra is not installed")


def test_the_model_is_patched_and_computes_what_the_original_does(tmp_path) -> None:
    plain = saved(tmp_path, "gpt2")
    ids = torch.arange(20, 30).unsqueeze(0)
    with torch.no_grad():
        expected = plain(ids).logits
        model = el.open_model(tmp_path).require_causal()
        torch.testing.assert_close(model(ids).logits + 0.0, expected)
    assert isinstance(model.get_output_embeddings(), el.OutputHead)
    assert not model.training


@pytest.mark.filterwarnings("ignore:Only the table of ")
def test_what_is_no_causal_language_model_is_refused(tmp_path, monkeypatch) -> None:
    for model_type, kind in (("bert", "masked"), ("t5", "seq2seq")):
        saved(tmp_path / model_type, model_type, kind)
        with pytest.raises(el.CheckpointError, match="is no causal language model"):
            el.open_model(tmp_path / model_type).require_causal()
    saved(tmp_path / "new", "gpt2")
    (tmp_path / "new" / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    opened = el.open_model(tmp_path / "new")
    with pytest.raises(el.CheckpointError):
        opened.require_causal()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(el.MissingExtraError):
        opened.require_causal()


def test_a_tensor_that_is_missing_is_not_replaced_by_random_numbers(tmp_path) -> None:
    saved(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path / "model.safetensors", {name: each for name, each in tensors.items() if ".h.3." not in name})
    with pytest.raises(el.CheckpointError, match=r"lacks 12 tensors of a whole GPT2LMHeadModel \(transformer\.h\.3\."):
        el.open_model(tmp_path).require_causal()
