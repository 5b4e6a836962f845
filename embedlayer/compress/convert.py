"""Convert a table to another kind by a short name such as `int8`, and put it into a copy of a model."""

import re
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
from embedlayer.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.layers.input import TransformerEmbedding
from embedlayer.layers.output import OutputHead
from embedlayer.layers.prediction_head import PredictionHead
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.dense import as_table
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.table import TokenTable

Model = TypeVar("Model", bound=DecoderLM | EmbeddingLayer | TransformerEmbedding)

_QUANTISED = re.compile(r"int(8|4)(?:-g(\d+))?")
_RANK = re.compile(r"rank=(\d+)")


def compress_table(table: TokenTable | nn.Embedding, to: str, *, counts: Tensor | None = None) -> TokenTable:
    """Return `table` as the kind of table that `to` names, with the same scale and padding row.

    Args:
        table: A table of any kind, or a plain `nn.Embedding`.
        to: `"int8"` or `"int4"`; `"int4-g32"` for groups of 32 columns with a scale each; `"rank=128"` for a factorised
            table.
        counts: Number of occurrences of each token, `(V,)`: weights of the error that a factorised table minimises;
            `None` weights all tokens equally.

    Raises:
        SizeError: `to` names no kind, or a kind that does not fit the size of the table.

    Example:
        >>> compress_table(TokenEmbedding(100, 64), "int4-g32")
        QuantizedEmbedding(
          100, 64, bits=4, group_size=32, dtype=float32
          (index_check): IndexCheck(token id < 100)
        )
    """
    check_kind(to)
    table = as_table(table)
    rank, quantised = _RANK.fullmatch(to), _QUANTISED.fullmatch(to)
    if rank:
        return FactorizedEmbedding.from_table(table, int(rank[1]), counts)
    assert quantised
    group_size = None if quantised[2] is None else int(quantised[2])
    return QuantizedEmbedding.from_table(table, int(quantised[1]), group_size=group_size)


def check_kind(to: str) -> None:
    """Check the name of a kind before there is a table.

    Raises:
        SizeError: `compress_table` does not know the name.
    """
    if not (_RANK.fullmatch(to) or _QUANTISED.fullmatch(to)):
        raise SizeError(f"A table can be compressed to int8, int4, groups as in int4-g32, or rank=128; not to {to!r}.")


def replace_table(model: Model, table: TokenTable | nn.Embedding) -> Model:
    """Return a model with another table of the same width; all other modules are shared with `model`.

    A tied head is tied to the new table.

    Raises:
        SizeError: The table has another width, or the model has an untied head with another number of tokens.
    """
    table = as_table(table)
    if table.embed_dim != model.table.embed_dim:
        raise SizeError(f"The table has width {table.embed_dim}, the model needs {model.table.embed_dim}.")
    if isinstance(model, TransformerEmbedding):
        sizes = (table.vocab_size, table.embed_dim, model.max_seq_len)
        layer = TransformerEmbedding(*sizes, model.dropout.p, position=model.position, table=table)
        return cast(Model, layer.train(model.training))
    head = _tied_to(model.head, table)
    if isinstance(model, EmbeddingLayer):
        return cast(Model, _layer_with(model, table, head))
    assert isinstance(head, OutputHead)
    options: JsonObject = dict(model.sizes)
    with torch.device("meta"):
        other = DecoderLM(table, model.position, head, **options)
    other.blocks, other.norm, other.dropout = model.blocks, model.norm, model.dropout
    return cast(Model, other.train(model.training))


def _layer_with(layer: EmbeddingLayer, table: TokenTable, head: OutputHead | PredictionHead | None) -> EmbeddingLayer:
    names = {key: found for key, found in layer.tensor_names.items() if not key.startswith("table.")}
    other = EmbeddingLayer(
        table,
        layer.position,
        head,
        family=layer.family,
        recipe=layer.recipe,
        numbering=layer.numbering,
        padding_id=layer.padding_id,
        first_position_id=layer.first_position_id,
        types="table" if layer.types_from_table else layer.types,
        norm=layer.norm,
        projection=layer.projection,
        other_positions={kind: layer.position_of(kind) for kind in layer.other_positions},
        tensor_names=names,
    )
    other.load_record = layer.load_record
    other._checkpoint, other._tokenizer = layer._checkpoint, layer._tokenizer
    return other.train(layer.training)


def _tied_to(head: OutputHead | PredictionHead | None, table: TokenTable) -> OutputHead | PredictionHead | None:
    if head is None or not head.tied:
        return head
    if isinstance(head, PredictionHead):
        output = cast(OutputHead, _tied_to(head.output, table))
        return PredictionHead(output, dense=head.dense, activation=head.activation, norm=head.norm)
    with torch.device("meta"):
        tied = OutputHead(table, **head.config)
    tied.bias = head.bias
    return tied
