"""No hot path launches more kernels on a GPU, waits for it more often or allocates more memory than its ceiling."""

from functools import cache
from typing import Any

import pytest
from covering import LONG, some

from benchmarks.hot_paths import PASSES, PATHS, VOCAB_SIZE, WIDTH
from benchmarks.operator_counter import OperatorCounter
from embedlayer.kernels import kernels_disabled

pytest.importorskip("triton")

BY_NAME = {path.name: path for path in PATHS}
LOSSES = [path.name for path in PASSES if path.name.startswith("loss")]

LAUNCHES = {
    **{name: 12 * BY_NAME[name].chunks for name in LOSSES},
    "loss, plain": 22,
    "log-probabilities and entropies": 45,
    "64 largest logits": 1017,
    "forward KL": 1170,
    "Jensen-Shannon": 2176,
    "multi-token loss, two depths": 12 * BY_NAME["multi-token loss, two depths"].chunks,
    "look-up": 22,
    "GPT-2 input embedding, evaluation": 22,
    "GPT-2 input embedding, training": 31,
    "rotary": 10,
    "rotary, training": 24,
    "row-sparse step": 76,
    "look-up, int8": 42,
    "look-up, int4 in groups of 32": 48,
    "logits of one token, int8": 256,
    "logits of one token, int4 in groups of 32": 448,
    "patched transformers model without blocks": 111,
}
"""Launches of a call. A loss has 12 for each chunk of tokens; of the others, what there is today."""

WAITS = {
    **dict.fromkeys(BY_NAME, 0),
    **{path.name: 1 for path in PASSES},
    "loss, no target dropped": 0,
    "row-sparse step": 10,
    "patched transformers model without blocks": 2,
}
"""Waits of a call: a pass over the vocabulary counts the tokens and checks the IDs at once."""

BY_TORCH_OPERATORS = {
    "loss": 544,
    "loss, two chunks": 1064,
    "loss in 8 chunks": 2260,
    "loss, frozen rows": 531,
    "loss, soft cap": 878,
    "loss, bias": 631,
    "loss, label smoothing": 624,
    "loss, z_loss": 624,
    "loss of each token": 518,
    "loss, no target dropped": 569,
    "log-probabilities and entropies": 895,
    "64 largest logits": 1017,
    "forward KL": 1170,
    "Jensen-Shannon": 2176,
    "multi-token loss, two depths": 1069,
}
"""Launches of a pass where Triton is not installed; what there is today."""

WORK = 2**30
"""Bytes of the blocks of logits and the work space of a chunk whose logits are not kept until their gradients."""

KEPT = {
    **{name: BY_NAME[name].chunks for name in LOSSES if name != "loss of each token"},
    "multi-token loss, two depths": 2,
    "forward KL": 0.5,
    "Jensen-Shannon": 0.5,
}
"""Passes that with Triton keep the logits of a chunk until their gradients are computed, and chunks of all logits: half a
chunk if the teacher's logits are kept too."""


NOT_REACHED = {
    "loss, plain": "targets are checked by 30 small kernels",
    **dict.fromkeys(
        ["loss", "loss, two chunks", "loss, frozen rows", "loss, soft cap", "loss, bias", "loss, label smoothing"]
        + ["loss, z_loss", "loss, no target dropped", "multi-token loss, two depths"],
        "beside the chunks, the check of the targets and the reduction launch 22 small kernels",
    ),
}
"""Why paths launch more kernels than their ceiling."""


def paths() -> list[Any]:
    """Return the names of all paths; those that have not reached their ceiling are expected to fail."""
    marks = {name: [pytest.mark.xfail(reason=reason, strict=True)] for name, reason in NOT_REACHED.items()}
    return [pytest.param(name, marks=marks.get(name, [])) for name in BY_NAME]


@cache
def counted(name: str, *, triton: bool = True) -> OperatorCounter:
    if triton:
        return BY_NAME[name].count()
    with kernels_disabled():
        return BY_NAME[name].count()


@pytest.mark.parametrize("name", paths())
def test_a_hot_path_launches_no_more_kernels_than_its_ceiling(name) -> None:
    count = counted(name)
    assert len(count.launches) <= LAUNCHES[name], count.by_line().most_common(20)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_hot_path_waits_no_more_often_than_its_ceiling(name) -> None:
    count = counted(name)
    assert len(count.waits) <= WAITS[name], count.waits


@pytest.mark.parametrize("name", some(["loss", "loss of each token"], BY_TORCH_OPERATORS))
def test_a_pass_by_torch_operators_launches_and_waits_no_more_than_its_ceiling(name) -> None:
    count = counted(name, triton=False)
    assert len(count.launches) <= BY_TORCH_OPERATORS[name], count.by_line().most_common(20)
    assert len(count.waits) <= WAITS[name], count.waits


@pytest.mark.parametrize("triton", [True, pytest.param(False, marks=LONG)], ids=["Triton", "torch operators"])
@pytest.mark.parametrize("name", [path.name for path in PASSES])
def test_a_pass_allocates_gradients_and_one_chunk_of_logits(name, triton) -> None:
    tokens = BY_NAME[name].tokens
    sums = 4 * VOCAB_SIZE * WIDTH + 6 * tokens * WIDTH  # float32; those of hidden states once more in bfloat16
    totals = 2048 * tokens
    states = 4 * tokens * WIDTH if name.startswith("multi-token") else 0  # concatenated, and their gradients
    blocks = 2 * VOCAB_SIZE * tokens // KEPT[name] if triton and name in KEPT else WORK
    result = 2 * VOCAB_SIZE * WIDTH  # the gradient of rows in bfloat16, when the blocks are free again
    assert counted(name, triton=triton).memory.peak <= sums + totals + states + max(blocks, result)
