"""Kind identifiers: the names by which saved files refer to classes.

A `config.json` names each class by a stable identifier such as `"token_embedding"`, never by its Python name, so a
class can be renamed or moved without breaking a file. `KINDS` is the whole table. It holds strings only, so reading it
imports nothing.

A class that is not in the table, such as a user's own position scheme, is written as `"module:Class"`. Reading such a
file imports no module: the module must have been imported before. So a file cannot run code that the program does not
already use.
"""

import sys
from importlib import import_module

from embedlayer.core.errors import CheckpointError

KINDS: dict[str, str] = {
    "token_embedding": "embedlayer.tables.dense:TokenEmbedding",
    "row_sparse_embedding": "embedlayer.tables.row_sparse:RowSparseEmbedding",
    "factorized_embedding": "embedlayer.tables.factorized:FactorizedEmbedding",
    "quantized_embedding": "embedlayer.tables.quantized:QuantizedEmbedding",
    "gguf_embedding": "embedlayer.tables.gguf_rows:GGUFEmbedding",
    "stored_embedding": "embedlayer.tables.stored_embedding:StoredEmbedding",
    "quantized_rows": "embedlayer.formats.quantized:QuantizedRows",
    "gguf_rows": "embedlayer.formats.gguf:GGUFRows",
    "fused_rows": "embedlayer.formats.layouts:FusedRows",
    "gguf_blocks": "embedlayer.formats.layouts:GGUFBlocks",
    "mlx_affine_rows": "embedlayer.formats.mlx:MLXAffineRows",
    "mlx_float_rows": "embedlayer.formats.mlx:MLXFloatRows",
    "pack_quantized_rows": "embedlayer.formats.compressed_tensors:PackQuantizedRows",
    "naive_quantized_rows": "embedlayer.formats.compressed_tensors:NaiveQuantizedRows",
    "compressed_float_rows": "embedlayer.formats.compressed_tensors:CompressedFloatRows",
    "modelopt_nvfp4_rows": "embedlayer.formats.modelopt:NVFP4Rows",
    "modelopt_fp8_rows": "embedlayer.formats.modelopt:FP8Rows",
    "gemma_rows": "embedlayer.formats.gemma:GemmaRows",
    "torchao_rows": "embedlayer.formats.torchao:TorchAORows",
    "gptq_rows": "embedlayer.formats.gptq:GPTQRows",
    "awq_rows": "embedlayer.formats.gptq:AWQRows",
    "bitsandbytes_int8_rows": "embedlayer.formats.bitsandbytes:Int8Rows",
    "bitsandbytes_4_bit_rows": "embedlayer.formats.bitsandbytes:FourBitRows",
    "mapped_embedding": "embedlayer.tables.stored.mapped:MappedEmbedding",
    "stream_table": "embedlayer.tables.streams:StreamTable",
    "bag": "embedlayer.tables.bag:Bag",
    "delta_embedding": "embedlayer.tables.delta:DeltaEmbedding",
    "no_position": "embedlayer.positions.position:Position",
    "learned_positions": "embedlayer.positions.learned:LearnedPositionalEmbedding",
    "axial_positions": "embedlayer.positions.axial:AxialPositionalEmbedding",
    "sinusoidal_positions": "embedlayer.positions.sinusoidal:SinusoidalPositionalEmbedding",
    "rotary": "embedlayer.positions.rotary.embedding:RotaryEmbedding",
    "alibi": "embedlayer.positions.alibi:AlibiBias",
    "relative_bias": "embedlayer.positions.relative:RelativePositionBias",
    "linear_scaling": "embedlayer.positions.rotary.scaling:LinearScaling",
    "dynamic_ntk_scaling": "embedlayer.positions.rotary.scaling:DynamicNTKScaling",
    "yarn_scaling": "embedlayer.positions.rotary.scaling:YarnScaling",
    "long_rope_scaling": "embedlayer.positions.rotary.scaling:LongRopeScaling",
    "llama3_scaling": "embedlayer.positions.rotary.scaling:Llama3Scaling",
    "proportional_scaling": "embedlayer.positions.rotary.scaling:ProportionalScaling",
    "ntk_alpha_scaling": "embedlayer.positions.rotary.scaling:NTKAlphaScaling",
    "chunked_axes": "embedlayer.positions.rotary.axes:ChunkedAxes",
    "interleaved_axes": "embedlayer.positions.rotary.axes:InterleavedAxes",
    "alternating_axes": "embedlayer.positions.rotary.axes:AlternatingAxes",
    "channel_axes": "embedlayer.positions.rotary.axes:ChannelAxes",
    "axial_axes": "embedlayer.positions.rotary.axes:AxialAxes",
    "query_scaled_position": "embedlayer.positions.rotary.query:QueryScaledPosition",
    "log_query_scaling": "embedlayer.positions.rotary.query:LogQueryScaling",
    "power_query_scaling": "embedlayer.positions.rotary.query:PowerQueryScaling",
    "output_head": "embedlayer.heads.output:OutputHead",
    "stacked_rows": "embedlayer.heads.streams:StackedRows",
    "stream_head": "embedlayer.heads.streams:StreamHead",
    "type_tables": "embedlayer.inputs.parts:TypeTables",
    "elementwise_affine": "embedlayer.inputs.parts:ElementwiseAffine",
    "offset_rms_norm": "embedlayer.inputs.parts:OffsetRMSNorm",
    "shift_scale": "embedlayer.inputs.parts:ShiftScale",
    "trigram_projection": "embedlayer.inputs.parts:TrigramProjection",
    "feature_projection": "embedlayer.inputs.parts:FeatureProjection",
    "prediction_streams": "embedlayer.inputs.parts:PredictionStreams",
    "token_dropout": "embedlayer.inputs.parts:TokenDropout",
    "per_layer_inputs": "embedlayer.inputs.per_layer:PerLayerInputs",
    "per_layer_residual": "embedlayer.inputs.per_layer:PerLayerResidual",
    "transformer_embedding": "embedlayer.inputs.embedding:TransformerEmbedding",
    "gpt_embedding": "embedlayer.lessons.book:GPTEmbedding",
    "ngram_hash": "embedlayer.inputs.ngram:NgramHash",
    "ngram_embedding": "embedlayer.inputs.ngram:NgramEmbedding",
    "context_gate": "embedlayer.inputs.context_gate:ContextGate",
    "short_convolution": "embedlayer.inputs.context_gate:ShortConvolution",
    "code_streams": "embedlayer.inputs.codes:CodeStreams",
    "decoder_input": "embedlayer.inputs.parts:DecoderInput",
    "added_embedding": "embedlayer.inputs.injection:AddedEmbedding",
    "gated_embedding": "embedlayer.inputs.gated:GatedEmbedding",
    "per_layer_embedding": "embedlayer.inputs.per_layer_embedding:PerLayerEmbedding",
    "value_embedding": "embedlayer.inputs.value:ValueEmbedding",
    "embedding_layer": "embedlayer.checkpoints.layer:EmbeddingLayer",
    "decoder_lm": "embedlayer.models.decoder:DecoderLM",
}
"""`"module:Class"` of each savable class of the library, by its kind identifier. Identifiers never change."""

_KIND_OF = {path: kind for kind, path in KINDS.items()}


def kind_of(cls: type) -> str:
    """Return the kind identifier of a class, or `"module:Class"` for a class that is not in `KINDS`."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in path:
        raise CheckpointError(
            f"{cls.__qualname__} is in a function, so no file can name it: define it at the top level of a module."
        )
    return _KIND_OF.get(path, path)


def class_of(kind: str) -> type:
    """Return the class that a kind identifier, or `"module:Class"`, refers to."""
    module, _, name = KINDS.get(kind, kind).partition(":")
    if kind in KINDS:
        import_module(module)
    elif name and module not in sys.modules:
        raise CheckpointError(
            f"The saved configuration names the class {name} of the module {module}, which is not imported. Import "
            f"{module} first if you trust it; for a command see docs/errors.md, A class of your own."
        )
    value = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, type) and module == "__main__":
        raise CheckpointError(
            f"The saved configuration names the class {name} of the script or notebook that saved it. Define it here "
            f"too, or in a module, and save again."
        )
    if not isinstance(value, type):
        raise CheckpointError(
            f"The kind {kind!r} is not known here. Known kinds: {', '.join(KINDS)}, and 'module:Class' of your own."
        )
    return value
