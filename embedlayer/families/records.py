"""The fields of a family's record: tensor names, scale, norms, projections, head, positions, configuration keys.

Tensor names are suffixes: `"wte.weight"` finds `transformer.wte.weight` and `wte.weight`. Where a field holds several
names, the reader takes the first one that the checkpoint has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from embedlayer.families.field_types import End, Names, Numbering, Presence, Step
from embedlayer.families.stream_records import CodeSpec

CONFIG_KEYS: Mapping[str, Names] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers"),
}
"""Names under which the configurations of all families store a size, most common name first."""

POSITION_KEYS: Names = ("max_position_embeddings", "n_positions")
"""Configuration keys of the number of positions, the preferred one first."""

SCALE_ATTRIBUTES: Names = ("scalar_embed_scale", "embed_scale")
"""Attributes of transformers' scaled embeddings: the unrounded factor of Gemma, and the factor of all families."""

STATE_POSITIONS = (
    "this family's positions are a bias that each block computes from its hidden states, so they are no part of this "
    "layer."
)
"""Note of families whose positions are terms of attention scores that depend on hidden states."""

STATIC_EMBEDDING = "StaticEmbedding"
"""The `model_type` that `load` uses for sentence-transformers' StaticEmbedding, which has no configuration."""

META_LLAMA = "llama_meta"
"""The `model_type` that `load_llama` uses for Meta's layout, in which no configuration names a family."""

OWN_MODEL_TYPE = "embedlayer"
"""The `model_type` that `DecoderLM.config` shows to tools of transformers."""


@dataclass(frozen=True)
class Factor:
    """Factor `of / per` on looked-up rows or on logits, from numbers of the configuration."""

    of: str | None = None
    per: str | None = None
    default: float | None = None
    only_if: Names = ()
    otherwise: bool = False
    rounding: Literal["rows", "bfloat16"] | None = None


SQRT_DIM = Factor("sqrt_dim")
"""Factor sqrt(D)."""

SQRT_DIM_ROUNDED = Factor("sqrt_dim", rounding="rows")
"""Factor sqrt(D), rounded to the dtype of the rows (Gemma)."""

SQRT_DIM_BFLOAT16 = Factor("sqrt_dim", rounding="bfloat16")
"""Factor sqrt(D), rounded to bfloat16 whatever the dtype of the rows is (RecurrentGemma)."""

SQRT_DIM_IF_SCALE_EMBEDDING = Factor("sqrt_dim", only_if=("scale_embedding",))
"""Factor sqrt(D) if `scale_embedding` is true in the configuration."""


@dataclass(frozen=True)
class LearnedPositions:
    """Learned position embeddings of a family: a table with one row per position."""

    names: Names
    offset: int | Literal["padding"] = 0
    ids_include_offset: bool = False


@dataclass(frozen=True)
class SinusoidalPositions:
    """Fixed sinusoidal positions of a family: a vector holds all sines, then all cosines."""

    after_padding: bool = True
    offset: int | None = None
    endpoint: bool | None = None
    stored: Names = ()
    cosines_first: bool = False


@dataclass(frozen=True)
class AlibiPositions:
    """Linear attention biases (ALiBi) of a family, which are computed from the number of heads."""

    is_divided: bool = False


@dataclass(frozen=True)
class RelativePositions:
    """Learned relative attention biases of a family, one number for each head and bucket of distances (T5)."""

    names: Names
    bidirectional: bool = True


@dataclass(frozen=True)
class AxialPositions:
    """Axial learned positions of a family: one table for the rows and one for the columns of a grid (Reformer)."""

    names: tuple[Names, Names]
    plain: LearnedPositions


@dataclass(frozen=True)
class BiasedPositions:
    """Positions that are added to the input, and a bias that all blocks apply in attention (MPNet)."""

    added: LearnedPositions
    bias: RelativePositions


@dataclass(frozen=True)
class StreamPositions:
    """Positions of a decoder whose step `"streams"` appends the vectors of the streams that predict later tokens."""

    added: LearnedPositions
    streams: Names


@dataclass(frozen=True)
class PositionChoice:
    """Position scheme of a family that a configuration key selects (ESM, Falcon, Zamba 2)."""

    key: str
    choices: tuple[tuple[str | bool, LearnedPositions | AlibiPositions | Literal["rotary"]], ...]
    otherwise: Literal["rotary", "refused"] | None = "refused"


PositionSpec = (
    LearnedPositions
    | AxialPositions
    | BiasedPositions
    | StreamPositions
    | PositionChoice
    | SinusoidalPositions
    | AlibiPositions
    | RelativePositions
    | Literal["rotary"]
)
"""Position scheme of a family; `"rotary"` stands for its model type's `RotaryPositions` in `rotary_settings`."""


@dataclass(frozen=True)
class NormSpec:
    """Name and epsilon of a norm in a checkpoint."""

    name: str | Names
    eps_key: str | None = "layer_norm_eps"
    eps: float = 1e-12
    affine_key: tuple[str, str] | None = None
    bias: Presence = True
    kind: Literal["layer", "rms", "rms_offset", "rms_plain", "layer_plain"] = "layer"


@dataclass(frozen=True)
class ShiftSpec:
    """Names of two vectors in a checkpoint, with which the step `"norm"` computes `(x + shift) * scale` per channel."""

    shift: Names
    scale: Names = ()


@dataclass(frozen=True)
class LinearSpec:
    """Name of a linear projection in a checkpoint, and whether it has a bias."""

    name: str | Names
    bias: Presence = True
    optional: bool = False


@dataclass(frozen=True)
class TrigramSpec:
    """Projection that reads the vectors of the next token, the token and the token before (MobileBERT)."""

    linear: LinearSpec
    key: str


@dataclass(frozen=True)
class FeatureSpec:
    """Projection of each vector with row 0 of further tables appended (RoCBert); a missing table is left out."""

    linear: LinearSpec
    tables: tuple[Names, ...]


@dataclass(frozen=True)
class ExtraRows:
    """Number of rows of the token table beyond `vocab_size`, to which the head has no rows (Moshi, mllama)."""

    count: int


@dataclass(frozen=True)
class FoldedRows:
    """Names of the tensors of a token table `rows[mapping] * weights`; a checkpoint may lack them (model2vec)."""

    mapping: str = "mapping"
    weights: str = "weights"


@dataclass(frozen=True)
class OtherTable:
    """A table of a family that `load` does not read, beside the token table that it reads."""

    name: str
    use: str
    end: End | None = None
    of_tokens: bool = True
    is_input: bool = False


@dataclass(frozen=True)
class PerLayerSpec:
    """Names of the per-layer inputs of a family: a second table whose rows have a vector for each block."""

    table: str = "embed_tokens_per_layer.weight"
    projection: str = "per_layer_model_projection.weight"
    norm: str = "per_layer_projection_norm.weight"
    rows: str = "vocab_size_per_layer_input"
    width: str = "hidden_size_per_layer_input"
    missing_row: int | None = None
    round_scales: bool = False

    @property
    def names(self) -> Names:
        """Return the ends of the names of all tensors."""
        return self.table, self.projection, self.norm


@dataclass(frozen=True)
class AddedColumns:
    """Tensor names of columns, stored as `(columns, V)`, that follow those of the token table (MobileBERT)."""

    names: Names


@dataclass(frozen=True)
class CountedRows:
    """Configuration key of the number of rows of a head; without a value, all stored rows count."""

    key: str


@dataclass(frozen=True)
class WideRows:
    """Number of hidden vectors of width D that a head reads one after another for each token (Reformer)."""

    hidden: int


@dataclass(frozen=True)
class HeadSpec:
    """Describe the LM head of a family: the names of its tensors, and the steps that it computes."""

    weight: Names = ("lm_head.weight",)
    bias: Names = ()
    has_bias: Presence | Literal["stored"] = True
    rows: AddedColumns | CountedRows | WideRows | None = None
    dense: LinearSpec | None = None
    activation: str | None = None
    norm: NormSpec | None = None
    logit_scale: Factor | None = None
    scales_hidden: bool = False
    softcap: str | None = None
    tied: bool | Literal["always", "never"] = False

    @property
    def columns(self) -> Names:
        """Return the tensor names of columns that are added to the rows; empty for a head without them."""
        return self.rows.names if isinstance(self.rows, AddedColumns) else ()


@dataclass(frozen=True)
class DecoderSpec:
    """Input embedding of the decoder of an encoder-decoder model, where it differs from that of the encoder."""

    table: Names = ("decoder.embed_tokens.weight",)
    vocab_size: str = "vocab_size"
    position: PositionSpec | None = None
    norm: NormSpec | None = None
    recipe: tuple[Step, ...] | None = None
    is_scaled: bool = True
    layers: Names = ("num_decoder_layers", "decoder_layers")
    sub_configs: Names = ()


@dataclass(frozen=True)
class Family:
    """Description of one model family, from which the reader builds the embedding layer of its checkpoints."""

    name: str
    model_types: Names
    table: Names
    rows: ExtraRows | FoldedRows | None = None
    width: Names = CONFIG_KEYS["hidden_size"]
    aliases: tuple[tuple[str, str], ...] = ()
    scale: Factor | None = None
    position: PositionSpec | None = None
    numbering: Numbering = "all"
    recipe: tuple[Step, ...] = ()
    optional: tuple[tuple[Step, str, bool | int], ...] = ()
    types: Names | Literal["table"] = ()
    more_types: tuple[tuple[Names, float], ...] = ()
    norm: NormSpec | ShiftSpec | None = None
    projection: LinearSpec | TrigramSpec | FeatureSpec | None = None
    head: HeadSpec | None = HeadSpec()
    decoder_input: DecoderSpec | None = None
    not_computed: tuple[tuple[str, tuple[object, ...]], ...] = ()
    decoder: Mapping[str, str] | None = None
    defaults: tuple[tuple[str, int | float | str], ...] = ()
    other_tables: tuple[OtherTable, ...] = ()
    per_layer: PerLayerSpec | None = None
    codes: CodeSpec | None = None
    vocab_size: str = "vocab_size"
    notes: Names = ()

    @property
    def extra_rows(self) -> int:
        """Return the number of rows of the table beyond `vocab_size`, to which the head has no rows."""
        return self.rows.count if isinstance(self.rows, ExtraRows) else 0

    @property
    def sub_configs(self) -> Names:
        """Return the configuration keys of the configurations of encoder and decoder, if the two have their own."""
        return () if self.decoder_input is None else self.decoder_input.sub_configs


@dataclass(frozen=True)
class MultimodalSpec:
    """How a multimodal model uses the head of its language model, whose record is that of `text_config.model_type`."""

    tied_by: Literal["model", "text", "either", "none"] = "model"
    tied: bool | Literal["text"] = False
    scales_logits: bool = False
    table: Names = ()
    part: str = "text_config"
    flat: str | None = None
