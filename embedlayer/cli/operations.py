"""All operations that have compiled kernels, for `embedlayer doctor`, the table of docs/kernels.md and the tests."""

from embedlayer.formats import compiled
from embedlayer.inputs import fused
from embedlayer.kernels import divergences, index_check, input, largest, quantized, softmax
from embedlayer.kernels.operation import Operation
from embedlayer.positions import position
from embedlayer.positions.rotary import embedding, rotation
from embedlayer.row_sparse import gradient, pending_updates
from embedlayer.tables import sums
from embedlayer.tables.stored import rows_in_files

MODULES = (
    *(input, fused, sums, index_check, position, rotation, embedding, quantized, compiled, gradient, rows_in_files),
    *(pending_updates, softmax, largest, divergences),
)
"""Modules with records of operations, in the order of the tables."""

OPERATIONS = list(
    dict.fromkeys(each for module in MODULES for each in vars(module).values() if isinstance(each, Operation))
)
