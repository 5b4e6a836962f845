"""Write a quantised table as a compact ONNX graph: look-up and logits that read the same codes."""

from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from embedlayer.core.block_sizes import TABLE_ROWS
from embedlayer.core.errors import SizeError, require
from embedlayer.core.formatting import a_or_an
from embedlayer.formats.layouts import GGUFBlocks
from embedlayer.io.files import named_path, replace_file
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.table import TokenTable

LARGEST = 2**31 - 2**20
"""Bytes of codes and scales that fit into one ONNX file: protobuf's limit, less the graph."""

DOCUMENTATION = (
    "Rows of a token table for input_ids, and logits for hidden states. IDs must be from 0 to {V} - 1. They are not "
    "checked: the vector of an ID from {V} on is zero, and a negative ID counts from the last row."
)
"""What the graph says of itself."""


def export_onnx(table: TokenTable, path: Path | str, *, logits: bool = True, accuracy_level: int = 1) -> None:
    """Write a table of the layout `GGUFBlocks` as an ONNX file that looks up vectors and computes logits.

    | input | output | operator |
    |---|---|---|
    | `input_ids`, int64, `(batch, T)` | `vectors = table(input_ids)`, float32 | `GatherBlockQuantized` |
    | `hidden`, float32, `(batch, T, D)` | `logits = table.logits(hidden)`, float32 | `MatMulNBits` |

    Both operators read one initializer of codes, so the file holds the table once. A program that needs one end only
    passes an empty array to the other one. The operators are of the domain `com.microsoft`; onnxruntime runs them on
    the CPU. The graph does not check IDs: of an ID from V on the vector is zero, and -1 is the last row. Its
    documentation says so too.

    Args:
        table: A table of the layout `GGUFBlocks`, with 4 or 8 bits.
        path: The file, replaced atomically.
        logits: Whether the graph computes logits too; leave them out if the model's head is untied.
        accuracy_level: Attribute of `MatMulNBits`: 1 computes in float32; 4 may round hidden states to 8 bits, which
            changes logits by about 0.5 % of the largest one, and is faster, much faster with 8-bit codes.

    Raises:
        SizeError: The table has another layout, or more than `LARGEST` bytes, 1 MiB below 2 GiB.
        FileError: The file cannot be written.
        MissingExtraError: onnx is not installed: `pip install 'embedlayer[onnx]'`.

    Example:
        >>> table = compress_table(TokenEmbedding(100, 64, scale="sqrt_dim"), "q4_0")
        >>> export_onnx(table, "table.onnx")

    Reference: ContribOperators.md of onnxruntime. Groups are an axis of their own, `(V, D / 32, 16)`, because both
    operators accept this shape; so none needs a reshaped copy of the codes.
    """
    path = named_path(path)
    if not has_onnx_layout(table):
        raise SizeError(f"export_onnx cannot write {a_or_an(table)}: use compress_table(table, 'q4_0') first.")
    if table.nbytes > LARGEST:
        raise SizeError(f"The table has {table.nbytes:,} bytes, and an ONNX file holds less than 2 GiB.")
    onnx = require("onnx", extra="onnx")
    helper, arrays, types = onnx.helper, onnx.numpy_helper, onnx.TensorProto
    V, D, form = table.vocab_size, table.embed_dim, table.row_format
    codes, scales = _codes_and_scales(table)
    factor = 1.0 if table.embed_scale is None else float(table.embed_scale)

    def node(kind: str, inputs: str, output: str, **attributes: int) -> object:
        """Return a node; of the domain `com.microsoft` if it reads the codes."""
        return helper.make_node(
            kind, inputs.split(), [output], domain="com.microsoft" if "codes" in inputs else "", **attributes
        )

    constants = {
        "codes": codes,
        "scales_float16": scales,
        "shape_of_scales": torch.tensor([V, form.groups(), 1]),
        "shape_of_vectors": torch.tensor([0, 0, form.groups() * form.group_size]),
        "first": torch.tensor([0]),
        "width": torch.tensor([D]),
        "axis": torch.tensor([2]),
        "embed_scale": torch.tensor(factor, dtype=torch.float32),
    }
    blocks = {"bits": form.bits, "block_size": form.group_size}
    nodes = [
        node("Cast", "scales_float16", "scales", to=types.FLOAT),
        node("Reshape", "scales shape_of_scales", "scales_by_group"),
        node("GatherBlockQuantized", "codes input_ids scales_by_group", "groups", **blocks, quantize_axis=2),
        node("Reshape", "groups shape_of_vectors", "padded"),
        node("Slice", "padded first width axis", "rows"),
        node("Mul", "rows embed_scale", "vectors"),
    ]
    inputs = [helper.make_tensor_value_info("input_ids", types.INT64, ["batch", "length"])]
    outputs = [helper.make_tensor_value_info("vectors", types.FLOAT, ["batch", "length", D])]
    if logits:
        sizes = {**blocks, "K": D, "N": V, "accuracy_level": accuracy_level}
        nodes.append(node("MatMulNBits", "hidden codes scales", "logits", **sizes))
        inputs.append(helper.make_tensor_value_info("hidden", types.FLOAT, ["hidden_batch", "hidden_length", D]))
        outputs.append(helper.make_tensor_value_info("logits", types.FLOAT, ["hidden_batch", "hidden_length", V]))
    initializers = [arrays.from_array(value.numpy(), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "table", inputs, outputs, initializers, doc_string=DOCUMENTATION.format(V=V))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=9, producer_name="embedlayer")
    with replace_file(path) as partial:
        onnx.save_model(model, str(partial))


def has_onnx_layout(table: TokenTable) -> TypeGuard[QuantizedEmbedding]:
    """Return whether `export_onnx` can write a table: its layout is `GGUFBlocks`."""
    return isinstance(table, QuantizedEmbedding) and isinstance(table.layout, GGUFBlocks)


def _codes_and_scales(table: QuantizedEmbedding) -> tuple[Tensor, Tensor]:
    """Return the codes of a table, `(V, groups, bytes)`, and its scales, `(V, groups)`."""
    # with 4 bits, two codes are in a byte, the first in the low bits
    form = table.row_format
    codes = torch.empty(table.vocab_size, form.groups(), form.code_bytes(), dtype=torch.uint8)
    scales = torch.empty(table.vocab_size, form.groups(), dtype=torch.float16)
    for start in range(0, table.vocab_size, TABLE_ROWS["cpu"]):
        block = slice(start, start + TABLE_ROWS["cpu"])
        block_codes, step, _ = form.decode(table.packed[block].cpu())
        if form.bits == 4:
            block_codes = block_codes[:, ::2] | block_codes[:, 1::2] << 4
        codes[block] = block_codes.view(-1, form.groups(), form.code_bytes())
        scales[block] = step.view(-1, form.groups())
    return codes, scales
