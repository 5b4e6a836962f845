"""The self-test of `batch_invariant`: whether results of a token depend on the other tokens, on this machine.

A library of matrix products, and vector loops over tokens, compute the last tokens of a batch in another way than the
others, or a few tokens by other code than many. So a pass pads its chunks to a multiple of some number of tokens. Which
number suffices depends on the instructions of the CPU, the number of threads, the width and the format of the rows. At
the first use of each the test computes a chunk of tokens together and in parts, and compares all bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from embedlayer.core.errors import SizeError
from embedlayer.core.torch_state import count_dispatch_modes
from embedlayer.kernels.softmax import STATISTICS
from embedlayer.losses.chunk_size import INVARIANT_MULTIPLES, LEAST_ROWS, ROWS_OF_A_BLOCK
from embedlayer.losses.divergences import JensenShannon, divergence
from embedlayer.losses.linear import cross_entropy_of
from embedlayer.losses.logit_arguments import HasLogits, require_head
from embedlayer.losses.options import LossSettings
from embedlayer.losses.statistics import Statistic, token_statistics_of
from embedlayer.losses.uncomputed_logits import BlockLogits, LinearLogits, UncomputedLogits

PARTS = 1, 34, 93, 161, 223
"""Numbers of tokens that are computed together, out of all 512 in another order.

512 is the largest chunk of a pass (`MAX_CHUNK_TOKENS`). Libraries block products of few tokens in another way than
those of many: MKL those of 192 rows and more on Intel processors with AVX-512.
"""

Head = Callable[[Tensor], UncomputedLogits]
"""Function from hidden states `(N, D)` to their logits, a new object at each call."""


class BatchInvariance(NamedTuple):
    """Hold which results of tokens depend on the other tokens of a call.

    Attributes:
        multiple: Number of tokens to a multiple of which `batch_invariant` pads on this machine: the first for which
            nothing differs. `None` if there is none, and the option is refused.
        differing: For each tested multiple, the names of the results that differ; 1 is the pass without padding.
    """

    multiple: int | None
    differing: dict[int, tuple[str, ...]]


def check_batch_invariance(head: HasLogits, hidden: Tensor | None = None) -> BatchInvariance:
    """Test whether results of a head with `batch_invariant` depend on the other tokens of a call, on this machine.

    Some tokens are computed together and in parts, in another order, and all bits of the results are compared:
    statistics, losses, divergences, logits, and gradients of hidden states. The test covers the head's own rows, the
    present number of threads, and kernels on or off. It takes a second or more. `batch_invariant=True` runs the
    same test at its first use, and pads to the multiple for which nothing differs.

    Args:
        head: A head or a table on the CPU.
        hidden: Hidden states to test with, `(512, D)`, whose dtype and width the head takes; `None` for random ones.

    Returns:
        The multiple that is used, and what differs for this and others.

    Raises:
        SizeError: The head is not on the CPU, or its rows are sharded.

    Example:
        >>> report = check_batch_invariance(OutputHead(64, 1000))
        >>> report.differing[report.multiple]
        ()
    """
    require_head(head)
    if hidden is None:
        hidden = _random_states(*_inputs_of(head))

    def of_states(states: Tensor) -> UncomputedLogits:
        return _of_first_rows(head.uncomputed_logits(states, batch_invariant=True))

    differing = {multiple: _differing(of_states, hidden, multiple) for multiple in (1, *INVARIANT_MULTIPLES)}
    return BatchInvariance(next((m for m in INVARIANT_MULTIPLES if not differing[m]), None), differing)


_tested: dict[tuple[object, ...], int | tuple[str, ...]] = {}
"""The multiple of each kind of products that was tested, or what differs with the largest."""


def tested_multiple(logits: UncomputedLogits) -> int:
    """Return the first of `INVARIANT_MULTIPLES` for which nothing differs, after a test at the first use."""
    if count_dispatch_modes():  # whose tensors may have no numbers
        return INVARIANT_MULTIPLES[-1]
    width, dtype = logits.hidden.shape[-1], logits.hidden.dtype
    key = _kind(logits)
    if key not in _tested:
        part = _of_first_rows(logits)
        states = _random_states(width, dtype)
        for multiple in INVARIANT_MULTIPLES:
            differing = _differing(lambda x: part.replaced(x, part.options), states, multiple)
            _tested[key] = differing or multiple
            if not differing:
                break
    found = _tested[key]
    if isinstance(found, int):
        return found
    raise SizeError(
        f"batch_invariant=True is not possible here: {', '.join(found)} differ with the batch. Leave it out."
    )


def _kind(logits: UncomputedLogits) -> tuple[object, ...]:
    """Return what decides which multiple suffices: products, reductions, threads and kernels."""
    options = logits.options
    rows: tuple[object, ...]
    if isinstance(logits, LinearLogits):
        rows = (logits.weight.dtype,)
    else:
        assert isinstance(logits, BlockLogits)
        source = getattr(logits.raw_logits, "__self__", None)
        rows = (repr(source) if isinstance(source, nn.Module) else type(source), logits.rows_at_once)
    finishing = (options.softcap is None, options.bias is None, options.masked() is None, options.head_dtype)
    return (
        *(type(logits), rows, finishing, logits.hidden.shape[-1], _row_count(logits.vocab_size)),
        *(logits.hidden.dtype, logits.dtype, torch.get_num_threads(), STATISTICS.applies(logits.hidden)),
        torch.is_inference_mode_enabled(),
    )


def _row_count(vocab_size: int) -> int:
    """Return the number of rows of the test: those of a whole block of a pass, and of its last one."""
    size = ROWS_OF_A_BLOCK["cpu"]
    return min(vocab_size, size + (vocab_size - LEAST_ROWS) % size + LEAST_ROWS)


def _of_first_rows(logits: UncomputedLogits) -> UncomputedLogits:
    """Return the logits of the first rows alone, whose gradients reach the hidden states alone."""
    rows = _row_count(logits.vocab_size)
    bias = None if logits.options.bias is None else logits.options.bias.detach()
    part = logits.replaced(logits.hidden, logits.options._replace(bias=bias).of_rows(0, rows))
    part.vocab_size = rows
    if isinstance(part, LinearLogits):
        part.weight = part.weight.detach()[:rows]
    return part


def _random_states(width: int, dtype: torch.dtype) -> Tensor:
    """Return random hidden states, without a change of torch's random numbers."""
    return torch.randn(sum(PARTS), width, generator=torch.Generator().manual_seed(0)).to(dtype)


def _inputs_of(head: Any) -> tuple[int, torch.dtype]:
    """Return width and dtype of the hidden states that a head or table takes without conversion."""
    head = getattr(head, "head", head)  # that whose rows a draft head reads
    dense = getattr(head, "dense", None)  # the transform of a `PredictionHead`
    if dense is not None:
        return dense.in_features, dense.weight.dtype
    table = getattr(head, "table", None)
    rows = head.weight if hasattr(head, "tied") and table is None else (table or head).rows(0, 1)
    return head.embed_dim, rows.dtype


def _differing(head: Head, hidden: Tensor, multiple: int) -> tuple[str, ...]:
    """Return the names of the results that differ if tokens are computed in parts, padded to a multiple."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(hidden), generator=generator)
    ids = torch.randint(head(hidden[:1]).vocab_size, (len(hidden),), generator=generator)
    whole, differing = _results(head, hidden, ids, multiple), set()
    for part in order.split(PARTS):
        of_part = _results(head, hidden[part], ids[part], multiple)
        differing |= {name for name, value in of_part.items() if not torch.equal(value, whole[name][part])}
    return tuple(name for name in whole if name in differing)


def _results(head: Head, hidden: Tensor, ids: Tensor, multiple: int) -> dict[str, Tensor]:
    """Return the results of tokens by their names, with the tokens along the first dimension."""
    trained = not torch.is_inference_mode_enabled()
    own_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # not those of a checkpoint
    with torch.set_grad_enabled(trained), own_hooks:
        states = hidden.detach().clone().requires_grad_(trained)
        logits = head(states)
        logits.tested_multiple = multiple
        smoothing = 0.1 if logits.options.masked() is None else 0.0
        losses = [LossSettings(-100, smoothing, 1e-4, reduction) for reduction in ("none", "sum")]
        statistics = token_statistics_of(logits, ids, statistics=get_args(Statistic), top_k=min(4, logits.vocab_size))
        results = {name: value for name, value in statistics._asdict().items() if value is not None}
        results["losses"] = cross_entropy_of(logits, ids, losses[0])
        results["divergences"] = divergence(logits, logits.divided_by(2.0), JensenShannon(), reduction="none")
        results["logits"] = logits.logits()
        if trained:
            totals = [(value, value.detach().tanh()) for value in results.values() if value.requires_grad]
            for name, value, factor in (
                ("statistics", *zip(*totals[:-1], strict=True)),
                ("logits", *totals[-1]),
                ("the sum of losses", cross_entropy_of(logits, ids, losses[1]), None),
            ):
                results[f"hidden gradients of {name}"] = torch.autograd.grad(value, states, factor, retain_graph=True)[
                    0
                ]
    return results
