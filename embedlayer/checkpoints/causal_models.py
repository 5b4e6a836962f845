"""Load the whole causal language model of a checkpoint folder with transformers, patched, or refuse it by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from embedlayer.checkpoints.patching import patch
from embedlayer.core.errors import CheckpointError, require, transformers_errors

NAMED = 3
"""Number of tensors that an error names."""


def load_causal_model(folder: Path | str, *, device: torch.device | str = "cpu") -> nn.Module:
    """Load the causal language model of a checkpoint folder with transformers, and `patch` it.

    The model has the dtype of its files, and is in evaluation mode. No pickle is loaded and no code of the folder is
    run.
    """
    transformers = require("transformers", extra="hf")
    options = {"local_files_only": True, "trust_remote_code": False}
    with transformers_errors(f"load {folder} as a causal language model"):
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        written = next(iter(config.architectures or ()), None)
        if causal is None or (
            written not in (None, causal.__name__)
            and hasattr(transformers, written)  # else a name that code of the folder or an older release had
            and causal.config_class is type(config)  # else the language model of a multimodal one
        ):
            raise CheckpointError(f"{folder} is no causal language model: {written or f'type {config.model_type}'}.")
        options |= attention_options(config)
        model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype="auto", use_safetensors=True, output_loading_info=True, **options
        )
    count, names = missing_tensors(loaded)
    if count:
        raise CheckpointError(f"{folder} lacks {count:,} tensors of a whole {type(model).__name__} ({names}).")
    return cast(nn.Module, patch(model.to(device).eval()))


def attention_options(config: Any) -> dict[str, Any]:
    """Return the options with which transformers applies a soft cap on attention scores (Gemma 2).

    Before 5.22 the default of transformers for these models is SDPA, which ignores the cap.
    """
    return {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}


def missing_tensors(loaded: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many tensors transformers has filled with random numbers, and the first names as text."""
    missing = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    return len(missing), ", ".join([*missing[:NAMED], *["..."] * (len(missing) > NAMED)])
