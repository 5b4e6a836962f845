"""Parameters and bytes of the two ends of a model, before anything is built.

A table of V rows of width D has `V * D` parameters; all the rest follows from it:

| part | size |
|---|---|
| table | `V * D` numbers, or `V * R + R * D` when factorised with rank R |
| head | nothing when tied, else `V * D` of its own |
| learned positions | `max_seq_len * D` |
| gradient | one number a parameter, in the dtype of the weights |
| AdamW | two moments a parameter |
| logits | `tokens * V` numbers, and as many again for their gradient |

Parameters are counted in decimal units (1 M = 10^6), memory in binary ones (1 MiB = 2^20 bytes). What introductions
print as "147 MB" for GPT-2 small is 147 MiB.

torch is not needed here, so that a plan is quick to make.
"""

from dataclasses import KW_ONLY, asdict, dataclass
from difflib import get_close_matches

from embedlayer.errors import SizeError

DTYPE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}
"""Bits of one stored number, by the name of its type."""

OPTIMIZER_MOMENTS = {"adamw": 2, "sgd": 0, "none": 0}
"""Numbers an optimizer keeps for each parameter. `none` is inference: no gradient either."""

SCALE_BYTES = 4
"""Each row of a quantised matrix carries one fp32 scale."""


@dataclass(frozen=True)
class EmbeddingPlan:
    """What the table, the head, their training and the logits take, in parameters and bytes.

    An int8 or int4 plan stores one fp32 scale a row beside the numbers (int4: two numbers a byte, rows filled up to
    whole bytes), keeps learned positions in fp32, and is for inference: it has no gradient and no optimizer state.

    Args:
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        tied: The head reads the table; else it is a full `V x D` matrix of its own, also beside a factorised table.
        rank: Rank R of a factorised table, E = E1 E2; `None` for a dense one.
        positions: Rows of a learned position table, 0 for none.
        dtype: Of the weights, one of `DTYPE_BITS`.
        tokens: Tokens whose logits are in memory at once, B * T; 0 leaves logits out.
        optimizer: One of `OPTIMIZER_MOMENTS`. A few bytes of step counters are not counted.
        moment_dtype: Of the optimizer's moments. Mixed-precision trainers keep fp32; plain `torch.optim.AdamW` keeps
            them in the dtype of the weights.
        name: What the plan is called in tables.

    Raises:
        SizeError: A size is too small, the rank exceeds the width, or a dtype or an optimizer is unknown.

    Example:
        >>> gpt2 = EmbeddingPlan(50257, 768)
        >>> gpt2.table_parameters, format_bytes(gpt2.table_bytes)
        (38597376, '147.2 MiB')
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
    name: str = ""

    def __post_init__(self) -> None:
        _at_least(1, vocab_size=self.vocab_size, embed_dim=self.embed_dim, rank=1 if self.rank is None else self.rank)
        _at_least(0, positions=self.positions, tokens=self.tokens)
        if self.rank is not None and self.rank > self.embed_dim:
            raise SizeError(f"rank {self.rank} exceeds embed_dim {self.embed_dim}: a dense table is smaller.")
        _one_of(DTYPE_BITS, dtype=self.dtype)
        _one_of(OPTIMIZER_MOMENTS, optimizer=self.optimizer)
        _one_of([name for name in DTYPE_BITS if not _quantised(name)], moment_dtype=self.moment_dtype)

    @property
    def table_parameters(self) -> int:
        """Numbers in the input table alone: `V * D`, or `V * R + R * D`."""
        return sum(rows * columns for rows, columns in self._factors)

    @property
    def head_parameters(self) -> int:
        """Numbers the head adds: 0 when tied, else `V * D`."""
        return 0 if self.tied else self.vocab_size * self.embed_dim

    @property
    def position_parameters(self) -> int:
        """Numbers in the learned position table."""
        return self.positions * self.embed_dim

    @property
    def parameters(self) -> int:
        """All parameters: table, head and positions."""
        return self.table_parameters + self.head_parameters + self.position_parameters

    @property
    def table_bytes(self) -> int:
        """The input table as stored, scales included."""
        return sum(rows * _row_bytes(columns, self.dtype) for rows, columns in self._factors)

    @property
    def head_bytes(self) -> int:
        """What the head adds to storage: 0 when tied."""
        return 0 if self.tied else self.vocab_size * _row_bytes(self.embed_dim, self.dtype)

    @property
    def position_bytes(self) -> int:
        """The learned position table as stored."""
        return self.position_parameters * _bytes(self.compute_dtype)

    @property
    def weight_bytes(self) -> int:
        """All that is stored: table, head and positions."""
        return self.table_bytes + self.head_bytes + self.position_bytes

    @property
    def scale_bytes(self) -> int:
        """The share of `weight_bytes` that is scales of quantised rows."""
        rows = sum(rows for rows, _ in self._factors) + (0 if self.tied else self.vocab_size)
        return rows * SCALE_BYTES if _quantised(self.dtype) else 0

    @property
    def trained(self) -> bool:
        """Whether there are gradients: an optimizer is named and the weights are not quantised."""
        return self.optimizer != "none" and not _quantised(self.dtype)

    @property
    def gradient_bytes(self) -> int:
        """A dense gradient of every parameter."""
        return self.parameters * _bytes(self.dtype) if self.trained else 0

    @property
    def optimizer_bytes(self) -> int:
        """The optimizer's moments."""
        moments = OPTIMIZER_MOMENTS[self.optimizer] if self.trained else 0
        return self.parameters * moments * _bytes(self.moment_dtype)

    @property
    def compute_dtype(self) -> str:
        """The dtype of vectors and logits: that of the weights, or fp32 where these are quantised."""
        return "fp32" if _quantised(self.dtype) else self.dtype

    @property
    def logits_bytes(self) -> int:
        """Logits of all tokens at once. A chunked loss needs the share of one chunk only."""
        return self.tokens * self.vocab_size * _bytes(self.compute_dtype)

    @property
    def logits_gradient_bytes(self) -> int:
        """The gradient of the logits, as large as they are."""
        return self.logits_bytes if self.trained else 0

    @property
    def total_bytes(self) -> int:
        """Weights, gradients, optimizer state, logits and their gradient."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.logits_bytes
            + self.logits_gradient_bytes
        )

    def as_dict(self) -> dict[str, str | int | bool | None]:
        """Every field and every derived size under its own name, ready for JSON."""
        derived = [name for name, value in vars(type(self)).items() if isinstance(value, property) and name[0] != "_"]
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @property
    def _factors(self) -> list[tuple[int, int]]:
        if self.rank is None:
            return [(self.vocab_size, self.embed_dim)]
        return [(self.vocab_size, self.rank), (self.rank, self.embed_dim)]


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
        tokens: Tokens whose logits are in memory at once.
        optimizer: `adamw`, `sgd` or `none`.
        moment_dtype: Of the optimizer's moments.

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
        **sizes, dtype=dtype, tokens=tokens, optimizer=optimizer, moment_dtype=moment_dtype, name=preset or ""
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


def _row_bytes(columns: int, dtype: str) -> int:
    return -(-columns * DTYPE_BITS[dtype] // 8) + (SCALE_BYTES if _quantised(dtype) else 0)


def _at_least(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < least:
            raise SizeError(f"{name} must be at least {least}, not {size}.")


def _one_of(known: dict[str, int] | list[str], **options: str) -> None:
    for option, value in options.items():
        if value not in known:
            raise SizeError(f"{option} {value!r} is unknown: use one of {', '.join(known)}.")
