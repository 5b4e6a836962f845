"""Compare rotary positions that are read from configurations with transformers, for every configuration class.

    python examples/rotary_families.py [MODEL_TYPE ...]

prints one row for each class of transformers whose modeling file rotates queries and keys: equal (with the largest
difference), refused (with the sentence), or wrong.
"""

import importlib
import inspect
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_models import quiet, small_config

from embedlayer import CheckpointError
from embedlayer.positions import rotary_positions
from embedlayer.positions.rotary_comparison import compare_model, text_model

_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_WIDE = {"hidden_size": 512}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 5e5}},
    **dict.fromkeys(("deepseek_v2", "deepseek_ocr2_text"), {"num_experts_per_tok": 2}),
    "step3p5": {"sliding_window": 8},
    "helium": {"head_dim": 16},
    **dict.fromkeys(("glm4v_text", "glm_image_text"), _HALF),
    "glm4v_moe_text": {**_HALF, **_WIDE},
    "glm4_moe": _WIDE,
    "qwen3_omni_moe_text": _WIDE,
    "qwen3_omni_moe_talker_text": {**_WIDE, "head_dim": 128},
    "ernie4_5_vl_moe_text": {
        **_WIDE,
        "moe_intermediate_size": [40, 40],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]},
    },
    "hunyuan_vl_text": {
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "dynamic",
            "factor": 1.0,
            "alpha": 1000.0,
            "rope_theta": 1e4,
            "mrope_section": [16, 16, 16, 16],
        }
    },
    "bamba": {"attn_layer_indices": [2, 4]},
    "zamba2": {"use_mem_rope": True},
    "granitemoehybrid": {
        "position_embedding_type": "rope",
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba"],
    },
    "llama4_text": {"floor_scale": 4},
    "beam": {},
    "csm_depth_decoder_model": {"backbone_hidden_size": 512},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "mrope_section": [24, 20, 20]}}},
    "moonshine_streaming": {},
}
"""Model type -> settings of its small configuration."""


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
        if not modeling.exists() or not re.search("rotary|rope", modeling.read_text()):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, PreTrainedConfig) and value.__module__ == module.__name__:
                yield value


def overrides(config_class: Any) -> dict[str, Any]:
    """Return settings that keep the width of a head where the default configuration does not state it."""
    settings = dict(OVERRIDES.get(config_class.model_type, {}))
    try:
        default = config_class()
        stated = default.to_dict()
        hidden, heads = default.hidden_size, default.num_attention_heads
    except Exception:
        return settings
    stated_width = isinstance(inspect.getattr_static(config_class, "head_dim", None), int)
    if isinstance(hidden, int) and isinstance(heads, int) and not stated_width:
        key = next((key for key in ("n_embd", "d_model", "hidden_size") if key in stated), None)
        if key is not None and not stated.get("qk_rope_head_dim"):
            settings = {key: 4 * (hidden // heads), "hidden_size": 4 * (hidden // heads), **settings}
    if stated.get("num_key_value_heads", 0) is None:
        settings.setdefault("num_key_value_heads", 2)
    return settings


def compare_class(config_class: Any, changes: Mapping[str, Any] | None = None) -> Row:
    """Compare the default configuration of a class, with small sizes and these changes."""
    name, model_type = config_class.__name__, config_class.model_type
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = small_config(config_class, {**overrides(config_class), **(changes or {})})
        except Exception as error:
            return Row(name, model_type, "not built", 0.0, f"{type(error).__name__}: {error}".partition("\n")[0][:200])
        described = json.loads(json.dumps(config.to_dict(), default=str))
        try:
            schemes = rotary_positions(described)
        except CheckpointError as error:
            return Row(name, model_type, "refused", 0.0, str(error))
        try:
            results = compare_model(text_model(config), schemes)
        except Exception as error:
            return Row(name, model_type, "not built", 0.0, f"{type(error).__name__}: {error}".partition("\n")[0][:200])
    wrong = [f"block {one.block} {one.reason}" for one in results if one.reason]
    return Row(
        name, model_type, "wrong" if wrong else "equal", max(one.difference for one in results), "; ".join(wrong)
    )


def main(names: list[str]) -> None:
    """Print one row for each class whose model type is among `names`, or for every class."""
    counts: Counter[str] = Counter()
    for config_class in config_classes():
        if names and config_class.model_type not in names:
            continue
        row = compare_class(config_class)
        counts[row.verdict] += 1
        print(f"{row.model_type} | {row.name} | {row.verdict} | {row.largest:.1e} | {row.reason[:300]}", flush=True)
    print(dict(counts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
