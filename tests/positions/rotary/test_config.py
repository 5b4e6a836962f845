"""Reading transformers' configurations: what live models turn by, and what is refused."""

import importlib
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from covering import looped, some

from embedlayer import CheckpointError, EmbedLayerWarning, Position, RotaryEmbedding
from embedlayer.families import REFUSED_ROTARY, ROTARY
from embedlayer.positions import (
    AxialAxes,
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QueryScaledPosition,
    YarnScaling,
    rotary_positions,
)

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "max_position_embeddings": 128}
SMALL = {"model_type": "llama", **SIZES}
DIVISORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
DEEPSEEK = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
FAMILIES: list[tuple[str, str, dict]] = [  # module of transformers, its configuration and module of angles, options;
    # tests/test_all_families.py compares the positions of all types
    ("llama", "Llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("qwen2", "Qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    ("gemma3", "Gemma3Text", {"head_dim": 16, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gpt_neox", "GPTNeoX", {"rotary_pct": 0.25, "rotary_emb_base": 25000}),
    ("phi", "Phi", {"partial_rotary_factor": 0.5}),
    ("phi3", "Phi3", {"original_max_position_embeddings": 32, "rope_scaling": {"rope_type": "longrope", **DIVISORS}}),
    ("cohere", "Cohere", {}),
    ("modernbert", "ModernBert", {"vocab_size": 10}),
    ("gemma4", "Gemma4Text", {"head_dim": 16, "global_head_dim": 32}),
    ("deepseek_v3", "DeepseekV3", {"qk_rope_head_dim": 8, "rope_scaling": DEEPSEEK}),
    ("glm", "Glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
]


def as_file(config) -> dict:
    return json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize(
    ("module", "name", "options"), FAMILIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_layer_type_of_a_live_model_has_the_frequencies_that_are_read(module, name, options) -> None:
    pytest.importorskip("transformers")
    configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(configuration, f"{name}Config")(**{**SIZES, **options})
    short = f"{name.removesuffix('Text')}RotaryEmbedding"
    theirs = getattr(modeling, f"{name}RotaryEmbedding", None) or getattr(modeling, short)
    theirs = theirs(config)
    by_type = [key for key in config.rope_parameters if isinstance(config.rope_parameters[key], dict)]
    for layer_type in by_type or [None]:
        prefix = f"{layer_type}_" if layer_type else ""
        ours = RotaryEmbedding.from_config(as_file(config), layer_type)
        their_frequencies = getattr(theirs, f"{prefix}inv_freq").double()
        ours_in_radians = ours.phase_increments.double() / 2**53 * 2 * torch.pi
        torch.testing.assert_close(their_frequencies, ours_in_radians, rtol=5e-7, atol=1e-12)
        assert ours.attention_scaling == pytest.approx(getattr(theirs, f"{prefix}attention_scaling"), rel=1e-12)
    assert len(rotary_positions(as_file(config))) == 6


TRAINED = {"original_max_position_embeddings": 32}
LONG: Any = ((1.0,) * 8, (2.0,) * 8, 32, 4.0)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= TRAINED


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"type": "default"}}, None),
        ({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}, LinearScaling(2.0)),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, DynamicNTKScaling(2.0, 128)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None, **TRAINED}}, YarnScaling(4.0, 32)),
        ({"rope_scaling": {"type": "longrope", **DIVISORS}, **TRAINED}, LongRopeScaling(*LONG)),
        ({"rope_scaling": {"type": "su", **DIVISORS}, **TRAINED}, LongRopeScaling(*LONG)),
        ({"rope_parameters": {"rope_type": "proportional"}, "partial_rotary_factor": 0.25}, ProportionalScaling(0.25)),
        ({"rope_parameters": LLAMA3, "rope_theta": 5e5}, Llama3Scaling(8.0, 32, 1.0, 4.0)),
    ],
)
def test_old_and_new_keys_are_read(keys, scaling) -> None:
    position = RotaryEmbedding.from_config({**SMALL, "rope_theta": 5e5, **keys})
    assert (position.scaling, position.base, position.head_dim, position.rotary_dim) == (scaling, 5e5, 16, 16)


@pytest.mark.parametrize(
    ("keys", "rotary_dim"),
    [
        ({"partial_rotary_factor": 0.5}, 8),
        ({"rotary_pct": 0.25}, 4),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 8),
        ({"rotary_dim": 4}, 4),
        ({}, 16),
    ],
)
def test_a_part_of_a_head_may_turn(keys, rotary_dim) -> None:
    config = {**SMALL, "model_type": "phi3", "rope_theta": 1e4, **keys}
    assert RotaryEmbedding.from_config(config).rotary_dim == rotary_dim


SHARED = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32, "factor": 2.0}
SHARED_TYPES: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("default", "linear", "dynamic", "yarn")},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    "proportional": {},
}
UNSCALED, UNLIMITED = ("default",), ("default", "linear", "dynamic", "proportional")


@pytest.mark.parametrize("family", some(("Llama", "Glm4"), ("Llama", "Glm4", "Mistral", "Qwen3", "Olmo2")))
@pytest.mark.parametrize("rope_type", SHARED_TYPES)
def test_a_part_of_a_head_is_rotated_ignored_or_refused_as_the_original_does(family, rope_type) -> None:
    """transformers' model of the type is built and run: whether it fails, and how many frequencies it has."""
    transformers = pytest.importorskip("transformers")
    parameters = {"rope_type": rope_type, **SHARED, **SHARED_TYPES[rope_type]}
    for key, types in (("factor", UNSCALED), ("original_max_position_embeddings", UNLIMITED)):
        if rope_type in types:
            del parameters[key]
    sizes = {**SIZES, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 9, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**sizes, rope_parameters=parameters)
    model = getattr(transformers, f"{family}Model")(config)
    theirs = model.rotary_emb.inv_freq
    try:
        with torch.no_grad():
            model(torch.tensor([[1, 2]]))
    except RuntimeError:
        with pytest.raises(CheckpointError):
            rotary_positions(as_file(config))
        return
    ignores = rope_type == "default" and family != "Glm4"
    with pytest.warns(EmbedLayerWarning) if ignores else nullcontext():
        ours = rotary_positions(as_file(config))[0]
    assert ours.phase_increments.shape == theirs.shape
    torch.testing.assert_close(
        ours.phase_increments.double() / 2**53 * 2 * torch.pi, theirs.double(), rtol=5e-7, atol=0
    )


@pytest.mark.parametrize(
    ("family", "keys", "interleaved"),
    [("llama", {}, False), ("cohere", {}, True), ("glm", {"partial_rotary_factor": 0.5}, True)],
)
def test_the_layout_is_that_of_the_family_or_as_told(family, keys, interleaved) -> None:
    config = {**SMALL, "model_type": family, "rope_theta": 1e4, **keys}
    assert RotaryEmbedding.from_config(config).interleaved is interleaved
    assert RotaryEmbedding.from_config(config, interleaved=not interleaved).interleaved is not interleaved


GEMMA3 = {
    **SMALL,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 3,
}


def test_layer_types_have_bases_and_scalings_of_their_own() -> None:
    local = RotaryEmbedding.from_config(GEMMA3, "sliding_attention")
    whole = RotaryEmbedding.from_config(GEMMA3, "full_attention")
    assert (local.base, local.scaling) == (1e4, None)
    assert (whole.base, whole.scaling) == (1e6, LinearScaling(8.0))
    layers = rotary_positions(GEMMA3)
    assert [layer.base for layer in layers] == [1e4, 1e4, 1e6, 1e4, 1e4, 1e6]
    assert len({id(layer) for layer in layers}) == 2
    with pytest.raises(CheckpointError, match="layers of two types: pass layer_type='sliding_attention'"):
        RotaryEmbedding.from_config(GEMMA3)
    modernbert = {
        **SMALL,
        "model_type": "modernbert",
        "local_rope_theta": 1e4,
        "global_rope_theta": 16e4,
        "global_attn_every_n_layers": 3,
    }
    assert [layer.base for layer in rotary_positions(modernbert)] == [16e4, 1e4, 1e4, 16e4, 1e4, 1e4]
    assert RotaryEmbedding.from_config(modernbert, "sliding_attention").base == 1e4


def test_yarn_nested_by_layer_type_keeps_its_truncate() -> None:
    """transformers reads it from outside the nested dictionary, and so not at all."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    config = {**SMALL, "rope_parameters": {"full_attention": {**yarn, "truncate": False}}}
    assert RotaryEmbedding.from_config(config, "full_attention").scaling == YarnScaling(4.0, 32, truncate=False)


def test_layers_without_positions_are_neutral() -> None:
    nested = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None}
    config = {**SMALL, "rope_parameters": nested, "layer_types": ["sliding_attention", "full_attention"] * 3}
    assert type(RotaryEmbedding.from_config(config, "full_attention")) is Position
    assert [type(layer) is Position for layer in rotary_positions(config)] == [False, True] * 3
    with pytest.raises(CheckpointError):
        RotaryEmbedding.from_config(config, "fullattention")


@pytest.mark.parametrize(
    ("keys", "rotated"),
    [
        ({"no_rope_layers": [1, 1, 0, 1, 1, 0]}, [True, True, False] * 2),
        ({"no_rope_layer_interval": 3}, [True, True, False] * 2),
        ({"no_rope_layers": [], "no_rope_layer_interval": 2}, [True, False] * 3),
        ({}, [True] * 6),
    ],
)
def test_no_rope_layers_says_1_for_layers_that_turn(keys, rotated) -> None:
    config = {**SMALL, "rope_theta": 1e4, **keys}
    assert [isinstance(layer, RotaryEmbedding) for layer in rotary_positions(config)] == rotated


@pytest.mark.parametrize(("module", "name"), [("smollm3", "SmolLM3"), ("cohere2", "Cohere2"), ("exaone4", "Exaone4")])
def test_layers_that_live_models_do_not_turn_are_known(module, name) -> None:
    pytest.importorskip("transformers")
    configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(configuration, f"{name}Config")(**SIZES, vocab_size=10, pad_token_id=0, intermediate_size=8)
    attention = [getattr(modeling, f"{name}Attention")(config, layer) for layer in range(6)]
    theirs = [
        part.use_rope
        if hasattr(part, "use_rope")
        else part.sliding_window is not None and (module == "cohere2" or part.is_sliding)
        for part in attention
    ]
    ours = [isinstance(layer, RotaryEmbedding) for layer in rotary_positions(as_file(config))]
    assert ours == [bool(flag) for flag in theirs]
    assert not all(theirs)


ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
WRONG: list[dict[str, Any]] = [  # in addition to the keys of a small model
    {"rope_parameters": {**ROPE, "attn_factor": 1.0}},
    {"rope_parameters": {**ROPE, "mrope_section": [1]}},
    {"rope_scaling": {"type": "mrope", "mrope_section": [1]}, "rope_theta": 1e4},
    {"rope_parameters": {**ROPE, "rope_type": "yarm"}},
    {"rope_parameters": {**ROPE, "rope_type": ["yarn"]}},
    {"rope_parameters": {**ROPE, "type": "linear"}},
    {"rope_parameters": {**ROPE, "factor": "4"}},
    {"rope_parameters": {**ROPE, "truncate": 1}},
    *({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, **factor}} for factor in ({}, {"factor": None})),
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": [1]},
    {"rope_parameters": {"full_attention": 3, "sliding_attention": {}}},
    {},
    {"rope_theta": 1e4, "rope_parameters": ROPE | {"rope_theta": 2e4}},
    {"rope_thetta": 1e4},
    {"rope_theta": True},
    {"rope_theta": 1e4, "model_type": "gpt_neox"},
    {"alibi": True},
    {"rope_theta": 1e4, "head_dim": 0.5},
]
WITHOUT_SIZES: list[dict[str, Any]] = [
    {"text_config": {}},
    {"vision_config": {"model_type": "pixtral"}, "text_config": {}},
    *({"rope_theta": 1e4, **name} for name in ({"model_type": "llama"}, {}, {"model_type": "lama"})),
]
OF_LAYERS: list[dict[str, Any]] = [
    {"num_hidden_layers": None},
    {"no_rope_layers": [1]},
    {"model_type": "smollm3"},
    {"model_type": "cohere2", "sliding_window": 8},
    *({"model_type": name} for name in ("cohere2", "gpt_oss", "deepseek_v3")),
    {"model_type": "llama", "rope_interleave": True},
    {"model_type": "gptj", "rotary_dim": 8, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"model_type": "qwen2_vl_text", "rope_scaling": {"mrope_section": [1, 1, 1]}},
    {"model_type": "llama", "layer_rope_theta": [1e4]},
    {"model_type": "novel"},
]
REFUSALS = [
    *((RotaryEmbedding.from_config, SMALL | config) for config in WRONG),
    *((RotaryEmbedding.from_config, config) for config in WITHOUT_SIZES),
    *((rotary_positions, SMALL | {"rope_theta": 1e4} | config) for config in OF_LAYERS),
]


@looped("read, config", REFUSALS)
def test_keys_that_are_unknown_missing_or_contradicting_are_refused(read, config) -> None:
    with pytest.raises(CheckpointError):
        read(config)


def test_a_model_type_that_rotates_in_another_way_is_refused_with_the_reason() -> None:
    assert not REFUSED_ROTARY.keys() & ROTARY.keys()
    for model_type, reason in REFUSED_ROTARY.items():
        with pytest.raises(CheckpointError, match=f"'{model_type}' are not read: {reason}"):
            RotaryEmbedding.from_config(
                {"model_type": model_type, "rope_theta": 1e4, "head_dim": 64}, interleaved=False
            )


AXIAL = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}


def test_the_heads_of_a_vision_tower_have_rows_and_columns() -> None:
    first, second = rotary_positions({**AXIAL, "model_type": "paddleocr_vl_vision"})  # without rope_parameters
    assert first is second
    assert (first.head_dim, first.base, first.axes) == (32, 10_000.0, AxialAxes(2))
    first, _ = rotary_positions({**AXIAL, "hidden_size": 160, "model_type": "minimax_m3_vl_vision"})
    assert (first.head_dim, first.rotary_dim, first.axes) == (80, 78, AxialAxes(3))
    for model_type, rope_type in (("pixtral", "yarn"), ("llama", "axial")):
        with pytest.raises(CheckpointError):
            rotary_positions({**AXIAL, "model_type": model_type, "rope_parameters": {"rope_type": rope_type}})


def test_a_base_that_is_told_fills_in_for_a_missing_one_only() -> None:
    assert RotaryEmbedding.from_config(SMALL, default_base=1e4).base == 1e4
    assert RotaryEmbedding.from_config({**SMALL, "rope_theta": 5e5}, default_base=1e4).base == 5e5


def test_an_unknown_family_is_read_when_the_caller_states_pairing_and_layers() -> None:
    config = {**SIZES, "model_type": "novel", "rope_theta": 1e4}
    assert RotaryEmbedding.from_config(config, interleaved=True).interleaved
    with pytest.raises(CheckpointError):
        rotary_positions(config, interleaved=False, rotated=[True])
    layers = rotary_positions(config, interleaved=False, rotated=[True, False] * 3)
    assert [isinstance(layer, RotaryEmbedding) for layer in layers] == [True, False] * 3
    assert all(isinstance(each, RotaryEmbedding) for each in rotary_positions(config, interleaved=False, rotated=True))


BLOCKS: list[tuple[str, dict, list[str]]] = [
    ("afmoe", {"layer_types": ["sliding_attention", "full_attention"] * 3}, ["rotary", "none"] * 3),
    ("qwen3_next", {"full_attention_interval": 3, "partial_rotary_factor": 0.25}, ["none", "none", "rotary"] * 2),
    ("granite_swa", {"layer_rope_theta": [1e4, 0, 5e5] * 2}, ["rotary", "none", "rotary_2"] * 2),
    ("mllama_text_model", {"cross_attention_layers": [1]}, ["rotary", "none", *["rotary"] * 4]),
    (
        "molmo2_text",
        {"rope_scaling_layers": [0, 1], "rope_scaling": {"type": "linear", "factor": 2.0}},
        ["rotary", "rotary", *["rotary_2"] * 4],
    ),
    (
        "llama4_text",
        {"no_rope_layers": [1, 0] * 3, "attn_scale": 0.1, "floor_scale": 8},
        ["rotary", "query_scaling"] * 3,
    ),
    ("jamba", {}, ["none"] * 6),
]


@pytest.mark.parametrize(("family", "keys", "expected"), BLOCKS, ids=[family for family, *_ in BLOCKS])
def test_each_block_has_the_key_of_its_scheme(family, keys, expected) -> None:
    layers = rotary_positions({**SIZES, "model_type": family, "rope_theta": 1e4, **keys})
    assert [type(layer) is Position for layer in layers] == [key == "none" for key in expected]
    assert len({id(layer) for layer in layers if type(layer) is not Position}) == len({*expected} - {"none"})
    for layer, key in zip(layers, expected, strict=True):
        assert key == "none" or layer is layers[expected.index(key)]
        assert isinstance(layer, QueryScaledPosition) == (key == "query_scaling")
