"""The fields of a family's record: tensor names, scale, norms, projections, head, positions, configuration keys.

Tensor names are suffixes: `"wte.weight"` finds `transformer.wte.weight` and `wte.weight`. Where a field holds several
names, the reader takes the first one that the checkpoint has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from embedlayer.families.field_types import End, Names, Numbering, Presence, Step

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
    """Factor `of / per` on looked-up rows or on logits, from numbers of the configuration.

    In place of a key, `"sqrt_dim"` is sqrt(D) and `"1/sqrt_dim"` is D^-0.5, where D is the width of a row.
    """

    of: str | None = None  # configuration key of the numerator; `None` for 1
    per: str | None = None  # configuration key of the denominator; `None` for 1
    default: float | None = None  # if a key is missing or null; `None`: an error
    only_if: Names = ()  # keys that switch the factor on or off; the first present one decides
    otherwise: bool = False  # whether it applies if none of `only_if` is present
    rounding: Literal["rows", "bfloat16"] | None = None  # to the dtype of the rows (Gemma), or to bfloat16


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
    offset: int | Literal["padding"] = 0  # rows before that of position 0; "padding": `pad_token_id + 1`
    # whether `position_ids` in transformers are rows of the table, so that the first token has `offset`, not 0
    ids_include_offset: bool = False


@dataclass(frozen=True)
class SinusoidalPositions:
    """Fixed sinusoidal positions of a family, which are computed: a vector holds all sines, then all cosines."""

    # the first token has position `pad_token_id + 1`, and padding a zero vector (M2M-100); else the first token has
    # position 0, and padding is not treated separately (Marian)
    after_padding: bool = True
    offset: int | None = None  # position of the first token, if the code has a fixed one (XGLM: 2)
    # whether the last pair has exactly the longest wavelength; `None`: as `after_padding` (Pegasus-X: true without it)
    endpoint: bool | None = None
    stored: Names = ()  # names of stored vectors, which are read instead, as in transformers (FSMT, Marian, Pegasus)
    cosines_first: bool = False  # all cosines, then all sines (MusicGen)


@dataclass(frozen=True)
class AlibiPositions:
    """Linear attention biases (ALiBi) of a family, which are computed from the number of heads.

    `max_bias` of `AlibiBias` is 8; MPT's configuration may state another value as `attn_config.alibi_bias_max`.
    """

    is_divided: bool = False  # by the square root of a head's width (Falcon)


@dataclass(frozen=True)
class RelativePositions:
    """Learned relative attention biases of a family, one number for each head and bucket of distances (T5)."""

    names: Names  # "{}" is the number of a block, if each has its own table (UMT5)
    bidirectional: bool = True  # whether keys before and after the query differ (encoders)


@dataclass(frozen=True)
class AxialPositions:
    """Axial learned positions of a family: one table for the rows and one for the columns of a grid (Reformer)."""

    names: tuple[Names, Names]  # of rows `(A, 1, D1)` and of columns `(1, B, D2)`
    plain: LearnedPositions  # of a checkpoint without these tables


@dataclass(frozen=True)
class BiasedPositions:
    """Positions that are added to the input, and a bias that all blocks apply in attention (MPNet).

    The loaded layer has the bias as `position_of("attention")`.
    """

    added: LearnedPositions
    bias: RelativePositions


@dataclass(frozen=True)
class StreamPositions:
    """Positions of a decoder whose step `"streams"` appends the vectors of the streams that predict later tokens.

    The step adds the vector of the following position to a row of the table of streams (ProphetNet).
    """

    added: LearnedPositions
    streams: Names


@dataclass(frozen=True)
class PositionChoice:
    """Position scheme of a family that a configuration key selects (ESM, Falcon, Zamba 2)."""

    key: str
    # pairs (value, scheme)
    choices: tuple[tuple[str | bool, LearnedPositions | AlibiPositions | Literal["rotary"]], ...]
    # without the key or with another value; `None`: no positions; "refused": the first choice without the key, and an
    # error for another value
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
    """Name and epsilon of a norm in a checkpoint.

    The two tensors of a LayerNorm are called `weight` and `bias`, or in checkpoints from TensorFlow `gamma` and `beta`.
    """

    name: str | Names  # end of the module's name: "norm" finds `norm` and `encoder.norm`
    eps_key: str | None = "layer_norm_eps"  # `None`: the code has no other epsilon than `eps`
    eps: float = 1e-12
    affine_key: tuple[str, str] | None = None  # (key, value) for which it only multiplies and adds (MobileBERT)
    bias: Presence = True
    # rms: no bias; rms_offset: times `1 + weight` (Gemma); rms_plain, layer_plain: no tensors
    kind: Literal["layer", "rms", "rms_offset", "rms_plain", "layer_plain"] = "layer"


@dataclass(frozen=True)
class ShiftSpec:
    """Names of two vectors in a checkpoint, with which the step `"norm"` computes `(x + shift) * scale` per channel."""

    shift: Names
    scale: Names = ()


@dataclass(frozen=True)
class LinearSpec:
    """Name of a linear projection in a checkpoint, and whether it has a bias."""

    name: str | Names  # end of the module's name
    bias: Presence = True
    optional: bool = False  # whether a head may lack this projection (OPT)


@dataclass(frozen=True)
class TrigramSpec:
    """Projection that reads the vectors of the next token, the token and the token before (MobileBERT)."""

    linear: LinearSpec
    key: str  # switches the neighbours on, as does its absence


@dataclass(frozen=True)
class FeatureSpec:
    """Projection of each vector with row 0 of further tables appended (RoCBert); a missing table is left out."""

    linear: LinearSpec
    tables: tuple[Names, ...]


@dataclass(frozen=True)
class FoldedRows:
    """Names of the tensors of a token table `rows[mapping] * weights`; a checkpoint may lack them (model2vec)."""

    mapping: str = "mapping"
    weights: str = "weights"


@dataclass(frozen=True)
class OtherTable:
    """A table of a family that `load` does not read, beside the token table that it reads."""

    name: str
    use: str  # what the model does with its rows, as a sentence without full stop
    end: End | None = None  # `None`: values of new tokens are not known, so the vocabulary is not edited
    of_tokens: bool = True
    is_input: bool = False  # whether it is a part of the first block's input, so that `load` refuses the checkpoint


@dataclass(frozen=True)
class PerLayerSpec:
    """Names of the per-layer inputs of a family: a second table whose rows have a vector for each block."""

    table: str = "embed_tokens_per_layer.weight"
    projection: str = "per_layer_model_projection.weight"
    norm: str = "per_layer_projection_norm.weight"
    rows: str = "vocab_size_per_layer_input"  # key of the number of rows, which may be below `vocab_size`
    width: str = "hidden_size_per_layer_input"  # key of the width of a block's vector, P; 0 for none
    missing_row: int | None = None  # row of tokens that the table lacks
    round_scales: bool = False  # whether factors are rounded to the dtype of the weights

    @property
    def names(self) -> Names:
        """Return the ends of the names of all tensors."""
        return self.table, self.projection, self.norm


@dataclass(frozen=True)
class AddedColumns:
    """Tensor names of columns, stored as `(columns, V)`, that follow those of the token table (MobileBERT).

    Such a head is loaded as an untied one.
    """

    names: Names


@dataclass(frozen=True)
class CountedRows:
    """Configuration key of the number of rows of a head; without a value, all stored rows count.

    Stored rows beyond it have no logits (Inkling), or there are none (Apertus 1.5).
    """

    key: str


@dataclass(frozen=True)
class WideRows:
    """Number of hidden vectors of width D that a head reads one after another for each token (Reformer)."""

    hidden: int


@dataclass(frozen=True)
class HeadSpec:
    """Describe the LM head of a family: the names of its tensors, and the steps that it computes.

    `logits = softcap(logit_scale * norm(activation(dense(hidden))) @ weight.T + bias)`. Most families have no dense
    layer, activation and norm.
    """

    weight: Names = ("lm_head.weight",)  # rows of an untied head
    bias: Names = ()  # `(V,)` or `(1, V)`
    # "stored": the checkpoint decides, because transformers takes zeros for a bias that is not stored (BART)
    has_bias: Presence | Literal["stored"] = True
    rows: AddedColumns | CountedRows | WideRows | None = None  # how they differ from one row of width D a token
    dense: LinearSpec | None = None  # without its tensors there is no head, unless it is optional
    activation: str | None = None  # a name, or its key, such as "hidden_act"
    norm: NormSpec | None = None
    logit_scale: Factor | None = None
    scales_hidden: bool = False  # whether the model applies that factor to the hidden states, before the head
    softcap: str | None = None  # key of c in `softcap(x) = c * tanh(x / c)`
    # whether the head is tied if the configuration has no `tie_word_embeddings`. "always": tied whatever that key says,
    # unless the checkpoint stores other rows (T5). "never": not tied whatever it says, as the code has no tying (Moshi)
    tied: bool | Literal["always", "never"] = False

    @property
    def columns(self) -> Names:
        """Return the tensor names of columns that are added to the rows; empty for a head without them."""
        return self.rows.names if isinstance(self.rows, AddedColumns) else ()


@dataclass(frozen=True)
class DecoderSpec:
    """Input embedding of the decoder of an encoder-decoder model, where it differs from that of the encoder.

    A checkpoint that stores only the decoder (`AutoModelForCausalLM`) is read with these fields alone.
    """

    # a second table if it differs from the encoder's; without it, or with equal rows, there is one table for both
    table: Names = ("decoder.embed_tokens.weight",)
    vocab_size: str = "vocab_size"  # key of the rows of a second table
    position: PositionSpec | None = None  # `None` here and below: the encoder's
    norm: NormSpec | None = None
    recipe: tuple[Step, ...] | None = None
    is_scaled: bool = True  # whether the family's scale applies to it (not in Blenderbot Small)
    layers: Names = ("num_decoder_layers", "decoder_layers")  # keys of the number of blocks, else that of the encoder
    sub_configs: Names = ()  # keys of the configurations of both stacks (T5Gemma)


# Streams of codes

Layout = Literal["joined", "stacked", "transposed"]
"""How the rows of K streams are stored in one tensor: `(sum(V_k), D)`; `(K, V, D)` (Moshi); or `(K, D, V)` (CSM)."""


def numbered(names: Names, number: int) -> Names:
    """Return tensor names with the number of a stream or head in the place of `"{}"`."""
    return tuple(name.format(number) for name in names)


@dataclass(frozen=True)
class CodeHeadSpec:
    """Heads of K streams of codes: one matrix of rows for each stream that they predict, without a bias."""

    weight: Names  # with "{}", one tensor for each head; else one of all, see `layout`
    first: int = 0  # first stream that is predicted (1 in some depth decoders, and in Bark)
    only: bool = False  # no other stream than `first` (CSM's backbone, Kyutai)
    layout: Layout = "joined"
    tied: str | None = None  # key that ties the rows to those of the input


@dataclass(frozen=True)
class CodeSpec:
    """K streams of codes, such as those of a sound codec: their rows, whose sum is an input, and their heads."""

    table: Names  # with "{}", one tensor for each stream; else one of all, stream after stream
    size: Names  # keys of the number of codes of a stream, V_k
    count: str = "num_codebooks"  # key of the number of streams, or of those of a side
    sides: int = 1  # of a dialogue (Moshi: 2)
    more_rows: int = 0  # rows of a stream beyond its codes (MusicGen: padding)
    text_size: str | None = None  # key of the size of a stream of text before the others
    shared_padding: str | None = None  # key of a row behind all streams, which is an ID of each
    # the sum alone is the input, added to that of text, or in the place of `placeholders`
    use: Literal["alone", "added", "placed"] = "alone"
    placeholders: Names = ()  # keys of these tokens
    head: CodeHeadSpec | None = None
    depth_head: CodeHeadSpec | None = None  # heads of a depth decoder, one for each stream
    # "steps": stream k by k; "first": all but the first of each side by one; or the key of a list
    delays: str | None = None  # how many steps later each stream is written

    def streams_of(self, head: CodeHeadSpec, num_streams: int) -> range:
        """Return the streams that a head predicts, of so many, that of text included."""
        if head.only:
            return range(head.first, head.first + 1)
        text = int(self.text_size is not None)
        return range(text + head.first, text + (num_streams - text) // self.sides)


# Families


@dataclass(frozen=True)
class Family:
    """Description of one model family, from which the reader builds the embedding layer of its checkpoints."""

    name: str  # in reports; empty for a group, whose layers have the `model_type`
    model_types: Names
    table: Names  # several in one checkpoint store the same rows; empty for `codes` alone
    rows: FoldedRows | None = None  # how they differ from one stored row for each token
    extra_rows: int = 0  # rows of the table beyond `vocab_size`, to which the head has no rows (Moshi, mllama)
    width: Names = CONFIG_KEYS["hidden_size"]  # keys of the width; the first present one is used
    aliases: tuple[tuple[str, str], ...] = ()  # (key of this family, common key of the same meaning)
    scale: Factor | None = None
    position: PositionSpec | None = None
    numbering: Numbering = "all"
    recipe: tuple[Step, ...] = ()  # steps after look-up and scale, in order
    optional: tuple[tuple[Step, str, bool | int], ...] = ()  # (step, key, default): left out if the value is false or 0
    types: Names | Literal["table"] = ()  # tensor names of segments; "table": rows of the token table (GPT-2)
    more_types: tuple[tuple[Names, float], ...] = ()  # (tensor names, factor): more tables, by default their row 0
    norm: NormSpec | ShiftSpec | None = None  # of the step `norm`
    # of the step `project`, which a checkpoint without its tensors lacks
    projection: LinearSpec | TrigramSpec | FeatureSpec | None = None
    head: HeadSpec | None = HeadSpec()
    decoder_input: DecoderSpec | None = None
    # (key, values): another value is refused; the first is the default
    not_computed: tuple[tuple[str, tuple[object, ...]], ...] = ()
    # tensor of `DecoderLM` -> its name here, for `load_llama`; `{}` is the block
    decoder: Mapping[str, str] | None = None
    # (key, transformers' default) of keys that configurations leave out
    defaults: tuple[tuple[str, int | float | str], ...] = ()
    other_tables: tuple[OtherTable, ...] = ()  # tables that are not read
    per_layer: PerLayerSpec | None = None
    codes: CodeSpec | None = None  # K streams of codes beside the tokens, or in their place
    vocab_size: str = "vocab_size"  # key of the number of rows
    notes: Names = ()  # what transformers computes and the layer does not; shown when it is loaded

    def like(self, name: str, *model_types: str, **changes: Any) -> "Family":
        """Return another family, which differs from this one in the fields of `changes`.

        `name` is that in reports, and the only model type if none follows.
        """
        return replace(self, name=name, model_types=model_types or (name,), **changes)

    @property
    def sub_configs(self) -> Names:
        """Return the configuration keys of the configurations of encoder and decoder, if the two have their own."""
        return () if self.decoder_input is None else self.decoder_input.sub_configs


@dataclass(frozen=True)
class MultimodalSpec:
    """How a multimodal model uses the head of its language model, whose record is that of `text_config.model_type`."""

    # the configuration whose `tie_word_embeddings` decides; either: if one of both is true; none: the code never ties
    tied_by: Literal["model", "text", "either", "none"] = "model"
    tied: bool | Literal["text"] = False  # without that key; "text": as `text_config` says
    # whether it applies the factor and the cap that the language model alone applies: if not, its logits differ
    scales_logits: bool = False
    table: Names = ()  # names of the token table, if it looks tokens up by itself and not by its language model's
    part: str = "text_config"  # key of the language model's configuration
    flat: str | None = None  # `model_type` of the language model in older configurations without `text_config`
