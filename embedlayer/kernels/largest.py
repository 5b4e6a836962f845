"""An operator that finds the K largest logits of each token, exactly, from one block of rows after another.

`embedlayer.losses.largest.top_k` defines it, in plain operators. It runs a numba kernel for tensors on the CPU, and
Triton kernels for those on CUDA, where nothing waits for the device.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from embedlayer.core.devices import device_kind
from embedlayer.core.torch_state import has_memory
from embedlayer.kernels.cpu import softmax
from embedlayer.kernels.gpu.launch import imported_launches, launch
from embedlayer.kernels.operation import Operation
from embedlayer.kernels.softmax import FINISHING, launched_block, or_empty

largest_launches = partial(imported_launches, "embedlayer.kernels.gpu.largest")

LARGEST = Operation(
    "K largest logits, by keys that the statistics store",
    "losses.largest:top_k",
    cpu=[softmax.largest],
    gpu=largest_launches,
    launches=["statistics_and_keys", "keys_of_lanes", "member_keys", "logits_of_keys", "keys_of_logits"],
)

LANES = 64
"""Tokens whose largest logits a thread of a CPU looks for at a time."""

KEY_BYTES = 128 * 2**20
"""Bytes of the keys of candidates on CUDA that are in memory at once."""


@LARGEST.operator(
    "(Tensor z, Tensor? bias, SymInt first_id, SymInt seen, Tensor lane_keys, Tensor part_keys, Tensor(a!) thresholds, "
    f"Tensor(b!) values, Tensor(c!) ids, {FINISHING}) -> ()",
    mutates=("thresholds", "values", "ids"),
)
def update_largest(
    z: Tensor,
    bias: Tensor | None,
    first_id: int,
    seen: int,
    lane_keys: Tensor,
    part_keys: Tensor,
    thresholds: Tensor,
    values: Tensor,
    ids: Tensor,
    *finishing: float | None,
) -> bool:
    """Update the K largest logits of each token with the rows of a block; return whether a kernel could be compiled.

    - `seen`: number of rows of earlier blocks.
    - `lane_keys`: result of `softmax_statistics`; only on CUDA.
    - `thresholds`: on the CPU, the smallest of the K logits, `(C,)`; -inf while there are fewer.
    - `values`: the logits, largest first, `(C, K)`; of equal ones that with the lowest ID is first. NaN is largest.
      While there are fewer than K, the last are -inf.
    - `ids`: their IDs, `(C, K)`; `NO_ID` for the last while there are fewer.
    """
    tokens, count = values.shape
    if device_kind(z) == "cuda":
        blocks = largest_launches()["member_keys"].blocks
        members = blocks["PART"] // blocks["ROWS"]
        step = max(1, KEY_BYTES // (8 * members * min(count, len(lane_keys))))
        block = launched_block(z, bias, finishing)
        del block["units"], block["UNIT"]
        for start in range(0, tokens, step):
            here = slice(start, min(start + step, tokens))
            keys = lane_keys, part_keys[here]
            found = _candidates({**block, "first_token": start, "tokens": tokens}, first_id, keys, count)
            _merge(found, values[here], ids[here], seen)
        return True
    inputs = z, or_empty(bias, thresholds.dtype), first_id, seen, thresholds, values, ids
    return not has_memory(z) or softmax.largest.run(-(-tokens // LANES), LANES, *inputs, block=1)


def _candidates(block: dict[str, Any], first_id: int, keys: tuple[Tensor, Tensor], count: int) -> Tensor:
    """Return keys of the logits of some tokens, `(T, M)`, among which are the largest."""
    lane_keys, part_keys = keys
    blocks = largest_launches()["member_keys"].blocks
    parts = _best(part_keys, count)
    lanes = parts.new_empty(len(parts), parts.shape[1] * blocks["ROWS"])
    of_tokens = {name: block[name] for name in ("first_token", "tokens")}
    sizes = {"chosen_parts": parts.shape[1], "pairs": parts.numel()}
    launch(largest_launches(), "keys_of_lanes", lane_keys=lane_keys, chosen=parts, keys=lanes, **sizes, **of_tokens)
    groups = _best(lanes, count)
    members = groups.new_empty(len(groups), groups.shape[1] * (blocks["PART"] // blocks["ROWS"]))
    sizes = {"chosen_groups": groups.shape[1], "pairs": groups.numel()}
    launch(largest_launches(), "member_keys", **block, chosen=groups, keys=members, first_id=first_id, **sizes)
    return members


def _merge(found: Tensor, values: Tensor, ids: Tensor, seen: int) -> None:
    """Store the logits and IDs of the K largest keys among `found` and, if rows were `seen`, those stored already."""
    state = {"values": values, "ids": ids, "count": values.numel()}
    if seen:
        earlier = torch.empty_like(ids)
        launch(largest_launches(), "keys_of_logits", **state, keys=earlier)
        found = torch.cat([earlier, found], dim=1)
    missing = values.shape[1] - found.shape[1]
    found = F.pad(found, (0, missing), value=softmax.MISSING) if missing > 0 else found
    launch(largest_launches(), "logits_of_keys", keys=found.topk(values.shape[1], dim=1).values, **state)


def _best(keys: Tensor, count: int) -> Tensor:
    """Return the `count` largest keys of each token, or all if it has no more."""
    return keys.topk(count, dim=1).values if keys.shape[1] > count else keys.contiguous()
