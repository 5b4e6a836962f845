"""The base of tables that store rows as codes and scales, which are dequantised only where they are used."""

import json
from abc import abstractmethod
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.block_sizes import NUMBERS, block_size
from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.devices import autocast_dtype, device_kind
from embedlayer.core.errors import SizeError
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import constant_in_graphs, is_current, is_transformed, plain_operators_only
from embedlayer.formats.compiled import logits_of_few_tokens, read_rows
from embedlayer.formats.stored import StoredFormat, StoredRows
from embedlayer.io.files import JsonObject
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS
from embedlayer.losses.rows import write_product
from embedlayer.saving import build, describe
from embedlayer.tables.computed_weight import ComputedRows
from embedlayer.tables.dense_table import resolve_scale
from embedlayer.tables.lookup import check_sizes
from embedlayer.tables.table import check_width

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
"""Data types of vectors, by name."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PackedRows(ComputedRows, ComputedBuffers, checks_ids=True):
    """Abstract base class of frozen tables of codes: `out[..., :] = scale * dequantise(stored rows of ids)`.

    The arguments are those of its subclasses. A `dtype` of `None` is that of torch's default. A subclass creates the
    buffers of the stored rows, and `stored_rows` returns them with their format.
    """

    example: Tensor
    embed_scale: float | Tensor | None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        round_scale: bool = False,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim)
        self.vocab_size = self.num_rows = vocab_size
        self.embed_dim = embed_dim
        self.scale = resolve_scale(scale, embed_dim)
        self.round_scale = round_scale
        self.index_check = IndexCheck(vocab_size, "token id")
        resolved = torch.get_default_dtype() if dtype is None else DTYPES.get(str(dtype).removeprefix("torch."))
        if resolved is None:
            raise SizeError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}.")
        self.register_buffer("example", torch.empty(0, dtype=resolved, device=device), persistent=False)
        if not round_scale:
            self.embed_scale = self.scale
        self.recompute_buffers(self.example.device)

    @property
    @abstractmethod
    def stored_rows(self) -> StoredRows:
        """Return the tensors that store the rows, which are buffers of this table, and their format."""

    @property
    @abstractmethod
    def stored_type(self) -> str:
        """Return the name of the type of the stored rows, such as `"int8"`, or GGUF's name: `"Q8_0"`."""

    def replace_rows(self, stored: StoredRows) -> None:
        """Store other rows in place of all, in place: the buffers become these tensors, and V their number of rows.

        Args:
            stored: Rows in the format of this table, any number of them. `padding_idx` stays.
        """
        tensors = stored.rows | stored.shared
        for module in self.modules():
            for name, _ in list(module.named_buffers(recurse=False)):
                if name in tensors:
                    setattr(module, name, tensors[name])
        self.vocab_size = self.num_rows = self.index_check.size = stored.shape[0]

    def store_rows(self, ids: Int[Tensor, " N"], stored: StoredRows) -> None:
        """Store N rows in place of those of `ids`, in place; all other stored bytes stay, and so does a mapped file.

        Args:
            ids: IDs of the rows.
            stored: The new rows, in the format of this table and with its shared tensors, such as
                `table.stored_rows.quantised(values)`.
        """
        for name, part in self.stored_rows.rows.items():
            integers = _INTEGERS[part.itemsize]  # torch copies no rows of FP8 or uint32
            part.view(integers).index_copy_(0, ids, stored.rows[name].view(integers))

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all stored rows: codes, scales and what else their format has."""
        stored = self.stored_rows
        return sum(part.nbytes for parts in (stored.rows, stored.shared) for part in parts.values())

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the vectors that look-ups return. The stored tensors have other ones."""
        example: Any = self._buffers["example"]
        dtype: torch.dtype = example.dtype
        return dtype

    @property
    def dtype_name(self) -> str:
        """Return the name of `dtype`, such as `"bfloat16"`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON, with the name of `dtype`."""
        return {**super().config, "dtype": self.dtype_name}

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffers that are not saved: `example` and, with `round_scale`, the scalar `embed_scale`.

        Both have the dtype of the vectors. `example` is empty and exists only so that `.to(dtype)` has a floating-point
        tensor to cast.
        """
        tensors = {"example": torch.empty(0, dtype=self.dtype)}
        if self.round_scale:
            tensors["embed_scale"] = torch.tensor(1.0 if self.scale is None else self.scale, dtype=self.dtype)
        return tensors

    def reset_parameters(self) -> None:
        """Set all stored tensors to zero in place, as in a new table: codes and scales are lost."""
        stored = self.stored_rows
        for part in (*stored.rows.values(), *stored.shared.values()):
            part.zero_()

    def dequantised(self, ids: Int[Tensor, " N"], dtype: torch.dtype | None = None) -> Float[Tensor, "N D"]:
        """Return the vectors of IDs that were checked, without `scale`; a few rows at a time are dequantised.

        They are in `dtype`, by default that of the table. The errors are those of the format: that of GGUF refuses
        types of blocks that its package cannot dequantise.
        """
        if torch.compiler.is_compiling() or is_transformed(ids):
            return self.stored_rows.take(ids).dequantise(dtype or self.dtype)
        return read_rows(self.stored_rows, dtype or self.dtype, ids)

    def look_up(self, ids: Ids) -> Vectors:
        """Return the dequantised vectors of `ids` without `scale`, `(...)` to `(..., D)`."""
        check: Any = self._modules["index_check"]
        ids, outside = check.forward(ids)
        vectors = self.dequantised(ids.reshape(-1)).view(*ids.shape, self.embed_dim)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Dequantise rows `start` to `stop - 1`, `(stop - start, D)`, not yet multiplied by the table's factor `scale`.

        Bounds are handled like those of a slice.
        """
        return self.dequantised(self._places(start, stop))

    def rows_as(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "N D"]:
        """Return rows for products in `dtype`, dequantised to it; see `TokenTable.rows_as`."""
        if not is_current(type(self), "rows_as", "rows"):
            return self.rows(start, stop)
        return self.dequantised(self._places(start, stop), dtype)

    def vectors_as(self, ids: Ids, dtype: torch.dtype) -> Vectors:
        """Return vectors for products in `dtype`, dequantised to it; see `TokenTable.rows_as`."""
        if not is_current(type(self), "vectors_as", "look_up"):
            return self.look_up(ids)
        return self.dequantised(ids.reshape(-1), dtype).view(*ids.shape, self.embed_dim)

    def _places(self, start: int, stop: int) -> Int[Tensor, " N"]:
        """Return the IDs `start` to `stop - 1`, with the bounds of a slice."""
        start, stop, _ = slice(start, stop).indices(self.vocab_size)
        return torch.arange(start, max(start, stop), device=self.example.device)

    def raw_logits(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """Return `hidden @ rows(start, stop).T`: logits before scale, bias and soft cap, in the dtype of `hidden`.

        Rows are dequantised block by block into the dtype of `hidden`, and again in the backward pass. Under autocast,
        `hidden` is cast to autocast's dtype. See `TokenTable.raw_logits` for the arguments.
        """
        if (narrow := autocast_dtype(hidden)) is not None and hidden.dtype != torch.float64:
            hidden = hidden.to(narrow)
        check_width(hidden, self.embed_dim)
        if not is_current(type(self), "raw_logits", "rows"):  # a subclass changes the rows
            return super().raw_logits(hidden, start, stop)
        stored = self.stored_rows.take(slice(start, self.vocab_size if stop is None else stop))
        if plain_operators_only() or is_transformed(hidden):
            return F.linear(hidden, stored.dequantise(hidden.dtype))
        tensors = (*stored.rows.values(), *stored.shared.values())
        description = _description_of(type(stored.format), *stored.format.config.items())
        products: Tensor = times_stored_rows(hidden.reshape(-1, self.embed_dim), description, True, *tensors)
        return products.view(*hidden.shape[:-1], products.shape[-1])

    def requires_grad_(self, requires_grad: bool = True) -> "PackedRows":
        """Return the table unchanged for `requires_grad=False`, and refuse `True`: stored bytes have no gradient."""
        if requires_grad:
            raise SizeError(f"A {type(self).__name__} is frozen. See docs/errors.md, Frozen codes.")
        return self


@constant_in_graphs  # Dynamo takes no function with a cache for a constant one
def _description_of(kind: type[StoredFormat], *config: tuple[str, Any]) -> str:
    """Return the description in JSON of the record of this class that has this `config`."""
    return _cached_description_of(kind, config)


@lru_cache(maxsize=64)
def _cached_description_of(kind: type[StoredFormat], config: tuple[tuple[str, Any], ...]) -> str:
    return json.dumps(describe(kind(**dict(config))))


@lru_cache(maxsize=64)
def _format_of(description: str) -> StoredFormat:
    """Return the record that a description in JSON is of."""
    record: StoredFormat = build(json.loads(description))
    return record


@torch.library.custom_op("embedlayer::times_stored_rows", mutates_args=())
def times_stored_rows(
    x: Tensor,
    description: str,
    transposed: bool,
    codes: Tensor,
    second: Tensor | None = None,
    third: Tensor | None = None,
    fourth: Tensor | None = None,
) -> Tensor:
    """Multiply `x` by the dequantised rows, a block of rows at a time, as a custom operator with a gradient."""
    record = _format_of(description)
    tensors = dict(zip((*record.row_parts, *record.shared_parts), (codes, second, third, fourth), strict=False))
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    stored = StoredRows(
        record,
        {name: present[name] for name in record.row_parts},
        {name: present[name] for name in record.shared_parts},
    )
    if transposed and (logits := logits_of_few_tokens(x, stored)) is not None:
        return logits
    count, width = stored.shape
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    result = x.new_empty(len(x), count) if transposed else x.new_zeros(len(x), width, dtype=wide)
    least = 2 * NUMBERS["cpu"] // width  # products are faster with larger blocks, which no number of tokens changes
    step = max(1, least, MAX_CHUNK_TOKENS["cpu"], block_size(NUMBERS, device_kind(x)) // width)
    for start in range(0, count, step):
        stop = min(start + step, count)
        rows = read_rows(stored.take(slice(start, stop)), x.dtype)
        if transposed:
            torch.mm(x, rows.T, out=result[:, start:stop])
        else:
            write_product(result, x[:, start:stop], rows, add=True)
    return result.to(x.dtype)


@times_stored_rows.register_fake
def _(x: Tensor, description: str, transposed: bool, codes: Tensor, *others: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], len(codes) if transposed else _format_of(description).embed_dim)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save in the autograd context `ctx` those `inputs` of `times_stored_rows` that `_backward` reads."""
    _, ctx.description, ctx.transposed, *tensors = inputs
    ctx.save_for_backward(*(tensor for tensor in tensors if tensor is not None))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of `times_stored_rows`: that of `x`, and `None` for the six others."""
    return times_stored_rows(gradient, ctx.description, not ctx.transposed, *ctx.saved_tensors), *[None] * 6


times_stored_rows.register_autograd(_backward, setup_context=_keep)
