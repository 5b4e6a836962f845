"""Multimodal models: whose `tie_word_embeddings` counts, and which factors their heads have, as in transformers."""

import json
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from covering import LONG
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.checkpoints.reading.configuration import text_config
from embedlayer.families import MULTIMODAL, family_of

V, D = 20, 8
TEXT: dict[str, Any] = {"vocab_size": V, "hidden_size": D, "num_attention_heads": 2, "num_hidden_layers": 1}
TEXT |= {"rope_theta": 1e4, "pad_token_id": None, "head_dim": 4}
TIED_OTHERWISE = {
    *("glm4v", "glm4v_moe", "glm_ocr", "shieldgemma2", "video_llama_3", "qwen2_vl", "qwen2_5_vl", "paddleocr_vl"),
    *("glmasr", "granite_speech"),
}
"""Models whose head transformers left untied before 5.16 if only the language model says that it is tied."""
TIED_INSIDE = ("blip", "kosmos-2")
"""Models whose language model also ties its own head, which their configuration does not show."""
STATED_BY_THE_MODEL = [
    name for name, spec in MULTIMODAL.items() if spec.tied_by in ("model", "either") and name not in TIED_INSIDE
]


def checkpoint(folder, config, *names):
    """A folder with a configuration and random matrices of V rows."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: torch.randn(V, D) for name in names}, folder / "model.safetensors")
    return folder


DISAGREEING = [(None, None), (False, True), (True, False)]
"""What a model and its language model say, as their configurations may: enough to tell which of them counts."""


@pytest.mark.parametrize(
    "statements",
    [DISAGREEING, pytest.param([*product((None, False, True), repeat=2)], marks=LONG)],
    ids=["disagreeing", "all"],
)
def test_the_head_is_tied_where_transformers_ties_it(statements) -> None:
    from transformers import CONFIG_MAPPING

    before = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 16)
    differences = []
    for model_type in (each for each in STATED_BY_THE_MODEL if each in CONFIG_MAPPING):
        of_model: Any = CONFIG_MAPPING[model_type]
        default = of_model().get_text_config(decoder=True)
        text_type, sizes = default.model_type, {}
        if "adaptor_config" in of_model.sub_configs:  # whose width is checked (FunASR)
            sizes = {"hidden_size": default.hidden_size}
        for statement in statements:
            outer, inner = ({} if each is None else {"tie_word_embeddings": each} for each in statement)
            peer = of_model(**outer, text_config={"model_type": text_type, **sizes, **inner})
            theirs = getattr(peer, "tie_word_embeddings", False)
            config = {"model_type": model_type, **outer, "text_config": {"model_type": text_type, **inner}}
            is_old = before and model_type in TIED_OTHERWISE and not theirs
            if text_config(config)["tie_word_embeddings"] != theirs and not is_old:
                differences.append((model_type, outer, inner, theirs))
    assert differences == []


def test_a_language_model_inside_another_decides_itself() -> None:
    text = {"model_type": "llama4_text", "tie_word_embeddings": True}
    config = {"model_type": "llama4", "tie_word_embeddings": False, "text_config": text}
    assert text_config(config) == text
    config = {"model_type": "mllama", "tie_word_embeddings": True, "text_config": {"model_type": "mllama_text_model"}}
    assert text_config(config)["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("model", "text", "logit_scale", "softcap"),
    [
        (
            "aya_vision",
            {"model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 4, "layer_types": ["sliding_attention"]},
            1.0,
            None,
        ),
        ("llava_next", {"model_type": "granite", "embedding_multiplier": 3.0, "logits_scaling": 4.0}, 1.0, None),
        ("llava_next", {"model_type": "gemma2", "final_logit_softcapping": 5.0}, 1.0, None),
        ("paligemma", {"model_type": "gemma2", "final_logit_softcapping": 5.0}, 1.0, 5.0),
        ("hyperclovax_vision_v2", {"model_type": "hyperclovax", "logits_scaling": 4.0}, 4.0, None),
    ],
)
def test_factor_and_cap_of_the_language_model_count_where_the_model_applies_them(
    tmp_path, model, text, logit_scale, softcap
) -> None:
    config = {"model_type": model, "tie_word_embeddings": True, "text_config": TEXT | text}
    layer = el.load(checkpoint(tmp_path, config, "model.language_model.embed_tokens.weight"))
    assert (layer.head.tied, layer.head.logit_scale, layer.head.softcap) == (True, logit_scale, softcap)


def test_an_unknown_model_around_a_known_language_model_is_refused(tmp_path) -> None:
    config = {"model_type": "novel_vl", "text_config": TEXT | {"model_type": "llama"}}
    folder = checkpoint(tmp_path, config, "model.language_model.embed_tokens.weight")
    with pytest.raises(el.CheckpointError, match="model_type 'novel_vl' is not known"):
        el.load(folder)


def test_older_configurations_have_the_keys_of_the_language_model_beside_those_of_the_model() -> None:
    config = {"model_type": "qwen2_vl", "hidden_size": D, "vision_config": {}}
    assert text_config(config)["model_type"] == "qwen2_vl_text"
    for model_type, spec in MULTIMODAL.items():
        assert family_of(model_type) is None, model_type
        assert spec.flat is None or family_of(spec.flat) is not None, model_type
    assert text_config({"model_type": "llama"}) == {"model_type": "llama"}
