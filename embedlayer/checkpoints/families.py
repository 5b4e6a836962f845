"""The layouts of model families, as data: which tensors are the two ends of a model, and what happens to them.

Names are suffixes: `"wte.weight"` finds `transformer.wte.weight` and `wte.weight`. Where several are given, the first
that the checkpoint has is read. What the words mean is defined in `loader.py`; a new family is one more entry here.
"""

from dataclasses import dataclass
from typing import Literal

Names = tuple[str, ...]

Step = Literal["types", "project", "position", "norm"]
"""A step on the way in, after look-up and scale: add token types, project, add positions, normalise."""

Numbering = Literal["all", "mask", "ids"]
"""How positions are counted where none are given: every place from 0; text only, as the attention mask says; or text
only, as the IDs that are not padding say. Padding then stands at -1, one row before the first."""

ScaleRule = Literal["sqrt_dim", "sqrt_dim_rounded", "sqrt_dim_if_scale_embedding", "embedding_multiplier"]
"""Factor on looked-up rows: sqrt(D); the same in the type of the rows; sqrt(D) if the configuration's `scale_embedding`
says so; or the configuration's `embedding_multiplier`."""

LogitScaleRule = Literal["logit_scale", "1/logits_scaling", "sqrt_dim_if_tied"]
"""Factor on the logits: one of two configuration keys, or D^-0.5 unless `scale_decoder_outputs` or, where that is
missing, `tie_word_embeddings` is false (T5)."""


@dataclass(frozen=True)
class Learned:
    """One trained row per position. `offset`: rows before position 0, or `"padding"` for the padding ID and one."""

    names: Names
    offset: int | Literal["padding"] = 0


@dataclass(frozen=True)
class Sinusoids:
    """Sines in the one half and cosines in the other, from row padding ID + 1 on; padding adds nothing."""


@dataclass(frozen=True)
class Rotary:
    """Rotary positions as `RotaryEmbedding.from_config` reads them; `base` for configurations that name none."""

    base: float = 10000.0


@dataclass(frozen=True)
class Alibi:
    """Linear biases; in MPT `attn_config` holds `alibi_bias_max`."""


@dataclass(frozen=True)
class FalconPositions:
    """Rotary, or where the configuration says `alibi`, linear biases that are divided by the root of a head's width."""

    base: float = 10000.0


@dataclass(frozen=True)
class Relative:
    """T5's buckets: one tensor for the encoder's both directions, one for the decoder's past."""

    encoder: Names
    decoder: Names


PositionRule = Learned | Sinusoids | Rotary | Alibi | FalconPositions | Relative | None


@dataclass(frozen=True)
class Norm:
    """A LayerNorm, with the configuration key of its epsilon and the number to take where that is missing."""

    weight: Names
    bias: Names
    eps_key: str
    eps: float


@dataclass(frozen=True)
class Linear:
    """A projection; without `bias` it has none."""

    weight: Names
    bias: Names = ()


@dataclass(frozen=True)
class Head:
    """The way out: `logits = finish(norm(activation(dense(hidden))) @ rows.T)`; most have nothing before the product.

    Attributes:
        weight: Its rows, where they are not the table's.
        bias: A number for each token.
        dense: A projection before the product; a checkpoint without it has no head.
        dense_optional: Whether a checkpoint without `dense` has a head all the same (OPT).
        activation: Its name, or `"hidden_act"` for what that configuration key says.
        norm: A LayerNorm before the product.
        logit_scale: Factor on the products.
        softcap: Configuration key of the cap on logits.
        tied: Whether a configuration without `tie_word_embeddings` means tied; `"always"` whatever it says (T5).
    """

    weight: Names = ("lm_head.weight",)
    bias: Names = ()
    dense: Linear | None = None
    dense_optional: bool = False
    activation: str | None = None
    norm: Norm | None = None
    logit_scale: LogitScaleRule | None = None
    softcap: str | None = None
    tied: bool | Literal["always"] = False


@dataclass(frozen=True)
class Family:
    """One layout.

    Attributes:
        name: What reports call it.
        model_types: `model_type` of the configurations that have it.
        table: The table's tensor; further names are the same rows under another name.
        width: Configuration keys of the table's width.
        scale: Factor on looked-up rows.
        position: The scheme.
        numbering: How positions are counted where none are given.
        recipe: Steps of the way in.
        types: Table of token types; `"table"` if they are rows of the token table (GPT-2).
        norm: LayerNorm of the step `"norm"`.
        projection: Of the step `"project"`; left out where the checkpoint has none.
        head: The way out, or `None` for a family without one.
        defaults: Keys that published configurations leave out, and what transformers then takes.
        tokenizer_rules: Whether transformers opens every folder of this family with the family's own tokenizer class,
            which cuts text by its own rules whatever `tokenizer.json` says.
    """

    name: str
    model_types: Names
    table: Names
    width: Names = ("hidden_size", "n_embd", "d_model")
    scale: ScaleRule | None = None
    position: PositionRule = None
    numbering: Numbering = "all"
    recipe: tuple[Step, ...] = ()
    types: Names | Literal["table"] = ()
    norm: Norm | None = None
    projection: Linear | None = None
    head: Head | None = Head()
    defaults: tuple[tuple[str, int | float], ...] = ()
    tokenizer_rules: bool = False


def _layer_norm(name: str, eps_key: str, eps: float) -> Norm:
    """A LayerNorm by its module's name; files from TensorFlow say gamma and beta."""
    return Norm((f"{name}.weight", f"{name}.gamma"), (f"{name}.bias", f"{name}.beta"), eps_key, eps)


def _linear(name: str) -> Linear:
    return Linear((f"{name}.weight",), (f"{name}.bias",))


def _masked(at: str, dense: str, norm: str, activation: str = "hidden_act") -> Head:
    """The head of a masked language model: the module `at` after a dense layer, an activation and a norm."""
    return Head(
        weight=(f"{at}.decoder.weight",),
        bias=(f"{at}.bias", f"{at}.decoder.bias"),
        dense=_linear(dense),
        activation=activation,
        norm=_layer_norm(norm, "layer_norm_eps", 1e-12),
        tied=True,
    )


def _bert(name: str, types: Names, **changes: object) -> Family:
    """Word, type and position rows, added and normalised."""
    common: dict[str, object] = {
        "table": ("embeddings.word_embeddings.weight",),
        "position": Learned(("embeddings.position_embeddings.weight",)),
        "recipe": ("types", "position", "norm"),
        "types": ("embeddings.token_type_embeddings.weight",),
        "norm": _layer_norm("embeddings.LayerNorm", "layer_norm_eps", 1e-12),
    }
    return Family(name, types, **{**common, **changes})  # type: ignore[arg-type]


def _llama(name: str, *types: str, **changes: object) -> Family:
    """Rows as they are, rotary positions, a head without a bias."""
    common: dict[str, object] = {"table": ("embed_tokens.weight",), "position": Rotary()}
    return Family(name, types or (name,), **{**common, **changes})  # type: ignore[arg-type]


FAMILIES: tuple[Family, ...] = (
    Family(
        "gpt2",
        ("gpt2",),
        table=("wte.weight",),
        position=Learned(("wpe.weight",)),
        recipe=("position", "types"),
        types="table",
        head=Head(tied=True),
    ),
    _bert(
        "bert",
        ("bert",),
        head=_masked("predictions", "predictions.transform.dense", "predictions.transform.LayerNorm"),
    ),
    _bert(
        "roberta",
        ("roberta", "xlm-roberta"),
        position=Learned(("embeddings.position_embeddings.weight",), offset="padding"),
        numbering="ids",
        head=_masked("lm_head", "lm_head.dense", "lm_head.layer_norm", "gelu"),
    ),
    _bert(
        "albert",
        ("albert",),
        width=("embedding_size",),
        recipe=("types", "position", "norm", "project"),
        projection=_linear("embedding_hidden_mapping_in"),
        head=_masked("predictions", "predictions.dense", "predictions.LayerNorm"),
    ),
    Family(
        "opt",
        ("opt",),
        table=("decoder.embed_tokens.weight", "embed_tokens.weight"),
        width=("word_embed_proj_dim", "hidden_size"),
        position=Learned(("embed_positions.weight",), offset=2),
        numbering="mask",
        recipe=("project", "position"),
        projection=Linear(("project_in.weight",)),
        head=Head(dense=Linear(("project_out.weight",)), dense_optional=True, tied=True),
    ),
    Family(
        "bloom",
        ("bloom",),
        table=("word_embeddings.weight",),
        position=Alibi(),
        recipe=("norm",),
        norm=_layer_norm("word_embeddings_layernorm", "layer_norm_epsilon", 1e-5),
        head=Head(tied=True),
    ),
    Family("mpt", ("mpt",), table=("wte.weight",), position=Alibi(), head=Head(tied=True)),
    Family(
        "t5",
        ("t5",),
        table=("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        position=Relative(
            encoder=("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
            decoder=("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
        ),
        head=Head(logit_scale="sqrt_dim_if_tied", tied="always"),
    ),
    Family(
        "m2m_100",
        ("m2m_100",),
        table=("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        scale="sqrt_dim_if_scale_embedding",
        position=Sinusoids(),
        numbering="ids",
        recipe=("position",),
        head=Head(tied=True),
    ),
    _llama("llama"),
    _llama("mistral"),
    _llama("qwen2", tokenizer_rules=True),
    _llama("qwen3"),
    _llama("gemma", scale="sqrt_dim_rounded", head=Head(tied=True)),
    _llama("gemma2", scale="sqrt_dim_rounded", head=Head(softcap="final_logit_softcapping", tied=True)),
    _llama(
        "gemma3",
        "gemma3",
        "gemma3_text",
        scale="sqrt_dim_rounded",
        head=Head(softcap="final_logit_softcapping", tied=True),
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
        position=Rotary(),
        head=Head(("embed_out.weight", "lm_head.weight")),
    ),
    Family(
        "gptj",
        ("gptj",),
        ("wte.weight",),
        position=Rotary(),
        recipe=("types",),
        types="table",
        head=Head(bias=("lm_head.bias",)),
    ),
    _llama("phi", head=Head(bias=("lm_head.bias",))),
    _llama("phi3"),
    Family("falcon", ("falcon",), ("word_embeddings.weight",), position=FalconPositions(), head=Head(tied=True)),
    _llama("cohere", position=Rotary(500_000.0), head=Head(logit_scale="logit_scale", tied=True)),
    _llama("granite", scale="embedding_multiplier", head=Head(logit_scale="1/logits_scaling")),
    Family("model2vec", ("model2vec",), ("embeddings",), head=None),
    Family("static_embedding", ("StaticEmbedding",), ("embedding.weight", "embeddings"), head=None),
)
"""The families that are known; the last two are tables alone."""

TABLE_NAMES: Names = tuple(
    f"{name}.weight"
    for name in (
        "embed_tokens",
        "word_embeddings",
        "shared",
        "token_embedding",
        "token_embeddings",
        "wte",
        "tok_embeddings",
        "embed_in",
        "embeddings",
        "embedding",
        "tok_emb",
    )
)
"""Where to look for the table of a family that is not known: in transformers, from the commonest name on."""

HEAD_NAMES: Names = ("lm_head.weight", "embed_out.weight", "output.weight", "proj_out.weight")
"""Where to look for its head."""


def family_of(model_type: object) -> Family | None:
    """The family whose configurations say `model_type`, or `None`."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
