"""The calls of a training step and of decoding, at the sizes of real models, on the default device of torch.

The law about launches and waits counts them on meta tensors, and so do the predictions of times on GPUs. On a GPU
`python -m benchmarks gpu` measures them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import embedlayer as el
from benchmarks.operator_counter import Answer, OperatorCounter
from embedlayer.distributed.sharded import ShardedTable
from embedlayer.formats.mlx import MLXAffineRows
from embedlayer.heads import StreamHead
from embedlayer.losses import ForwardKL, JensenShannon, divergence, linear_cross_entropy, token_statistics
from embedlayer.losses.divergences import Divergence
from embedlayer.models.attention import PackedDocuments
from embedlayer.models.generation import next_tokens
from embedlayer.tables import MappedEmbedding, StreamTable
from embedlayer.tables.stored_embedding import StoredEmbedding

Call = Callable[[], object]

TOKENS, WIDTH, VOCAB_SIZE = 8192, 4096, 128_256
"""Tokens of a step, width and vocabulary of Llama 3 8B."""

DIA, DIA_WIDTH = [1028] * 9, 2048
"""Sizes of the streams of Dia, and the width of its decoder."""

FEW_TOKENS = 512
"""Tokens of a step of which all logits of a stream are few."""

RANKS = 4
"""Ranks over which the rows of a table are sharded, each of which has `TOKENS` tokens."""

SMALLEST_VOCAB_SIZE = 50_257
"""That of GPT-2: IDs of all paths are smaller, so that each table has them."""


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
        ranks: Number of processes, of which the first one is counted. The others send and receive nothing.
    """

    name: str
    setting: str
    build: Callable[[], Call]
    answers: Mapping[str, Callable[[], Answer]] = field(default_factory=dict)
    tokens: int = TOKENS
    chunks: int = 1
    ranks: int = 1

    def count(self, calls: int = 2) -> OperatorCounter:
        """Count the last of several calls: the first allocates what an optimizer and a check of IDs keep."""
        with nullcontext() if self.ranks == 1 else fake_ranks(self.ranks):
            with torch.device("meta"):
                call = self.build()
            for _ in range(calls):
                with OperatorCounter({name: answer() for name, answer in self.answers.items()}) as count:
                    call()
        return count


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a default process group whose operations do nothing."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 - torch 2.9 has their meta kernels nowhere else
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ids(*shape: int) -> Tensor:
    """Return random token IDs."""
    return torch.randint(SMALLEST_VOCAB_SIZE, shape)


def numbers(*shape: int, trained: bool = True) -> Tensor:
    """Return numbers from N(0, 0.02^2) in bfloat16, as hidden states, rows, queries or keys."""
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02).requires_grad_(trained)


def trained(inputs: Sequence[Tensor | None], compute: Call) -> Call:
    """Return a call of `compute` and of the backward pass of its result, one tensor or several; gradients are dropped.

    The gradient of the result is the caller's: the first call draws it, and later calls use it again.

    Args:
        inputs: Tensors with gradients.
        compute: Function without arguments.
    """
    grads: list[Tensor] = []

    def call() -> None:
        results = [each for each in tree_leaves(compute()) if isinstance(each, Tensor) and each.requires_grad]
        grads.extend(map(torch.randn_like, results[len(grads) :]))
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
    ignored: int = 0,
    is_weighted: bool = False,
    states: torch.dtype = torch.bfloat16,
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
        ignored: Number of targets that are ignored.
        is_weighted: Whether each token has a weight.
        states: Dtype of the hidden states.
        **options: Options of `linear_cross_entropy`.
    """

    def build() -> Call:
        hidden = numbers(tokens, WIDTH, trained=False).to(states).requires_grad_()
        weight = numbers(vocab_size, WIDTH, trained=not is_frozen)
        added = torch.zeros(vocab_size, requires_grad=True) if bias else None
        targets = ids(tokens)
        targets[:ignored] = -100
        more = {**options, "bias": added} if bias else dict(options)
        if is_weighted:
            more["token_weights"] = torch.empty(tokens)
        return trained([hidden, weight, added], lambda: linear_cross_entropy(hidden, weight, targets, **more))

    numbers_read = [-1, -1, -1, -1, 0, ignored]
    answers = {name: lambda: numbers_read for name in ("_read_numbers", "tolist") if ignored}
    setting = f"{tokens:,} x {WIDTH:,} x {vocab_size:,}, bfloat16"
    return HotPath(name, setting, build, answers, tokens=tokens, chunks=chunks)


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


def codes(tokens: int) -> Tensor:
    """Return random IDs of Dia's nine streams, `(tokens, 9)`."""
    return torch.randint(DIA[0], (tokens, len(DIA)))


def stream_loss(tokens: int) -> Callable[[], Call]:
    """Return a builder of the loss of Dia's nine streams, with gradients."""

    def build() -> Call:
        output = el.OutputHead(DIA_WIDTH, sum(DIA), dtype=torch.bfloat16)
        head, hidden, targets = StreamHead(output, DIA), numbers(tokens, DIA_WIDTH), codes(tokens)
        return trained([hidden, output.weight], lambda: head.loss(hidden, targets).loss)

    return build


def stream_sum() -> Call:
    """Build the sum of Dia's nine streams, with the gradient of the rows."""
    rows, ids = el.TokenEmbedding(sum(DIA), DIA_WIDTH, dtype=torch.bfloat16), codes(FEW_TOKENS)
    table = StreamTable(rows, DIA)
    return trained([rows.weight], lambda: table(ids))


def look_up() -> Call:
    """Build a look-up in a dense table, with its gradient."""
    table, tokens = el.TokenEmbedding(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16), ids(1, TOKENS)
    return trained([table.weight], lambda: table(tokens))


def sharded_table(**options: Any) -> ShardedTable:
    """Return the first shard of a table of all ranks, with options of `ShardedTable`."""
    with torch.device("cpu"):
        mesh = init_device_mesh("meta", (RANKS,))
    local = el.TokenEmbedding(VOCAB_SIZE // RANKS, WIDTH, dtype=torch.bfloat16)
    return ShardedTable(local, mesh, vocab_size=VOCAB_SIZE, **options)


def sharded_look_up() -> Call:
    """Build a look-up in a sharded table, with its gradient."""
    table, tokens = sharded_table(), ids(1, TOKENS)
    return trained([table.weight], lambda: table(tokens))


def sharded_loss(**options: Any) -> HotPath:
    """Return the loss of a sharded table on each rank's hidden states, with gradients; for options of the table."""

    def build() -> Call:
        table, hidden, tokens = sharded_table(**options), numbers(1, TOKENS, WIDTH), ids(1, TOKENS)
        return trained([table.weight, hidden], lambda: table.loss(hidden, tokens))

    name = ", ".join(["loss, sharded", *(option.replace("_", " ") for option in options)])
    answers = {"_read_numbers": lambda: [-1, -1, -1, -1, 0, 0, *[4 * TOKENS + 3] * RANKS]}
    return HotPath(name, f"{RANKS} ranks, on each {SIZES}", build, answers, chunks=4, ranks=RANKS)


def input_embedding(training: bool, *, forward: bool = False, masked: bool = False) -> Callable[[], Call]:
    """Return a builder of GPT-2's input embedding, in training with its gradients.

    Args:
        training: Whether the layer is in training.
        forward: Whether only the forward pass runs.
        masked: Whether it gets an attention mask.
    """

    def build() -> Call:
        layer, tokens = el.TransformerEmbedding(50_257, 768, 1024, dropout=0.1).train(training), ids(8, 1024)
        mask = torch.ones(8, 1024, dtype=torch.int64) if masked else None
        call = partial(layer, tokens, attention_mask=mask)
        if not training:
            return torch.no_grad()(call)
        return call if forward else trained(list(layer.parameters()), call)

    return build


def rotate(training: bool) -> Callable[[], Call]:
    """Return a builder of the rotation of 32 query heads and 8 key heads, in training with its gradients."""

    def build() -> Call:
        rotary = el.RotaryEmbedding(128)
        q, k = numbers(1, 32, TOKENS, 128, trained=training), numbers(1, 8, TOKENS, 128, trained=training)
        with OperatorCounter() if q.is_meta else nullcontext():
            positions = rotary.prepare(torch.arange(TOKENS))
        return (
            trained([q, k], lambda: rotary.rotate(q, k, positions))
            if training
            else lambda: rotary.rotate(q, k, positions)
        )

    return build


def rotary_angles() -> Call:
    """Build the computation of the angles of a forward pass."""
    rotary, positions = el.RotaryEmbedding(128), torch.arange(TOKENS)
    return lambda: rotary.prepare(positions)


def row_step(optimizer_of: Callable[[Iterator[Tensor]], torch.optim.Optimizer], *, clips: bool) -> Callable[[], Call]:
    """Return a builder of a training step of a row-sparse table: look-up, backward pass, clipping and optimizer."""

    def build() -> Call:
        table, tokens = el.RowSparseEmbedding(VOCAB_SIZE, WIDTH), ids(2307)
        optimizer = optimizer_of(table.parameters())

        def call() -> None:
            vectors = table(tokens)
            vectors.backward(torch.empty_like(vectors))
            if clips:
                el.clip_grad_norm_(table.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return call

    return build


def quantised(bits: int, *, logits: bool = False) -> Callable[[], Call]:
    """Return a builder of a look-up in a quantised table, or of the logits of one token."""

    def build() -> Call:
        table = el.QuantizedEmbedding(VOCAB_SIZE, WIDTH, bits, group_size=32 if bits == 4 else None)
        table, tokens = table.to(torch.bfloat16), ids(TOKENS)
        hidden = numbers(1, WIDTH, trained=False)
        return torch.no_grad()((lambda: table.logits(hidden)) if logits else (lambda: table(tokens)))

    return build


def stored(*, logits: bool = False) -> Callable[[], Call]:
    """Return a builder of a look-up in a table that MLX quantised to 4 bits, or of the logits of one token."""

    def build() -> Call:
        table, tokens = StoredEmbedding(VOCAB_SIZE, MLXAffineRows(WIDTH, 4, 64, "BF16")), ids(TOKENS)
        hidden = numbers(1, WIDTH, trained=False)
        return torch.no_grad()((lambda: table.logits(hidden)) if logits else (lambda: table(tokens)))

    return build


def quantised_loss(bits: int) -> Callable[[], Call]:
    """Return a builder of the loss of a quantised table, with the gradient of the hidden states."""

    def build() -> Call:
        table = el.QuantizedEmbedding(VOCAB_SIZE, WIDTH, bits, group_size=32 if bits == 4 else None)
        table, hidden, targets = table.to(torch.bfloat16), numbers(TOKENS, WIDTH), ids(TOKENS)
        return trained([hidden], lambda: table.loss(hidden, targets))

    return build


def delta_step() -> Call:
    """Build a training step of 1,000 rows over a frozen table: look-up and loss, with their gradients."""
    table = el.DeltaEmbedding.last(el.TokenEmbedding(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16), 1000)
    hidden, tokens = numbers(TOKENS, WIDTH), ids(TOKENS)
    return trained([hidden, table.delta], lambda: (table(tokens), table.loss(hidden, tokens)))


def mapped_look_up() -> Call:
    """Build a look-up in a table whose rows stay in a file."""
    with TemporaryDirectory() as folder:  # an open file is read after it is deleted
        file = Path(folder) / "table.safetensors"
        save_file({"weight": torch.zeros(1000, WIDTH, dtype=torch.bfloat16, device="cpu")}, file)
        table, tokens = MappedEmbedding.open(file).to("meta"), ids(TOKENS)
    return lambda: table(tokens)


def decoder() -> el.DecoderLM:
    """Return two blocks of Llama 3 8B, with its table and head."""
    table, position = el.TokenEmbedding(VOCAB_SIZE, WIDTH), el.RotaryEmbedding(128, 500_000.0)
    model = el.DecoderLM(table, position, num_layers=2, num_heads=32, num_kv_heads=8, mlp_dim=14_336)
    return model.to(torch.bfloat16).eval()


def generate_prompt() -> Call:
    """Build the first token of `generate`: the model reads the prompt."""
    model, prompt = decoder(), ids(1, TOKENS)
    return lambda: next(next_tokens(model, prompt, max_new_tokens=1024, stop_id=[128_001, 128_009]))


def generate_token() -> Call:
    """Build a further token of `generate`: a step of cached decoding. The first call reads the prompt."""
    new = next_tokens(decoder(), ids(1, TOKENS), max_new_tokens=1024, stop_id=[128_001, 128_009])
    return lambda: next(new)


def packed_documents() -> Call:
    """Build what attention over documents reads of a mask, in each call of a model."""
    documents = 1 + torch.arange(TOKENS)[None] // 1000
    return lambda: PackedDocuments(documents)


def patched_model() -> Call:
    """Build a training step of a patched transformers model without blocks: embedding, norm, head and loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCAB_SIZE, hidden_size=WIDTH, num_hidden_layers=0, num_attention_heads=32)
    model: Any = LlamaForCausalLM(config)
    model, tokens = el.patch(model.to(torch.bfloat16)), ids(1, TOKENS)
    return trained(list(model.parameters()), lambda: model(tokens, labels=tokens).loss)


SIZES, ONE_TOKEN = (f"{tokens:,} x {WIDTH:,} x {VOCAB_SIZE:,}, bfloat16" for tokens in (TOKENS, 1))

GPT2 = "(8, 1024) IDs, 50,257 x 768, float32"
ROW_STEP = f"2,307 IDs, {VOCAB_SIZE:,} x {WIDTH:,}, float32"
STREAMS = f"{{:,}} x {DIA_WIDTH:,}, 9 x {DIA[0]:,}, bfloat16"

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
    loss_path("loss, half of the targets ignored", ignored=TOKENS // 2),
    loss_path("loss, head in float32", chunks=6, head_dtype=torch.float32),
    loss_path("loss, head and hidden states in float32", head_dtype=torch.float32, states=torch.float32),
    *PASSES,
    HotPath(
        "loss of nine streams", f"{TOKENS:,} x {DIA_WIDTH:,}, 9 x {DIA[0]:,}, bfloat16", stream_loss(TOKENS), chunks=18
    ),
    HotPath(
        "loss of nine streams of few tokens", STREAMS.format(FEW_TOKENS), stream_loss(FEW_TOKENS), tokens=9 * FEW_TOKENS
    ),
    HotPath("sum of nine streams", STREAMS.format(FEW_TOKENS), stream_sum, tokens=FEW_TOKENS),
    HotPath("look-up", SIZES, look_up),
    HotPath("GPT-2 input embedding, evaluation", GPT2, input_embedding(False)),
    HotPath("GPT-2 input embedding, training", GPT2, input_embedding(True)),
    HotPath("GPT-2 input embedding, forward", GPT2, input_embedding(True, forward=True)),
    HotPath("GPT-2 input embedding with a mask, training", GPT2, input_embedding(True, masked=True)),
    HotPath("GPT-2 input embedding with a mask, forward", GPT2, input_embedding(True, forward=True, masked=True)),
    HotPath("rotary, angles", f"{TOKENS:,} x 128", rotary_angles),
    HotPath("rotary", f"32 + 8 heads, {TOKENS:,} x 128, bfloat16", rotate(False)),
    HotPath("rotary, training", f"32 + 8 heads, {TOKENS:,} x 128, bfloat16", rotate(True)),
    HotPath(
        "lengths of documents",
        f"{TOKENS:,} tokens",
        packed_documents,
        {"packed_lengths": lambda: [9, 1000, TOKENS]},
    ),
    HotPath("row-sparse step", ROW_STEP, row_step(el.RowAdamW, clips=False)),
    HotPath("row-sparse step with clipping, Adagrad", ROW_STEP, row_step(el.RowAdagrad, clips=True)),
    HotPath("look-up, int8", SIZES, quantised(8)),
    HotPath("look-up, int4 in groups of 32", SIZES, quantised(4)),
    HotPath("logits of one token, int8", ONE_TOKEN, quantised(8, logits=True)),
    HotPath("logits of one token, int4 in groups of 32", ONE_TOKEN, quantised(4, logits=True)),
    HotPath("look-up, 4 bits of MLX", SIZES, stored()),
    HotPath("logits of one token, 4 bits of MLX", ONE_TOKEN, stored(logits=True)),
    HotPath(
        "look-up, sharded",
        f"{RANKS} ranks, on each {SIZES}",
        sharded_look_up,
        {"tolist": lambda: [TOKENS // RANKS] * 2 * RANKS},
        ranks=RANKS,
    ),
    sharded_loss(),
    sharded_loss(equal_loss_factors=True),
    HotPath("loss, int8", SIZES, quantised_loss(8)),
    HotPath("loss, int4 in groups of 32", SIZES, quantised_loss(4)),
    HotPath("look-up and loss of 1,000 trained rows over a frozen table", SIZES, delta_step),
    HotPath("patched transformers model without blocks", SIZES, patched_model),
    HotPath("generate, prompt, two blocks", SIZES, generate_prompt),
    HotPath(
        "generate, a token, two blocks",
        f"{ONE_TOKEN}, {TOKENS + 1023:,} slots",
        generate_token,
        {"_check_logits": lambda: 0.0},
        tokens=1,
    ),
]

BY_THE_HOST = [
    HotPath("look-up in a mapped file", f"{TOKENS:,} x {WIDTH:,}, bfloat16", mapped_look_up, {"look_up": lambda: 0}),
]
"""Calls whose work is on the CPU: their waits are counted, and their time on a GPU says nothing."""
