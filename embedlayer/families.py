"""One record per model family: tensor names, scale, norms, projections, head, positions, and configuration keys.

This module is data: `embedlayer.checkpoints.loader` and `embedlayer.positions.rotary_config` build modules from it. No
other module of the package names a `model_type`. To add a family, add one `Family` to `FAMILIES`.

Tensor names are suffixes: `"wte.weight"` finds `transformer.wte.weight` and `wte.weight`. Where a field holds several
names, the loader reads the first one that the checkpoint has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Names = tuple[str, ...]

Step = Literal["types", "project", "position", "norm"]
"""A step of the input embedding after look-up and scale: add token types, project, add positions, normalise."""

Numbering = Literal["all", "mask", "ids"]
"""How default positions are counted.

- `"all"`: every token, from 0.
- `"mask"`: only tokens that the attention mask keeps; padding has position -1.
- `"ids"`: only tokens other than the padding ID; padding has position -1.
"""

ScaleRule = Literal["sqrt_dim", "sqrt_dim_rounded", "sqrt_dim_if_scale_embedding", "embedding_multiplier"]
"""Factor on looked-up rows of width D.

- `"sqrt_dim"`: sqrt(D).
- `"sqrt_dim_rounded"`: sqrt(D), rounded to the dtype of the rows (Gemma).
- `"sqrt_dim_if_scale_embedding"`: sqrt(D) if the configuration's `scale_embedding` is true, else none.
- `"embedding_multiplier"`: the configuration's `embedding_multiplier`.
"""

LogitScaleRule = Literal["logit_scale", "1/logits_scaling", "sqrt_dim_if_tied"]
"""Factor on the logits.

- `"logit_scale"`: the configuration's `logit_scale`.
- `"1/logits_scaling"`: one divided by the configuration's `logits_scaling`.
- `"sqrt_dim_if_tied"`: D^-0.5, unless `scale_decoder_outputs` is false. Where that key is missing,
  `tie_word_embeddings` decides (T5).
"""

CONFIG_KEYS: Mapping[str, Names] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers"),
}
"""Names under which the configurations of all families store a size, most common name first."""

SCALE_ATTRIBUTES: Names = ("scalar_embed_scale", "embed_scale")
"""Attributes of transformers' scaled embeddings: the unrounded factor of Gemma, and the factor of all families."""

META_LLAMA = "llama_meta"
"""The `model_type` that `load_llama` uses for Meta's layout, in which no configuration names a family."""

OWN_MODEL_TYPE = "embedlayer"
"""The `model_type` that `DecoderLM.config` shows to tools of transformers."""


@dataclass(frozen=True)
class LearnedPositions:
    """Learned position embeddings of a family: a table with one row per position.

    Attributes:
        names: Names under which checkpoints store the table; the loader reads the first one that the checkpoint has.
        offset: Number of rows of the table before the row of position 0. `"padding"` means `pad_token_id + 1`.
    """

    names: Names
    offset: int | Literal["padding"] = 0


@dataclass(frozen=True)
class SinusoidalPositions:
    """Fixed sinusoidal positions of a family: a vector holds all sines, then all cosines (M2M-100).

    The vectors are computed, not stored. As in transformers, the first token gets the vector of position
    `pad_token_id + 1`, and a padding token gets a zero vector.
    """


@dataclass(frozen=True)
class AlibiPositions:
    """Linear attention biases (ALiBi) of a family, which are computed from the number of heads.

    `max_bias` of `AlibiBias` is 8; MPT's configuration may state another value as `attn_config.alibi_bias_max`.
    """


@dataclass(frozen=True)
class RelativePositions:
    """T5's learned relative attention biases, one number for each head and bucket of distances.

    The encoder and the decoder have one table each. A checkpoint may have only one of the two.

    Attributes:
        encoder: Names under which checkpoints store the encoder's table; it tells keys before and after the query
            apart.
        decoder: Names under which checkpoints store the decoder's table; it is for causal attention.
    """

    encoder: Names
    decoder: Names


@dataclass(frozen=True)
class RotaryPositions:
    """Rotary settings of a family that transformers has in its code and not in `config.json`.

    "The reader" below is `RotaryEmbedding.from_config`.

    Attributes:
        base: Base of the frequencies (theta) that transformers uses if a configuration states none.
        fixed_base: Whether the family's code has no other base than `base`. The reader then accepts a configuration
            without a base. For other families the reader refuses it, unless its caller passes a default.
        interleaved: Whether the channels (2i, 2i + 1) form a rotated pair, not (i, i + half). `rope_interleave` in a
            configuration takes precedence.
        reversed: Whether the family's code rotates by the negative angle; the reader refuses such a family.
        default_share: Share of a head's channels that transformers rotates if a configuration states no share. The
            reader refuses a configuration without a share. `None`: the default is all channels, and the reader uses it.
        former_rope_types: Pairs (old name, present name) of a `rope_type`; the reader understands both.
        scales_full_attention_only: Whether `rope_scaling` applies only to layers of full attention, not to layers of
            sliding attention.
        without_positions: Which layers have no positions. `"listed"`: the configuration states them in `no_rope_layers`
            or `no_rope_layer_interval`. `"full_attention"`: all layers of full attention, in a model that also has
            sliding attention. `None`: none.
        or_alibi: Whether `alibi: true` in a configuration replaces the rotation by linear biases (ALiBi), divided by
            the square root of a head's width (Falcon).
    """

    base: float = 10000.0
    fixed_base: bool = False
    interleaved: bool = False
    reversed: bool = False
    default_share: float | None = None
    former_rope_types: tuple[tuple[str, str], ...] = ()
    scales_full_attention_only: bool = False
    without_positions: Literal["listed", "full_attention"] | None = None
    or_alibi: bool = False


PositionSpec = LearnedPositions | SinusoidalPositions | AlibiPositions | RelativePositions | RotaryPositions


@dataclass(frozen=True)
class NormSpec:
    """Name and epsilon of a LayerNorm in a checkpoint.

    Its two tensors are called `weight` and `bias`, or in checkpoints from TensorFlow `gamma` and `beta`.

    Attributes:
        name: End of the module's name in the checkpoint: `"norm"` finds `norm` and `encoder.norm`.
        eps_key: Key of its epsilon in `config.json`.
        eps: Epsilon if that key is missing.
    """

    name: str
    eps_key: str = "layer_norm_eps"
    eps: float = 1e-12


@dataclass(frozen=True)
class LinearSpec:
    """Name of a linear projection in a checkpoint, and whether it has a bias.

    Attributes:
        name: End of the module's name in the checkpoint: `"project_in"` finds `model.decoder.project_in`.
        bias: Whether the projection has a bias vector.
    """

    name: str
    bias: bool = True


@dataclass(frozen=True)
class HeadSpec:
    """Describe the LM head of a family: the names of its tensors, and the steps that it computes.

    The head computes `logits = softcap(logit_scale * norm(activation(dense(hidden))) @ weight.T + bias)`. Most families
    have neither dense layer, activation nor norm.

    Attributes:
        weight: Tensor names of the rows of an untied head.
        bias: Tensor names of the bias, one number per token; empty for a head without a bias.
        dense: Projection before the product with `weight`. A checkpoint without its tensors has no head, unless
            `dense_optional` is true.
        dense_optional: Whether a checkpoint without the tensors of `dense` has a head without that step (OPT).
        activation: Name of the activation, or `"hidden_act"` to read the name from that configuration key.
        norm: LayerNorm before the product with `weight`.
        logit_scale: Rule for the factor on the logits; `None` for the factor 1.
        softcap: Configuration key of the cap c of `softcap(x) = c * tanh(x / c)`; `None` for no cap.
        tied: Whether the head is tied to the token table if the configuration has no `tie_word_embeddings`. `"always"`
            ties the head whatever that key says, unless the checkpoint stores other rows for the head (T5).
    """

    weight: Names = ("lm_head.weight",)
    bias: Names = ()
    dense: LinearSpec | None = None
    dense_optional: bool = False
    activation: str | None = None
    norm: NormSpec | None = None
    logit_scale: LogitScaleRule | None = None
    softcap: str | None = None
    tied: bool | Literal["always"] = False


@dataclass(frozen=True)
class Family:
    """Description of one model family, from which the loader builds the embedding layer of its checkpoints.

    Tensor names are suffixes, as the docstring of this module says.

    Attributes:
        name: Name in reports.
        model_types: Values of `model_type` in its configurations.
        table: Names of the token table in a checkpoint, the preferred one first. A checkpoint with several of them
            stores the same rows several times. Empty for a family of which only rotary positions are known; `load`
            treats its checkpoints as unknown.
        width: Configuration keys that may state the width of the table; the first one that is present is used.
        aliases: Pairs (key in the configurations of this family, common key of the same meaning) (T5, Meta's LLaMA).
        scale: Rule for the factor on looked-up rows; `None` for no factor.
        position: Position scheme; `None` for no positions.
        numbering: How default positions are counted; see `Numbering`.
        recipe: Steps of the input embedding after look-up and scale, in order.
        types: Tensor names of the token types (segments); `"table"` if segments are rows of the token table (GPT-2).
        norm: LayerNorm of the step `"norm"`.
        projection: Projection of the step `"project"`; a checkpoint without its tensors has no such step.
        head: LM head, or `None` for a family without one.
        decoder: Name of each tensor in `DecoderLM` -> its name in the checkpoint, for `load_llama`; `{}` stands for the
            number of the block. `None` for a family that `load_llama` does not read.
        defaults: Pairs (configuration key, transformers' default) of keys that published configurations leave out.
        tokenizer_rules: Whether transformers opens every folder of this family with the family's own tokenizer class,
            which splits text by its own rules and ignores those of `tokenizer.json`.
        folds_rows: Whether a checkpoint may store the tensors `mapping` and `weights`; the token table is then
            `rows[mapping] * weights` (model2vec).
    """

    name: str
    model_types: Names
    table: Names = ()
    width: Names = CONFIG_KEYS["hidden_size"]
    aliases: tuple[tuple[str, str], ...] = ()
    scale: ScaleRule | None = None
    position: PositionSpec | None = None
    numbering: Numbering = "all"
    recipe: tuple[Step, ...] = ()
    types: Names | Literal["table"] = ()
    norm: NormSpec | None = None
    projection: LinearSpec | None = None
    head: HeadSpec | None = HeadSpec()
    decoder: Mapping[str, str] | None = None
    defaults: tuple[tuple[str, int | float], ...] = ()
    tokenizer_rules: bool = False
    folds_rows: bool = False


_DECODER_TENSORS = {
    "table.weight": ("model.embed_tokens.weight", "tok_embeddings.weight"),
    "blocks.{}.attention_norm.weight": ("input_layernorm.weight", "attention_norm.weight"),
    "blocks.{}.attention.query.weight": ("self_attn.q_proj.weight", "attention.wq.weight"),
    "blocks.{}.attention.key.weight": ("self_attn.k_proj.weight", "attention.wk.weight"),
    "blocks.{}.attention.value.weight": ("self_attn.v_proj.weight", "attention.wv.weight"),
    "blocks.{}.attention.out.weight": ("self_attn.o_proj.weight", "attention.wo.weight"),
    "blocks.{}.mlp_norm.weight": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "blocks.{}.mlp.gate.weight": ("mlp.gate_proj.weight", "feed_forward.w1.weight"),
    "blocks.{}.mlp.up.weight": ("mlp.up_proj.weight", "feed_forward.w3.weight"),
    "blocks.{}.mlp.down.weight": ("mlp.down_proj.weight", "feed_forward.w2.weight"),
    "norm.weight": ("model.norm.weight", "norm.weight"),
    "head.weight": ("lm_head.weight", "output.weight"),
}
"""Tensor names of `DecoderLM`; in transformers' `LlamaForCausalLM` and in Meta's LLaMA, those of blocks in a block."""

HUGGING_FACE_TENSORS: Mapping[str, str] = {
    ours: f"model.layers.{{}}.{theirs}" if "{}" in ours else theirs for ours, (theirs, _) in _DECODER_TENSORS.items()
}
"""Tensor names of `DecoderLM`, and the names in transformers' `LlamaForCausalLM`."""

META_TENSORS: Mapping[str, str] = {
    ours: f"layers.{{}}.{theirs}" if "{}" in ours else theirs for ours, (_, theirs) in _DECODER_TENSORS.items()
}
"""Tensor names of `DecoderLM`, and the names in Meta's LLaMA checkpoints. Their rotary pairs are interleaved."""


def _masked_head(name: str, dense: str, norm: str, activation: str = "hidden_act") -> HeadSpec:
    """Return the spec of a masked LM head (BERT), which is tied to the token table by default.

    Args:
        name: Module that stores the bias of the head, and in some checkpoints its rows.
        dense: Name of the projection, which is followed by the activation.
        norm: Name of the LayerNorm after the activation.
        activation: Name of the activation, or `"hidden_act"` to read the name from that configuration key.
    """
    return HeadSpec(
        weight=(f"{name}.decoder.weight",),
        bias=(f"{name}.bias", f"{name}.decoder.bias"),
        dense=LinearSpec(dense),
        activation=activation,
        norm=NormSpec(norm),
        tied=True,
    )


def _bert(name: str, model_types: Names, **changes: Any) -> Family:
    """Return a family like BERT, which adds up token, type and position embeddings and normalises the sum.

    Args:
        name: Name of the family in reports.
        model_types: Values of `model_type` in its configurations.
        **changes: Fields of `Family` in which the family differs from BERT.
    """
    bert = Family(
        name,
        model_types,
        table=("embeddings.word_embeddings.weight",),
        position=LearnedPositions(("embeddings.position_embeddings.weight",)),
        recipe=("types", "position", "norm"),
        types=("embeddings.token_type_embeddings.weight",),
        norm=NormSpec("embeddings.LayerNorm"),
    )
    return replace(bert, **changes)


def _llama(name: str, *model_types: str, **changes: Any) -> Family:
    """Return a family like LLaMA: unscaled rows, rotary positions, and a head without a bias.

    Args:
        name: Name of the family in reports.
        *model_types: Values of `model_type` in its configurations; none if `name` is the only one.
        **changes: Fields of `Family` in which the family differs from LLaMA.
    """
    llama = Family(name, model_types or (name,), table=("embed_tokens.weight",), position=RotaryPositions())
    return replace(llama, **changes)


def _rotary_only(*model_types: str, **facts: Any) -> Family:
    """Return a family of which only the rotary positions are known; `load` treats its checkpoints as unknown.

    Args:
        *model_types: Values of `model_type`; the first one is also the name of the family.
        **facts: Fields of `RotaryPositions` that differ from their defaults.
    """
    return Family(model_types[0], model_types, position=RotaryPositions(**facts), head=None)


_ENCODER_DECODER_TABLE = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_GEMMA_HEAD = HeadSpec(softcap="final_logit_softcapping", tied=True)

FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt2",
        ("gpt2",),
        table=("wte.weight",),
        position=LearnedPositions(("wpe.weight",)),
        recipe=("position", "types"),
        types="table",
        head=HeadSpec(tied=True),
    ),
    _bert(
        "bert",
        ("bert",),
        head=_masked_head("predictions", "predictions.transform.dense", "predictions.transform.LayerNorm"),
    ),
    _bert(
        "roberta",
        ("roberta", "xlm-roberta"),
        position=LearnedPositions(("embeddings.position_embeddings.weight",), offset="padding"),
        numbering="ids",
        head=_masked_head("lm_head", "lm_head.dense", "lm_head.layer_norm", "gelu"),
    ),
    _bert(
        "albert",
        ("albert",),
        width=("embedding_size",),
        recipe=("types", "position", "norm", "project"),
        projection=LinearSpec("embedding_hidden_mapping_in"),
        head=_masked_head("predictions", "predictions.dense", "predictions.LayerNorm"),
    ),
    Family(
        "opt",
        ("opt",),
        table=("decoder.embed_tokens.weight", "embed_tokens.weight"),
        width=("word_embed_proj_dim", "hidden_size"),
        position=LearnedPositions(("embed_positions.weight",), offset=2),
        numbering="mask",
        recipe=("project", "position"),
        projection=LinearSpec("project_in", bias=False),
        head=HeadSpec(dense=LinearSpec("project_out", bias=False), dense_optional=True, tied=True),
    ),
    Family(
        "bloom",
        ("bloom",),
        table=("word_embeddings.weight",),
        position=AlibiPositions(),
        recipe=("norm",),
        norm=NormSpec("word_embeddings_layernorm", "layer_norm_epsilon", 1e-5),
        head=HeadSpec(tied=True),
    ),
    Family("mpt", ("mpt",), table=("wte.weight",), position=AlibiPositions(), head=HeadSpec(tied=True)),
    Family(
        "t5",
        ("t5",),
        table=_ENCODER_DECODER_TABLE,
        aliases=(("num_heads", "num_attention_heads"), ("num_layers", "num_hidden_layers")),
        position=RelativePositions(
            encoder=("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
            decoder=("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        ),
        head=HeadSpec(logit_scale="sqrt_dim_if_tied", tied="always"),
    ),
    Family(
        "m2m_100",
        ("m2m_100",),
        table=_ENCODER_DECODER_TABLE,
        scale="sqrt_dim_if_scale_embedding",
        position=SinusoidalPositions(),
        numbering="ids",
        recipe=("position",),
        head=HeadSpec(tied=True),
    ),
    _llama("llama", decoder=HUGGING_FACE_TENSORS),
    _llama("mistral", decoder=HUGGING_FACE_TENSORS),
    _llama(
        META_LLAMA,
        table=("tok_embeddings.weight",),
        aliases=(
            ("dim", "hidden_size"),
            ("n_heads", "num_attention_heads"),
            ("n_kv_heads", "num_key_value_heads"),
            ("n_layers", "num_hidden_layers"),
            ("norm_eps", "rms_norm_eps"),
        ),
        position=RotaryPositions(interleaved=True),
        head=HeadSpec(("output.weight",)),
        decoder=META_TENSORS,
    ),
    _llama("qwen2", tokenizer_rules=True),
    _llama("qwen3"),
    _llama("gemma", scale="sqrt_dim_rounded", head=HeadSpec(tied=True)),
    _llama("gemma2", scale="sqrt_dim_rounded", head=_GEMMA_HEAD),
    _llama(
        "gemma3",
        "gemma3",
        "gemma3_text",
        scale="sqrt_dim_rounded",
        position=RotaryPositions(scales_full_attention_only=True),
        head=_GEMMA_HEAD,
        defaults=(
            ("head_dim", 256),
            ("rope_theta", 1_000_000.0),
            ("rope_local_base_freq", 10_000.0),
            ("sliding_window_pattern", 6),
        ),
    ),
    Family(
        "gpt_neox",
        ("gpt_neox",),
        ("embed_in.weight",),
        position=RotaryPositions(default_share=0.25),
        head=HeadSpec(("embed_out.weight", "lm_head.weight")),
    ),
    Family(
        "gptj",
        ("gptj",),
        ("wte.weight",),
        position=RotaryPositions(fixed_base=True, interleaved=True),
        recipe=("types",),
        types="table",
        head=HeadSpec(bias=("lm_head.bias",)),
    ),
    _llama("phi", position=RotaryPositions(default_share=0.5), head=HeadSpec(bias=("lm_head.bias",))),
    _llama("phi3", position=RotaryPositions(former_rope_types=(("yarn", "longrope"),))),
    Family(
        "falcon",
        ("falcon",),
        ("word_embeddings.weight",),
        position=RotaryPositions(or_alibi=True),
        head=HeadSpec(tied=True),
    ),
    _llama(
        "cohere",
        position=RotaryPositions(500_000.0, interleaved=True),
        head=HeadSpec(logit_scale="logit_scale", tied=True),
    ),
    _llama("granite", scale="embedding_multiplier", head=HeadSpec(logit_scale="1/logits_scaling")),
    Family("model2vec", ("model2vec",), ("embeddings",), head=None, folds_rows=True),
    Family("static_embedding", ("StaticEmbedding",), ("embedding.weight", "embeddings"), head=None, folds_rows=True),
    _rotary_only("codegen", fixed_base=True, interleaved=True),
    _rotary_only("cohere2", "cohere2_moe", interleaved=True, without_positions="full_attention"),
    _rotary_only("exaone4", without_positions="full_attention"),
    _rotary_only("llama4", "llama4_text", interleaved=True, without_positions="listed"),
    _rotary_only("smollm3", without_positions="listed"),
    _rotary_only("gemma3n", "gemma3n_text", "t5gemma2", "olmo3", scales_full_attention_only=True),
    _rotary_only("glm", "glm4", interleaved=True, default_share=0.5),
    _rotary_only("ernie4_5", "ernie4_5_moe", "helium", "moonshine_streaming", "blt", interleaved=True),
    _rotary_only("deepseek_v2", "deepseek_v3", "mistral4", "axk1", "youtu", interleaved=True),
    _rotary_only("moonshine", interleaved=True, default_share=0.9),
    _rotary_only("stablelm", "qwen3_next", "qwen3_5", "qwen3_5_moe", default_share=0.25),
    _rotary_only("persimmon", "glm4_moe", "nemotron", "recurrent_gemma", default_share=0.5),
    _rotary_only("nanochat", reversed=True),
)
"""The known families. model2vec and StaticEmbedding are tables without a model; the rotary-only families come last."""

STATIC_EMBEDDING = "StaticEmbedding"
"""The `model_type` that `load` uses for sentence-transformers' StaticEmbedding, which has no configuration."""

UNKNOWN = Family(
    "unknown",
    (),
    tuple(
        f"{name}.weight"
        for name in (
            *("embed_tokens", "word_embeddings", "shared", "token_embedding", "token_embeddings", "wte"),
            *("tok_embeddings", "embed_in", "embeddings", "embedding", "tok_emb"),
        )
    ),
    head=HeadSpec(("lm_head.weight", "embed_out.weight", "output.weight", "proj_out.weight")),
)
"""Names of table and head in checkpoints of unknown families, most common name first."""


def stated_size(config: Mapping[str, object], key: str) -> object:
    """Return the size that a configuration states under one of the names in `CONFIG_KEYS[key]`; `None` if under none.

    The value is returned as the configuration has it, without a check of its type.
    """
    return next((config[name] for name in CONFIG_KEYS[key] if config.get(name) is not None), None)


def family_of(model_type: object) -> Family | None:
    """Return the family that has this `model_type`, or `None` if no family has it."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def rotary_facts(model_type: object) -> RotaryPositions:
    """Return the rotary settings of the family with this `model_type`.

    For an unknown family, or one without rotary positions, this is `RotaryPositions()` with its defaults.
    """
    family = family_of(model_type)
    position = None if family is None else family.position
    return position if isinstance(position, RotaryPositions) else RotaryPositions()
