"""Tables of stored codes, of our own formats, GGUF's and those of other libraries, and decoders with them."""

from collections.abc import Iterator
from typing import Any

import torch
from stored_cases import OTHER_ROWS
from stored_folders import one_of_each
from torch import Tensor, nn

import embedlayer as el
from embedlayer.tables import GGUFEmbedding, StoredEmbedding

KINDS = [*OTHER_ROWS, *one_of_each()]
"""Names of the formats: each of our own and of GGUF's, and one of each kind of layout of other libraries."""

Packed = el.QuantizedEmbedding | GGUFEmbedding | StoredEmbedding
"""A table of stored codes."""


def table_of(stored: Any) -> Packed:
    """Return a table that stores copies of these rows, with float32 vectors."""
    record, (vocab_size, width) = stored.format, stored.shape
    table: Packed
    if record.library == "embedlayer":
        form = record.row_format
        sizes = {"group_size": form.group_size if form.group_size < width else None}
        layout = form.layout() if record.layout_index else None
        table = el.QuantizedEmbedding(vocab_size, width, record.bits, **sizes, layout=layout)
    elif record.library == "GGUF":
        table = GGUFEmbedding(vocab_size, width, record.block_type)
    else:
        table = StoredEmbedding(vocab_size, record, dtype="float32")
    shared = {name: part.clone() for name, part in stored.shared.items()}
    table.replace_rows(stored.take(torch.arange(vocab_size))._replace(shared=shared))
    return table


def decoder_of(stored: Any, *, tied: bool) -> el.DecoderLM:
    """Return a small decoder with these rows at both ends, in two tables if it is not tied."""
    table = table_of(stored)
    head = None if tied else el.OutputHead(rows=table_of(stored), bias=True)
    if head is not None and head.bias is not None:
        nn.init.normal_(head.bias)
    return el.DecoderLM(table, el.RotaryEmbedding(stored.shape[1] // 2), head, num_layers=1, num_heads=2).eval()


def tables_in(module: nn.Module) -> Iterator[Packed]:
    """Yield the tables of stored codes in a module."""
    yield from (part for part in module.modules() if isinstance(part, Packed))


def bytes_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the bytes of all tensors of a module, by name."""
    return {name: tensor.detach().clone().reshape(-1).view(torch.uint8) for name, tensor in module.state_dict().items()}
