"""Small random models of every model type of transformers, built from the type's default configuration.

    config, model = build("llama", "causal")

`KINDS` has the model types of each kind. A size that a default configuration has becomes the one in `SIZES`; its
sub-configurations are treated in the same way. `OVERRIDES` has more settings by model type: data, no code. Widths of
heads, lengths, bases, scales and epsilons stay those of the default configuration.
"""

import os
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 131
"""Number of tokens: a prime, so that no other size of a model equals it."""

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Kind -> name of the mapping in transformers' `modeling_auto` whose keys are its model types."""

LAYERS = 6
_SAME = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_total")
SIZES: Mapping[str, int] = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(_SAME, 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 24),
}
"""Size in a configuration -> its value here."""

OVERRIDES: Mapping[str, Mapping[str, Any]] = {}
"""Model type -> settings of its configuration; `text_config.hidden_size` is that of a sub-configuration."""


class CannotBuild(Exception):
    """A model cannot be built here; the message is the reason."""


def model_types(kind: str) -> dict[str, str]:
    """Return the model types of a kind, and the name of each one's model class in transformers."""
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, KINDS[kind]))


def small_config(config_class: Any, overrides: Mapping[str, Any], path: str = "") -> Any:
    """Return a small configuration of a class.

    Args:
        config_class: Class of the configuration.
        overrides: Settings by path, such as `text_config.hidden_size`.
        path: Path of the sub-configuration that is built, with a dot at its end; empty for the whole.
    """
    own = {key.removeprefix(path): value for key, value in overrides.items() if key.startswith(path)}
    flat = {key: value for key, value in own.items() if "." not in key}
    try:
        default = config_class(**flat)
    except Exception:  # the defaults of a composite may need their parts
        default = config_class.__new__(config_class)
    changes: dict[str, Any] = {}
    for key in config_class.sub_configs:
        part = getattr(default, key, None)
        if part is not None and key not in flat:
            changes[key] = small_config(type(part), overrides, f"{path}{key}.")
    known = default.to_dict() if getattr(default, "__dict__", None) else {}
    for key in {*SIZES, *config_class.attribute_map} & {*SIZES}:
        value = known.get(key, getattr(default, key, None))
        if isinstance(value, int) and not isinstance(value, bool):
            changes[key] = SIZES[key]
    ids = VOCAB
    for key, value in sorted(known.items()):
        if "token" in key and key.endswith(("_id", "_index", "_ids")):
            if isinstance(value, int) and not isinstance(value, bool) and value >= VOCAB - 10:
                ids -= 1
                changes[key] = ids
            elif isinstance(value, list) and any(isinstance(one, int) and one >= VOCAB - 10 for one in value):
                ids -= len(value)
                changes[key] = list(range(ids, ids + len(value)))
    return config_class(**{**changes, **flat})


def build(model_type: str, kind: str) -> tuple[Any, nn.Module]:
    """Build a small random model of a type; no bias is 0 and no weight of a norm is 1.

    Args:
        model_type: A key of `model_types(kind)`.
        kind: A key of `KINDS`.

    Returns:
        The configuration and the model in float32, in evaluation mode.

    Raises:
        CannotBuild: transformers cannot build it from such a configuration.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    with quiet():
        model_class = getattr(transformers, model_types(kind)[model_type])
        try:
            config = small_config(config_class, OVERRIDES.get(model_type, {}))
            if model_class.config_class == config_class.sub_configs.get("text_config"):
                config = config.get_text_config()
            torch.manual_seed(0)
            model = model_class._from_config(config, attn_implementation="eager")
        except Exception as error:
            raise CannotBuild(f"{type(error).__name__}: {error}".partition("\n")[0][:300]) from error
        randomise(model)
    return config, model.eval()


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw every parameter of a model from a normal distribution of standard deviation 0.2."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)


@contextmanager
def quiet():
    """Suppress the warnings of transformers about tiny and patched configurations."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
