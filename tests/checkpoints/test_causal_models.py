"""A checkpoint folder is loaded as the whole causal language model that transformers has of it, or refused by name."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from stored_folders import save_tensors

import embedlayer as el

pytest.importorskip("transformers", reason="the hf extra is not installed")


def saved(folder, model_type: str, kind: str = "causal"):
    from tiny_models import build

    _, model = build(model_type, kind)
    model.save_pretrained(folder)
    return model


def test_the_model_is_patched_and_computes_what_the_original_does(tmp_path) -> None:
    plain = saved(tmp_path, "gpt2")
    ids = torch.arange(20, 30).unsqueeze(0)
    with torch.no_grad():
        expected = plain(ids).logits
        model = el.open_model(tmp_path).require_causal()
        torch.testing.assert_close(model(ids).logits + 0.0, expected)
    assert isinstance(model.get_output_embeddings(), el.OutputHead)
    assert not model.training


@pytest.mark.parametrize(
    ("model_type", "kind", "message"),
    [
        ("bert", "masked", "is a BertForMaskedLM, which is no causal language model"),
        ("t5", "seq2seq", "is a T5ForConditionalGeneration, which is no causal language model"),
    ],
)
def test_a_model_of_another_kind_is_refused(tmp_path, model_type, kind, message) -> None:
    saved(tmp_path, model_type, kind)
    with pytest.raises(el.CheckpointError, match=message):
        el.open_model(tmp_path).require_causal()


def test_a_tensor_that_is_missing_is_not_replaced_by_random_numbers(tmp_path) -> None:
    saved(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path / "model.safetensors", {name: each for name, each in tensors.items() if ".h.3." not in name})
    with pytest.raises(el.CheckpointError, match=r"lacks 12 tensors of a whole GPT2LMHeadModel \(transformer\.h\.3\."):
        el.open_model(tmp_path).require_causal()


@pytest.mark.filterwarnings("ignore:Only the table of ")
def test_a_type_that_transformers_does_not_know_is_refused(tmp_path) -> None:
    saved(tmp_path, "gpt2")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    with pytest.raises(el.CheckpointError, match="cannot load .* as a causal language model: .*brand_new") as caught:
        el.open_model(tmp_path).require_causal()
    assert "\n" not in str(caught.value)


def test_without_transformers_the_install_line_is_named(tmp_path, monkeypatch) -> None:
    saved(tmp_path, "gpt2")
    opened = el.open_model(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(el.MissingExtraError, match=r"pip install 'embedlayer\[hf\]'"):
        opened.require_causal()
