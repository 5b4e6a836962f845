"""Plans from a `config.json`: those of the published models, and of the layers that are loaded."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from covering import some
from stored_cases import mlx_case, weights
from stored_folders import write_folder
from tiny_models import SAMPLE

import embedlayer as el
from embedlayer.analysis import plan
from embedlayer.core.errors import CheckpointError

QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "tie_word_embeddings": True}
GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 262144}
CONFIGS = {  # as published, as far as a plan reads them
    "qwen3-0.6b": {**QWEN3, "dtype": "bfloat16"},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "tie_word_embeddings": False},
    "gemma-3-270m": {**GEMMA3, "hidden_size": 640},
    "gemma-3-4b": {"model_type": "gemma3", "text_config": {**GEMMA3, "vocab_size": 262208, "hidden_size": 2560}},
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_positions": 1024},
    "opt-125m": {"model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "max_position_embeddings": 2048},
    "roberta-base": {"model_type": "roberta", "vocab_size": 50265, "hidden_size": 768, "max_position_embeddings": 514},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_gives_the_plan_of_the_published_model(name, tmp_path):
    config, file = CONFIGS[name], tmp_path / "config.json"
    dtype = "bf16" if "dtype" in config else "fp32"
    assert plan(config) == replace(plan(name, dtype=dtype), name=config["model_type"])
    file.write_text(json.dumps(config))
    assert plan(str(file), tokens=7) == replace(plan(config), tokens=7, name=str(file))


NOT_PLANNED = [
    ({"model_type": "llama5"}, "near: llama"),
    ({}, "model type None"),
    ({"model_type": "mobilebert", "vocab_size": 9, "embedding_size": 4}, "mobilebert"),
    ({"model_type": "csm", "vocab_size": 2051, "hidden_size": 4}, "csm"),
    ({**QWEN3, "vocab_size": "many"}, "vocab_size"),
    ({"model_type": "qwen3", "vocab_size": 9}, "hidden_size"),
    ({"kind": "decoder_lm"}, "--checkpoint"),
]


@pytest.mark.parametrize(("config", "named"), NOT_PLANNED)
def test_a_configuration_that_is_not_planned_is_refused(config, named):
    with pytest.raises(CheckpointError, match=named):
        plan(config)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"bits": 4, "group_size": 64}, {}),
        ({"bits": 6, "group_size": 32}, {}),
        ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, {}),
        ({"bits": 8, "group_size": 64}, {"bits": 4, "group_size": 32, "model.embed_tokens": {"bits": 8}}),
        (None, {"bits": 4, "group_size": 64, "lm_head": False}),
    ],
)
def test_the_configuration_of_a_model_of_mlx_tells_the_bytes_of_its_rows(tmp_path, options, settings) -> None:
    case = mlx_case(weights(384), "bfloat16", **(options or {"bits": 4, "group_size": 64}))
    head = torch.randn(case.rows.shape).bfloat16() if options is None else None
    if "model.embed_tokens" in settings:
        settings = {**settings, "group_size": 64, "model.embed_tokens": options}
    write_folder(tmp_path, case._replace(settings={**(options or {}), **settings}), head)
    config, layer = json.loads((tmp_path / "config.json").read_text()), el.load(tmp_path)
    planned = plan({**config, "dtype": "bfloat16"})
    assert planned.table_bytes == layer.table.nbytes
    assert planned.head_bytes == (0 if head is None else head.nbytes)
    assert not planned.trained


def test_a_configuration_of_another_library_does_not_tell_how_the_ends_are_stored() -> None:
    config = {**QWEN3, "dtype": "bfloat16", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.warns(el.EmbedLayerWarning, match=r"\(gptq\), which does not tell .* counted in bf16"):
        assert plan(config).table_bytes == 151936 * 1024 * 2


ALL_TYPES = [(kind, name) for kind, names in SAMPLE.items() for name in names if name != "electra"]  # wider than D


@pytest.mark.parametrize(
    ("kind", "model_type"),
    some([("causal", "opt"), ("causal", "bart"), ("seq2seq", "bart"), ("masked", "roberta")], ALL_TYPES),
)
def test_a_configuration_gives_the_sizes_of_the_layer_that_is_loaded(kind, model_type, tmp_path, unchecked):
    from tiny_models import build, quiet

    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        build(model_type, kind)[1].save_pretrained(tmp_path)
        layer = el.load(tmp_path)
    row = plan(str(tmp_path / "config.json"))
    positions = [part for part in layer.modules() if isinstance(part, el.LearnedPositionalEmbedding)]
    assert (row.vocab_size, row.rank or row.embed_dim) == (layer.table.vocab_size, layer.table.embed_dim)
    assert (row.lookup_only, row.tied) == (layer.head is None, layer.head is None or layer.head.tied)
    assert row.positions == sum(len(part.weight) for part in positions)
