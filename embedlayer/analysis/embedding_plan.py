"""Parameters and bytes of the embedding table and the LM head of a model, before anything is built.

A table of V rows of width D has `V * D` parameters; all the rest follows from it. With N tokens in a step:

| part | size |
|---|---|
| table | `V * D` numbers, `V * R + R * D` when factorised with rank R, or codes and scales when quantised |
| head | nothing when tied or for a table that is only looked up, else `V * D` of its own |
| learned positions | `max_seq_len * D` |
| per-layer inputs | a table of width W and its projection, `V * W + W * D` |
| gradient | one number a trained parameter; of a row-sparse table one row and one ID a token |
| AdamW | two moments a trained parameter; of a row-sparse table also two step numbers a row |
| row-wise AdamW | a second moment and two step numbers a row of a row-sparse table, and its first moments or none |
| Adagrad | one sum a trained parameter; of a row-sparse table one sum and two step numbers a row |
| activations | input of the first block and output of the last one, `2 N D`, and the gradient of the output |
| loss | chunked: the logits of one chunk; plain: softmax of the logits and two gradients of it, `3 N V` in fp32 |
| network, look-up | an ID and two rows for each distinct token, on average over the ranks |
| network, loss | all-gather of the hidden state, target and scores of each token |
| network, gradients | all-reduce: twice the bytes of what all processes hold |
| FLOPs, head | `2 N D V` forward; backward as many for the gradient of the hidden states, and for that of the rows |
| FLOPs, projections | `2 N R D` of a factorised table, once at each end; `2 N D W` per-layer; backward twice |
| FLOPs, look-up | rows are copied; one addition a number for positions, and backward for the gradient of a row |
| a step | weights, optimizer, activations, and the larger of loss and gradients; a tied table has two gradients |

Parameters are counted in decimal units (1 M = 10^6), memory in binary ones (1 MiB = 2^20 bytes). What introductions
print as "147 MB" for GPT-2 small is 147 MiB. A test builds each kind of table and measures each part.

The options are the fields of `EmbeddingPlan`. Its documentation, the signature of `plan`, the options of the command
`embedlayer plan` and the table in the documentation are generated from them. This module does not import torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from embedlayer.core.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS, ROWS_OF_A_BLOCK, tokens_per_chunk

Value = TypeVar("Value")
PARTS = ("table", "head", "position", "per_layer", "delta")  # parts of the weights, each with its parameters and bytes

DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "q8_0": 8, "q4_0": 4}  # of one stored number
FLOAT_DTYPES = ("fp32", "fp16", "bf16")

OPTIMIZER_MOMENTS = {"adamw": 2, "adagrad": 1, "sgd": 0, "none": 0}
"""Numbers that an optimizer stores for each parameter. `none` is inference, without gradients."""

ROW_STATES = {"adamw": 0, "rowwise_fp32": 32, "rowwise_bf16": 16, "rowwise": 0}
"""Bits of the first moment of a number of a row-sparse table, for rules with one second moment a row."""

SCALE_BYTES = {"int8": 8, "int4": 4, "q8_0": 2, "q4_0": 2}
"""Bytes of the step and the offset of a quantised row, or of a group of its numbers: in fp32, in fp16; GGUF's blocks
have a step in fp16 alone."""

ROW_SCALE_BYTES = {"int8": 0, "int4": 4, "q8_0": 0, "q4_0": 0}  # bytes of the fp32 scale of a quantised row
GGUF_BLOCK = {"q8_0": 32, "q4_0": 32}  # numbers in a group of GGUF's types; the last block of a row is filled up
STEP_BYTES, ID_BYTES = 2 * 4, 8  # bytes of the two step numbers of a row of a row-sparse table, and of a token ID
ROWS_AT_ONCE = 8192  # rows in a block of logits where no single matrix holds the rows of a tied head


class RowSize(NamedTuple):
    """Format and size of stored rows.

    Attributes:
        format: Name of the format.
        nbytes: Bytes of a row: codes, scales and what else the format has for each row.
    """

    format: str
    nbytes: int


def _option(
    default: Any, help: str, *, flag: str = "", least: int | None = None, choices: tuple[str, ...] | None = None
) -> Any:
    """Return a dataclass field whose `metadata` has what the documentation, the checks and the command need."""
    return field(default=default, metadata={"help": help, "flag": flag, "least": least, "choices": choices})


class _Planned(property, Generic[Value]):
    """A property of a plan as a line of data: its meaning, its formula, and when that applies; else it is 0."""

    def __init__(
        self,
        meaning: str,
        formula: "Callable[[EmbeddingPlan], Value]",
        *,
        when: "Callable[[EmbeddingPlan], object] | None" = None,
    ) -> None:
        super().__init__(lambda plan: formula(plan) if when is None or when(plan) else 0, doc=meaning)

    if TYPE_CHECKING:  # a property has no type of its value

        def __get__(self, plan: object, owner: type | None = None) -> Value: ...  # type: ignore[override]


def _all_reduced(processes: int, numbers: int, number_bytes: int) -> int:
    """Return the bytes that each process sends in an all-reduce: twice what it has, without its own share."""
    return 2 * (processes - 1) * numbers * number_bytes // processes


@dataclass(frozen=True)
class EmbeddingPlan:
    """Compute the parameters and bytes of a table, its head, their training and the loss, on one device (one rank).

    An int8 or int4 table stores a quantisation step and an offset for each row or group of columns. It is not trained,
    so only `delta_rows` have gradients and optimizer state. Learned positions beside it stay in fp32. Not counted are
    the optimizer's step counters of a few bytes, and what it allocates only during its update. Fused AdamW allocates
    next to nothing, `RowAdamW` at most five copies of the rows in a gradient.

    Args:
        row_sizes: The stored rows of `"table"`, `"head"` and `"per_layer"` whose format `dtype` does not name, such as
            those of MLX or GGUF's K-quants. They are decoded to `dtype`, and nothing but `delta_rows` is trained.
        name: Name of the plan in printed tables.

    Example:
        >>> gpt2 = EmbeddingPlan(50257, 768)
        >>> gpt2.table_parameters, gpt2.table_bytes
        (38597376, 154389504)
        >>> EmbeddingPlan(50257, 768, delta_rows=200).optimizer_bytes
        1228800
    """

    vocab_size: int = _option(MISSING, "Number of tokens, V: rows of the table.", flag="--vocab", least=1)
    embed_dim: int = _option(MISSING, "Width of a row, D.", flag="--dim", least=1)
    _: KW_ONLY
    tied: bool = _option(True, "Tie the head to the table; untied, it is a V x D matrix of its own.")
    lookup_only: bool = _option(False, "Plan a table without a head (n-gram tables): no logits, no loss.")
    rank: int | None = _option(None, "Rank R of a factorised table, E = E1 E2; a dense table by default.", least=1)
    positions: int = _option(0, "Rows of a learned position table; 0 for none.", least=0)
    per_layer_dim: int = _option(
        0, "Width of a per-layer table (Gemma 3n and 4), layers * P; 0 for none.", flag="--per-layer", least=0
    )
    per_layer_rows: int = _option(0, "Rows of the per-layer table; 0 for V.", least=0)
    dtype: str = _option("fp32", "Data type of the weights.", choices=tuple(DTYPE_BITS))
    tokens: int = _option(0, "Tokens of a step on each process, B * T; 0 leaves activations and loss out.", least=0)
    optimizer: str = _option("adamw", "Optimizer; none plans inference.", choices=tuple(OPTIMIZER_MOMENTS))
    moment_dtype: str = _option("fp32", "Data type of the moments of AdamW.", flag="--moments", choices=FLOAT_DTYPES)
    plain_loss: bool = _option(
        False, "Compute the loss from all logits at once, as plain PyTorch does; by default in chunks, as this library."
    )
    row_sparse: bool = _option(
        False, "Give gradients to looked-up rows only (RowAdamW); needs an untied head or lookup_only."
    )
    row_state: str = _option(
        "adamw",
        "adamw: two moments a number; rowwise_fp32, rowwise_bf16, rowwise: one second moment a row, and a first moment "
        "a number in fp32, in bf16, or none; needs row-sparse.",
        choices=tuple(ROW_STATES),
    )
    delta_rows: int = _option(
        0, "Freeze all but this number of rows (DeltaEmbedding); 0 trains all.", flag="--delta", least=0
    )
    group_size: int | None = _option(None, "Numbers that share a scale in int8 and int4; default: a row.", least=1)
    vocab_parallel_size: int = _option(1, "Processes that the rows are sharded over (ShardedTable).", least=1)
    replicas: int = _option(1, "Data-parallel replicas of the sharded table.", least=1)
    distinct_tokens: int = _option(
        0, "Distinct tokens of a process; 0 for as many as possible.", flag="--distinct", least=0
    )
    device: str = _option(
        "cpu", "Device of the loss, which sets the length of a chunk.", choices=tuple(MAX_CHUNK_TOKENS)
    )
    row_sizes: Mapping[str, RowSize] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        for option in fields(self):
            value, least, choices = getattr(self, option.name), *map(option.metadata.get, ("least", "choices"))
            if least is not None and value is not None and value < least:
                raise SizeError(f"{option.name} must be at least {least}, not {value}.")
            if choices and value not in choices:
                raise SizeError(f"{option.name} {value!r} is unknown: use one of {', '.join(choices)}.")
        if self.row_sizes and (self.rank is not None or self.row_sizes.keys() - {"table", "head", "per_layer"}):
            raise SizeError("row_sizes are those of 'table', 'head' and 'per_layer', and of no factorised table.")
        if self.rank is not None and self.rank > self.embed_dim:
            raise SizeError(f"rank {self.rank} exceeds embed_dim {self.embed_dim}: a dense table is smaller.")
        if self.delta_rows > self.vocab_size:
            raise SizeError(f"delta_rows {self.delta_rows} exceeds vocab_size {self.vocab_size}.")
        if self.plain_loss and (self.lookup_only or self.vocab_parallel_size > 1):
            raise SizeError("plain_loss is for an unsharded table with a head: leave it out.")
        if self.row_sparse and (self._tied_head or self.rank is not None or self.delta_rows or self.quantised):
            raise SizeError("row_sparse needs an untied or looked-up table without rank, delta_rows and int8 or int4.")
        if self.row_state != "adamw" and (not self.row_sparse or self.optimizer != "adamw"):
            raise SizeError(f"row_state {self.row_state} needs row_sparse=True and optimizer='adamw'.")
        if self.delta_rows and self.processes > 1:
            raise SizeError(f"delta_rows {self.delta_rows} is for one process, not for {self.processes}.")
        if self.group_size is not None and self.dtype not in SCALE_BYTES.keys() - GGUF_BLOCK.keys():
            raise SizeError(f"group_size {self.group_size} is for int8 and int4, not for {self.dtype}.")

    quantised = _Planned(
        "Whether weights are stored as codes: int8, int4, GGUF's q8_0 and q4_0, or the formats of `row_sizes`.",
        lambda p: p.dtype not in FLOAT_DTYPES or len(p.row_sizes) > 0,
    )
    trained = _Planned(
        "Whether there are gradients: with an optimizer, and floating-point weights or `delta_rows`.",
        lambda p: p.optimizer != "none" and (p.delta_rows > 0 or not p.quantised),
    )
    processes = _Planned(
        "Number of processes that train together, `vocab_parallel_size * replicas`.",
        lambda p: p.vocab_parallel_size * p.replicas,
    )
    compute_dtype = _Planned(
        'Data type of activations and logits: `dtype`, or `"fp32"` if that is one of codes.',
        lambda p: p.dtype if p.dtype in FLOAT_DTYPES else "fp32",
    )

    # What the sizes are computed from

    _tied_head = _Planned("Whether there is a head that is tied to the table.", lambda p: p.tied and not p.lookup_only)
    _own_head = _Planned("Whether there is a head with a matrix of its own.", lambda p: not (p.tied or p.lookup_only))
    _rows = _Planned(
        "Rows that one rank stores, `ceil(V / vocab_parallel_size)`.",
        lambda p: -(-p.vocab_size // p.vocab_parallel_size),
    )
    _factors = _Planned(
        "Shapes of the matrices of the table: `[(rows, D)]`, or `[(rows, R), (R, D)]` for a factorised table.",
        lambda p: [(p._rows, p.embed_dim)] if p.rank is None else [(p._rows, p.rank), (p.rank, p.embed_dim)],
    )
    _number_bytes = _Planned("Bytes of one number of `compute_dtype`.", lambda p: DTYPE_BITS[p.compute_dtype] // 8)
    _distinct = _Planned(
        "Distinct tokens in a rank's batch: `distinct_tokens`, but at most `min(tokens, vocab_size)`, as also for 0.",
        lambda p: min(p.distinct_tokens or p.tokens, p.tokens, p.vocab_size),
    )
    _head_width = _Planned(
        "Width of the vectors that the head multiplies with rows: R for a tied factorised table, else D.",
        lambda p: p.rank if p.rank is not None and p.tied else p.embed_dim,
    )
    _chunk_length = _Planned(
        "Tokens in one chunk of the loss, if the ranks that share the table were one process.",
        lambda p: tokens_per_chunk(
            p.tokens * p.vocab_parallel_size,
            p._rows,
            p._head_width,
            p.device,
            p._number_bytes if p.device == "cuda" else 4,
            is_gathered=p.vocab_parallel_size > 1,
        ),
    )
    _chunk_tokens = _Planned(
        "Tokens in one chunk of the loss, counted over the ranks that share the table.",
        lambda p: p.vocab_parallel_size * min(-(-p._chunk_length // p.vocab_parallel_size), p.tokens),
    )
    _has_wide_sums = _Planned(
        "Whether the gradient of the head is first a sum in fp32: of 16-bit weights, on CUDA over chunks.",
        lambda p: p.device == "cpu" or p._chunk_tokens < p.tokens * p.vocab_parallel_size,
        when=lambda p: p._number_bytes < 4,
    )

    # Weights on one rank

    table_parameters = _Planned(
        "Parameters of the table, without head and delta rows: `V * D`, or `V * R + R * D` if it is factorised. A "
        "sharded table has only its share of the V rows.",
        lambda p: sum(rows * columns for rows, columns in p._factors),
    )
    head_parameters = _Planned(
        "Parameters that the head adds; 0 if it is tied to the table, or missing.",
        lambda p: p._rows * p.embed_dim,
        when=lambda p: p._own_head,
    )
    position_parameters = _Planned("Parameters of learned positions.", lambda p: p.positions * p.embed_dim)
    per_layer_parameters = _Planned(
        "Parameters of a per-layer table, which is not sharded, and its projection. The norm of the per-layer inputs "
        "has P more.",
        lambda p: ((p.per_layer_rows or p.vocab_size) + p.embed_dim) * p.per_layer_dim,
    )
    delta_parameters = _Planned(
        "Parameters of the delta rows, the trained rows of a table whose other rows are frozen.",
        lambda p: p.delta_rows * p.embed_dim,
    )
    parameters = _Planned(
        "All parameters: table, head, positions, per-layer table and delta rows.",
        lambda p: sum(getattr(p, f"{part}_parameters") for part in PARTS),
    )
    trained_parameters = _Planned(
        "Parameters with a gradient: those of the delta rows if there are any, else all; 0 if nothing is trained.",
        lambda p: p.delta_parameters if p.delta_rows else p.parameters,
        when=lambda p: p.trained,
    )
    _head_gradient = _Planned(
        "Numbers in the gradient that the loss computes for the head; 0 if the head is frozen. For a head tied to a "
        "table, these are the rows of the table: `(V, D)`, `(V, R)`, or the delta rows.",
        lambda p: p.delta_parameters or (prod(p._factors[0]) if p.tied else p.head_parameters),
        when=lambda p: p.trained and not p.lookup_only and (p.tied or not p.delta_rows),
    )
    table_bytes = _Planned(
        "Bytes of the table as stored, with the steps and offsets of quantised rows.",
        lambda p: sum(rows * p._row_bytes(columns, "table") for rows, columns in p._factors),
    )
    head_bytes = _Planned(
        "Bytes that the head adds; 0 if it is tied to the table, or missing.",
        lambda p: p._rows * p._row_bytes(p.embed_dim, "head"),
        when=lambda p: p._own_head,
    )
    position_bytes = _Planned("Bytes of learned positions.", lambda p: p.position_parameters * p._number_bytes)
    per_layer_bytes = _Planned(
        "Bytes of a per-layer table, quantised as the table is unless `row_sizes` has it, and of its projection.",
        lambda p: (
            (p.per_layer_rows or p.vocab_size) * p._row_bytes(p.per_layer_dim, "per_layer")
            + p.embed_dim * p.per_layer_dim * p._number_bytes
        ),
        when=lambda p: p.per_layer_dim,
    )
    delta_bytes = _Planned(
        "Bytes of the delta rows and of their int64 token IDs.",
        lambda p: p.delta_rows * (p.embed_dim * p._number_bytes + ID_BYTES),
    )
    weight_bytes = _Planned(
        "Bytes of all weights: table, head, positions, per-layer table and delta rows.",
        lambda p: sum(getattr(p, f"{part}_bytes") for part in PARTS),
    )
    scale_bytes = _Planned(
        "Bytes of the quantisation parameters of table and head: steps, offsets and scales. `weight_bytes` has them, "
        "and those of `row_sizes`, which are not counted here.",
        lambda p: sum(
            rows * p._scale_bytes_of(columns)
            for rows, columns in [*p._factors, *([(p._rows, p.embed_dim)] if p._own_head else [])]
        ),
        when=lambda p: p.dtype in SCALE_BYTES,
    )

    # Memory of a step on one rank

    gradient_bytes = _Planned(
        "Bytes of all gradients: one number for each trained parameter. The gradient of a row-sparse table has one row "
        "and one token ID for each token of the step. If that table is sharded, a rank gets the rows that it stores, "
        "once for each distinct token of all ranks: on average as many as the distinct tokens of one rank.",
        lambda p: (
            p._row_gradient_bytes(p.tokens if p.vocab_parallel_size == 1 else p._distinct)
            + (p.parameters - p.table_parameters) * p._number_bytes
            if p.row_sparse and p.trained
            else p.trained_parameters * p._number_bytes
        ),
    )
    optimizer_bytes = _Planned(
        "Bytes of the optimizer state: the moments of all trained parameters. A row-sparse table also has two int32 "
        "numbers for each row, from which the optimizer applies its pending updates. With one second moment a row "
        "(`row_state`, or Adagrad), this moment is an fp32 number.",
        lambda p: p._optimizer_bytes(OPTIMIZER_MOMENTS[p.optimizer] * DTYPE_BITS[p.moment_dtype] // 8),
    )
    activation_bytes = _Planned(
        "Bytes of the activations that embedding and head keep for one step: the input of the first block, the output "
        "of the last block and, in training, the gradient of that output; of a table that is only looked up, its "
        "vectors and their gradient. A trained factorised table also keeps the looked-up rows of width R, a trained "
        "sharded table the token IDs.",
        lambda p: (
            p.tokens * p._number_bytes * ((1 if p.lookup_only else 2) + p.trained) * p.embed_dim
            + p.tokens * p._number_bytes * (p.rank if p.rank and p.trained and not p.delta_rows else 0)
            + (p.tokens + p._distinct if p.trained and p.vocab_parallel_size > 1 else 0) * ID_BYTES
        ),
    )
    logits_bytes = _Planned(
        "Bytes of the logits of all tokens at once, in `compute_dtype`; 0 without a head.",
        lambda p: p.tokens * p._rows * p._number_bytes,
        when=lambda p: not p.lookup_only,
    )
    loss_bytes = _Planned(
        """Peak bytes of computing the loss, without gradients of weights.

        - Without training: the logits of all tokens; of a sharded table, of one chunk of tokens.
        - With `plain_loss`: the softmax of the logits and two gradients of it, in fp32.
        - By default: one chunk of logits in fp32, and as much again for a block of its rows. 16-bit weights add
          that block in 16 bits, and a temporary fp32 copy of the head's gradient. A CPU without instructions for
          products of 16-bit numbers needs no such block. On CUDA, with Triton: one chunk of logits in
          `compute_dtype`, and for several chunks the fp32 copy of the gradient.
        - Head tied to delta rows: four fp32 blocks of logits, of some tokens by some rows.
        - Without a head: 0.
        """,
        lambda p: p._loss_bytes(),
        when=lambda p: not p.lookup_only,
    )
    loss_in_chunks = _Planned(
        "Whether the loss is computed for one chunk of tokens at a time: the loss of this library, unless `plain_loss` "
        "is set.",
        lambda p: not (p.lookup_only or p.plain_loss),
    )
    loss_by_blocks = _Planned(
        "Whether the loss is computed for one block of tokens and rows at a time: for a head that is tied to a table "
        "with delta rows, which has no single matrix of all rows.",
        lambda p: p._tied_head and p.delta_rows > 0,
    )
    peak_bytes = _Planned(
        """Peak bytes of one step: forward pass, loss, backward pass and optimizer.

        Weights, optimizer state and activations stay allocated during the step. The rest is the larger of two phases.
        The first computes the loss, and the head's gradient if the loss computes it. The second holds all gradients. A
        tied table has two in it until they are added, one from the look-up and one from the head.
        """,
        lambda p: (
            p.weight_bytes
            + p.optimizer_bytes
            + p.activation_bytes
            + max(p._loss_phase_bytes(), p._gradient_phase_bytes())
        ),
    )
    gathered_bytes = _Planned(
        "Bytes that a rank needs to all-gather hidden states for a chunk of the loss; 0 for one rank. These are two "
        "copies of the hidden states of all ranks' tokens in the chunk and, in training, their gradients.",
        lambda p: p._chunk_tokens * p._head_width * p._number_bytes * (3 if p.trained else 2),
        when=lambda p: p.vocab_parallel_size > 1 and not p.lookup_only,
    )

    # What a rank sends in a step

    lookup_network_bytes = _Planned(
        """Bytes that a rank sends for the look-up: IDs, rows and, in training, gradients of rows.

        It is the average over the S = `vocab_parallel_size` ranks. A rank requests each distinct token of its batch
        once, and (S - 1)/S of these rows are stored on other ranks. Of a factorised table the rows of width R are sent.
        Tokenizers give frequent tokens the first IDs, so rank 0 sends more than the average: at most `(S - 1) * min(V /
        S, distinct_tokens)` rows. `peak_bytes` is that of an average rank.
        """,
        lambda p: (
            p._distinct
            * (p.vocab_parallel_size - 1)
            * (ID_BYTES + p._factors[0][1] * p._number_bytes * (2 if p.trained else 1))
            // p.vocab_parallel_size
        ),
    )
    loss_network_bytes = _Planned(
        """Bytes that a rank sends for the loss of a sharded table.

        A rank sends its hidden states and targets to all other ranks, and all-reduces three numbers for each token of
        all ranks. In training it also sends one factor for each of its tokens, and the gradients of the other ranks'
        hidden states. Neither logits nor rows of the table are sent.
        """,
        lambda p: (
            p.tokens
            * (p.vocab_parallel_size - 1)
            * (ID_BYTES + p._head_width * p._number_bytes * (2 if p.trained else 1) + 4 * p.trained + 2 * 3 * 4)
        ),
        when=lambda p: not p.lookup_only,
    )
    replicas_network_bytes = _Planned(
        "Bytes that a rank sends to average the gradients of table and head over the replicas. Dense gradients are "
        "all-reduced. Of a row-sparse table, a rank sends the IDs and gradients of its looked-up rows to each other "
        "replica; their number is an average over the ranks.",
        lambda p: (
            _all_reduced(p.replicas, (not p.row_sparse) * prod(p._factors[0]) + p.head_parameters, p._number_bytes)
            + (p.replicas - 1) * p.row_sparse * p._row_gradient_bytes(p._distinct)
        ),
        when=lambda p: p.trained,
    )
    replicated_network_bytes = _Planned(
        "Bytes that a process sends to all-reduce the gradients of unsharded parameters: learned positions, a "
        "per-layer table, and the `(R, D)` projection of a factorised table. `DistributedDataParallel` averages their "
        "gradients over all processes.",
        lambda p: _all_reduced(
            p.processes,
            p.position_parameters + p.per_layer_parameters + sum(prod(shape) for shape in p._factors[1:]),
            p._number_bytes,
        ),
        when=lambda p: p.trained,
    )

    # Operations of a step on one rank

    lookup_flops = _Planned(
        "Operations of the look-up, forward: none for rows, which are copied; `N D` to add positions.",
        lambda p: p.tokens * p.embed_dim,
        when=lambda p: p.positions,
    )
    lookup_backward_flops = _Planned(
        "Operations of the look-up, backward: one addition a number of each token's gradient, to the gradient of the "
        "token's row, or of its inner row of width R, and to that of its position.",
        lambda p: (
            p.tokens * p.embed_dim
            if p.delta_rows
            else p.tokens * (p._factors[0][1] + (p.embed_dim if p.positions else 0))
        ),
        when=lambda p: p.trained,
    )
    projection_flops = _Planned(
        "Operations of the projections of the input, forward: `2 N R D` for a factorised table, and `2 N D W` for "
        "per-layer inputs of width W.",
        lambda p: 2 * p.tokens * p.embed_dim * ((p.rank or 0) + p.per_layer_dim),
    )
    projection_backward_flops = _Planned(
        "Operations of the projections of the input, backward: twice those of `projection_flops`, half of them for the "
        "gradient of the input, half for that of the projection; none if they are frozen.",
        lambda p: 2 * p.projection_flops,
        when=lambda p: p.trained and not p.delta_rows,
    )
    head_flops = _Planned(
        "Operations of the logits of all tokens, forward: `2 N D V`, or `2 N D R + 2 N R V` if the table is factorised "
        "and tied. The softmax, a few operations a logit, is not counted, nor is dequantisation. A rank of a sharded "
        "table multiplies its rows with the tokens of all ranks.",
        lambda p: (
            2 * p.tokens * p.vocab_parallel_size * p._rows * p._head_width
            + (2 * p.tokens * (p.delta_parameters + p.embed_dim * (p.rank or 0)) if p.tied else 0)
        ),
        when=lambda p: not p.lookup_only,
    )
    head_backward_flops = _Planned(
        "Operations of the head, backward: `2 N D V` each for the gradients of hidden states and rows. The loss of "
        "this library computes no logits a second time, except for a head tied to delta rows. A frozen head has the "
        "gradient of the hidden states alone.",
        lambda p: (
            p.head_flops * (1 if p.delta_rows and not p.loss_by_blocks else 2)
            + (2 * p.tokens * p.delta_parameters if p.tied else 0)
        ),
        when=lambda p: p.trained and not p.lookup_only,
    )
    forward_flops = _Planned(
        "Operations of look-up, projections and head, forward.",
        lambda p: p.lookup_flops + p.projection_flops + p.head_flops,
    )
    backward_flops = _Planned(
        "Operations of look-up, projections and head, backward.",
        lambda p: p.lookup_backward_flops + p.projection_backward_flops + p.head_backward_flops,
    )
    network_bytes = _Planned(
        "All bytes that a rank sends in a step, on average over the ranks. The optimizer sends nothing.",
        lambda p: p.lookup_network_bytes + p.replicas_network_bytes + p.loss_network_bytes + p.replicated_network_bytes,
    )

    def as_dict(self) -> JsonObject:
        """Return the value of every field and of every planned size by its name, ready for JSON."""
        sizes = [name for name, value in vars(type(self)).items() if isinstance(value, _Planned) and name[0] != "_"]
        row_sizes = {part: size._asdict() for part, size in self.row_sizes.items()}
        return asdict(self) | {"row_sizes": row_sizes} | {name: getattr(self, name) for name in sizes}

    def _row_gradient_bytes(self, rows: int) -> int:
        """Return the bytes of `rows` rows of a row-sparse gradient, and of their token IDs."""
        return rows * (self._factors[0][1] * self._number_bytes + ID_BYTES)

    def _optimizer_bytes(self, number: int) -> int:
        """Return the bytes of the optimizer state, with `number` bytes for each parameter that has full moments."""
        if not self.row_sparse or not number:
            return self.trained_parameters * number
        row = self.embed_dim * number
        if self.row_state != "adamw" or self.optimizer == "adagrad":
            row = self.embed_dim * ROW_STATES[self.row_state] // 8 + 4
        return (self.trained_parameters - self.table_parameters) * number + self._rows * (row + STEP_BYTES)

    def _loss_bytes(self) -> int:
        if not self.trained and self.vocab_parallel_size == 1:
            return self.logits_bytes
        if self.loss_by_blocks:
            return 4 * min(self.tokens, MAX_CHUNK_TOKENS[self.device]) * min(ROWS_AT_ONCE, self._rows) * 4
        if not self.loss_in_chunks:
            return 3 * self.tokens * self._rows * 4
        if self.device == "cuda":
            sums = self._head_gradient * 4 if self._has_wide_sums else 0
            return self._rows * self._chunk_tokens * self._number_bytes + sums
        block = min(ROWS_OF_A_BLOCK[self.device], self._rows) * self._chunk_tokens
        chunk = (self._rows * self._chunk_tokens + block) * 4
        size = self._number_bytes
        return chunk if size == 4 else chunk + block * size + self._head_gradient * 4

    def _loss_phase_bytes(self) -> int:
        """Return the bytes of the loss, of gathered hidden states, and of a head's gradient that the loss computes."""
        head, loss = self._head_gradient * self._number_bytes, self.loss_bytes + self.gathered_bytes
        if not self.trained:
            return loss
        if self.loss_in_chunks or self.loss_by_blocks:
            return loss + (head if self.loss_by_blocks or not self._has_wide_sums else 0)
        return max(loss, self.logits_bytes + self.gathered_bytes + head)

    def _gradient_phase_bytes(self) -> int:
        """Return the bytes of all gradients while the backward pass adds them up.

        That of a tied table counts twice, for the look-up and for the head, unless the loss adds to it block by block;
        so does that of a sharded table.
        """
        sharded = self.vocab_parallel_size > 1 and self.trained and not self.row_sparse
        twice = self.tokens and ((self.tied and self._head_gradient) or sharded) and not self.loss_by_blocks
        return self.gradient_bytes + (prod(self._factors[0]) * self._number_bytes if twice else 0)

    def _groups(self, columns: int) -> tuple[int, int]:
        """Return how many groups a quantised row of `columns` numbers has, and the numbers in one."""
        size = GGUF_BLOCK.get(self.dtype) or self.group_size or columns
        return -(-columns // size), size

    def _scale_bytes_of(self, columns: int) -> int:
        """Return the bytes of the steps, offsets and scale of one quantised row of `columns` numbers."""
        return self._groups(columns)[0] * SCALE_BYTES[self.dtype] + ROW_SCALE_BYTES[self.dtype]

    def _row_bytes(self, columns: int, part: str) -> int:
        """Return the bytes of one stored row of `columns` numbers; of a quantised row also its steps and offsets."""
        if part in self.row_sizes:
            return self.row_sizes[part].nbytes
        if self.dtype in FLOAT_DTYPES:
            return columns * self._number_bytes
        groups, size = self._groups(columns)
        return groups * -(-size * DTYPE_BITS[self.dtype] // 8) + self._scale_bytes_of(columns)


OPTIONS = {option.name: option for option in fields(EmbeddingPlan) if option.metadata}
"""The fields of `EmbeddingPlan` that are options, by name. Their `metadata` has help, flag, least value and choices."""

EmbeddingPlan.__doc__ = re.sub(  # Python 3.13 removes the indentation of docstrings
    "^( +)(?=name: )",
    lambda found: "".join(f"{found[1]}{name}: {each.metadata['help']}\n" for name, each in OPTIONS.items()) + found[1],
    EmbeddingPlan.__doc__ or "",
    count=1,
    flags=re.MULTILINE,
)


def command_flag(name: str) -> str:
    """Return the command-line option of a field of `EmbeddingPlan`.

    Args:
        name: Name of the field.

    Example:
        >>> command_flag("vocab_size"), command_flag("plain_loss"), command_flag("tied")
        ('--vocab', '--plain-loss', '--tied/--untied')
    """
    flag: str = OPTIONS[name].metadata["flag"] or f"--{name.replace('_', '-')}"
    return f"{flag}/--un{flag[2:]}" if OPTIONS[name].default is True else flag


def options_table() -> str:
    """Return a Markdown table of all options of a plan for the documentation: option, field, default and meaning."""
    lines = ["| command | Python | default | meaning |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        default = "required" if option.default is MISSING else f"`{option.default}`"
        choices = f" One of {', '.join(option.metadata['choices'])}." if option.metadata["choices"] else ""
        flag = command_flag(name).replace("/", "`, `")
        lines.append(f"| `{flag}` | `{name}` | {default} | {option.metadata['help']}{choices} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class PlanAlternative:
    """One change to a plan, with the bytes that it saves.

    Args:
        change: Name of the change.
        plan: The plan after the change.
        saved_bytes: Bytes by which `peak_bytes` falls; negative if it grows.
        tradeoff: What else the change costs, in words.
    """

    change: str
    plan: EmbeddingPlan
    saved_bytes: int
    tradeoff: str


def plan_alternatives(now: EmbeddingPlan, *, used: int | None = None, delta_rows: int = 256) -> list[PlanAlternative]:
    """Plan every change that applies to a table and head, and sort the changes by the bytes that they save in a step.

    Args:
        now: The plan to start from.
        used: Number of tokens that would be kept in a trimmed vocabulary; `None` leaves trimming out, and so does a
            number that is not below the vocabulary's.
        delta_rows: Number of trained rows in the alternative that trains only some rows.

    Returns:
        The alternatives, the one that saves most first.

    Example:
        >>> now = plan("gpt2", tokens=4096)
        >>> [alternative.change for alternative in plan_alternatives(now)][:3]
        ['train 256 rows only', 'factorise, rank 192', 'weights in bf16']
    """
    all_rows = {"row_sparse": False, "row_state": "adamw"}
    frozen = {"optimizer": "none", **all_rows, "delta_rows": 0, "group_size": None}
    fewer = min(delta_rows, now.vocab_size)
    quarter = max(1, now.embed_dim // 4)
    trained, dense = now.trained, now.rank is None
    has_head = not now.lookup_only
    can_be_sparse = trained and dense and not ((has_head and now.tied) or now.row_sparse or now.delta_rows)
    can_freeze_rows = trained and not now.delta_rows and fewer < now.vocab_size and now.processes == 1
    can_factorise = dense and not now.quantised and now.embed_dim > quarter
    used_tokens = used or 0
    trimmed = {"vocab_size": used_tokens, "delta_rows": min(now.delta_rows, used_tokens)}
    only_rows, factors = {"delta_rows": fewer, **all_rows}, {"rank": quarter, **all_rows}
    options: list[tuple[bool, str, dict[str, Any], str]] = [
        (has_head and trained and now.plain_loss, "chunked loss", {"plain_loss": False}, "none: same results"),
        (has_head and not now.tied, "tie the head", {"tied": True, **all_rows}, "another model: train again"),
        (has_head and now.tied and dense, "untie the head", {"tied": False}, "same model at the start"),
        (can_be_sparse, "row-sparse table", {"row_sparse": True}, "none: same results"),
        (can_freeze_rows, f"train {fewer:,} rows only", only_rows, "all other rows stay"),
        (can_factorise, f"factorise, rank {quarter:,}", factors, "approximate: train again"),
        (now.dtype == "fp32" and not now.row_sizes, "weights in bf16", {"dtype": "bf16"}, "weights of three digits"),
        (not now.quantised, "int8, nothing trained", {**frozen, "dtype": "int8"}, "rows about 1 % off"),
        (not now.quantised, "int4, nothing trained", {**frozen, "dtype": "int4"}, "rows about 10 % off"),
        (0 < used_tokens < now.vocab_size, f"trim to {used_tokens:,} tokens", trimmed, "other text: more tokens"),
    ]
    alternatives = []
    for applies, change, values, tradeoff in options:
        if applies:
            after = replace(now, **values, name=change)
            alternatives.append(PlanAlternative(change, after, now.peak_bytes - after.peak_bytes, tradeoff))
    return sorted(alternatives, key=lambda alternative: -alternative.saved_bytes)
