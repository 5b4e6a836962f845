"""No hot path launches more kernels on a GPU, waits for it more often or allocates more memory than its ceiling."""

from functools import cache

import pytest

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
    "multi-token loss, two depths": 1064,
}
"""Launches of a pass where Triton is not installed; what there is today."""

WORK = 2**30
"""Bytes of the blocks of logits and the work space of a chunk whose logits are not kept until their gradients."""

KEPT = {name for name in LOSSES if name != "loss of each token"} | {"multi-token loss, two depths"}
"""Passes that with Triton keep the logits of a chunk until their gradients are computed."""


@cache
def counted(name: str, *, triton: bool = True) -> OperatorCounter:
    if triton:
        return BY_NAME[name].count()
    with kernels_disabled():
        return BY_NAME[name].count()


@pytest.mark.parametrize("name", BY_NAME)
def test_a_hot_path_launches_no_more_kernels_than_its_ceiling(name) -> None:
    count = counted(name)
    assert len(count.launches) <= LAUNCHES[name], count.by_line().most_common(20)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_hot_path_waits_no_more_often_than_its_ceiling(name) -> None:
    count = counted(name)
    assert len(count.waits) <= WAITS[name], count.waits


@pytest.mark.parametrize("name", [path.name for path in PASSES])
def test_a_pass_by_torch_operators_launches_and_waits_no_more_than_its_ceiling(name) -> None:
    count = counted(name, triton=False)
    assert len(count.launches) <= BY_TORCH_OPERATORS[name], count.by_line().most_common(20)
    assert len(count.waits) <= WAITS[name], count.waits


@pytest.mark.parametrize("triton", [True, False], ids=["Triton", "torch operators"])
@pytest.mark.parametrize("name", [path.name for path in PASSES])
def test_blocks_of_logits_and_work_space_of_a_pass_take_a_gigabyte(name, triton) -> None:
    tokens, chunks = BY_NAME[name].tokens, BY_NAME[name].chunks
    gradients = 4 * VOCAB_SIZE * WIDTH + 6 * tokens * WIDTH  # float32 sums; those of hidden states also in bfloat16
    totals = 2048 * tokens
    logits = 2 * VOCAB_SIZE * tokens // chunks if triton and name in KEPT else WORK
    assert counted(name, triton=triton).memory.peak <= gradients + totals + logits
