"""Blocks of more than 2^31 logits for tests of Triton kernels: their last programs compute with far addresses."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from interpreted import interpreted
from kernel_records import operation_of
from torch import Tensor

from embedlayer.kernels.gpu.launch import launch

ROWS, TOKENS, PART = 33_001, 65_544, 256
FIRST = (ROWS - 1) // PART * PART
assert FIRST * TOKENS > 2**31
"""Places of a block of this size are beyond 2^31 in all rows of its last part, from `FIRST` on."""


def far_blocks(folder: Path) -> list[Tensor]:
    """Return two blocks of logits in files with a hole, which take no memory."""
    files = [str(folder / name) for name in ("student", "teacher")]
    return [
        torch.from_file(file, shared=True, size=ROWS * TOKENS, dtype=torch.bfloat16).view(ROWS, TOKENS)
        for file in files
    ]


NUMBERS = {"scale": 0.5, "softcap": 20.0, "bound": 10.0, "masked": ROWS - 2}
FLAGS = {"MEAN": True, "SQUARES": True}
WITH_SUM = {"SUM": True, **FLAGS}
PARTS = -(-ROWS // PART)


OPERATION = {"softmax": operation_of("statistics"), "divergences": operation_of("divergence")}
"""An operation of each module."""


def tiles(module: str, name: str) -> int:
    """Return the number of programs of a kernel along the tokens."""
    return -(-TOKENS // OPERATION[module].gpu()[name].blocks["TOKENS"])


FAR: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "softmax.statistics": (
        lambda: {
            **NUMBERS, **WITH_SUM, "bias": torch.randn(ROWS), "found": torch.zeros(PARTS, 5, TOKENS),
            "lane_keys": None, "part_keys": None, "parts": PARTS,
        },
        ["found"],
    ),
    "softmax.merge": (
        lambda: {
            **NUMBERS, **WITH_SUM, "bias": torch.randn(ROWS), "found": torch.zeros(1, 5, TOKENS), "parts": 1,
            "ids": torch.randint(FIRST, ROWS, (2, TOKENS)), "requests": 2, "first_id": 0,
            "totals": torch.zeros(6, TOKENS), "selected": torch.zeros(2, TOKENS),
        },
        ["selected"],
    ),
    "softmax.statistics_gradient": (
        lambda: {
            **NUMBERS, **FLAGS, "bias": torch.randn(ROWS), "factors": torch.rand(6, TOKENS), "first_id": 0,
            "ids": torch.randint(FIRST, ROWS, (1, TOKENS)), "by_request": torch.rand(1, TOKENS),
            "row_sums": torch.zeros(tiles("softmax", "statistics_gradient"), ROWS),
        },
        ["z", "row_sums"],
    ),
    "softmax.requested_gradient": (
        lambda: {
            **NUMBERS, **FLAGS, "factors": torch.rand(6, TOKENS), "first_id": 0, "requests": 2,
            "ids": torch.randint(FIRST, ROWS, (2, TOKENS)), "by_request": torch.rand(2, TOKENS),
            "values": torch.rand(2, TOKENS), "of_bias": torch.zeros(2, TOKENS),
        },
        ["z", "of_bias"],
    ),
    "divergences.divergence": (
        lambda: {"s_bias": torch.randn(ROWS), "t_bias": None, "KIND": 1, "found": torch.zeros(PARTS, 5, TOKENS)},
        ["found"],
    ),
    "divergences.jensen_shannon": (
        lambda: {
            "s_bias": torch.randn(ROWS), "t_bias": None, "levels": torch.rand(4, TOKENS), "beta": 0.3,
            "found": torch.zeros(PARTS, 2, TOKENS),
        },
        ["found"],
    ),
    "divergences.divergence_gradient": (
        lambda: {
            "s_bias": torch.randn(ROWS), "t_bias": None, "factors": torch.rand(6, TOKENS), "beta": 0.3, "KIND": 0,
            "row_sums": torch.zeros(tiles("divergences", "divergence_gradient"), ROWS),
        },
        ["s", "row_sums"],
    ),
}  # fmt: skip
"""Kernels that read or write blocks: their arguments but for blocks and sizes, and the results that are compared."""


def with_sizes(arguments: dict[str, Any], kernel: Any, rows: int, tokens: int) -> dict[str, Any]:
    """Return the arguments with those of the sizes that the kernel has."""
    sizes = {"rows": rows, "units": tokens // 8, "UNIT": 8, "tokens": tokens}
    return {**arguments, **{name: size for name, size in sizes.items() if name in kernel.arg_names}}


def assert_places_beyond_2_to_31_are_those_of_a_small_block(label: str, blocks: list[Tensor]) -> None:
    """The last programs of a large block compute what those of a small one compute from the same numbers.

    Args:
        label: Key of `FAR`.
        blocks: Result of `far_blocks`; their last rows and tokens are overwritten.
    """
    module, name = label.split(".")
    entry = OPERATION[module].gpu()[name]
    arguments, results = FAR[label]
    left = (TOKENS - 1) // entry.blocks["TOKENS"] * entry.blocks["TOKENS"]
    firsts = {ROWS: FIRST, TOKENS: left, PARTS: PARTS - 1, tiles(module, name): -1}
    for each in blocks:
        each[FIRST:, left:].copy_(torch.randn(ROWS - FIRST, TOKENS - left))
    of_block = dict(zip(("z",) if module != "divergences" else ("s", "t"), blocks, strict=False))
    far = {**of_block, **arguments()}

    def near(x: Any) -> Any:
        """Return the part of a tensor that belongs to the last rows and tokens."""
        here = tuple(slice(firsts.get(size, 0), None) for size in x.shape)
        return x[here].contiguous().clone()

    small = {key: near(x) if isinstance(x, Tensor) else x for key, x in far.items()}
    small |= {"masked": ROWS - 2 - FIRST} if "masked" in far else {}
    small |= {"first_id": FIRST} if "first_id" in far else {}
    small |= {"parts": 1} if "parts" in far else {}
    with interpreted() as run:
        launch(OPERATION[module].gpu(), name, **with_sizes(small, entry.kernel, ROWS - FIRST, TOKENS - left))
        run.programs = lambda grid: [
            (grid[0] - 1, *others)
            for others in product(*(range(size)[-1 if size == PARTS else 0 :] for size in grid[1:]))
        ]
        launch(OPERATION[module].gpu(), name, **with_sizes(far, entry.kernel, ROWS, TOKENS))
    for result in results:
        ours, right = near(far[result]), small[result]
        assert ours.any()
        torch.testing.assert_close(ours, right, rtol=0, atol=0)
