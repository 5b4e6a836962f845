"""Operators over blocks of logits: totals of softmaxes, and gradients by the logits, each in one pass over a block.

`embedlayer.losses.objective.Objective.terms` and `dlogits_` are the definitions, in plain operators. An operator runs a
numba kernel for tensors on the CPU, and Triton kernels for those on CUDA; `STATISTICS.applies` says whether it can.

A block is `(R, C)`: R rows of the vocabulary by C tokens, vocabulary first. Its totals have parts of its rows in front,
`(P, ...)`. On CUDA a second kernel merges them: P is 1. Totals of all rows, each `(C,)`, are the maximum `top`, the sum
of exponentials `sums` and its log `log_sum`.

`z` are logits as stored. `bias` is what the logits of each row do not contain yet, `(R,)`, or `None`; `first_id` is the
ID of the first row; `ids`, `rows` and `places` are `Requests`; `finishing` is a `Finishing`, on CUDA only. An operator
returns `None`, or `False`, if the CPU kernel could not be compiled.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.kernels.cpu import softmax
from embedlayer.kernels.gpu.launch import imported_launches, launch
from embedlayer.kernels.kernel import EMPTY, Array, as_array
from embedlayer.kernels.operation import Operation

softmax_launches = partial(imported_launches, "embedlayer.kernels.gpu.softmax")

STATISTICS = Operation(
    "statistics of the logits of a block: maximum, logsumexp, mean, squares, requested logits",
    "losses.statistics:LogitStatistics.terms",
    cpu=[softmax.statistics],
    gpu=softmax_launches,
    launches=["statistics", "merge"],
)
FACTORS = Operation(
    "factors of the gradient of the statistics",
    "losses.statistics:LogitStatistics.dlogits_",
    gpu=softmax_launches,
    launches=["statistics_factors"],
)
STATISTICS_GRADIENT = Operation(
    "gradient of the statistics of the logits",
    "losses.statistics:LogitStatistics.dlogits_",
    cpu=[softmax.statistics_gradient],
    gpu=softmax_launches,
    launches=["statistics_gradient", "requested_gradient"],
)
BFLOAT16_SUMS = Operation(
    "float32 sums over chunks of bfloat16 products", "losses.blocks:add_bfloat16_", cpu=[softmax.add_bfloat16]
)
CROSS_ENTROPY = Operation(
    "losses of tokens by the statistics, and their gradients",
    "losses.statistics:CrossEntropy.of",
    gpu=softmax_launches,
    launches=["cross_entropy"],
)
CHECK_TARGETS = Operation(
    "targets that are ignored, and those that are no tokens",
    "losses.targets:checked_ids",
    gpu=softmax_launches,
    launches=["check_targets"],
)

PART = 256  # rows whose totals are summed on their own: rounding errors grow with the number of terms of a sum
BLOCK_NUMEL = 1 << 17  # logits that a thread of a CPU claims at once


class Finishing(NamedTuple):
    """Say what the Triton kernels do to stored logits as they read them, besides adding the bias."""

    scale: float = 1.0
    softcap: float | None = None
    bound: float | None = None
    masked: int | None = None


class Requests(NamedTuple):
    """Say which logits are requested of each token.

    Attributes:
        ids: Token IDs, which are rows of the vocabulary, `(K, C)`; `None` for none. Of several tensors of IDs it is the
            concatenation on CUDA, and on the CPU the first.
        rows: On the CPU, all IDs sorted, `(M,)`.
        places: Place of each of `rows` in the flattened IDs, those of several one after another; modulo C it is the
            token.
    """

    ids: Tensor | None
    rows: Tensor | None = None
    places: Tensor | None = None

    @classmethod
    def of(cls, ids: list[Tensor]) -> "Requests":
        """Return the requests of some IDs, each `(K, C)`."""
        if not ids:
            return cls(None)
        if device_kind(ids[0]) == "cuda":
            return cls(concatenated(ids))
        return cls(ids[0], *torch.cat([each.flatten() for each in ids]).sort(stable=True))


OF_BLOCK = "Tensor? bias, Tensor? ids, Tensor? rows, Tensor? places, SymInt first_id"
FINISHING = "float scale, float? softcap, float? bound, SymInt? masked"


@STATISTICS.operator(
    f"(Tensor z, {OF_BLOCK}, bool with_sum, bool with_mean, bool with_squares, bool with_keys, {FINISHING}) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
def softmax_statistics(
    z: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    rows: Tensor | None,
    places: Tensor | None,
    first_id: int,
    with_sum: bool,
    with_mean: bool,
    with_squares: bool,
    with_keys: bool,
    *finishing: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Compute statistics of the logits of a block, and read requested logits.

    - `with_keys`: whether to return what `embedlayer.kernels.largest.update_largest` needs on CUDA.

    Returns:
        `(P, 6, C)`: maximum, log of the sum of exponentials, that sum, sum of logits, mean of logits minus maximum
        under the softmax, log of the sum of squared exponentials; the last three are valid only where requested. And
        the requested logits `(K, C)`, 0 where the ID is no row of the block. And the keys of the largest logits of
        groups of rows, `(groups, C)`, and of the parts that the first kernel read, `(C, parts)`, on CUDA with
        `with_keys`, else empty; see `embedlayer.kernels.gpu.largest`.
    """
    if device_kind(z) != "cuda":
        return None
    size, tokens = z.shape
    dtype = wide_dtype(z.dtype)
    selected = torch.empty((0, tokens) if ids is None else ids.shape, dtype=dtype, device=z.device)
    flags = {"SUM": with_sum, "MEAN": with_mean, "SQUARES": with_squares}
    block = launched_block(z, bias, finishing)
    name = "statistics_and_keys" if with_keys else "statistics"
    blocks = softmax_launches()[name].blocks
    parts = -(-size // blocks["PART"])
    keys = (
        z.new_empty(parts * blocks["ROWS"] * with_keys, tokens, dtype=torch.long),
        z.new_empty(tokens, parts * with_keys, dtype=torch.long),
    )
    of_groups = dict(zip(("lane_keys", "part_keys"), keys if with_keys else (None, None), strict=True))
    found = z.new_empty(parts, 2 + sum(flags.values()), tokens, dtype=dtype)
    totals = z.new_empty(1, 6, tokens, dtype=dtype)
    launch(softmax_launches(), name, found=found, parts=parts, **of_groups, **block, **flags)
    requests = 0 if ids is None else len(ids)
    of_ids = {"ids": ids, "selected": selected, "requests": requests, "first_id": first_id}
    launch(softmax_launches(), "merge", found=found, totals=totals, parts=parts, **of_ids, **block, **flags)
    return totals, selected, *keys


BlockStatistics = Callable[[Array, Tensor | None, int], tuple[Tensor, Tensor] | None]
"""Function from the logits of a block, the bias that they lack and the ID of the first row to statistics of its parts,
`(P, 6, C)`, and requested logits, `(K, C)`, as `softmax_statistics` returns them."""


def statistics_on_cpu(requests: Requests, z: Tensor, *, extended: bool) -> BlockStatistics:
    """Return the kernel for the blocks of a chunk, with as many tokens and of the dtype of `z`."""
    tokens, dtype = z.shape[1], np.float64 if z.dtype == torch.float64 else np.float32
    rows, places = (EMPTY[torch.long] if each is None else as_array(each) for each in requests[1:])
    shape, empty = (0, tokens) if requests.ids is None else requests.ids.shape, EMPTY[wide_dtype(z.dtype)]
    claimed = max(1, BLOCK_NUMEL // (PART * max(tokens, 1)))

    def statistics(z: Array, bias: Tensor | None, first_id: int) -> tuple[Tensor, Tensor] | None:
        found, selected = np.empty((-(-z.shape[0] // PART), 6, tokens), dtype), np.zeros(shape, dtype)
        inputs = z, empty if bias is None else bias, first_id, rows, places, selected.reshape(-1)
        if not softmax.statistics.run(len(found), PART, *inputs, found, extended, block=claimed):
            return None
        return torch.from_numpy(found), torch.from_numpy(selected)

    return statistics


def gradient_on_cpu(
    requests: Requests, by_request: Tensor | None, factors: Tensor
) -> Callable[[Array, Tensor | None, int, Tensor | None], bool]:
    """Return the kernel that does what `softmax_gradient` does to the blocks of a chunk on a CPU.

    Its arguments are the logits of a block, their bias, the ID of the first row, and the gradient of the bias.
    """
    tokens = factors.shape[1]
    rows, places = (EMPTY[torch.long] if each is None else as_array(each) for each in requests[1:])
    of_tokens = as_array(factors)
    of_requests = EMPTY[factors.dtype] if by_request is None else as_array(by_request)
    empty, claimed = EMPTY[factors.dtype], max(1, BLOCK_NUMEL // max(tokens, 1))

    def gradient(z: Array, bias: Tensor | None, first_id: int, bias_grad: Tensor | None) -> bool:
        of_block = z, empty if bias is None else bias, first_id
        sums = empty if bias_grad is None else bias_grad
        return softmax.statistics_gradient.run(
            len(z), *of_block, rows, places, of_requests, of_tokens, sums, block=claimed
        )

    return gradient


@FACTORS.operator()
def softmax_factors(
    top: Tensor,
    sums: Tensor,
    mean: Tensor | None,
    log_squares: Tensor | None,
    by_log_sum: Tensor | None,
    by_mean: Tensor | None,
    by_squares: Tensor | None,
    by_sum: Tensor | None,
) -> Tensor:
    """Compute the factors of `softmax_gradient`, `(6, C)`, from totals of all rows and their gradients, each `(C,)`.

    They are `top`, or 0 where it is -inf or NaN, and f₀ to f₄. A gradient that is `None` counts as 0; `mean` is needed
    with `by_mean` only, and `log_squares` with `by_squares`.
    """
    if device_kind(top) == "cuda":
        names = ("top", "sums", "mean", "log_squares", "by_log_sum", "by_mean", "by_squares", "by_sum")
        given = (top, sums, mean, log_squares, by_log_sum, by_mean, by_squares, by_sum)
        factors = top.new_empty(6, len(top))
        inputs = {name: None if x is None else x.contiguous() for name, x in zip(names, given, strict=True)}
        if by_mean is None:
            inputs["mean"] = None
        if by_squares is None:
            inputs["log_squares"] = None
        launch(softmax_launches(), "statistics_factors", **inputs, factors=factors, tokens=len(top))
        return factors
    zeros = torch.zeros_like(top)
    share = 1 / sums
    slope = zeros if by_mean is None else by_mean
    offset, squares = zeros if by_log_sum is None else by_log_sum, zeros
    if by_mean is not None and mean is not None:
        offset = offset + slope * (1 - mean)
    if by_squares is not None and log_squares is not None:
        squares = 2 * by_squares * (-log_squares).exp()
    level = top.where(top > -torch.inf, 0.0)
    return torch.stack([level, share, offset, slope, squares, zeros if by_sum is None else by_sum])


@STATISTICS_GRADIENT.operator(
    f"(Tensor(a!) z, {OF_BLOCK}, Tensor? by_request, Tensor? values, Tensor factors, Tensor(b!)? bias_grad, "
    f"bool add, bool with_mean, bool with_squares, {FINISHING}) -> ()",
    mutates=("z", "bias_grad"),
)
def softmax_gradient(
    z: Tensor,
    bias: Tensor | None,
    ids: Tensor | None,
    rows: Tensor | None,
    places: Tensor | None,
    first_id: int,
    by_request: Tensor | None,
    values: Tensor | None,
    factors: Tensor,
    bias_grad: Tensor | None,
    add: bool,
    with_mean: bool,
    with_squares: bool,
    *finishing: float | None,
) -> bool:
    """Replace the logits of a block by gradients on CUDA; elsewhere return `False`.

    They are `e f₀ (f₁ + f₂ x) + e² f₃ + f₄` for `x = z - top` and `e = exp(x)`, plus the gradients of requests. Here z
    is a logit with its bias. On CUDA it is the finished logit, and the result is multiplied by the derivative of the
    finishing.

    - `by_request`: gradient of each request, in the order of `rows` on the CPU, else `(K, C)`.
    - `values`: on CUDA the requested logits, `(K, C)`.
    - `factors`: result of `softmax_factors`.
    - `bias_grad`: gradients of the bias, to which the sum of each row is added, `(R,)`; or `None`.
    - `add`: on CUDA, whether it is added; otherwise `bias_grad` is overwritten.
    - `with_mean`: whether any f₂ is not 0.
    - `with_squares`: whether any f₃ is not 0.
    """
    if device_kind(z) != "cuda":
        return False
    size, tokens = z.shape
    block, flags = launched_block(z, bias, finishing), {"MEAN": with_mean, "SQUARES": with_squares}
    of_ids = {"ids": ids, "by_request": by_request, "first_id": first_id}
    requests = 0 if ids is None else len(ids)
    in_kernel = of_ids if requests == 1 else {"ids": None, "by_request": None, "first_id": first_id}
    row_sums, of_requests = None, None
    if bias_grad is not None:
        tiles = -(-tokens // softmax_launches()["statistics_gradient"].blocks["TOKENS"])
        row_sums = factors.new_empty(tiles, size)
    launch(softmax_launches(), "statistics_gradient", **block, **in_kernel, factors=factors, row_sums=row_sums, **flags)
    if ids is not None and requests > 1:
        of_requests = None if bias_grad is None else factors.new_empty(ids.shape)
        of_ids |= {"values": values, "requests": requests, "tokens": tokens, "of_bias": of_requests}
        block = {name: x for name, x in block.items() if name not in ("bias", "units", "UNIT")}
        launch(softmax_launches(), "requested_gradient", **block, **of_ids, factors=factors, **flags)
    if bias_grad is not None and row_sums is not None:
        store_row_sums(bias_grad, row_sums, add=add)
        if ids is not None and of_requests is not None:
            bias_grad.index_put_(((ids - first_id).clamp(0, size - 1),), of_requests, accumulate=True)
    return True


@CROSS_ENTROPY.operator()
def cross_entropy_of_totals(
    ids: Tensor,
    top: Tensor,
    log_sum: Tensor,
    sums: Tensor,
    selected: Tensor,
    logit_sum: Tensor | None,
    weights: Tensor,
    results: int,
    vocab_size: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Compute each token's loss and what its gradient needs from its totals; `None` elsewhere than on CUDA.

    `embedlayer.losses.statistics.CrossEntropy` defines both. The loss of a target outside the vocabulary is NaN,
    or 0 if it is -1, and its gradients are 0.

    - `ids`: targets, `(1, C)`.
    - `selected`: logits of the targets, `(1, C)`.
    - `logit_sum`: sum of logits, with label smoothing.
    - `weights`: factor of each loss, `(C,)`.
    - `results`: how many tokens are summed; the others are padding.

    Returns:
        Losses `(C,)`, the gradient by `selected` `(1, C)`, the result of `softmax_factors` `(6, C)`, and the sum of the
        losses times `weights`, `()`.
    """
    if device_kind(top) != "cuda":
        return None
    inputs = {"ids": ids, "top": top, "log_sum": log_sum, "sums": sums, "selected": selected, "weights": weights}
    outputs = {"losses": torch.empty_like(top), "by_selected": torch.empty_like(selected)}
    outputs |= {"factors": top.new_empty(6, len(top)), "total": top.new_empty(())}
    launch(
        softmax_launches(),
        "cross_entropy",
        **{name: x.contiguous() for name, x in inputs.items()},
        **outputs,
        logit_sum=None if logit_sum is None else logit_sum.contiguous(),
        tokens=len(top),
        results=results,
        vocab_size=vocab_size,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return outputs["losses"], outputs["by_selected"], outputs["factors"], outputs["total"]


@CHECK_TARGETS.operator(mutates=("record",))
def check_targets(
    targets: Tensor,
    weights: Tensor | None,
    record: Tensor,
    vocab_size: int,
    ignore_index: int,
    other: int | None,
    mean: bool,
    read: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """Find the targets that are ignored, and those that are no tokens; elsewhere than on CUDA return `None`.

    - `targets`: token IDs or `ignore_index`, int64, contiguous.
    - `weights`: weight of each loss, in the shape of the targets, by which its factor is multiplied; `None` for 1.
    - `record`: `embedlayer.core.index_checks.target_record`. Without `read`, the first bad target is written to it if
      it is empty.
    - `other`: what is returned in place of targets that do not count; `None`, only without `read`, for V where they are
      bad and -1 where they are ignored, as `cross_entropy_of_totals` takes them.
    - `read`: whether the host reads the numbers at once and so finds bad targets. These count then, and are returned as
      they are.

    Returns:
        The targets that count, with `other` in place of the others; a mask of those that count; without `read`, a mask
        of those that are no tokens, or of all that do not count if `other` is `None`; and the factor of each loss,
        float32, 0 where the target does not count; all in the shape of the targets. And numbers for the host: those of
        the record, how many targets are no tokens, with weights how many that are not ignored have one that is not
        finite, and how many do not count. And whether no target counts, a mask `()`.
    """
    if device_kind(targets) != "cuda":
        return None
    ids, (mask, is_bad) = torch.empty_like(targets), (torch.empty_like(targets, dtype=torch.bool) for _ in range(2))
    factors, numbers = (
        torch.empty_like(targets, dtype=torch.float32),
        record.new_empty(len(record) + (2 if weights is None else 3)),
    )
    sizes = {"tokens": targets.numel(), "length": targets.shape[-1] if targets.dim() else 1}
    sizes |= {"vocab_size": vocab_size, "ignore_index": ignore_index, "other": 0 if other is None else other}
    outputs = {"ids": ids, "mask": mask, "is_bad": None if read else is_bad, "factors": factors, "numbers": numbers}
    outputs["is_empty"] = is_empty = mask.new_empty(())
    if weights is not None:
        weights = weights.float().contiguous()
    inputs = {"targets": targets, "weights": weights, "record": record}
    constants = {"MEAN": mean, "CODED": other is None, "READ": read}
    launch(softmax_launches(), "check_targets", **inputs, **outputs, **sizes, **constants)
    return ids, mask, is_bad, factors, numbers, is_empty


def launched_block(z: Tensor, bias: Tensor | None, finishing: tuple[float | None, ...]) -> dict[str, Any]:
    """Return the arguments that all Triton kernels over a block share."""
    rows, tokens = z.shape
    unit = 8 if tokens % 8 == 0 else 1
    numbers = dict(zip(Finishing._fields, finishing, strict=True))
    return {"z": z, "bias": bias, "rows": rows, "units": tokens // unit, "UNIT": unit, **numbers}


def store_row_sums(bias_grad: Tensor, row_sums: Tensor, *, add: bool) -> None:
    """Add the sums of the rows of a block, in parts `(P, R)`, to the gradients of the bias, or overwrite these."""
    if add:
        bias_grad.add_(row_sums.sum(0))
    else:
        torch.sum(row_sums, 0, out=bias_grad)


def or_empty(x: Tensor | None, dtype: torch.dtype) -> Array:
    """Return `x`, or an array without numbers, which a CPU kernel takes for `None`."""
    return EMPTY[dtype] if x is None else x


def concatenated(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors; one that is contiguous is returned unchanged."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
