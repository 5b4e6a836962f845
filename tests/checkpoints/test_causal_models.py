"""A checkpoint folder is loaded as the whole causal language model that transformers has of it, or refused by name."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import embedlayer as el
from embedlayer.checkpoints.causal_models import load_causal_model
from embedlayer.core.errors import CheckpointError, MissingExtraError
from embedlayer.io.safetensors_files import save_tensors

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
    with pytest.raises(CheckpointError, match=message):
        el.open_model(tmp_path).require_causal()


def test_a_tensor_that_is_missing_is_not_replaced_by_random_numbers(tmp_path) -> None:
    saved(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(tmp_path / "model.safetensors", {name: each for name, each in tensors.items() if ".h.3." not in name})
    with pytest.raises(CheckpointError, match=r"lacks 12 tensors of a whole GPT2LMHeadModel \(transformer\.h\.3\."):
        load_causal_model(tmp_path)


def test_a_type_that_transformers_does_not_know_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    with pytest.raises(CheckpointError, match="cannot load .* as a causal language model: .*brand_new") as caught:
        load_causal_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_without_transformers_the_install_line_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'embedlayer\[hf\]'"):
        load_causal_model(tmp_path)
