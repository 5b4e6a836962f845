"""Convert a table to another kind by a short name such as `int8`, and put it into a copy of a model."""

import copy
import re
from typing import TypeVar

import torch
from torch import Tensor, nn

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.compress.transformers_models import with_table
from embedlayer.core.errors import SizeError
from embedlayer.formats.compressed_tensors import PackQuantizedRows
from embedlayer.formats.layouts import GGUFBlocks
from embedlayer.formats.mlx import MLXAffineRows
from embedlayer.formats.rounding import CovarianceRounding
from embedlayer.inputs.embedding import TransformerEmbedding
from embedlayer.io.safetensors_files import DTYPE_NAMES
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.conversions import as_table
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.stored_embedding import StoredEmbedding
from embedlayer.tables.table import TokenTable

Model = TypeVar("Model", bound=nn.Module)

_KIND = re.compile(
    r"int(?P<bits>8|4)(-g(?P<group>\d+))?|q(?P<blocks>8|4)_0|rank=(?P<rank>\d+)"
    r"|mlx-int(?P<mlx_bits>\d)(-g(?P<mlx_group>\d+))?|ct-int(?P<ct_bits>\d)(-g(?P<ct_group>\d+))?"
)


def compress_table(table: TokenTable | nn.Embedding, to: str, *, counts: Tensor | None = None) -> TokenTable:
    """Convert `table` to the kind of table that `to` names, with the same scale and padding row.

    The original is not changed.

    Args:
        table: A table of any kind, or a plain `nn.Embedding`.
        to: `"int8"` or `"int4"` for a scale for each row; `"int4-g32"` for groups of 32 columns with a scale each;
            `"q8_0"` or `"q4_0"` for GGUF's blocks of 32 columns, which `export_onnx` writes too; `"mlx-int4"` for MLX's
            groups of 64 columns, or `"mlx-int8-g32"` and the like; `"ct-int4-g32"` for symmetric integers of
            compressed-tensors, without a group for a scale for each row; `"rank=128"` for a factorised table. 4-bit
            codes of the first kinds are rounded by `CovarianceRounding`, those of other libraries as these do it.
        counts: Number of occurrences of each token, `(V,)`: weights of the error that a factorised table minimises;
            `None` weights all tokens equally. Other kinds ignore it.

    Raises:
        SizeError: `to` names no kind, or a kind that does not fit the size of the table; `table` is no table; or, for a
            factorised table, `counts` are negative, not finite or all 0.
        ShapeError: Rows contain NaN, infinity, or numbers too large for the layout.
        CheckpointError: Rows contain these, and the kind is that of another library.

    Example:
        >>> compress_table(TokenEmbedding(100, 64), "int4-g32")
        QuantizedEmbedding(
          100, 64, bits=4, group_size=32, dtype=float32
          (index_check): IndexCheck(token id < 100)
        )
    """
    numbers, table = check_kind(to), as_table(table)
    if "rank" in numbers:
        return FactorizedEmbedding.from_table(table, numbers["rank"], counts)
    if to.startswith(("mlx", "ct")):
        dtype, width = table.rows(0, 1).dtype, table.embed_dim
        scales = DTYPE_NAMES[torch.float32 if dtype == torch.float64 else dtype]
        if "mlx_bits" in numbers:
            return StoredEmbedding.from_table(
                table, MLXAffineRows(width, numbers["mlx_bits"], numbers["mlx_group"], scales)
            )
        record = PackQuantizedRows(width, numbers.get("ct_group", width), scales, True, numbers["ct_bits"])
        return StoredEmbedding.from_table(table, record)
    bits, layout = (numbers["blocks"], GGUFBlocks()) if "blocks" in numbers else (numbers["bits"], None)
    rounding = CovarianceRounding() if bits == 4 else None
    return QuantizedEmbedding.from_table(table, bits, group_size=numbers.get("group"), layout=layout, rounding=rounding)


def check_kind(to: str) -> dict[str, int]:
    """Check that `compress_table` knows the kind `to`, and return the numbers in its name. No table is needed."""
    match = _KIND.fullmatch(to)
    if match is None:
        raise SizeError(f"{to!r} is no kind such as int8, int4-g32, q8_0, q4_0, mlx-int4, ct-int4-g32 or rank=128.")
    numbers = {name: int(digits) for name, digits in match.groupdict().items() if digits is not None}
    return numbers | ({"mlx_group": numbers.get("mlx_group", 64)} if "mlx_bits" in numbers else {})


def replace_table(model: Model, table: TokenTable | nn.Embedding) -> Model:
    """Return a copy of a model with another table of the same width; all other modules and parameters are shared.

    A tied head is tied to the new table. The original model is not changed.

    In a model of transformers the look-ups keep their scale, whatever the scale of `table`. If the table is not dense,
    transformers cannot store it: `save_pretrained` of the copy raises a `CheckpointError`, and `save_model` writes it.
    The table of a StaticEmbedding is saved by its own `save_pretrained`.

    Args:
        model: A decoder, an embedding layer, an input embedding, or a model of transformers, a StaticEmbedding or a
            SentenceTransformer with one after `patch`.
        table: The new table.

    Raises:
        SizeError: The table does not fit the width, the untied head or the scale of the model's look-ups.
        CheckpointError: The model is not patched, has bags of several tables, has modules other than look-ups and LM
            heads that use the weight of the table, or multiplies the rows itself (MobileBERT).
    """
    table = as_table(table)
    if not isinstance(model, DecoderLM | EmbeddingLayer | TransformerEmbedding):
        return with_table(model, table)
    if table.embed_dim != model.table.embed_dim:
        raise SizeError(f"The table has width {table.embed_dim}, the model needs {model.table.embed_dim}.")
    head = getattr(model, "head", None)
    size = None if head is None or head.tied else getattr(head, "output", head).out_features
    if size not in (None, table.vocab_size):
        raise SizeError(f"The head has {size} tokens, the table {table.vocab_size}.")
    # deepcopy keeps every object in its memo, so only the model itself and a tied head are copied
    copied = {model, *((head, getattr(head, "output", head)) if head is not None and head.tied else ())}
    shared = [
        *(module for module in model.modules() if module not in copied),
        *model.parameters(),
        *model.buffers(),
        *(value for value in vars(model).values() if not isinstance(value, dict | list | tuple)),
    ]
    other = copy.deepcopy(model, {**{id(each): each for each in shared}, id(model.table): table})
    if isinstance(other, EmbeddingLayer):
        other.tensor_names = {key: names for key, names in other.tensor_names.items() if not key.startswith("table.")}
    return other
