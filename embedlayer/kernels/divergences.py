"""Operators over blocks of logits of two heads: both softmaxes, divergences from their mixture, and gradients.

`embedlayer.losses.divergences` defines them, in plain operators. Like those of `embedlayer.kernels.softmax`, they
run a numba kernel for tensors on the CPU, and Triton kernels for those on CUDA. Blocks are `(R, C)`, and totals have
parts of the rows in front.

`s` and `t` are logits of student and teacher as stored. A bias is what the logits of each row do not contain yet,
`(R,)`, or `None`. `kind` is a `DivergenceKind`, and `beta` the weight of the teacher in the mixture m. An operator
returns `None`, or `False`, if the CPU kernel could not be compiled.
"""

from enum import IntEnum
from functools import partial

from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.shapes import wide_dtype
from embedlayer.core.torch_state import has_memory
from embedlayer.kernels.cpu import softmax
from embedlayer.kernels.gpu.launch import imported_launches, launch
from embedlayer.kernels.kernel import Array
from embedlayer.kernels.operation import Operation
from embedlayer.kernels.softmax import BLOCK_NUMEL, PART, or_empty, store_row_sums

divergence_launches = partial(imported_launches, "embedlayer.kernels.gpu.divergences")

DIVERGENCE = Operation(
    "forward and reverse KL of two blocks of logits",
    "losses.divergences:ForwardKL.terms",
    cpu=[softmax.divergence],
    gpu=divergence_launches,
    launches=["divergence", "merge"],
)
JENSEN_SHANNON = Operation(
    "Jensen-Shannon divergence",
    "losses.divergences:JensenShannon.terms",
    cpu=[softmax.jensen_shannon],
    gpu=divergence_launches,
    launches=["jensen_shannon"],
)
DIVERGENCE_GRADIENT = Operation(
    "gradient of a divergence by the student's logits",
    "losses.divergences:ForwardKL.dlogits_",
    cpu=[softmax.divergence_gradient],
    gpu=divergence_launches,
    launches=["divergence_gradient"],
)


class DivergenceKind(IntEnum):
    """Divergences by the number that kernels know them by."""

    JENSEN_SHANNON = 0
    FORWARD = 1
    REVERSE = 2


@DIVERGENCE.operator()
def pair_statistics(s: Tensor, t: Tensor, s_bias: Tensor | None, t_bias: Tensor | None, kind: int) -> Tensor | None:
    """Compute the softmaxes of two heads over the rows of a block, and the mean of a difference of logits.

    Returns:
        `(P, 7, C)`: maximum, log of the sum of exponentials, and that sum, of student and teacher; mean of t - s under
        the teacher's softmax for `FORWARD`, of s - t under the student's for `REVERSE`, no number for
        `JENSEN_SHANNON`.
    """
    rows, tokens = s.shape
    totals = s.new_empty(1 if device_kind(s) == "cuda" else -(-rows // PART), 7, tokens, dtype=wide_dtype(s.dtype))
    if device_kind(s) == "cuda":
        parts = -(-rows // divergence_launches()["divergence"].blocks["PART"])
        found = s.new_empty(parts, 5, tokens, dtype=wide_dtype(s.dtype))
        launch(divergence_launches(), "divergence", **_launched_block(s, t, s_bias, t_bias), found=found, KIND=kind)
        launch(divergence_launches(), "merge", found=found, totals=totals, parts=parts, tokens=tokens, KIND=kind)
        return totals
    pair = _pair(s, t, s_bias, t_bias)
    is_done = not has_memory(s) or softmax.divergence.run(len(totals), PART, *pair, totals, kind, block=_parts(tokens))
    return totals if is_done else None


@JENSEN_SHANNON.operator()
def mixture_divergences(
    s: Tensor, t: Tensor, s_bias: Tensor | None, t_bias: Tensor | None, levels: Tensor, beta: float
) -> Tensor | None:
    """Compute what the rows of a block add to the divergences of two softmaxes from their mixture.

    - `levels`: maximum, and log of the sum of exponentials, of student and teacher over all rows, `(4, C)`.

    Returns:
        `(P, 2, C)`: sum of q (log q - log m), and sum of p (log p - log m), for the softmaxes q of the student and p of
        the teacher.
    """
    rows, tokens = s.shape
    if device_kind(s) == "cuda":
        parts = -(-rows // divergence_launches()["jensen_shannon"].blocks["PART"])
        found = s.new_empty(parts, 2, tokens, dtype=levels.dtype)
        block = _launched_block(s, t, s_bias, t_bias)
        launch(divergence_launches(), "jensen_shannon", **block, levels=levels, found=found, beta=beta)
        return found.sum(0, keepdim=True)
    found = s.new_empty(-(-rows // PART), 2, tokens, dtype=levels.dtype)
    pair = _pair(s, t, s_bias, t_bias)
    is_done = not has_memory(s) or softmax.jensen_shannon.run(
        len(found), PART, *pair, levels, found, beta, block=_parts(tokens)
    )
    return found if is_done else None


@DIVERGENCE_GRADIENT.operator(mutates=("s", "bias_grad"))
def divergence_gradient(
    s: Tensor,
    t: Tensor,
    s_bias: Tensor | None,
    t_bias: Tensor | None,
    factors: Tensor,
    bias_grad: Tensor | None,
    add: bool,
    kind: int,
    beta: float,
) -> bool:
    """Replace the logits of the student by gradients, and return whether a kernel could be compiled.

    - `factors`: numbers of each token, `(6, C)`; see `embedlayer.kernels.cpu.softmax.divergence_gradient`.
    - `bias_grad`: gradients of the student's bias, to which the sum of each row is added, `(R,)`; or `None`.
    """
    rows, tokens = s.shape
    if device_kind(s) != "cuda":
        inputs = *_pair(s, t, s_bias, t_bias), factors, or_empty(bias_grad, factors.dtype), kind, beta
        claimed = max(1, BLOCK_NUMEL // max(tokens, 1))
        return not has_memory(s) or softmax.divergence_gradient.run(rows, *inputs, block=claimed)
    row_sums = None
    if bias_grad is not None:
        tiles = -(-tokens // divergence_launches()["divergence_gradient"].blocks["TOKENS"])
        row_sums = factors.new_empty(tiles, rows)
    block = _launched_block(s, t, s_bias, t_bias)
    launch(
        divergence_launches(), "divergence_gradient", **block, factors=factors, row_sums=row_sums, beta=beta, KIND=kind
    )
    if bias_grad is not None and row_sums is not None:
        store_row_sums(bias_grad, row_sums, add=add)
    return True


def _launched_block(s: Tensor, t: Tensor, s_bias: Tensor | None, t_bias: Tensor | None) -> dict[str, object]:
    """Return the arguments that all Triton kernels over a pair of blocks share."""
    rows, tokens = s.shape
    unit = 8 if tokens % 8 == 0 else 1
    sizes = {"rows": rows, "units": tokens // unit, "UNIT": unit}
    return {"s": s, "t": t, "s_bias": s_bias, "t_bias": t_bias, **sizes}


def _pair(s: Tensor, t: Tensor, s_bias: Tensor | None, t_bias: Tensor | None) -> tuple[Array, ...]:
    """Return the arguments that all CPU kernels over a pair of blocks share."""
    return s, t, or_empty(s_bias, wide_dtype(s.dtype)), or_empty(t_bias, wide_dtype(s.dtype))


def _parts(tokens: int) -> int:
    """Return how many parts, of `PART` rows each, a CPU thread claims at once of a block with `tokens` columns."""
    return max(1, BLOCK_NUMEL // (PART * max(tokens, 1)))
