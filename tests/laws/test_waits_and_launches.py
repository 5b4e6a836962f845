"""No hot path launches more kernels on a GPU, waits for it more often or allocates more memory than its ceiling."""

from functools import cache

import pytest
from covering import LONG, looped, some

from benchmarks.hot_paths import BY_THE_HOST, PASSES, PATHS, VOCAB_SIZE, WIDTH
from benchmarks.operator_counter import OperatorCounter
from embedlayer.kernels import kernels_disabled

pytest.importorskip("triton")

BY_NAME = {path.name: path for path in [*PATHS, *BY_THE_HOST]}
OF_OTHER_ROWS = {"loss, int8", "loss, int4 in groups of 32", "logits of one token, 4 bits of MLX"}
"""Paths with the launches of others: of the loss of trained rows over a frozen table, and of a look-up."""
ALWAYS = [name for name in BY_NAME if name not in OF_OTHER_ROWS]
LOSSES = [path.name for path in PASSES if path.name.startswith("loss")]

LAUNCHES = {
    "loss, plain": 23,
    "loss, half of the targets ignored": 19,
    "loss, head in float32": 55,
    "loss, head and hidden states in float32": 105,
    "loss": 12,
    "loss, two chunks": 21,
    "loss in 8 chunks": 63,
    "loss, frozen rows": 30,
    "loss, soft cap": 12,
    "loss, bias": 14,
    "loss, label smoothing": 12,
    "loss, z_loss": 12,
    "loss, weights of tokens": 12,
    "loss of each token": 58,
    "loss, no target dropped": 12,
    "log-probabilities and entropies": 62,
    "64 largest logits": 108,
    "forward KL": 45,
    "Jensen-Shannon": 46,
    "multi-token loss, two depths": 45,
    "loss of nine streams": 190,
    "loss of nine streams of few tokens": 131,
    "sum of nine streams": 4,
    "look-up": 2,
    "GPT-2 input embedding, evaluation": 1,
    "GPT-2 input embedding, training": 5,
    "GPT-2 input embedding, forward": 1,
    "GPT-2 input embedding with a mask, training": 6,
    "GPT-2 input embedding with a mask, forward": 2,
    "rotary, angles": 1,
    "rotary": 1,
    "rotary, training": 2,
    "lengths of documents": 17,
    "row-sparse step": 9,
    "row-sparse step with clipping, Adagrad": 17,
    "look-up, int8": 1,
    "look-up, int4 in groups of 32": 1,
    "logits of one token, int8": 1,
    "logits of one token, int4 in groups of 32": 1,
    "look-up, 4 bits of MLX": 42,
    "logits of one token, 4 bits of MLX": 544,
    "look-up, sharded": 30,
    "loss, sharded": 186,
    "loss, sharded, equal loss factors": 188,
    "loss, int8": 2129,
    "loss, int4 in groups of 32": 2129,
    "look-up and loss of 1,000 trained rows over a frozen table": 1813,
    "look-up in a mapped file": 3,
    "patched transformers model without blocks": 64,
    "generate, prompt, two blocks": 104,
    "generate, a token, two blocks": 98,
}
"""Most launches of a call: what there are today."""

BY_TORCH_OPERATORS = {"loss": 522, "loss, two chunks": 1002, "loss of each token": 560, "forward KL": 1050}
"""Most launches of some passes where Triton is not installed: what there are today."""

WAITS = {
    **dict.fromkeys(BY_NAME, 0),
    **{name: 1 for name in BY_NAME if name.startswith("loss") or BY_NAME[name] in PASSES},
    "loss, plain": 0,
    "loss, no target dropped": 0,
    "look-up and loss of 1,000 trained rows over a frozen table": 1,
    "patched transformers model without blocks": 1,
    "look-up, sharded": 1,
    "loss, sharded": 2,
    "loss, sharded, equal loss factors": 1,
    "look-up in a mapped file": 1,
    "generate, prompt, two blocks": 1,
    "generate, a token, two blocks": 1,
    "lengths of documents": 1,
}
"""Most waits of a call: a loss reads how many targets are ignored; a mapped table needs the IDs on the CPU; `generate`
checks the prompt, and reads whether all texts have ended; attention over documents needs how many there are, once for
all blocks.

The backward pass of a sharded loss waits too, except with `equal_loss_factors`: only the device knows whether the ranks
multiply their losses by one number.
"""

WORK = 2**30
"""Bytes of the blocks of logits and the work space of a chunk whose logits are not kept until their gradients."""

KEPT = {
    **{name: BY_NAME[name].chunks for name in LOSSES if name != "loss of each token"},
    "multi-token loss, two depths": 2,
    "forward KL": 0.5,
    "Jensen-Shannon": 0.5,
}
"""Passes that with Triton keep the logits of a chunk until their gradients are computed, and how many chunks the logits
are: half a one if the teacher's are kept too."""


@cache
def counted(name: str, *, triton: bool = True) -> OperatorCounter:
    if triton:
        return BY_NAME[name].count()
    with kernels_disabled():
        return BY_NAME[name].count()


@looped("name", some(ALWAYS, BY_NAME))
def test_a_hot_path_launches_no_more_kernels_than_its_ceiling(name) -> None:
    count = counted(name)
    assert len(count.launches) <= LAUNCHES[name], count.by_line().most_common(20)


@looped("name", some(ALWAYS, BY_NAME))
def test_a_hot_path_waits_no_more_often_than_its_ceiling(name) -> None:
    count = counted(name)
    assert len(count.waits) <= WAITS[name], count.waits


def test_each_token_of_generate_launches_the_same_kernels_on_the_same_shapes() -> None:
    """So a CUDA graph of a step can be replayed for the next ones."""
    path = BY_NAME["generate, a token, two blocks"]
    assert path.count(3).launches == path.count(2).launches


@pytest.mark.parametrize("name", some(["loss"], BY_TORCH_OPERATORS))
def test_a_pass_by_torch_operators_launches_and_waits_no_more_than_its_ceiling(name) -> None:
    count = counted(name, triton=False)
    assert len(count.launches) <= BY_TORCH_OPERATORS[name], count.by_line().most_common(20)
    assert len(count.waits) <= WAITS[name], count.waits


@pytest.mark.parametrize("triton", [True, pytest.param(False, marks=LONG)], ids=["Triton", "torch operators"])
@looped("name", [path.name for path in PASSES])
def test_a_pass_allocates_gradients_and_one_chunk_of_logits(name, triton) -> None:
    tokens = BY_NAME[name].tokens
    sums = 4 * VOCAB_SIZE * WIDTH + 6 * tokens * WIDTH  # float32; those of hidden states once more in bfloat16
    totals = 2048 * tokens
    states = 2 * tokens * WIDTH  # with zeros for ignored targets
    states += 4 * tokens * WIDTH if name.startswith("multi-token") else 0  # concatenated, and their gradients
    blocks = 2 * VOCAB_SIZE * tokens // KEPT[name] if triton and name in KEPT else WORK
    result = 2 * VOCAB_SIZE * WIDTH  # the gradient of rows in bfloat16, when the blocks are free again
    assert counted(name, triton=triton).memory.peak <= sums + totals + states + max(blocks, result)
