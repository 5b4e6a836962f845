"""Keys of `params.json` in checkpoints of Meta's layout, as Meta, Mistral and llama2.c write them.

A key outside these lists that has a value may change the model, so the reader refuses it by name.
"""

from collections.abc import Mapping

from embedlayer.families.field_types import Names

META_PARAMS: Names = (
    *("dim", "n_heads", "n_kv_heads", "n_layers", "head_dim", "norm_eps", "vocab_size", "tied_embeddings"),
    *("rope", "rope_theta", "yarn", "llama_4_scaling", "sliding_window", "quantization"),
)
"""Keys that are read."""

BLOCK_PARAMS: Names = (
    *("hidden_dim", "multiple_of", "ffn_dim_multiplier", "moe"),
    *("max_seq_len", "seq_len", "max_position_embeddings", "max_batch_size", "ragged_attention"),
    *("format", "tied", "vision_encoder"),
)
"""Keys of the MLPs in blocks, of lengths that no tensor has, and of images, whose vectors replace those of tokens."""

FIXED_PARAMS: Mapping[str, tuple[object, ...]] = {
    "activation": ("silu",),
    "causal": (True,),
    "model_type": ("transformer",),
    "use_scaled_rope": (False,),
}
"""Key -> values of it that change nothing; other values are refused."""

YARN_PARAMS: Mapping[str, str] = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
"""Key of Mistral's `yarn` -> the common key of the same meaning."""

QUERY_PARAMS: Names = ("beta", "original_max_position_embeddings")
"""Keys of Mistral's `llama_4_scaling`."""

MISTRAL_BASES = {"with a window": 10_000.0, "without a window": 1_000_000.0}
"""Base of the rotary frequencies that Mistral's code uses if `params.json` states none, by its `sliding_window`."""
