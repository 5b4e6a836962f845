"""A table as another kind of table, by a short name; and the same model around it."""

import re
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from embedlayer.checkpoints.layer import EmbeddingLayer, TransformedHead
from embedlayer.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.layers.output import OutputHead
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.dense import as_table
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.table import TokenTable

Model = TypeVar("Model", bound=DecoderLM | EmbeddingLayer)

_QUANTISED = re.compile(r"int(8|4)(?:-g(\d+))?")
_RANK = re.compile(r"rank=(\d+)")


def compressed(table: TokenTable | nn.Embedding, to: str, *, counts: Tensor | None = None) -> TokenTable:
    """`table` as the kind that `to` names; scale and padding are kept.

    Args:
        table: A table of any kind, or a plain `nn.Embedding`.
        to: `"int8"` or `"int4"`, in groups of 32 columns `"int4-g32"`, or `"rank=128"`.
        counts: How often each token occurs, `(V,)`: a table of low rank is then nearest where tokens are frequent.

    Raises:
        SizeError: No such kind, or one that this table cannot be.

    Example:
        >>> compressed(TokenEmbedding(100, 64), "int4-g32")
        QuantizedEmbedding(
          100, 64, bits=4, group_size=32, dtype=float32
          (bounds): Bounds(token id < 100)
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
    """Refuse a name that `compressed` does not know, before there is a table.

    Raises:
        SizeError: No such kind.
    """
    if not (_RANK.fullmatch(to) or _QUANTISED.fullmatch(to)):
        raise SizeError(f"A table can be compressed to int8, int4, groups as in int4-g32, or rank=128; not to {to!r}.")


def with_table(model: Model, table: TokenTable | nn.Embedding) -> Model:
    """The same model around another table of its width: all other parts are shared, a tied head is tied to `table`.

    Raises:
        SizeError: The table has another width, or the model a free head for another vocabulary.
    """
    table = as_table(table)
    if table.embed_dim != model.table.embed_dim:
        raise SizeError(f"The table has width {table.embed_dim}, the model needs {model.table.embed_dim}.")
    head = _tied_to(model.head, table)
    if isinstance(model, EmbeddingLayer):
        return cast(Model, _layer_with(model, table, head))
    assert isinstance(head, OutputHead)
    sizes: JsonObject = dict(model.sizes)
    with torch.device("meta"):
        other = DecoderLM(table, model.position, head, **sizes)
    other.blocks, other.norm, other.dropout = model.blocks, model.norm, model.dropout
    return cast(Model, other.train(model.training))


def _layer_with(layer: EmbeddingLayer, table: TokenTable, head: OutputHead | TransformedHead | None) -> EmbeddingLayer:
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
    other.origin = layer.origin
    other._find_tokenizer, other._tokenizer = layer._find_tokenizer, layer._tokenizer
    return other.train(layer.training)


def _tied_to(head: OutputHead | TransformedHead | None, table: TokenTable) -> OutputHead | TransformedHead | None:
    if head is None or not head.tied:
        return head
    if isinstance(head, TransformedHead):
        output = cast(OutputHead, _tied_to(head.output, table))
        return TransformedHead(output, dense=head.dense, activation=head.activation, norm=head.norm)
    with torch.device("meta"):
        tied = OutputHead(table, **head.config)
    tied.bias = head.bias
    return tied
