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
    """Factor `of / per` on looked-up rows or on logits, from numbers of the configuration.

    In place of a key, `"sqrt_dim"` means sqrt(D) and `"1/sqrt_dim"` means D^-0.5, where D is the width of a row.

    Attributes:
        of: Configuration key of the numerator; `None` for 1.
        per: Configuration key of the denominator; `None` for 1.
        default: Factor if one of the keys is missing or null; `None` if such a configuration is a `CheckpointError`.
        only_if: Configuration keys that switch the factor on or off. The first one that is present decides. Empty for a
            factor that always applies.
        otherwise: Whether the factor applies if none of `only_if` is present.
        rounding: Dtype to which the factor is rounded: `"rows"` for that of the rows (Gemma), or `"bfloat16"`. `None`
            for no rounding.
    """

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
    """Learned position embeddings of a family: a table with one row per position.

    Attributes:
        names: Names under which checkpoints store the table; the reader takes the first one that the checkpoint has.
        offset: Number of rows of the table before the row of position 0. `"padding"` means `pad_token_id + 1`.
        ids_include_offset: Whether `position_ids` in transformers are rows of the table, so that the first token has
            the position ID `offset`. Otherwise they count from 0.
    """

    names: Names
    offset: int | Literal["padding"] = 0
    ids_include_offset: bool = False


@dataclass(frozen=True)
class SinusoidalPositions:
    """Fixed sinusoidal positions of a family: a vector holds all sines, then all cosines.

    The vectors are computed, not stored.

    Attributes:
        after_padding: Whether the first token gets the vector of position `pad_token_id + 1` and a padding token a zero
            vector, with the wavelengths of `endpoint` (M2M-100). Otherwise the first token gets the vector of position
            0 and padding is not treated apart (Marian).
        offset: Position whose vector the first token gets, if the family's code has a fixed one (XGLM: 2).
        endpoint: Whether the last pair of channels has exactly the longest wavelength; `None` if `after_padding` says
            so (Pegasus-X: true without padding).
        stored: Names under which a checkpoint may store the vectors. As in transformers, stored ones are read instead
            of computed (FSMT, Marian, Pegasus).
        cosines_first: Whether a vector holds all cosines, then all sines (MusicGen).
    """

    after_padding: bool = True
    offset: int | None = None
    endpoint: bool | None = None
    stored: Names = ()
    cosines_first: bool = False


@dataclass(frozen=True)
class AlibiPositions:
    """Linear attention biases (ALiBi) of a family, which are computed from the number of heads.

    `max_bias` of `AlibiBias` is 8; MPT's configuration may state another value as `attn_config.alibi_bias_max`.

    Attributes:
        is_divided: Whether the biases are divided by the square root of a head's width (Falcon).
    """

    is_divided: bool = False


@dataclass(frozen=True)
class RelativePositions:
    """Learned relative attention biases of a family, one number for each head and bucket of distances (T5).

    Attributes:
        names: Names under which checkpoints store the table. `"{}"` in a name stands for the number of a block, if
            every block has its own table (UMT5).
        bidirectional: Whether the table tells keys before and after the query apart (encoders).
    """

    names: Names
    bidirectional: bool = True


@dataclass(frozen=True)
class AxialPositions:
    """Axial learned positions of a family: one table for the rows and one for the columns of a grid (Reformer).

    Attributes:
        names: Names of the tables of rows, `(A, 1, D1)`, and of columns, `(1, B, D2)`.
        plain: Learned positions of a checkpoint without these tables.
    """

    names: tuple[Names, Names]
    plain: LearnedPositions


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
    """Position scheme of a family that a configuration key selects (ESM, Falcon, Zamba 2).

    Attributes:
        key: The configuration key.
        choices: Pairs (value, scheme).
        otherwise: Scheme of a configuration without the key or with another value; `None` for no positions.
            `"refused"`: a configuration without the key has the first value, and other values are refused.
    """

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
    """Name and epsilon of a norm in a checkpoint.

    The two tensors of a LayerNorm are called `weight` and `bias`, or in checkpoints from TensorFlow `gamma` and `beta`.

    Attributes:
        name: End of the module's name in the checkpoint: `"norm"` finds `norm` and `encoder.norm`. Of several names,
            the first one that the checkpoint has is used.
        eps_key: Key of its epsilon in `config.json`; `None` if the family's code has no other epsilon than `eps`.
        eps: Epsilon if that key is missing.
        affine_key: Pair (configuration key, value) for which the norm does not normalise, but only multiplies by
            `weight` and adds `bias` (MobileBERT); `None` for a family without such a key.
        bias: Whether a LayerNorm has a bias: yes or no, or a configuration key that says it and its default.
        kind: `"layer"`: LayerNorm. `"rms"`: RMSNorm, which has a weight only. `"rms_offset"`: RMSNorm that multiplies
            by `1 + weight` (Gemma). `"rms_plain"`, `"layer_plain"`: RMSNorm and LayerNorm without tensors.
    """

    name: str | Names
    eps_key: str | None = "layer_norm_eps"
    eps: float = 1e-12
    affine_key: tuple[str, str] | None = None
    bias: Presence = True
    kind: Literal["layer", "rms", "rms_offset", "rms_plain", "layer_plain"] = "layer"


@dataclass(frozen=True)
class ShiftSpec:
    """Names of two vectors in a checkpoint, with which the step `"norm"` computes `(x + shift) * scale` per channel.

    Attributes:
        shift: Tensor names of the vector that is added.
        scale: Tensor names of the vector that the sum is multiplied with; empty for none.
    """

    shift: Names
    scale: Names = ()


@dataclass(frozen=True)
class LinearSpec:
    """Name of a linear projection in a checkpoint, and whether it has a bias.

    Attributes:
        name: End of the module's name in the checkpoint: `"project_in"` finds `model.decoder.project_in`. Of several
            names, the first one that the checkpoint has is used.
        bias: Whether the projection has a bias vector: yes or no, or a configuration key that says it and its default.
        optional: Whether a checkpoint may have the head without this projection before it (OPT).
    """

    name: str | Names
    bias: Presence = True
    optional: bool = False


@dataclass(frozen=True)
class TrigramSpec:
    """Projection that reads the vectors of the next token, the token and the token before (MobileBERT).

    The configuration key switches the neighbours on; without the key, they are on.
    """

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
    """A table of a family that `load` does not read, beside the token table that it reads.

    Attributes:
        name: End of its tensor's name in the checkpoint.
        use: What the model does with its rows, as a sentence without full stop.
        end: Which initialisation computes the rows of new tokens; `None` if they are not known, so that the vocabulary
            is not edited.
        of_tokens: Whether its rows belong to tokens of the vocabulary.
        is_input: Whether its rows are a part of the input of the first block, so that `load` refuses a checkpoint that
            has it unless the table alone is requested.
    """

    name: str
    use: str
    end: End | None = None
    of_tokens: bool = True
    is_input: bool = False


@dataclass(frozen=True)
class PerLayerSpec:
    """Names of the per-layer inputs of a family: a second table, whose rows have a vector for each block (Gemma 3n, 4).

    Attributes:
        table: End of the table's name in the checkpoint.
        projection: End of the name of the projection of the input embeddings.
        norm: End of the name of the norm after that projection.
        rows: Configuration key of the number of rows of the table, which may be smaller than `vocab_size`.
        width: Configuration key of the width of one block's vector, P; 0 for a model without per-layer inputs.
        missing_row: Row that is looked up for tokens which the table lacks; `None` if it has a row for each token.
        round_scales: Whether the factors on projection and sum are rounded to the dtype of the weights.
    """

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

    The head computes `logits = softcap(logit_scale * norm(activation(dense(hidden))) @ weight.T + bias)`. Most families
    have neither dense layer, activation nor norm.

    Attributes:
        weight: Tensor names of the rows of an untied head.
        bias: Tensor names of the bias, one number per token, `(V,)` or `(1, V)`; empty for a head without a bias.
        has_bias: Whether the head has that bias: yes, or a configuration key that says it and its default. `"stored"`
            if the checkpoint decides, because transformers takes zeros for a bias that is not stored (BART).
        rows: How the rows differ from one row of width D for each row of the table; `None` if they do not.
        dense: Projection before the product with `weight`. A checkpoint without its tensors has no head, unless the
            projection is optional.
        activation: Name of the activation, or the configuration key that states the name, such as `"hidden_act"`.
        norm: LayerNorm before the product with `weight`.
        logit_scale: Factor on the logits; `None` for the factor 1.
        scales_hidden: Whether the model applies that factor to the hidden states, before it calls the head.
        softcap: Configuration key of the cap c of `softcap(x) = c * tanh(x / c)`; `None` for no cap.
        tied: Whether the head is tied to the token table if the configuration has no `tie_word_embeddings`. `"always"`
            ties the head whatever that key says, unless the checkpoint stores other rows for the head (T5). `"never"`
            does not tie it whatever that key says, because the family's code has no tying (Moshi).
    """

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
    """Input embedding of the decoder of an encoder-decoder model, where it differs from that of the encoder.

    Fields that are `None` are those of the encoder. A checkpoint that stores only the decoder (`AutoModelForCausalLM`)
    is read with these fields alone; one that stores only the encoder has no decoder input.

    Attributes:
        table: Names of the decoder's token table. A table that differs from the encoder's is a second one; a checkpoint
            without it, or with equal rows, has one table for both.
        vocab_size: Configuration key of the number of rows of a second table.
        position: Position scheme of the decoder.
        norm: LayerNorm of the step `"norm"`.
        recipe: Steps of the decoder's input embedding.
        is_scaled: Whether the decoder applies the family's scale to its rows (not in Blenderbot Small).
        layers: Configuration keys of the number of blocks, the preferred one first; without them, both stacks have as
            many blocks.
        sub_configs: Configuration keys of the configurations of encoder and decoder, if the two have their own
            (T5Gemma); empty for other models.
    """

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
    """Description of one model family, from which the reader builds the embedding layer of its checkpoints.

    Tensor names are suffixes, as the docstring of this module says.

    Attributes:
        name: Name in reports. Empty for a group of families; their layers have the `model_type` as name.
        model_types: Values of `model_type` in its configurations.
        table: Names of the token table in a checkpoint, the preferred one first. A checkpoint with several of them
            stores the same rows several times. Empty for a model whose IDs are `codes` alone.
        rows: How the rows of the table differ from one stored row for each of `vocab_size` tokens; `None` if they do
            not.
        width: Configuration keys that may state the width of the table; the first one that is present is used.
        aliases: Pairs (key in the configurations of this family, common key of the same meaning) (T5, Meta's LLaMA).
        scale: Factor on looked-up rows; `None` for no factor.
        position: Position scheme; `None` for no positions.
        numbering: How default positions are counted; see `Numbering`.
        recipe: Steps of the input embedding after look-up and scale, in order.
        optional: Triples (step, configuration key, default): the step is left out if the configuration's value, or
            without one the default, is false or 0.
        types: Tensor names of the token types (segments); `"table"` if segments are rows of the token table (GPT-2).
        more_types: Further tables that the step `"types"` adds, by default their row 0: pairs (tensor names, factor).
            A table that the checkpoint lacks is left out.
        norm: Norm of the step `"norm"`, or the vectors that are added and multiplied in its place (Zaya).
        projection: Projection of the step `"project"`; a checkpoint without its tensors has no such step.
        head: LM head, or `None` for a family without one.
        decoder_input: Input embedding of the decoder of an encoder-decoder model; `None` for other models.
        not_computed: Pairs (configuration key, values): the family computes something else for other values of the
            key, which is refused. The first of the values is the default.
        decoder: Name of each tensor in `DecoderLM` -> its name in the checkpoint, for `load_llama`; `{}` stands for the
            number of the block. `None` for a family that `load_llama` does not read.
        defaults: Pairs (configuration key, transformers' default) of keys that published configurations leave out.
        other_tables: Tables that the model has beside the token table, and that are not read.
        per_layer: Per-layer inputs; `None` for a family without them.
        codes: K streams of codes beside the tokens, or in their place; `None` for a model of tokens alone.
        vocab_size: Configuration key of the number of rows of the table.
        notes: Sentences about what transformers computes for this family and the layer does not; shown when a
            checkpoint is loaded.
    """

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
    """How a multimodal model uses the head of its language model, whose record is that of `text_config.model_type`.

    Attributes:
        tied_by: Configuration whose `tie_word_embeddings` decides whether the head is tied: that of the whole model
            (`"model"`) or `text_config` (`"text"`), or a true one of either (`"either"`). `"none"`: the code never
            ties it.
        tied: Whether the head is tied if that key is missing in the configuration of the whole model. `"text"`: it is
            if `text_config` says so.
        scales_logits: Whether the model applies the factor and the cap that the language model alone applies to its
            logits. If not, and the language model has one, its logits differ from those of the whole model.
        table: Names of the token table, the preferred one first, if the multimodal model looks tokens up by itself and
            not by its language model's table. Empty for the names in the record of the language model.
        part: Configuration key of the language model's configuration.
        flat: `model_type` of the language model if older configurations have its keys beside those of the whole model,
            without `text_config`; `None` if there are no such configurations.
    """

    tied_by: Literal["model", "text", "either", "none"] = "model"
    tied: bool | Literal["text"] = False
    scales_logits: bool = False
    table: Names = ()
    part: str = "text_config"
    flat: str | None = None
