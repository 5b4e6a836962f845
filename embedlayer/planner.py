"""Parameters and bytes of the two ends of a model, before anything is built.

A table of V rows of width D has `V * D` parameters; all the rest follows from it. With N tokens in a step, `b` bytes a
number, and `G` bytes of gradient:

| part | size |
|---|---|
| table | `V * D` numbers, `V * R + R * D` when factorised with rank R, or codes and scales when quantised |
| head | nothing when tied, else `V * D` of its own |
| learned positions | `max_seq_len * D` |
| gradient | one number a trained parameter; of a row-sparse table one row and one ID a token |
| AdamW | two moments a trained parameter; of a row-sparse table also two step numbers a row |
| vectors | what enters the first block and leaves the last one, `2 N D`, and the gradient of the latter |
| loss | plain: logits' softmax and two gradients of it, `3 N V` in fp32; chunked: the logits of one chunk |
| look-up's network | an ID and two rows for each different token, on average over the ranks |
| loss' network | hidden state, target and scores of each token, to all |
| gradients' network | twice those of what all processes hold: copies of rows, projection, learned positions |
| a step | weights, optimizer, vectors, and the larger of loss and gradients, as they are not there at once |

Parameters are counted in decimal units (1 M = 10^6), memory in binary ones (1 MiB = 2^20 bytes). What introductions
print as "147 MB" for GPT-2 small is 147 MiB. A test builds each kind and measures each part.

torch is not needed here, so that a plan is quick to make.
"""

from dataclasses import KW_ONLY, asdict, dataclass, replace
from difflib import get_close_matches

from embedlayer.errors import SizeError
from embedlayer.losses.chunk_size import MAX_CHUNK_TOKENS, tokens_per_chunk

DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}
"""Bits of one stored number, by the name of its type."""

OPTIMIZER_MOMENTS = {"adamw": 2, "sgd": 0, "none": 0}
"""Numbers an optimizer keeps for each parameter. `none` is inference: no gradient either."""

SCALE_BYTES = {"int8": 8, "int4": 4}
"""A row of a quantised matrix, or a group of its numbers, carries a step and an offset: in fp32, in fp16."""

ROW_SCALE_BYTES = {"int8": 0, "int4": 4}
"""An int4 row also carries a scale in fp32."""

ID_BYTES = 8
ROWS_AT_ONCE = 8192
"""Rows that a table without a matrix of its own is compared with at a time."""


@dataclass(frozen=True)
class EmbeddingPlan:
    """What the table, the head, their training and the loss take, in parameters and bytes; of one device.

    An int8 or int4 table stores a step and an offset for each row or group (int4: two numbers a byte; the last group
    of a row is filled up), keeps learned positions in fp32, and is not trained: it has gradients and optimizer state
    only for `delta_rows`.

    Args:
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        tied: The head reads the table; else it is a full `V x D` matrix of its own, also beside a factorised table.
        rank: Rank R of a factorised table, E = E1 E2; `None` for a dense one.
        positions: Rows of a learned position table, 0 for none.
        dtype: Of the weights, one of `DTYPE_BITS`.
        tokens: Tokens of a step, B * T; 0 leaves vectors and loss out.
        optimizer: One of `OPTIMIZER_MOMENTS`. A few bytes of step counters are not counted, nor what an optimizer holds
            only while it steps: fused and row-sparse AdamW hold next to nothing.
        moment_dtype: Of the optimizer's moments. Mixed-precision trainers keep fp32; plain `torch.optim.AdamW` keeps
            them in the dtype of the weights.
        chunked_loss: The loss takes a chunk of tokens at a time, as `linear_cross_entropy` does beyond 65,536 logits,
            and a divided table always; else all logits at once.
        row_sparse: The table's gradient has the looked-up rows only (`RowAdamW`); its head is its own.
        delta_rows: Train only so many rows, and freeze everything else at the ends (`DeltaEmbedding`); 0 for all.
        group_size: Numbers of a quantised row that share a scale; `None` for all of them.
        ranks: Processes that table and head are divided among, by rows, each with `tokens` of its own
            (`ShardedTable`).
        copies: Copies of the divided table: `ranks * copies` processes train together.
        distinct_tokens: Different ones among a rank's `tokens`; 0 for as many as there can be.
        device: `"cpu"` or `"cuda"`: how large a chunk is.
        name: What the plan is called in tables.

    Raises:
        SizeError: A size is too small, the rank exceeds the width, a dtype or an optimizer is unknown, or two options
            exclude each other.

    Example:
        >>> gpt2 = EmbeddingPlan(50257, 768)
        >>> gpt2.table_parameters, format_bytes(gpt2.table_bytes)
        (38597376, '147.2 MiB')
        >>> format_bytes(EmbeddingPlan(50257, 768, delta_rows=200).optimizer_bytes)
        '1.2 MiB'
    """

    vocab_size: int
    embed_dim: int
    _: KW_ONLY
    tied: bool = True
    rank: int | None = None
    positions: int = 0
    dtype: str = "fp32"
    tokens: int = 0
    optimizer: str = "adamw"
    moment_dtype: str = "fp32"
    chunked_loss: bool = False
    row_sparse: bool = False
    delta_rows: int = 0
    group_size: int | None = None
    ranks: int = 1
    copies: int = 1
    distinct_tokens: int = 0
    device: str = "cpu"
    name: str = ""

    def __post_init__(self) -> None:
        _at_least(1, vocab_size=self.vocab_size, embed_dim=self.embed_dim, rank=1 if self.rank is None else self.rank)
        _at_least(1, ranks=self.ranks, copies=self.copies, group_size=1 if self.group_size is None else self.group_size)
        _at_least(0, positions=self.positions, tokens=self.tokens, delta_rows=self.delta_rows)
        _at_least(0, distinct_tokens=self.distinct_tokens)
        if self.rank is not None and self.rank > self.embed_dim:
            raise SizeError(f"rank {self.rank} exceeds embed_dim {self.embed_dim}: a dense table is smaller.")
        if self.delta_rows > self.vocab_size:
            raise SizeError(f"delta_rows {self.delta_rows} exceeds vocab_size {self.vocab_size}.")
        _one_of(DTYPE_BITS, dtype=self.dtype)
        _one_of(OPTIMIZER_MOMENTS, optimizer=self.optimizer)
        _one_of(list(MAX_CHUNK_TOKENS), device=self.device)
        _one_of([name for name in DTYPE_BITS if not _quantised(name)], moment_dtype=self.moment_dtype)
        if self.row_sparse and (self.tied or self.rank is not None or self.delta_rows or _quantised(self.dtype)):
            raise SizeError(
                "row_sparse is for a trained dense table with a head of its own: a tied head sends a gradient to every "
                "row. Leave out rank, delta_rows and int8 or int4, and plan it untied."
            )
        if self.delta_rows and self._processes > 1:
            raise SizeError(
                f"delta_rows {self.delta_rows} is for one process: rows that learn beside a frozen table are not "
                "divided among ranks, nor are there copies of them. Plan it with ranks=1 and copies=1, or without "
                "delta_rows."
            )
        if self.group_size is not None and not _quantised(self.dtype):
            raise SizeError(f"group_size {self.group_size} is for int8 and int4, not for {self.dtype}.")

    @property
    def table_parameters(self) -> int:
        """Numbers in the input table alone: `V * D`, or `V * R + R * D`."""
        return sum(rows * columns for rows, columns in self._factors)

    @property
    def head_parameters(self) -> int:
        """Numbers the head adds: 0 when tied, else `V * D`."""
        return 0 if self.tied else self._rows * self.embed_dim

    @property
    def position_parameters(self) -> int:
        """Numbers in the learned position table."""
        return self.positions * self.embed_dim

    @property
    def delta_parameters(self) -> int:
        """Numbers in the rows that alone are trained."""
        return self.delta_rows * self.embed_dim

    @property
    def parameters(self) -> int:
        """All parameters: table, head, positions, and rows beside the table."""
        return self.table_parameters + self.head_parameters + self.position_parameters + self.delta_parameters

    @property
    def trained_parameters(self) -> int:
        """Those that have a gradient."""
        if not self.trained:
            return 0
        return self.delta_parameters if self.delta_rows else self.parameters

    @property
    def table_bytes(self) -> int:
        """The input table as stored, scales included."""
        return sum(rows * self._row_bytes(columns) for rows, columns in self._factors)

    @property
    def head_bytes(self) -> int:
        """What the head adds to storage: 0 when tied."""
        return 0 if self.tied else self._rows * self._row_bytes(self.embed_dim)

    @property
    def position_bytes(self) -> int:
        """The learned position table as stored."""
        return self.position_parameters * _bytes(self.compute_dtype)

    @property
    def delta_bytes(self) -> int:
        """The rows beside the table, and which tokens they belong to."""
        return self.delta_rows * (self.embed_dim * _bytes(self.compute_dtype) + ID_BYTES)

    @property
    def weight_bytes(self) -> int:
        """All that is stored: table, head, positions, and rows beside the table."""
        return self.table_bytes + self.head_bytes + self.position_bytes + self.delta_bytes

    @property
    def scale_bytes(self) -> int:
        """The share of `weight_bytes` that is steps, offsets and scales."""
        if not _quantised(self.dtype):
            return 0
        matrices = [*self._factors, *([] if self.tied else [(self._rows, self.embed_dim)])]
        return sum(rows * self._scale_bytes_of(columns) for rows, columns in matrices)

    @property
    def trained(self) -> bool:
        """Whether there are gradients: an optimizer is named, and the weights are not quantised or have rows beside."""
        return self.optimizer != "none" and (self.delta_rows > 0 or not _quantised(self.dtype))

    @property
    def gradient_bytes(self) -> int:
        """Gradients of the trained parameters: of a row-sparse table one row and one ID a token, else dense.

        A rank of several gets one for each different token that all have, on average as many as its own batch has.
        """
        size = _bytes(self.compute_dtype)
        if not self.row_sparse or not self.trained:
            return self.trained_parameters * size
        looked_up = self.tokens if self.ranks == 1 else self._distinct
        return looked_up * (self.embed_dim * size + ID_BYTES) + (self.parameters - self.table_parameters) * size

    @property
    def optimizer_bytes(self) -> int:
        """The optimizer's moments, and of a row-sparse table the steps up to which its rows and moments are right."""
        moments = self.trained_parameters * OPTIMIZER_MOMENTS[self.optimizer] * _bytes(self.moment_dtype)
        return moments + (2 * 4 * self._rows if self.row_sparse and moments else 0)

    @property
    def compute_dtype(self) -> str:
        """The dtype of vectors and logits: that of the weights, or fp32 where these are quantised."""
        return "fp32" if _quantised(self.dtype) else self.dtype

    @property
    def activation_bytes(self) -> int:
        """The vectors of both ends: those that enter the first block, those that leave the last, and their gradient.

        A factorised table that is trained also keeps the narrow rows that it looked up, a divided one the IDs.
        """
        narrow = self.rank if self.rank and self.trained and not self.delta_rows else 0
        wide = 3 if self.trained else 2
        ids = self.tokens + self._distinct if self.trained and self.ranks > 1 else 0
        return self.tokens * (wide * self.embed_dim + narrow) * _bytes(self.compute_dtype) + ids * ID_BYTES

    @property
    def logits_bytes(self) -> int:
        """Logits of all tokens at once, in the dtype of the weights."""
        return self.tokens * self._rows * _bytes(self.compute_dtype)

    @property
    def loss_bytes(self) -> int:
        """What the loss holds at its peak besides the gradients of the weights; without training, the logits.

        Plain: softmax and two gradients, in fp32 in every case. Chunked: one chunk of them, and, where the weights are
        narrow, the chunk in their type and the head's gradient in fp32. A head tied to rows beside a table goes by
        blocks of tokens and rows: four times a block of logits.
        """
        if not self.trained and self.ranks == 1:
            return self.logits_bytes
        if self._by_blocks:
            tokens = min(self.tokens, MAX_CHUNK_TOKENS[self.device])
            return 4 * tokens * min(ROWS_AT_ONCE, self._rows) * 4
        if not self.chunked_loss and self.ranks == 1:
            return 3 * self.tokens * self._rows * 4
        size, chunk = _bytes(self.compute_dtype), self._rows * self._chunk_tokens
        return chunk * 4 if size == 4 else chunk * (4 + size) + self._head_gradient * 4

    @property
    def peak_bytes(self) -> int:
        """The most that is in memory during one step: forward, loss, backward, optimizer.

        Weights, optimizer and vectors are there all the time. Then come the loss, with the head's gradient if it makes
        that on its way, and the gradients, of a tied table two until they are added.
        """
        size = _bytes(self.compute_dtype)
        head = self._head_gradient * size
        if not self.trained:
            loss = self.loss_bytes
        elif self._by_blocks:
            loss = self.loss_bytes + head
        elif not self.chunked_loss and self.ranks == 1:
            loss = max(self.loss_bytes, self.logits_bytes + head)
        else:
            loss = self.loss_bytes + (head if size == 4 else 0)
        again = (self.tied and self._head_gradient) or (self.ranks > 1 and self.trained and not self.row_sparse)
        twice = self._factors[0][0] * self._factors[0][1] * size if again else 0
        at_rest = self.weight_bytes + self.optimizer_bytes + self.activation_bytes
        gradients = self.gradient_bytes + (twice if self.tokens and not self._by_blocks else 0)
        return at_rest + max(loss + self.gathered_bytes, gradients)

    @property
    def gathered_bytes(self) -> int:
        """What a rank holds of all ranks' hidden states in a chunk of the loss; in training, their gradients too."""
        if self.ranks == 1:
            return 0
        return self._chunk_tokens * self._head_width * _bytes(self.compute_dtype) * (3 if self.trained else 2)

    @property
    def lookup_network_bytes(self) -> int:
        """What a rank sends in a step for the look-up, on average over the ranks: IDs, rows, in training gradients.

        Each of the different tokens once, to whoever owns its row: of N ranks, N - 1 of N are somebody else's. Of a
        factorised table they are the narrow rows. Which rank sends the rows depends on the tokens:
        `busiest_lookup_network_bytes`.
        """
        each = ID_BYTES + self._row_sent * (2 if self.trained else 1)
        return self._distinct * (self.ranks - 1) * each // self.ranks

    @property
    def busiest_lookup_network_bytes(self) -> int:
        """The most that one rank sends of its own rows in a step; in training it gets as many bytes of gradients back.

        Each rank owns a block of rows, and learned tokenizers give frequent tokens the first IDs, so all ask the first
        rank. It sends each of its rows once to each other rank, or as many of them as a rank has different tokens; it
        holds them all at once, which `peak_bytes`, an average rank's, leaves out.
        """
        return (self.ranks - 1) * min(self._rows, self._distinct) * self._row_sent

    @property
    def loss_network_bytes(self) -> int:
        """What a rank sends in a step for the loss: its hidden states and targets to all others.

        Then come two all-reduces of three numbers for each token of all ranks; in training a factor of each token's
        gradient, and the gradients of the others' hidden states. Logits and rows stay where they are.
        """
        hidden = self._head_width * _bytes(self.compute_dtype)
        own = ID_BYTES + hidden + (4 + hidden if self.trained else 0)
        return self.tokens * (self.ranks - 1) * (own + 2 * 3 * 4)

    @property
    def copies_network_bytes(self) -> int:
        """What a rank sends in a step for the mean of its rows' gradients over the copies.

        Dense ones by an all-reduce; of a row-sparse table the IDs and rows of its gradient, to each other copy, on
        average over the ranks.
        """
        if not self.trained:
            return 0
        rows, columns = self._factors[0]
        table = 0 if self.row_sparse else rows * columns
        size, sparse = _bytes(self.compute_dtype), self.row_sparse * (self.copies - 1) * self._distinct
        dense = 2 * (self.copies - 1) * (table + self.head_parameters) * size // self.copies
        return dense + sparse * (columns * size + ID_BYTES)

    @property
    def undivided_network_bytes(self) -> int:
        """What a process sends in a step for the mean of the gradients of what each has whole, by an all-reduce.

        A factorised table's projection and learned positions, which `DistributedDataParallel` joins over all processes.
        """
        if not self.trained:
            return 0
        numbers = self.position_parameters + sum(rows * columns for rows, columns in self._factors[1:])
        return 2 * (self._processes - 1) * numbers * _bytes(self.compute_dtype) // self._processes

    @property
    def network_bytes(self) -> int:
        """What a rank sends in a step for both ends, on average over the ranks.

        The optimizer sends nothing, as each rank owns its rows.
        """
        rows = self.lookup_network_bytes + self.copies_network_bytes
        return rows + self.loss_network_bytes + self.undivided_network_bytes

    def as_dict(self) -> dict[str, str | int | bool | None]:
        """Every field and every derived size under its own name, ready for JSON."""
        derived = [name for name, value in vars(type(self)).items() if isinstance(value, property) and name[0] != "_"]
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @property
    def _rows(self) -> int:
        """Rows on one device."""
        return -(-self.vocab_size // self.ranks)

    @property
    def _factors(self) -> list[tuple[int, int]]:
        if self.rank is None:
            return [(self._rows, self.embed_dim)]
        return [(self._rows, self.rank), (self.rank, self.embed_dim)]

    @property
    def _processes(self) -> int:
        return self.ranks * self.copies

    @property
    def _row_sent(self) -> int:
        """Bytes of a row on its way: of a factorised table the narrow one."""
        return self._factors[0][1] * _bytes(self.compute_dtype)

    @property
    def _distinct(self) -> int:
        """Different tokens of a rank."""
        most = min(self.tokens, self.vocab_size)
        return min(self.distinct_tokens, most) if self.distinct_tokens else most

    @property
    def _head_width(self) -> int:
        """Numbers of a hidden state that are compared with a row."""
        return self.embed_dim if self.rank is None or not self.tied else self.rank

    @property
    def _chunk_tokens(self) -> int:
        """Tokens in a chunk of the loss, of all ranks."""
        length = tokens_per_chunk(self.tokens * self.ranks, self._rows, self._head_width, self.device, 4)
        return min(-(-length // self.ranks), self.tokens) * self.ranks

    @property
    def _by_blocks(self) -> bool:
        """Whether the head is tied to rows that no one matrix holds."""
        return self.tied and self.delta_rows > 0

    @property
    def _head_gradient(self) -> int:
        """Numbers in the gradient that the loss sends to the rows it compares with."""
        if not self.trained or (self.delta_rows and not self.tied):
            return 0
        if self.delta_rows:
            return self.delta_parameters
        return self._factors[0][0] * self._factors[0][1] if self.tied else self.head_parameters

    def _groups(self, columns: int) -> int:
        return -(-columns // (self.group_size or columns))

    def _scale_bytes_of(self, columns: int) -> int:
        """Steps, offsets and scale of a quantised row."""
        return self._groups(columns) * SCALE_BYTES[self.dtype] + ROW_SCALE_BYTES[self.dtype]

    def _row_bytes(self, columns: int) -> int:
        if not _quantised(self.dtype):
            return columns * _bytes(self.dtype)
        codes = -(-(self.group_size or columns) * DTYPE_BITS[self.dtype] // 8)
        return self._groups(columns) * codes + self._scale_bytes_of(columns)


@dataclass(frozen=True)
class Change:
    """One thing that can be done to the ends of a model, and what it saves.

    Args:
        what: Name of the change.
        plan: The ends after it.
        saved_bytes: What a step takes less than before; negative if it takes more.
        price: What it costs otherwise, in words.
    """

    what: str
    plan: EmbeddingPlan
    saved_bytes: int
    price: str


def changes(now: EmbeddingPlan, *, used: int | None = None, delta_rows: int = 256) -> list[Change]:
    """What can be done to the ends of a model, that which saves most in a step first.

    Args:
        now: The ends as they are.
        used: Tokens of the vocabulary that the texts at hand use; `None` leaves trimming out.
        delta_rows: How many rows training "only some rows" means.

    Example:
        >>> now = plan("gpt2", tokens=4096)
        >>> [change.what for change in changes(now)][:3]
        ['train 256 rows only', 'chunked loss', 'int4, nothing trained']
    """
    quantised = _quantised(now.dtype)
    wide = now.dtype == "fp32"
    frozen = {"optimizer": "none", "row_sparse": False, "delta_rows": 0, "group_size": None}
    fewer = min(delta_rows, now.vocab_size)
    quarter = max(1, now.embed_dim // 4)
    trained = now.trained
    options: list[tuple[bool, str, dict[str, object], str]] = [
        (trained and not now.chunked_loss, "chunked loss", {"chunked_loss": True}, "none: same results"),
        (not now.tied, "tie the head", {"tied": True, "row_sparse": False}, "another model: train again"),
        (now.tied and now.rank is None, "untie the head", {"tied": False}, "same model at the start"),
        (
            trained and not now.tied and now.rank is None and not now.row_sparse and not now.delta_rows,
            "row-sparse table",
            {"row_sparse": True},
            "none: same results",
        ),
        (
            trained and not now.delta_rows and fewer < now.vocab_size and now._processes == 1,
            f"train {fewer:,} rows only",
            {"delta_rows": fewer, "row_sparse": False},
            "all other rows stay",
        ),
        (
            now.rank is None and not quantised and now.embed_dim > quarter,
            f"factorise, rank {quarter:,}",
            {"rank": quarter, "row_sparse": False},
            "approximate: train again",
        ),
        (wide, "weights in bf16", {"dtype": "bf16"}, "weights of three digits"),
        (not quantised, "int8, nothing trained", {**frozen, "dtype": "int8"}, "rows about 1 % off"),
        (not quantised, "int4, nothing trained", {**frozen, "dtype": "int4"}, "rows about 10 % off"),
        (
            used is not None and 0 < used < now.vocab_size,
            f"trim to {used or 0:,} tokens",
            {"vocab_size": used, "delta_rows": min(now.delta_rows, used or 0)},
            "other text: more tokens",
        ),
    ]
    found = []
    for possible, what, fields, price in options:
        if possible:
            after = replace(now, **fields, name=what)  # type: ignore[arg-type]
            found.append(Change(what, after, now.peak_bytes - after.peak_bytes, price))
    return sorted(found, key=lambda change: -change.saved_bytes)


@dataclass(frozen=True)
class Preset:
    """The two ends of a published model.

    Args:
        vocab_size: Rows of its table, V, as its checkpoint holds them (padding to a round number included).
        embed_dim: Width of its residual stream, D.
        tied: Whether its head reads the table.
        positions: Rows of its learned position table, 0 where positions are sinusoidal, rotary or biases.
        rank: Rank of its factorised table, `None` for a dense one.
    """

    vocab_size: int
    embed_dim: int
    _: KW_ONLY
    tied: bool
    positions: int = 0
    rank: int | None = None


PRESETS: dict[str, Preset] = {
    "gpt2": Preset(50257, 768, tied=True, positions=1024),
    "gpt2-medium": Preset(50257, 1024, tied=True, positions=1024),
    "gpt2-large": Preset(50257, 1280, tied=True, positions=1024),
    "gpt2-xl": Preset(50257, 1600, tied=True, positions=1024),
    "bert-base": Preset(30522, 768, tied=True, positions=512),
    "bert-large": Preset(30522, 1024, tied=True, positions=512),
    # RoBERTa and OPT start counting positions at 2.
    "roberta-base": Preset(50265, 768, tied=True, positions=514),
    "opt-125m": Preset(50272, 768, tied=True, positions=2050),
    # ALBERT's 512 positions are as narrow as its rank; not counted, as ours are added at full width.
    "albert-base": Preset(30000, 768, tied=True, rank=128),
    "t5-small": Preset(32128, 512, tied=True),
    "t5-base": Preset(32128, 768, tied=True),
    "bloom-560m": Preset(250880, 1024, tied=True),
    "pythia-70m": Preset(50304, 512, tied=False),
    "phi-2": Preset(51200, 2560, tied=False),
    "phi-3-mini": Preset(32064, 3072, tied=False),
    "llama-7b": Preset(32000, 4096, tied=False),
    "llama-13b": Preset(32000, 5120, tied=False),
    "llama-65b": Preset(32000, 8192, tied=False),
    "llama-2-7b": Preset(32000, 4096, tied=False),
    "llama-2-13b": Preset(32000, 5120, tied=False),
    "llama-2-70b": Preset(32000, 8192, tied=False),
    "llama-3-8b": Preset(128256, 4096, tied=False),
    "llama-3-70b": Preset(128256, 8192, tied=False),
    "llama-3.2-1b": Preset(128256, 2048, tied=True),
    "llama-3.2-3b": Preset(128256, 3072, tied=True),
    "mistral-7b": Preset(32000, 4096, tied=False),
    "gemma-2b": Preset(256000, 2048, tied=True),
    "gemma-7b": Preset(256000, 3072, tied=True),
    "gemma-2-2b": Preset(256000, 2304, tied=True),
    "gemma-2-9b": Preset(256000, 3584, tied=True),
    "gemma-2-27b": Preset(256000, 4608, tied=True),
    "gemma-3-270m": Preset(262144, 640, tied=True),
    "gemma-3-1b": Preset(262144, 1152, tied=True),
    "qwen2-0.5b": Preset(151936, 896, tied=True),
    "qwen2-1.5b": Preset(151936, 1536, tied=True),
    "qwen2-7b": Preset(152064, 3584, tied=False),
    "smollm2-135m": Preset(49152, 576, tied=True),
}
"""Published models by name."""


def plan(
    preset: str | None = None,
    *,
    vocab_size: int | None = None,
    embed_dim: int | None = None,
    tied: bool | None = None,
    rank: int | None = None,
    positions: int | None = None,
    dtype: str = "fp32",
    tokens: int = 0,
    optimizer: str = "adamw",
    moment_dtype: str = "fp32",
    chunked_loss: bool = False,
    row_sparse: bool = False,
    delta_rows: int = 0,
    group_size: int | None = None,
    ranks: int = 1,
    copies: int = 1,
    distinct_tokens: int = 0,
    device: str = "cpu",
) -> EmbeddingPlan:
    """Plan the ends of a model named in `PRESETS`, or of the sizes given; a size given beside a name replaces its own.

    Args:
        preset: A name in `PRESETS`; `None` if `vocab_size` and `embed_dim` are given.
        vocab_size: See `EmbeddingPlan`, as for all that follow.
        embed_dim: Width D.
        tied: `None` for the preset's own way, and tied where there is no preset.
        rank: `None` for the preset's own.
        positions: `None` for the preset's own.
        dtype: Of the weights.
        tokens: Tokens of a step.
        optimizer: `adamw`, `sgd` or `none`.
        moment_dtype: Of the optimizer's moments.
        chunked_loss: Whether all logits are there at once.
        row_sparse: Whether the table's gradient is of the looked-up rows only.
        delta_rows: Rows that alone are trained; 0 for all.
        group_size: Numbers that share a scale, in int8 and int4.
        ranks: Processes that the rows are divided among.
        copies: Copies of the divided table.
        distinct_tokens: Different ones among a rank's tokens; 0 for as many as there can be.
        device: `"cpu"` or `"cuda"`.

    Raises:
        SizeError: The preset is unknown, or a size is missing or cannot be built.

    Example:
        >>> plan("gpt2").parameters - plan("gpt2").position_parameters
        38597376
        >>> format_bytes(plan(vocab_size=32000, embed_dim=4096).table_bytes)
        '500.0 MiB'
    """
    given = {"vocab_size": vocab_size, "embed_dim": embed_dim, "tied": tied, "rank": rank, "positions": positions}
    sizes = (asdict(_preset(preset)) if preset is not None else {}) | {
        name: value for name, value in given.items() if value is not None
    }
    if missing := {"vocab_size", "embed_dim"} - sizes.keys():
        raise SizeError(
            f"a plan without a preset needs vocab_size and embed_dim; {' and '.join(sorted(missing))} missing.\n"
            "Give both, or the name of a model: plan('gpt2')."
        )
    return EmbeddingPlan(
        **sizes,
        dtype=dtype,
        tokens=tokens,
        optimizer=optimizer,
        moment_dtype=moment_dtype,
        chunked_loss=chunked_loss,
        row_sparse=row_sparse,
        delta_rows=delta_rows,
        group_size=group_size,
        ranks=ranks,
        copies=copies,
        distinct_tokens=distinct_tokens,
        device=device,
        name=preset or "",
    )


def textbook_tables() -> dict[str, list[EmbeddingPlan]]:
    """The two tables that introductions to embeddings print: known models, and sizes from tiny to large.

    Each plan holds one fp32 table; `table_parameters` and `table_bytes` are the printed columns.

    Example:
        >>> [plan.name for plan in textbook_tables()["models"]]
        ['GPT-2 Small', 'LLaMA 7B', 'LLaMA 70B']
    """
    models = {"GPT-2 Small": (50257, 768), "LLaMA 7B": (32000, 4096), "LLaMA 70B": (32000, 8192)}
    sizes = {
        "Tiny": (1000, 64),
        "Small": (8000, 256),
        "Medium": (32000, 512),
        "Large (GPT-2)": (50000, 768),
        "Large (LLaMA)": (100000, 4096),
    }
    return {
        title: [EmbeddingPlan(*size, name=name) for name, size in rows.items()]
        for title, rows in {"models": models, "sizes": sizes}.items()
    }


def format_parameters(count: int) -> str:
    """A count of parameters in decimal units.

    Example:
        >>> format_parameters(38597376)
        '38.6 M'
    """
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def format_bytes(count: int) -> str:
    """A number of bytes in binary units, with at most three digits before the point.

    Example:
        >>> format_bytes(32000 * 4096 * 4), format_bytes(32000 * 8192 * 4)
        ('500.0 MiB', '1.0 GiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count * 1024 >= size * 1000:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _preset(name: str) -> Preset:
    if name in PRESETS:
        return PRESETS[name]
    close = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(PRESETS)}."
    raise SizeError(f"there is no preset {name!r}.\n{hint} Other models: give vocab_size and embed_dim.")


def _quantised(dtype: str) -> bool:
    return dtype.startswith("int")


def _bytes(dtype: str) -> int:
    return DTYPE_BITS[dtype] // 8


def _at_least(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < least:
            raise SizeError(f"{name} must be at least {least}, not {size}.")


def _one_of(known: dict[str, int] | list[str], **options: str) -> None:
    for option, value in options.items():
        if value not in known:
            raise SizeError(f"{option} {value!r} is unknown: use one of {', '.join(known)}.")
