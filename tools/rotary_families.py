"""Compare rotary positions that are read from configurations with transformers, for every configuration class.

    python tools/rotary_families.py [--extend METHOD [--old-keys]] [MODEL_TYPE ...]

prints one row for each class of transformers whose modeling file rotates queries and keys: equal (with the largest
difference), refused (with the sentence), or wrong. With `--extend` the configuration is first extended to four times
its length by a method of `embedlayer.positions.rotary.extension`, in place of a scaling that it has. It is compared
below, at and beyond the trained length. With `--old-keys` it has `rope_scaling` and `rope_theta` in place of
`rope_parameters` before that.
"""

import argparse
import importlib
import inspect
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models
import torch
from rotary_comparison import LONG, SHORT, compare_model, small_config, small_model

from embedlayer import CheckpointError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.positions import RotaryEmbedding, rotary_positions
from embedlayer.positions.rotary.config import common_keys, family_facts, is_nested
from embedlayer.positions.rotary.extension import extend_rotary

LAYERS = 6
_SECTIONS = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}
_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_HEADS = [f"{stack}_num_{kind}_heads" for stack in ("encoder", "decoder") for kind in ("attention", "key_value")]
_CODECS = ("mimi", "mimi_decoder", "pocket_tts_audio_tokenizer", "pocket_tts_audio_tokenizer_decoder")
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [2, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "ernie4_5_vl_moe_text": {"num_attention_heads": 20, "rope_parameters": _SECTIONS},
    "glm4v_text": _HALF,
    "glm_image_text": _HALF,
    "glm4v_moe_text": {**_HALF, "num_attention_heads": 32},
    "glm4_moe": {**_HALF, "num_attention_heads": 32},
    "gradium_phonon_tts": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "flow_head_config": {"condition_dim": 256},
    },
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "num_hidden_layers": 6,
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba"],
    },
    "hunyuan_vl_text": {
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "dynamic",
            "factor": 1.0,
            "alpha": 1000.0,
            "rope_theta": 1e4,
            "mrope_section": [16, 16, 16, 16],
        },
    },
    "llama4_text": {"floor_scale": 4},
    "pocket_tts": {"hidden_size": 256, "num_attention_heads": 4, "flow_head_config": {"condition_dim": 256}},
    "qwen3_omni_moe_text": {"num_attention_heads": 16},
    "qwen3_omni_moe_talker_text": {"head_dim": 128, "shared_expert_intermediate_size": 32},
    "step3p5": {"sliding_window": 8},
    "dots3_note_audio_encoder": {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "adapter_input_size": 256,
    },
    "moonshine": dict.fromkeys(_HEADS, 4),
    "moonshine_streaming": {"num_key_value_heads": 8},
    **{name: {"upsample_groups": 256} for name in _CODECS},
    "t5_gemma_module": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "zamba2": {"use_mem_rope": True},
}
"""Model type -> settings of its configuration."""


FIXED: Mapping[str, Mapping[str, Any]] = {"llama4_vision_model": {"intermediate_size": 768, "image_size": 140}}
"""Model type -> sizes of the small model that follow from its other sizes."""

INPUTS: Mapping[str, Callable[[Any, int], Mapping[str, Any]]] = {
    "blt_local_encoder": lambda config, length: {"num_patches": 1, "patch_ids": torch.zeros(1, length).long()},
    "deepseek_ocr2_encoder": lambda config, length: {"num_patches": 1},
    "dia_decoder": lambda config, length: {"input_ids": torch.ones(1, length, config.num_channels).long()},
    "idefics": lambda config, length: {
        "image_encoder_embeddings": torch.ones(1, 1, 2, config.vision_config.embed_dim),
        "image_attention_mask": torch.ones(1, length, 1),
    },
    "moonshine_streaming": lambda config, length: {
        "encoder_hidden_states": torch.ones(1, 2, config.encoder_config.hidden_size)
    },
    "muse_glimmer_assistant": lambda config, length: {
        "context_hidden_states": torch.ones(1, 2, config.hidden_size * len(config.target_layer_ids))
    },
    "moshi_depth": lambda config, length: {"last_hidden_state": torch.ones(1, length, config.input_size)},
    "blt_local_decoder": lambda config, length: {"patch_embeds": torch.ones(1, length, config.hidden_size_global)},
    "voxtral_realtime_text": lambda config, length: {"t_cond": torch.ones(1, 1, config.hidden_size)},
}
"""Model type -> function from its configuration and a number of tokens to further inputs of the model."""


def llama4_grid(config: Any) -> torch.Tensor:
    """Return the rows and columns of patches, counted from 1, and 0 for the class token at the end."""
    side = torch.arange(1, config.image_size // config.patch_size + 1)
    return torch.cat([torch.cartesian_prod(side, side), torch.zeros(1, 2).long()]).T[:, None]


POSITIONS: Mapping[str, Callable[[Any], torch.Tensor]] = {"llama4_vision_model": llama4_grid}
"""Model type -> function from its configuration to positions, where no rotary module of the model gets them."""


class Row(NamedTuple):
    """Result for one configuration class."""

    name: str
    model_type: str
    verdict: str
    largest: float
    reason: str


def config_classes() -> Iterator[Any]:
    """Yield each configuration class of transformers whose modeling file names rotary positions."""
    import transformers
    from transformers import PreTrainedConfig

    for path in sorted(Path(transformers.__file__).parent.glob("models/*/configuration_*.py")):
        modeling = path.with_name(path.name.replace("configuration_", "modeling_"))
        if not modeling.exists() or not re.search("rotary|rope(?!r)", modeling.read_text()):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, PreTrainedConfig) and value.__module__ == module.__name__:
                yield value


def configuration(config_class: Any, changes: Mapping[str, Any]) -> Any:
    """Return the default configuration of a class with few layers, small sizes and these changes."""
    settings = {**OVERRIDES.get(config_class.model_type, {}), **changes}
    try:
        config = config_class(**{"num_hidden_layers": LAYERS, **settings})
    except Exception:
        config = config_class(**settings)
    return config_class.from_dict(small_config(config.to_dict()) | FIXED.get(config_class.model_type, {}))


def tiny_configuration(config_class: Any, changes: Mapping[str, Any]) -> Any:
    """Return the configuration of `tiny_models`, whose heads are narrower, with these changes."""
    return tiny_models.small_config(config_class, {**OVERRIDES.get(config_class.model_type, {}), **changes})


class Extended(NamedTuple):
    """How a configuration is extended before it is compared: see the arguments of this file."""

    method: str
    old_keys: bool = False

    def __call__(self, described: JsonObject) -> tuple[JsonObject, int]:
        """Return the configuration for four times its trained length, and the length to which it was trained."""
        described = with_old_keys(described) if self.old_keys else described
        factors = None
        if self.method == "longrope":
            schemes = rotary_positions(described)
            widest = max((each.rotary_dim for each in schemes if isinstance(each, RotaryEmbedding)), default=2)
            factors = {
                name: [1 + pair / number for pair in range(widest // 2)]
                for name, number in (("short_factor", 100), ("long_factor", 10))
            }
        facts = family_facts(described, is_stated=False)
        length = common_keys(described, facts).get("max_position_embeddings", 8192)
        longer = extend_rotary(described, 4 * length, self.method, factors=factors, replace=True)
        return longer.config, longer.original_length


def with_old_keys(config: JsonObject) -> JsonObject:
    """Return a configuration as transformers 4 wrote it, with the parameters of all layers beside `rope_scaling`."""
    parameters = config.get("rope_parameters")
    if not parameters or is_nested(parameters):
        raise CheckpointError("Parameters by layer type have no older form that is alike for all families.")
    older = {key: value for key, value in config.items() if key != "rope_parameters"}
    beside = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    scaling = {key: value for key, value in parameters.items() if key not in beside}
    return {**older, **beside, "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def compare_class(config_class: Any, changes: Mapping[str, Any] | None = None, extended: Extended | None = None) -> Row:
    """Compare the default configuration of a class, with small sizes and these changes, and maybe extended.

    If no model can be built from `configuration`, `tiny_configuration` is tried.
    """
    with tiny_models.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = _compare(config_class, configuration, changes or {}, extended)
        if first.verdict != "not built":
            return first
        second = _compare(config_class, tiny_configuration, changes or {}, extended)
    return first if second.verdict == "not built" else second


def _compare(config_class: Any, build: Any, changes: Mapping[str, Any], extended: Extended | None) -> Row:
    """Compare the configuration that `build` returns for a class."""

    def row(verdict: str, reason: object, largest: float = 0.0) -> Row:
        words = " ".join(str(reason).split())
        return Row(config_class.__name__, config_class.model_type, verdict, largest, words)

    try:
        config = build(config_class, changes)
    except Exception as error:
        return row("not built", error)
    described, at = json.loads(json.dumps(config.to_dict(), default=str)), (SHORT, LONG)
    try:
        if extended is not None:
            described, trained = extended(described)
            near = (0, 1, 7, trained // 2, trained - 2)
            at = (near, (*near, trained - 1), (*near, trained), (*near, 4 * trained - 1))
        schemes = rotary_positions(described)
    except (CheckpointError, SizeError) as error:
        return row("refused", error)
    try:
        config = config if extended is None else config_class.from_dict(described)
        inputs = INPUTS.get(config.model_type)
        positions = POSITIONS.get(config.model_type)
        results = compare_model(
            small_model(config), schemes, inputs and partial(inputs, config), positions and positions(config), at=at
        )
    except Exception as error:
        return row("not built", f"{type(error).__name__}: {error}")
    wrong = [f"block {one.block} {one.reason}" for one in results if one.reason]
    return row("wrong" if wrong else "equal", "; ".join(wrong), max(one.difference for one in results))


def main(names: list[str], extended: Extended | None = None) -> None:
    """Print one row for each class whose model type is among `names`, or for every class."""
    counts: Counter[str] = Counter()
    for config_class in config_classes():
        if names and config_class.model_type not in names:
            continue
        row = compare_class(config_class, extended=extended)
        counts[row.verdict] += 1
        print(f"{row.model_type} | {row.name} | {row.verdict} | {row.largest:.1e} | {row.reason[:300]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--extend", metavar="METHOD")
    parser.add_argument("--old-keys", action="store_true")
    arguments = parser.parse_args()
    main(arguments.names, arguments.extend and Extended(arguments.extend, arguments.old_keys))
