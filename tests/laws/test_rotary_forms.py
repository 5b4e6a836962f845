"""Older forms of rotary keys: the positions are those of transformers, an error, or named by one warning."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from covering import looped, some
from tiny_models import build

from embedlayer.checkpoints.reading.configuration import Configuration
from embedlayer.checkpoints.reading.positions import read_positions
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning
from embedlayer.families import ROTARY
from embedlayer.positions import RotaryEmbedding


def is_nested(parameters: dict[str, Any]) -> bool:
    """Whether there are keys for each type of layers."""
    return any(isinstance(each, dict) for each in parameters.values())


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "attention_factor": 1.2}
FORMS: dict[str, dict[str, object]] = {
    "flat": {"rope_parameters": {"rope_type": "default", "rope_theta": 3333.0}},
    "flat, YaRN": {"rope_parameters": {**YARN, "rope_theta": 500000.0}},
    "base alone": {"rope_theta": 3333.0},
    "base and scaling": {"rope_theta": 3333.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
FIXED_LATER = {"gemma4_vision", "pe_audio_encoder"}
"""Types whose class ignores a base outside of `rope_parameters` in transformers 5.6."""


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("form", some(["flat", "base and scaling"], FORMS))
def test_the_base_is_that_of_transformers_or_a_warning_names_both(unchecked: None, form: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    warned = set()
    for name in sorted(ROTARY.keys() & {*transformers.CONFIG_MAPPING}):
        kind = transformers.CONFIG_MAPPING[name]
        try:
            default = kind().to_dict()
            own = {key: value for key, value in default.items() if key != "rope_parameters"} | FORMS[form]
            theirs: Any = kind.from_dict(copy.deepcopy(own))
        except Exception:  # it needs what a default lacks, or does not read this form  # noqa: BLE001
            continue
        parameters = getattr(theirs, "rope_parameters", None) or {}
        if default.get("rope_parameters") is None or not (is_nested(parameters) or "rope_theta" in parameters):
            continue  # not rotated, or without a base, which the model fails to compute without
        model: Any = SimpleNamespace(config=Configuration(copy.deepcopy(own), "config.json"), tensors=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                positions, _ = read_positions(model, "rotary", 8)
            except CheckpointError:
                continue
        named = [each for each in caught if "ignores rotary keys" in str(each.message)]
        schemes = {"" if key not in parameters else key: each for key, each in positions.items()}
        bases = {key: scheme.base for key, scheme in schemes.items() if isinstance(scheme, RotaryEmbedding)}
        of = {key: each["rope_theta"] for key, each in parameters.items() if isinstance(each, dict)}
        expected = {*(of.values() if is_nested(parameters) else [parameters["rope_theta"]])}
        expected |= {*(getattr(theirs, "layer_rope_theta", None) or ())}
        if named:
            warned.add(name)
            assert len(named) == 1
            assert issubclass(named[0].category, EmbedLayerWarning)
        elif not (name in FIXED_LATER and form.startswith("base")):
            assert {*bases.values()} <= expected, name
    nested = {"gemma3_text", "gemma3n_text", "t5gemma2_text", "t5gemma2_decoder"}
    assert warned >= (nested if form.startswith("flat") else set())


@pytest.mark.parametrize("form", FORMS)
@looped("kind", ["olmo3", "gemma3_text", "gemma3n_text", "qwen3"])
def test_the_frequencies_of_a_folder_are_those_of_its_model_or_a_warning_names_both(tmp_path, kind, form) -> None:
    import json

    from transformers import AutoModelForCausalLM

    import embedlayer as el

    types = ["sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 8}
    sizes |= {"num_kv_shared_layers": 0} if "3n" in kind else {}
    build(kind, "causal", sizes)[1].save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    content = {key: value for key, value in json.loads(file.read_text()).items() if key != "rope_parameters"}
    file.write_text(json.dumps(content | FORMS[form]))
    buffers = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_buffers())
    inverse = {key: value for key, value in buffers.items() if key.endswith("inv_freq") and "original" not in key}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            layer = el.load(tmp_path)
        except CheckpointError:
            assert (kind, form[:4]) == ("gemma3n_text", "base")
            return
    named = [str(each.message) for each in caught if "ignores rotary keys" in str(each.message)]
    equal = []
    for block, of in enumerate(types):
        theirs = next((value for key, value in inverse.items() if of in key), next(iter(inverse.values())))
        position = layer.position_of_block(block)
        assert isinstance(position, RotaryEmbedding)
        equal.append(torch.allclose(position.frequencies().float(), theirs, rtol=1e-4, atol=1e-7))
    assert len(named) == (not all(equal))
    assert not named or ("here and" in named[0] and "in transformers" in named[0])
