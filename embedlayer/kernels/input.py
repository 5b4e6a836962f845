"""The input embedding in one pass: look-up, scale, added rows, dropout and index checks; kernels for CPUs, and on CUDA.

`embedlayer.inputs.fused` runs the kernels of the CPU.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.index_checks import length_of
from embedlayer.core.numbers import random_words
from embedlayer.core.torch_state import fusible, has_memory
from embedlayer.kernels.cpu.numbers import (
    as_computed,
    empty_computed,
    kernel,
    multiply_add,
    narrow,
    prefetch,
    widen,
)
from embedlayer.kernels.gpu.launch import columns_of, imported_launches, launch
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.operation import Operation


class StoredRows(NamedTuple):
    """Describe a look-up that reads rows of one tensor, `weight[ids]`: of a table, or of position vectors.

    Attributes:
        ids: Token IDs or positions, `(...)`.
        weight: The weight itself, `(num_rows, D)`. Read rows of a row-sparse table in a block of `applied_rows`.
        check: Check that the look-up makes as it reads the rows.
    """

    ids: Tensor
    weight: Tensor
    check: IndexCheck
    padding_idx: int | None = None
    sparse: bool = False


class Dropout(NamedTuple):
    """Describe the dropout of one forward pass.

    Attributes:
        seed: Seed of the mask, a signed 64-bit number.
        threshold: Probability of a 0 in the mask, times 65536.
        growth: Factor of the elements that are kept, `1 / (1 - dropout)`; 0 if all are dropped.
    """

    seed: int = 0
    threshold: int = 0
    growth: float = 1.0

    @classmethod
    def drawn(cls, probability: float, seed: int | None = None) -> "Dropout":
        """Return dropout with a seed, by default from torch's default generator; none is drawn for probability 0."""
        threshold = round(probability * (1 << 16))
        if not threshold:
            return cls()
        kept_share = (1 << 16) - threshold
        if seed is None:
            number = torch.empty((), dtype=torch.int64, device="cpu").random_(-(1 << 63), None)
            seed = int(number) if has_memory(number) else 0  # a fake tensor has no number
        return cls(seed, threshold, (1 << 16) / kept_share if kept_share else 0.0)

    def mask(self, first: int, tokens: int, like: Tensor) -> Tensor:
        """Compute zeros and ones for the tokens from `first` on, `(tokens, D)`, of the dtype and device of `like`.

        Each token begins with a new word of four elements.
        """
        width = like.shape[-1]
        words = -(-width // 4)
        bits = random_words(self.seed, first * words, tokens * words).view(torch.int16).view(tokens, -1)[:, :width]
        return (bits >= self.threshold - (1 << 15)).to(like)


NO_DROPOUT = Dropout()


def plain_scale_add_drop(
    x: Float[Tensor, "*batch T D"],
    scale: float | Tensor | None,
    addend: Float[Tensor, "*rows T D"] | None,
    dropout: float,
) -> Float[Tensor, "*batch T D"]:
    """Compute `dropout(scale * x + addend)` by separate PyTorch operations: the definition of the input embedding."""
    x = x if scale is None else scale * x
    x = x if addend is None else x + addend.to(x.dtype)
    return F.dropout(x, dropout) if dropout else x


AHEAD = 4
"""Rows between the one that is loaded into the cache and the one that is computed."""

APART = 16
"""Vectors that are summed on their own: rounding errors grow with the number of terms of a sum."""


@kernel
def gather_scale_add_drop(
    start: int,
    stop: int,
    rows: Any,
    ids: Any,
    size: int,
    bad: Any,
    scale: float,
    addend: Any,
    dropout: Any,
    growth: float,
    out: Any,
) -> None:
    """Compute `dropout(scale * rows[ids] + addend)` for the tokens `start` to `stop - 1`.

    - `size`: number of rows. An ID outside `0 .. size - 1` sets `bad[0]` to 1, and its vector is not written.
    - `addend`: vectors to add, `(A, D)`: token n gets the one at `n % A`. `(0, D)` for none.
    - `dropout`: seed and threshold of the mask, as in `drop`; threshold 0 for no dropout.
    - `growth`: factor on everything that is not dropped.
    - `out`: result, `(tokens, D)`, which may be `rows`.
    """
    width, (seed, threshold) = out.shape[1], dropout
    factor, grow = as_computed(scale * growth, rows[0, 0]), as_computed(growth, rows[0, 0])
    words = np.empty((width + 3) // 4, np.uint64)
    for n in range(start, stop):
        if ids[n] < 0 or ids[n] >= size:
            bad[0] = 1
            continue
        prefetch(rows[ids[min(n + AHEAD, len(ids) - 1)]])
        row, to = rows[ids[n]], out[n]
        if len(addend) > 0:
            added = addend[n % len(addend)]
            for i in range(width):
                to[i] = narrow(multiply_add(factor, widen(row[i]), grow * widen(added[i])), to[0])
        else:
            for i in range(width):
                to[i] = narrow(factor * widen(row[i]), to[0])
        if threshold > 0:
            draw_bits(words, seed, n)
            drop(to, words, threshold)


@kernel
def draw_bits(words: Any, seed: int, token: int) -> None:
    """Draw the random bits of one token; `embedlayer.core.numbers.random_words` defines them."""
    first = np.uint64(seed) + np.uint64(token * len(words)) * np.uint64(0x9E3779B97F4A7C15)
    for i in range(len(words)):
        a = first + np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)
        b = (a ^ (a >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        c = (b ^ (b >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words[i] = c ^ (c >> np.uint64(31))


@kernel
def drop(vector: Any, words: Any, threshold: int) -> None:
    """Multiply by 0 each number whose 16 bits, a signed integer, are below `threshold - 2^15`."""
    bits, least = words.view(np.int16), np.int32(threshold - (1 << 15))
    zero, one = as_computed(0.0, vector[0]), as_computed(1.0, vector[0])
    for i in range(len(vector)):
        vector[i] = narrow(widen(vector[i]) * (one if np.int32(bits[i]) >= least else zero), vector[0])


@kernel
def sum_masked_segments(
    start: int, stop: int, grad: Any, order: Any, offsets: Any, places: Any, factor: float, dropout: Any, out: Any
) -> None:
    """Sum `factor * mask * grad` over the tokens of each segment, in the order of `order`, `APART` at a time.

    - `order`: tokens, segment by segment.
    - `offsets`: start of each segment in `order`, and the end of the last.
    - `places`: row of `out` that gets the sum of each segment.
    - `dropout`: seed and threshold of the mask, as in `gather_scale_add_drop`.
    - `out`: sums; only the rows `places` are written.
    """
    width, (seed, threshold) = grad.shape[1], dropout
    words = np.empty((width + 3) // 4, np.uint64)
    bits, least = words.view(np.int16), np.int32(threshold - (1 << 15))
    total, part = empty_computed(width, grad[0, 0]), empty_computed(width, grad[0, 0])
    zero, one, factor_of = as_computed(0.0, grad[0, 0]), as_computed(1.0, grad[0, 0]), as_computed(factor, grad[0, 0])
    for segment in range(start, stop):
        total[:] = zero
        part[:] = zero
        for k in range(offsets[segment], offsets[segment + 1]):
            token = order[k]
            prefetch(grad[order[min(k + AHEAD, len(order) - 1)]])
            values = grad[token]
            if threshold > 0:
                draw_bits(words, seed, token)
                for i in range(width):
                    part[i] += widen(values[i]) * (one if np.int32(bits[i]) >= least else zero)
            else:
                for i in range(width):
                    part[i] += widen(values[i])
            if (k + 1 - offsets[segment]) % APART == 0:
                for i in range(width):
                    total[i] += part[i]
                    part[i] = zero
        for i in range(width):
            total[i] += part[i]
        to = out[places[segment]]
        for i in range(width):
            to[i] = narrow(factor_of * total[i], to[0])


input_launches = partial(imported_launches, "embedlayer.kernels.gpu.input")

INPUT_EMBEDDING = Operation(
    "look-up, scale, position vectors and dropout of the input",
    plain_scale_add_drop,
    cpu=[gather_scale_add_drop],
    gpu=input_launches,
    launches=["gather_scale_add_drop"],
)


def look_up_applies(*tensors: Tensor | None) -> bool:
    """Return whether the Triton kernel reads these tensors: on one CUDA device, contiguous, in eager mode."""
    on_cuda = fusible(*tensors) and any(x is not None and device_kind(x) == "cuda" for x in tensors)
    return on_cuda and INPUT_EMBEDDING.applies(*tensors) and all(x is None or x.is_contiguous() for x in tensors)


def rows_on_cuda(ids: Tensor, weight: Tensor, check: IndexCheck, padding_idx: int | None = None) -> StoredRows | None:
    """Return the look-up `weight[ids + check.offset]` that a kernel checks on CUDA; `None` where none applies."""
    applies = look_up_applies(weight) and INPUT_EMBEDDING.applies(ids, weight)
    return StoredRows(ids, weight, check, padding_idx) if applies else None


def scale_applies(scale: float | Tensor | None, *tensors: Tensor | None) -> bool:
    """Return whether the kernel takes these tensors and `scale`: a number, or one in a tensor without gradient."""
    factor = scale if isinstance(scale, Tensor) else None
    return not (factor is not None and factor.requires_grad) and look_up_applies(factor, *tensors)


@INPUT_EMBEDDING.operator(mutates=("record", "places_record"))
def embed_tokens(
    x: Tensor,
    ids: Tensor | None,
    record: Tensor | None,
    rows: int,
    offset: int,
    ignored: int,
    factor: Tensor | None,
    scale: float,
    addend: Tensor | None,
    places: Tensor | None,
    places_record: Tensor | None,
    places_offset: int,
    seed: int,
    threshold: int,
    growth: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `dropout(factor * scale * x[ids + offset] + addend)` on CUDA.

    All tensors are contiguous, and indices int64.

    - `x`: rows, `(R, D)`; without `ids` one for each token, `(..., D)`.
    - `ids`: token IDs or positions, `(...)`, or `None`. A row outside `0 .. rows - 1` gives zeros and is recorded.
    - `record`: `IndexCheck.first_bad_index` of the IDs; `None` without them.
    - `ignored`: what is returned in place of a row that is outside.
    - `factor`: factor on rows, one number, or `None` for 1.
    - `addend`: rows that are added, `(..., D)`, or `None`. Token n gets the row n modulo their number, or with `places`
      `places[n] + places_offset`, n modulo the number of places; one outside is treated as a row of `x`.
    - `threshold`: see `Dropout`, as for `seed` and `growth`; 0 for no dropout.

    Returns:
        Vectors, `(..., D)`. And what a backward pass needs: rows of `x` `(N,)` and of the addend `(P,)`, int64, with
        `ignored` and -1 for those outside; empty without `ids` and `places`.
    """
    width = x.shape[-1]
    out = x.new_empty(x.shape if ids is None else (*ids.shape, width))
    kept_ids, kept_places = (
        x.new_empty(0 if each is None else each.numel(), dtype=torch.int64) for each in (ids, places)
    )
    tensors = {"x": x, "ids": ids, "record": record, "kept_ids": None if ids is None else kept_ids, "factor": factor}
    tensors |= {"addend": addend, "places": places, "places_record": places_record, "out": out}
    tensors["kept_places"] = None if places is None else kept_places
    sizes = {"tokens": out.numel() // width, "rows": rows, "offset": offset, "ignored": ignored, **columns_of(x)}
    sizes |= {"length": 1 if ids is None else length_of(ids), "places_offset": places_offset}
    sizes |= {"addends": 1 if addend is None else addend.numel() // width}
    sizes |= {"places_count": 1, "places_length": 1}
    if places is not None:
        sizes |= {"places_count": places.numel(), "places_length": length_of(places)}
    mask = {"seed": seed, "threshold": threshold} if threshold else {"seed": None, "threshold": None}
    launch(input_launches(), "gather_scale_add_drop", **tensors, **sizes, **mask, scale=scale, growth=growth)
    return out, kept_ids, kept_places


def gather_rows(
    source: Tensor | StoredRows,
    *,
    scale: float | Tensor | None = None,
    addend: Tensor | StoredRows | None = None,
    dropout: Dropout = NO_DROPOUT,
) -> Tensor:
    """Compute `dropout(scale * source + addend)` on CUDA in one launch; bad IDs are recorded and give zeros.

    `look_up_applies` is true for the tensors. The gradient of a weight is dense.

    - `source`: vectors, `(..., D)`, or their look-up, with a check.
    - `addend`: vectors to add, `(T, D)` for all sequences or one for each token; or their look-up, with positions of
      these shapes; or `None`. They have the dtype of `source`.

    Raises:
        ShapeError: IDs or positions are not int32 or int64.
    """
    stored, added = (each if isinstance(each, StoredRows) else None for each in (source, addend))
    vectors: Tensor = _GatherRows.apply(  # type: ignore[no-untyped-call]
        source.weight if isinstance(source, StoredRows) else source,
        addend.weight if isinstance(addend, StoredRows) else addend,
        scale if isinstance(scale, Tensor) else None,
        1.0 if scale is None or isinstance(scale, Tensor) else scale,
        stored,
        added,
        dropout,
    )
    return vectors


class _GatherRows(torch.autograd.Function):
    """Compute `dropout(factor * scale * x[ids] + addend)`; see `gather_rows`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        factor: Tensor | None,
        scale: float,
        stored: StoredRows | None,
        added: StoredRows | None,
        dropout: Dropout,
    ) -> Tensor:
        ids, record = _checked_by_kernel(stored)
        places, places_record = _checked_by_kernel(added)
        ctx.ignored = -1 if stored is None or stored.padding_idx is None else stored.padding_idx
        out, kept_ids, kept_places = embed_tokens(
            *(x.detach(), ids, *record, ctx.ignored, factor, scale, None if addend is None else addend.detach()),
            *(places, places_record[0], places_record[2], *dropout),
        )
        ctx.save_for_backward(None if ids is None else kept_ids, None if places is None else kept_places, factor)
        ctx.scale, ctx.dropout = scale, dropout
        ctx.shape, ctx.addend_shape = x.shape, None if addend is None else addend.shape
        vectors: Tensor = out
        return vectors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, places, factor = ctx.saved_tensors
        by_vector = by_x = by_addend = None
        if ctx.needs_input_grad[0]:
            by_x = by_vector = _masked(grad, ctx.dropout, ctx.scale, factor)
            if ids is not None:
                by_x = _gradient_of_rows(by_vector, ids, ctx.shape, ctx.ignored)
        if ctx.needs_input_grad[1]:
            is_scaled = ctx.scale != 1 or factor is not None
            grown = _masked(grad, ctx.dropout) if by_vector is None or is_scaled else by_vector
            shape = ctx.addend_shape
            vectors = math.prod(shape[:-1]) if places is None else len(places)
            sums = grown.reshape(grad.shape[:-1].numel() // max(1, vectors), vectors, shape[-1])
            sums = sums[0] if len(sums) == 1 else sums.sum(0)
            by_addend = sums.view(shape) if places is None else _gradient_of_rows(sums, places, shape, -1)
        return by_x, by_addend, None, None, None, None, None


def _checked_by_kernel(stored: StoredRows | None) -> tuple[Tensor | None, tuple[Tensor | None, int, int]]:
    """Return the indices of a look-up as the kernel reads them, and the record, rows and offset of their check."""
    if stored is None:
        return None, (None, 0, 0)
    stored.check.require_integers(stored.ids)
    ids = stored.ids.long().contiguous()
    return ids, (stored.check.record_on(ids.device), stored.check.size + stored.check.offset, stored.check.offset)


def _masked(grad: Tensor, dropout: Dropout, scale: float = 1.0, factor: Tensor | None = None) -> Tensor:
    """Return `grad` times the dropout mask, the factor of kept elements and two more; differentiable where needed."""
    if not dropout.threshold:
        grad = grad if scale == 1 else grad * scale
        return grad if factor is None else grad * factor
    if not torch.is_grad_enabled() and look_up_applies(contiguous := grad.contiguous(), factor):
        masked: Tensor = embed_tokens(contiguous, None, None, 0, 0, 0, factor, scale, None, None, None, 0, *dropout)[0]
        return masked
    mask = dropout.mask(0, grad.shape[:-1].numel(), grad.new_empty((0, grad.shape[-1]))).view(grad.shape)
    return _masked(grad * (mask * dropout.growth), NO_DROPOUT, scale, factor)


def _gradient_of_rows(grad: Tensor, ids: Tensor, shape: tuple[int, ...], ignored: int) -> Tensor:
    """Return the dense gradient of looked-up rows, `(R, D)`: the sums of the gradients of equal IDs."""
    if ignored < 0 and torch.is_grad_enabled():  # torch's second derivative reads the row of each ID
        grad, ids = grad.masked_fill((ids < 0).view(*grad.shape[:-1], 1), 0), ids.clamp(min=0)
    by_row: Tensor = torch.ops.aten.embedding_dense_backward(
        grad.reshape(-1, grad.shape[-1]), ids, shape[0], ignored, False
    )
    return by_row
