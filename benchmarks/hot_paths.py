"""The calls of a training step and of decoding, at the sizes of real models, on meta tensors.

The law about launches and waits counts them, and so do the predictions of times on GPUs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import embedlayer as el
from benchmarks.operator_counter import Answer, OperatorCounter
from embedlayer.losses import ForwardKL, JensenShannon, divergence, linear_cross_entropy, token_statistics
from embedlayer.losses.divergence_kinds import Divergence

Call = Callable[[], object]

TOKENS, WIDTH, VOCAB_SIZE = 8192, 4096, 128_256
"""Tokens of a step, width and vocabulary of Llama 3 8B."""


@dataclass(frozen=True)
class HotPath:
    """A call that is counted.

    Attributes:
        name: What is called, as tables show it.
        setting: Sizes and dtype.
        build: Function that allocates the tensors and returns the call.
        answers: Values that the call reads, as `OperatorCounter` takes them.
        tokens: Number of tokens, N.
        chunks: Chunks of tokens of a pass over the vocabulary, of both passes if the second computes the logits again.
    """

    name: str
    setting: str
    build: Callable[[], Call]
    answers: Mapping[str, Callable[[], Answer]] = field(default_factory=dict)
    tokens: int = TOKENS
    chunks: int = 1

    def count(self) -> OperatorCounter:
        """Count the second call: the first allocates what an optimizer and a check of IDs keep."""
        with torch.device("meta"):
            call = self.build()
        for _ in range(2):
            with OperatorCounter({name: answer() for name, answer in self.answers.items()}) as count:
                call()
        return count


def ids(*shape: int) -> Tensor:
    """Return token IDs on the meta device."""
    return torch.empty(shape, dtype=torch.int64, device="meta")


def numbers(*shape: int, trained: bool = True) -> Tensor:
    """Return bfloat16 numbers on the meta device."""
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=trained)


def trained(inputs: Sequence[Tensor | None], compute: Call) -> Call:
    """Return a call of `compute` and of the backward pass of its result, one tensor or several; gradients are dropped.

    The gradient of the result is the caller's, so no kernel that fills it with ones is counted.

    Args:
        inputs: Tensors with gradients.
        compute: Function without arguments.
    """

    def call() -> None:
        results = [each for each in tree_leaves(compute()) if isinstance(each, Tensor) and each.requires_grad]
        grads = [torch.empty_like(each) for each in results]
        torch.autograd.backward(results, grads)
        for each in inputs:
            if each is not None:
                each.grad = None

    return call


def loss_path(
    name: str,
    *,
    tokens: int = TOKENS,
    vocab_size: int = VOCAB_SIZE,
    chunks: int = 1,
    bias: bool = False,
    is_frozen: bool = False,
    is_weighted: bool = False,
    **options: Any,
) -> HotPath:
    """Return the loss of a head with its gradients.

    Args:
        name: Name of the path.
        tokens: Number of tokens, N.
        vocab_size: Number of rows, V.
        chunks: Chunks of tokens.
        bias: Whether the head has a bias.
        is_frozen: Whether the rows need no gradient.
        is_weighted: Whether each token has a weight.
        **options: Options of `linear_cross_entropy`.
    """

    def build() -> Call:
        hidden, weight = numbers(tokens, WIDTH), numbers(vocab_size, WIDTH, trained=not is_frozen)
        added = torch.empty(vocab_size, requires_grad=True) if bias else None
        targets = ids(tokens)
        more = {**options, "bias": added} if bias else dict(options)
        if is_weighted:
            more["token_weights"] = torch.empty(tokens)
        return trained([hidden, weight, added], lambda: linear_cross_entropy(hidden, weight, targets, **more))

    return HotPath(name, f"{tokens:,} x {WIDTH:,} x {vocab_size:,}, bfloat16", build, tokens=tokens, chunks=chunks)


def statistics(**options: Any) -> Callable[[], Call]:
    """Return a builder of statistics of a head's logits, and of the gradients of those that have one."""

    def build() -> Call:
        hidden, weight, tokens = numbers(TOKENS, WIDTH), numbers(VOCAB_SIZE, WIDTH), ids(TOKENS)
        return trained([hidden, weight], lambda: token_statistics(hidden, weight, tokens, **options))

    return build


def divergence_of(kind: Divergence) -> Callable[[], Call]:
    """Return a builder of a divergence from a teacher of the same sizes, with the student's gradients."""

    def build() -> Call:
        hidden, weight, labels = numbers(TOKENS, WIDTH), numbers(VOCAB_SIZE, WIDTH), ids(TOKENS)
        teacher = numbers(TOKENS, WIDTH, trained=False), numbers(VOCAB_SIZE, WIDTH, trained=False)
        return trained([hidden, weight], lambda: divergence((hidden, weight), teacher, kind, labels=labels))

    return build


def multi_token_loss() -> Call:
    """Build the loss of two depths of multi-token prediction, with gradients."""
    head = el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=WIDTH).to(torch.bfloat16)
    states, labels = [numbers(1, TOKENS, WIDTH) for _ in range(2)], ids(1, TOKENS)
    return trained([*states, head.weight], lambda: head.multi_token_loss(states, labels, [1.0, 0.3]).loss)


def look_up() -> Call:
    """Build a look-up in a dense table, with its gradient."""
    table, tokens = el.TokenEmbedding(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16), ids(1, TOKENS)
    return trained([table.weight], lambda: table(tokens))


def input_embedding(training: bool) -> Callable[[], Call]:
    """Return a builder of GPT-2's input embedding, in training with its gradients."""

    def build() -> Call:
        layer, tokens = el.TransformerEmbedding(50_257, 768, 1024, dropout=0.1).train(training), ids(8, 1024)
        if training:
            return trained(list(layer.parameters()), lambda: layer(tokens))
        return torch.no_grad()(lambda: layer(tokens))

    return build


def rotate(training: bool) -> Callable[[], Call]:
    """Return a builder of the rotation of 32 query heads and 8 key heads, in training with its gradients."""

    def build() -> Call:
        rotary = el.RotaryEmbedding(128)
        q, k = numbers(1, 32, TOKENS, 128, trained=training), numbers(1, 8, TOKENS, 128, trained=training)
        with OperatorCounter():
            positions = rotary.prepare(torch.arange(TOKENS))
        return (
            trained([q, k], lambda: rotary.rotate(q, k, positions))
            if training
            else lambda: rotary.rotate(q, k, positions)
        )

    return build


def row_step() -> Call:
    """Build a training step of a row-sparse table: look-up, backward pass and `RowAdamW`."""
    table, tokens = el.TokenEmbedding(VOCAB_SIZE, WIDTH, row_sparse=True), ids(2307)
    optimizer = el.RowAdamW(table.parameters(), lr=1e-3)

    def call() -> None:
        vectors = table(tokens)
        vectors.backward(torch.empty_like(vectors))
        optimizer.step()
        optimizer.zero_grad()

    return call


def quantised(bits: int, *, logits: bool = False) -> Callable[[], Call]:
    """Return a builder of a look-up in a quantised table, or of the logits of one token."""

    def build() -> Call:
        table = el.QuantizedEmbedding(VOCAB_SIZE, WIDTH, bits, group_size=32 if bits == 4 else None)
        table, tokens = table.to(torch.bfloat16), ids(TOKENS)
        hidden = numbers(1, WIDTH, trained=False)
        return torch.no_grad()((lambda: table.logits(hidden)) if logits else (lambda: table(tokens)))

    return build


def patched_model() -> Call:
    """Build a training step of a patched transformers model without blocks: embedding, norm, head and loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB_SIZE, hidden_size=WIDTH, num_hidden_layers=0, num_attention_heads=32)
    model: Any = LlamaForCausalLM(config)
    model, tokens = el.patch(model.to(torch.bfloat16)), ids(1, TOKENS)
    return trained(list(model.parameters()), lambda: model(tokens, labels=tokens).loss)


SIZES, ONE_TOKEN = (f"{tokens:,} x {WIDTH:,} x {VOCAB_SIZE:,}, bfloat16" for tokens in (TOKENS, 1))

PASSES = [
    loss_path("loss"),
    loss_path("loss, two chunks", tokens=2 * TOKENS, chunks=2),
    loss_path("loss in 8 chunks", chunk_bytes=TOKENS // 8 * VOCAB_SIZE * 2, chunks=8),
    loss_path("loss, frozen rows", is_frozen=True, chunks=4),
    loss_path("loss, soft cap", softcap=30.0),
    loss_path("loss, bias", bias=True),
    loss_path("loss, label smoothing", label_smoothing=0.1),
    loss_path("loss, z_loss", z_loss=1e-4),
    loss_path("loss, weights of tokens", is_weighted=True),
    loss_path("loss of each token", reduction="none", chunks=6),
    loss_path("loss, no target dropped", drop_ignored=False),
    HotPath("log-probabilities and entropies", SIZES, statistics(statistics=("log_probs", "entropy"))),
    HotPath("64 largest logits", SIZES, statistics(statistics=("log_probs",), top_k=64)),
    HotPath("forward KL", SIZES, divergence_of(ForwardKL())),
    HotPath("Jensen-Shannon", SIZES, divergence_of(JensenShannon(0.5))),
    HotPath("multi-token loss, two depths", SIZES, multi_token_loss, tokens=2 * TOKENS, chunks=2),
]
"""Calls that are a pass over the vocabulary."""

PATHS = [
    loss_path("loss, plain", impl="plain"),
    *PASSES,
    HotPath("look-up", SIZES, look_up),
    HotPath("GPT-2 input embedding, evaluation", "(8, 1024) IDs, 50,257 x 768, float32", input_embedding(False)),
    HotPath("GPT-2 input embedding, training", "(8, 1024) IDs, 50,257 x 768, float32", input_embedding(True)),
    HotPath("rotary", f"32 + 8 heads, {TOKENS:,} x 128, bfloat16", rotate(False)),
    HotPath("rotary, training", f"32 + 8 heads, {TOKENS:,} x 128, bfloat16", rotate(True)),
    HotPath(
        "row-sparse step",
        f"2,307 IDs, {VOCAB_SIZE:,} x {WIDTH:,}, float32",
        row_step,
        {
            "apply_to_ids": lambda: True,
            "skipped_terms": lambda: 0,
            "coalesced": lambda: cycle([False, True]),
        },
    ),
    HotPath("look-up, int8", SIZES, quantised(8)),
    HotPath("look-up, int4 in groups of 32", SIZES, quantised(4)),
    HotPath("logits of one token, int8", ONE_TOKEN, quantised(8, logits=True)),
    HotPath("logits of one token, int4 in groups of 32", ONE_TOKEN, quantised(4, logits=True)),
    HotPath("patched transformers model without blocks", SIZES, patched_model),
]
