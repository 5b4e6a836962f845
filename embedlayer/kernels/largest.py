"""An operator that finds the K largest logits of each token, exactly, from one block of rows after another.

`embedlayer.losses.largest.top_k` defines it, in plain operators. It runs a numba kernel for tensors on the CPU, and
Triton kernels for those on CUDA, where nothing waits for the device.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.torch_state import has_memory
from embedlayer.kernels.gpu.launch import launch
from embedlayer.kernels.kernel import Kernel, operator
from embedlayer.kernels.softmax import FINISHING, launched_block, or_empty

LARGEST = Kernel("softmax", "largest", has_triton=True)

LANES = 64
"""Tokens whose largest logits a thread of a CPU looks for at a time."""

NO_ID = 2**52
"""Token ID of no logit: larger than every token ID; a float64 can hold it."""

MISSING = -(2**63)
"""Key of no logit; see `embedlayer.kernels.gpu.largest`."""

GROUP = 16
"""Rows of a group on CUDA, and groups of a group of groups."""

KEY_BYTES = 128 * 2**20
"""Bytes of the keys of candidates on CUDA that are in memory at once."""


@operator(
    "(Tensor z, Tensor? bias, SymInt first_id, SymInt seen, Tensor(a!) thresholds, Tensor(b!) values, "
    f"Tensor(c!) ids, {FINISHING}) -> ()",
    mutates=("thresholds", "values", "ids"),
)
def update_largest(
    z: Tensor,
    bias: Tensor | None,
    first_id: int,
    seen: int,
    thresholds: Tensor,
    values: Tensor,
    ids: Tensor,
    *finishing: float | None,
) -> bool:
    """Update the K largest logits of each token with the rows of a block; return whether a kernel could be compiled.

    Args:
        z: Logits as stored, `(R, C)`.
        bias: Bias of each row that the logits do not contain yet, `(R,)`, or `None`.
        first_id: ID of the first row. IDs of later blocks are larger.
        seen: Number of rows of earlier blocks.
        thresholds: On the CPU, the smallest of the K logits, `(C,)`; -inf while there are fewer.
        values: The logits, largest first, `(C, K)`; of equal ones that with the lowest ID is first. NaN is largest.
        ids: Their IDs, `(C, K)`; -inf and `NO_ID` while there are fewer.
        *finishing: See `Finishing`; only on CUDA.
    """
    rows, tokens = z.shape
    if device_kind(z) == "cuda":
        step = max(1, KEY_BYTES // (8 * GROUP * min(values.shape[1], -(-rows // GROUP))))
        block = launched_block(z, bias, finishing)
        maxima, keys = _group_maxima(z, block)
        del block["rows"], block["units"], block["UNIT"]
        for start in range(0, tokens, step):
            here = slice(start, min(start + step, tokens))
            _update(block, first_id, seen, maxima, keys[here], values[here], ids[here], start)
        return True
    state = thresholds, values, ids
    inputs = z, or_empty(bias, thresholds.dtype), first_id, seen, *state
    return not has_memory(z) or LARGEST.run(-(-tokens // LANES), LANES, *inputs, block=1)


def _group_maxima(z: Tensor, block: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the maximum of each group of rows, `(groups, C)`, and the keys of groups of groups, `(C, parts)`.

    Args:
        z: Logits as stored.
        block: Result of `launched_block`.
    """
    rows, tokens = z.shape
    groups = -(-rows // GROUP)
    parts = -(-groups // GROUP)
    maxima = z.new_empty(groups, tokens, dtype=torch.int32)
    keys = z.new_empty(tokens, parts, dtype=torch.int64)
    launch("largest", "group_maxima", **block, maxima=maxima, keys=keys, parts=parts)
    return maxima, keys


def _update(
    block: dict[str, Any],
    first_id: int,
    seen: int,
    maxima: Tensor,
    keys: Tensor,
    values: Tensor,
    ids: Tensor,
    first_token: int,
) -> None:
    """Update the K largest logits of some tokens; arguments as in `update_largest` and `_group_maxima`."""
    z, finishing = block["z"], {name: x for name, x in block.items() if name != "z"}
    count = values.shape[1]
    sizes = {"first_token": first_token, "tokens": z.shape[1]}
    none = dict.fromkeys(finishing)
    chosen = _best(keys, count)
    members = {"chosen": chosen, "keys": _member_keys(chosen), "chosen_groups": chosen.shape[1]}
    size = {"size": len(maxima), "first_id": 0, "pairs": chosen.numel()}
    launch("largest", "group_keys", source=maxima, **none, **members, **size, **sizes, IS_ORDER=True)
    chosen = _best(members["keys"], min(count, len(maxima)))
    members = {"chosen": chosen, "keys": _member_keys(chosen), "chosen_groups": chosen.shape[1]}
    size = {"size": len(z), "first_id": first_id, "pairs": chosen.numel()}
    launch("largest", "member_keys", source=z, **finishing, **members, **size, **sizes, IS_ORDER=False)
    found = members["keys"]
    state = {"values": values, "ids": ids, "count": values.numel()}
    if seen:
        earlier = torch.empty_like(ids)
        launch("largest", "keys_of_logits", **state, keys=earlier)
        found = torch.cat([earlier, found], dim=1)
    missing = count - found.shape[1]
    found = F.pad(found, (0, missing), value=MISSING) if missing > 0 else found
    launch("largest", "logits_of_keys", keys=found.topk(count, dim=1).values, **state)


def _best(keys: Tensor, count: int) -> Tensor:
    """Return the `count` largest keys of each token, or all."""
    return keys.topk(count, dim=1).values if keys.shape[1] > count else keys.contiguous()


def _member_keys(chosen: Tensor) -> Tensor:
    """Allocate the keys of the members of groups."""
    return chosen.new_empty(len(chosen), chosen.shape[1] * GROUP)
