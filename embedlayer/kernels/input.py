"""The input embedding on a CUDA device in one launch, forward: look-up, scale, added rows, dropout and index checks.

`embedlayer.inputs.fused.plain_scale_add_drop` is the definition. `embedlayer.inputs.fused` runs the kernels of the CPU.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.index_checks import length_of
from embedlayer.core.numbers import random_words
from embedlayer.core.torch_state import fusible, has_memory
from embedlayer.kernels.gpu.launch import launch
from embedlayer.kernels.index_check import INDEX_CHECK, IndexCheck
from embedlayer.kernels.kernel import operator


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


def look_up_applies(*tensors: Tensor | None) -> bool:
    """Return whether the Triton kernel reads these tensors: on one CUDA device, contiguous, in eager mode."""
    on_cuda = fusible(*tensors) and any(x is not None and device_kind(x) == "cuda" for x in tensors)
    return on_cuda and INDEX_CHECK.applies(*tensors) and all(x is None or x.is_contiguous() for x in tensors)


def rows_on_cuda(ids: Tensor, weight: Tensor, check: IndexCheck, padding_idx: int | None = None) -> StoredRows | None:
    """Return the look-up `weight[ids + check.offset]` that a kernel checks on CUDA; `None` where none applies."""
    applies = look_up_applies(weight) and INDEX_CHECK.applies(ids, weight)
    return StoredRows(ids, weight, check, padding_idx) if applies else None


def scale_applies(scale: float | Tensor | None, *tensors: Tensor | None) -> bool:
    """Return whether the kernel takes these tensors and `scale`: a number, or one in a tensor without gradient."""
    factor = scale if isinstance(scale, Tensor) else None
    return not (factor is not None and factor.requires_grad) and look_up_applies(factor, *tensors)


@operator(
    "(Tensor x, Tensor? ids, Tensor(a!)? record, SymInt rows, SymInt offset, SymInt ignored, Tensor? factor, "
    "float scale, Tensor? addend, Tensor? places, Tensor(b!)? places_record, SymInt places_offset, int seed, "
    "int threshold, float growth) -> (Tensor, Tensor, Tensor)",
    mutates=("record", "places_record"),
)
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
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute `dropout(factor * scale * x[ids + offset] + addend)`; elsewhere than on CUDA return `None`.

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
    if device_kind(x) != "cuda":
        return None
    width = x.shape[-1]
    out = x.new_empty(x.shape if ids is None else (*ids.shape, width))
    kept_ids, kept_places = (
        x.new_empty(0 if each is None else each.numel(), dtype=torch.int64) for each in (ids, places)
    )
    unit = 8 if width % 8 == 0 else 1
    launch(
        "input",
        "gather_scale_add_drop",
        x=x,
        ids=ids,
        record=record,
        kept_ids=None if ids is None else kept_ids,
        factor=factor,
        addend=addend,
        places=places,
        places_record=places_record,
        kept_places=None if places is None else kept_places,
        out=out,
        tokens=out.numel() // width,
        units=width // unit,
        rows=rows,
        offset=offset,
        length=1 if ids is None else length_of(ids),
        ignored=ignored,
        addends=1 if addend is None else addend.numel() // width,
        places_count=1 if places is None else places.numel(),
        places_offset=places_offset,
        places_length=1 if places is None else length_of(places),
        scale=scale,
        seed=seed if threshold else None,
        threshold=threshold or None,
        growth=growth,
        UNIT=unit,
    )
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


@operator("(Tensor mask, SymInt offset, SymInt padding_position) -> Tensor")
def positions_of_mask(mask: Tensor, offset: int, padding_position: int) -> Tensor | None:
    """Compute the positions of tokens in one launch, `(..., T)`, int64; elsewhere than on CUDA return `None`.

    `embedlayer.positions.position.positions_of` is the definition. The mask is contiguous.
    """
    if device_kind(mask) != "cuda":
        return None
    positions, sizes = torch.empty_like(mask, dtype=torch.int64), {"length": length_of(mask), "offset": offset}
    launch("input", "positions_of_mask", mask=mask, positions=positions, padding_position=padding_position, **sizes)
    return positions
