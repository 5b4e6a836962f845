"""One record per model family: tensor names, scale, norms, projections, head, positions, and configuration keys.

The records are data: `embedlayer.checkpoints.reading` and `embedlayer.positions.rotary.config` build modules from it.
No other module of `embedlayer` names a `model_type`. `records` defines the fields; `causal`, `masked`,
`encoder_decoder`, `text_encoders` and `streams` have the records. `multimodal` says how multimodal models use the head
of a language model. `rotary_settings` has the rotary settings of each model type; `token_ids` says which entries name
token IDs.

For edits of a vocabulary, `configurations` finds and moves the token IDs in configurations and modules,
`class_defaults` those that a class of transformers adds, and `vocabulary_tensors` the parameters and buffers whose size
follows the vocabulary; `left_out_files` names files that no edit can move, and `edit_report` is the report of all.
"""

from collections.abc import Mapping
from difflib import get_close_matches

from embedlayer.families.causal import CAUSAL_FAMILIES, HUGGING_FACE_TENSORS, META_TENSORS, REFUSED_CAUSAL
from embedlayer.families.encoder_decoder import ENCODER_DECODER_FAMILIES
from embedlayer.families.field_types import Names
from embedlayer.families.gguf import (
    GGUF_ARCHITECTURES,
    GGUF_HEAD,
    GGUF_HEAD_BIAS,
    GGUF_PER_LAYER,
    GGUF_TABLE,
    GGUF_TENSORS,
    GGUF_TOKENIZERS,
    LONG_FACTORS,
    PRE_TOKENIZERS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    gguf_config,
    gguf_family,
)
from embedlayer.families.masked import MASKED_FAMILIES, REFUSED_MASKED
from embedlayer.families.multimodal import MULTIMODAL, REFUSED_MULTIMODAL
from embedlayer.families.records import (
    CONFIG_KEYS,
    META_LLAMA,
    OWN_MODEL_TYPE,
    SCALE_ATTRIBUTES,
    STATIC_EMBEDDING,
    CountedRows,
    Family,
    FoldedRows,
    HeadSpec,
)
from embedlayer.families.rotary_settings import REFUSED_ROTARY, ROTARY, RotaryPositions
from embedlayer.families.streams import REFUSED_STREAMS, STREAM_FAMILIES
from embedlayer.families.text_encoders import REFUSED_TEXT_ENCODERS, TEXT_ENCODER_FAMILIES

__all__ = [
    "BASE_CLASSES",
    "CONFIG_KEYS",
    "FAMILIES",
    "GGUF_ARCHITECTURES",
    "GGUF_HEAD",
    "GGUF_HEAD_BIAS",
    "GGUF_PER_LAYER",
    "GGUF_TABLE",
    "GGUF_TENSORS",
    "GGUF_TOKENIZERS",
    "HEAD_CLASSES",
    "HUGGING_FACE_TENSORS",
    "LONG_FACTORS",
    "META_LLAMA",
    "META_TENSORS",
    "MULTIMODAL",
    "OTHER_WORDS",
    "OWN_MODEL_TYPE",
    "PER_LAYER_ROWS",
    "PRE_TOKENIZERS",
    "REFUSED",
    "REFUSED_ROTARY",
    "ROPE_FACTORS",
    "ROTARY",
    "SCALE_ATTRIBUTES",
    "SHORT_FACTORS",
    "STATIC_EMBEDDING",
    "TABLE_WORDS",
    "TEXT_CONFIGS",
    "TRANSFORMERS_VERSION",
    "UNKNOWN",
    "VOCAB_SIZE_KEYS",
    "Family",
    "RotaryPositions",
    "family_of",
    "gguf_config",
    "gguf_family",
    "is_table_name",
    "nearest_model_types",
    "rotary_facts",
    "stated_size",
]

HEAD_CLASSES = (
    *("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "ForMaskedLM", "ForConditionalGeneration", "MarianMTModel"),
    *("BertGenerationDecoder", "ForTextToText", "ForVisionText2Text", "ForProteinText2Text", "ForBlockDiffusion"),
    *("DoubleHeadsModel", "SeamlessM4TModel", "SeamlessM4Tv2Model"),
)
"""Ends of the names of transformers' model classes that have an LM head."""

BASE_CLASSES = ("Model", "Encoder", "Decoder")
"""Ends of the names of transformers' model classes without an LM head, if they do not end as `HEAD_CLASSES` do."""

TRANSFORMERS_VERSION = "5.24.0"
"""Version of transformers with which the records were compared."""

FAMILIES: tuple[Family, ...] = (
    *CAUSAL_FAMILIES,
    *MASKED_FAMILIES,
    *ENCODER_DECODER_FAMILIES,
    *TEXT_ENCODER_FAMILIES,
    *STREAM_FAMILIES,
    Family("model2vec", ("model2vec",), ("embeddings",), FoldedRows(), head=None),
    Family("static_embedding", ("StaticEmbedding",), ("embedding.weight", "embeddings"), FoldedRows(), head=None),
)
"""The known families. The last two, model2vec and StaticEmbedding, are tables without a model."""

REFUSED: Mapping[str, str] = {
    **REFUSED_CAUSAL,
    **REFUSED_MASKED,
    **REFUSED_MULTIMODAL,
    **REFUSED_STREAMS,
    **REFUSED_TEXT_ENCODERS,
}
"""Model type of a known model that `load` does not read -> the reason."""

PER_LAYER_ROWS: Names = tuple(
    dict.fromkeys(family.per_layer.rows for family in FAMILIES if family.per_layer is not None)
)
"""Configuration keys of the number of rows of a per-layer table, which may be smaller than the number of tokens."""

VOCAB_SIZE_KEYS: Names = tuple(
    dict.fromkeys(
        key
        for family in FAMILIES
        for key in (
            "vocab_size",
            family.vocab_size,
            *(own for own, common in family.aliases if common == "vocab_size"),
            *((family.head.rows.key,) if family.head is not None and isinstance(family.head.rows, CountedRows) else ()),
            *((family.decoder_input.vocab_size,) if family.decoder_input is not None else ()),
            *((family.per_layer.rows,) if family.per_layer is not None else ()),
        )
    )
)
"""Configuration keys of the number of tokens: an edit of the vocabulary changes those that equal it."""

TEXT_CONFIGS: Names = ("text_config", *sorted({key for family in FAMILIES for key in family.sub_configs}))
"""Configuration keys of nested configurations that describe text models with the same vocabulary."""

UNKNOWN = Family(
    "unknown",
    (),
    tuple(
        f"{name}.weight"
        for name in (
            *("embed_tokens", "word_embeddings", "shared", "token_embedding", "token_embeddings", "wte"),
            *("tok_embeddings", "embed_in", "embeddings", "embedding", "tok_emb", "token_embd", "embed"),
        )
    ),
    width=(),
    head=HeadSpec(("lm_head.weight", "embed_out.weight", "output.weight", "proj_out.weight")),
)
"""Names of table and head in checkpoints of unknown families, most common name first."""


TABLE_WORDS: Names = ("embed", "wte", "codebook")
"""Parts of the names of tables that are looked up."""

OTHER_WORDS: Names = (
    *("pos", "type", "norm", "proj", "patch_", "mask", "time", "row_", "column_", "distance", "relative", "rel_"),
    *("query", "queries", "speaker", "label", "class", "level", "not_a_point", "mapping", "transformation"),
    "embed_out",
)
"""Parts of the names of embeddings that have no row for each token or code."""


def is_table_name(name: str) -> bool:
    """Return whether a tensor or module is called like a table of tokens or codes."""
    return any(word in name for word in TABLE_WORDS) and not any(word in name for word in OTHER_WORDS)


def stated_size(config: Mapping[str, object], key: str) -> object:
    """Return the size that a configuration states under a name in `CONFIG_KEYS[key]`, or `None`."""
    return next((config[name] for name in CONFIG_KEYS[key] if config.get(name) is not None), None)


def family_of(model_type: object) -> Family | None:
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def nearest_model_types(model_type: str) -> list[str]:
    """Return the known model types with the most similar spelling, one to three."""
    own = (META_LLAMA, STATIC_EMBEDDING)  # names that no configuration has
    known = [*(name for family in FAMILIES for name in family.model_types if name not in own), *MULTIMODAL]
    starts = sorted((name for name in known if model_type.startswith(name)), key=len, reverse=True)
    alike = get_close_matches(model_type, known) or get_close_matches(model_type, known, 1, cutoff=0.0)
    return list(dict.fromkeys((*starts, *alike)))[:3]


def rotary_facts(model_type: object) -> RotaryPositions | None:
    """Return the rotary settings of this `model_type`; `None` for a type that is not known to rotate."""
    return ROTARY.get(model_type) if isinstance(model_type, str) else None
