"""Every kind of table, position, head and input layer, small: the laws in `tests/laws` are run over these.

A new kind is tested by adding it here. Each entry is a function that builds a fresh one: 50 tokens, width 24,
16 positions, 4 heads of width 6.
"""

import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import embedlayer as el
from embedlayer.heads import StackedRows, StreamHead
from embedlayer.inputs import (
    AddedEmbedding,
    EmbeddingInjection,
    GatedEmbedding,
    NgramEmbedding,
    NgramHash,
    PerLayerEmbedding,
    PerLayerInputs,
    ValueEmbedding,
)
from embedlayer.tables import MappedEmbedding, StoredEmbedding, StreamTable

VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, NUM_HEADS = 50, 24, 16, 4


def quantized(bits: int, **options: object) -> el.QuantizedEmbedding:
    rows = torch.randn(VOCAB_SIZE, EMBED_DIM)
    return el.QuantizedEmbedding.from_table(rows, bits, padding_idx=0, scale="sqrt_dim", **options)


def dense(kind: Any = el.TokenEmbedding, **options: object) -> Any:
    return kind(VOCAB_SIZE, EMBED_DIM, **{"padding_idx": 0, "scale": "sqrt_dim", **options})


def stored(kind: str, *arguments: object) -> StoredEmbedding:
    """A table of a format of compressed-tensors with random codes and scales."""
    from embedlayer.formats import compressed_tensors

    record = getattr(compressed_tensors, kind)(EMBED_DIM, *arguments)
    table = StoredEmbedding(VOCAB_SIZE, record, padding_idx=0, scale="sqrt_dim", dtype=torch.float32)
    for tensor in table.parts.tensors.values():
        if tensor.dtype in (torch.int8, torch.int32):
            info = torch.iinfo(tensor.dtype)
            tensor.copy_(torch.randint(info.min, info.max, tensor.shape))
        else:
            tensor.copy_(torch.rand(tensor.shape) / 8)
    return table


class TableOfAUser(el.TokenTable):
    """A table as a user may write it: row v is `weight[v] + shared`, and nothing else is said."""

    def __init__(self, vocab_size: int, embed_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.vocab_size = self.num_rows = vocab_size
        self.embed_dim, self.padding_idx, self.scale = embed_dim, padding_idx, 2.0
        self.weight = nn.Parameter(torch.empty(2 * vocab_size, embed_dim))  # more rows than IDs
        self.shared = nn.Parameter(torch.empty(embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.shared)

    @property
    def config(self) -> dict[str, object]:
        return {"vocab_size": self.vocab_size, "embed_dim": self.embed_dim, "padding_idx": self.padding_idx}

    def look_up(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight) + self.shared

    def rows(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop] + self.shared


TABLES: dict[str, Callable[[], el.TokenTable]] = {
    "dense": dense,
    "dense, spare rows": lambda: dense(pad_to_multiple_of=16, init_std=1.0),
    "dense, rounded scale": lambda: dense(round_scale=True),
    "dense, plain": lambda: el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM),
    "row-sparse": lambda: dense(el.RowSparseEmbedding),
    "factorised": lambda: el.FactorizedEmbedding(VOCAB_SIZE, EMBED_DIM, 8, padding_idx=0, scale="sqrt_dim"),
    "int8": lambda: quantized(8),
    "int4": lambda: quantized(4),
    "int4, groups": lambda: quantized(4, group_size=8),
    "int4, q4_0": lambda: quantized(4, layout=el.formats.GGUFBlocks()),
    "stored, 4 bits": lambda: stored("PackQuantizedRows", 8, "BF16", True, 4),
    "stored, FP8": lambda: stored("NaiveQuantizedRows", 0, "F32", True, "F8_E4M3"),
    "delta": lambda: el.DeltaEmbedding(dense(), [7, 48, 49]),
    "delta over int8": lambda: el.DeltaEmbedding(quantized(8), [7, 48, 49]),
    "of a user": lambda: TableOfAUser(VOCAB_SIZE, EMBED_DIM, padding_idx=0),
    "delta over factorised": lambda: el.DeltaEmbedding(TABLES["factorised"](), [7, 48, 49]),
}


def in_a_file(trained: bool) -> MappedEmbedding:
    """A table of its own temporary folder, which is deleted with the table."""
    folder = tempfile.TemporaryDirectory()
    options = {"padding_idx": 0, "scale": "sqrt_dim"}
    if trained:
        table = MappedEmbedding.create(f"{folder.name}/rows", VOCAB_SIZE, EMBED_DIM, init_std=0.02, **options)
    else:
        save_file({"rows": torch.randn(VOCAB_SIZE, EMBED_DIM)}, f"{folder.name}/rows.safetensors")
        table = MappedEmbedding.open(f"{folder.name}/rows.safetensors", **options)
    weakref.finalize(table, folder.cleanup)
    return table


LOOKUP_TABLES: dict[str, Callable[[], el.LookupTable]] = {
    **TABLES,
    "mapped, read-only": lambda: in_a_file(trained=False),
    "mapped, trained": lambda: in_a_file(trained=True),
}
"""Tables with the first direction, and some without the second."""

BAGS: dict[str, Callable[[], el.tables.Bag]] = {
    f"{mode} over {name}": lambda name=name, mode=mode: el.tables.Bag(LOOKUP_TABLES[name](), mode=mode)
    for name, mode in {
        "dense": "mean",
        "dense, plain": "sum",
        "row-sparse": "mean",
        "factorised": "sum",
        "int8": "mean",
        "delta": "sum",
        "of a user": "mean",
    }.items()
}
"""From a batch of bags `(B, T)`, or IDs and offsets, to one vector for each bag."""

STREAM_SIZES = (20, 7, 22, 1)
STREAM_TABLES: dict[str, Callable[[], StreamTable]] = {
    **{
        name: lambda name=name: StreamTable(LOOKUP_TABLES[name](), STREAM_SIZES)
        for name in ("dense", "dense, rounded scale", "row-sparse", "factorised", "int8", "stored, 4 bits", "delta")
    },
    "mapped": lambda: StreamTable(in_a_file(trained=False), STREAM_SIZES),
    "shared padding": lambda: StreamTable(dense(padding_idx=49), (20, 6, 22, 1), shared_padding_idx=49),
}
"""Four streams over 50 rows of several kinds of tables, from IDs `(..., 4)` to vectors."""

STREAM_IDS = torch.tensor([
    [[1, 5, 21, 0], [19, 0, 0, 0], [1, 5, 21, 0], [7, 2, 3, 0]],
    [[7, 5, 4, 0], [7, 5, 9, 0], [0, 0, 0, 0], [7, 4, 9, 0]],
    [[0, 0, 7, 0], [12, 1, 3, 0], [12, 1, 3, 0], [5, 5, 5, 0]],
])  # fmt: skip

POSITIONS: dict[str, Callable[[], el.Position]] = {
    "learned": lambda: el.LearnedPositionalEmbedding(MAX_SEQ_LEN, EMBED_DIM),
    "learned, offset": lambda: el.LearnedPositionalEmbedding(MAX_SEQ_LEN, EMBED_DIM, offset=2),
    "sinusoidal": lambda: el.SinusoidalPositionalEmbedding(MAX_SEQ_LEN, EMBED_DIM),
    "scaled-sinusoidal": lambda: el.SinusoidalPositionalEmbedding(MAX_SEQ_LEN, EMBED_DIM, init_scale=0.2),
    "axial": lambda: el.positions.AxialPositionalEmbedding(
        (2, (MAX_SEQ_LEN + 1) // 2), (EMBED_DIM // 4, EMBED_DIM - EMBED_DIM // 4)
    ),
    "rotary": lambda: el.RotaryEmbedding(EMBED_DIM // NUM_HEADS),
    "dynamic": lambda: el.RotaryEmbedding(
        EMBED_DIM // NUM_HEADS,
        scaling=el.positions.DynamicNTKScaling(factor=2.0, original_max_seq_len=6, length=MAX_SEQ_LEN),
    ),
    "rotary, axes": lambda: el.RotaryEmbedding(
        EMBED_DIM // NUM_HEADS, axes=el.positions.InterleavedAxes((1, 1, 1)), reversed=True
    ),
    "rotary, channel axes": lambda: el.RotaryEmbedding(
        EMBED_DIM // NUM_HEADS, axes=el.positions.ChannelAxes((1, 1, 1))
    ),
    "rotary, axial": lambda: el.RotaryEmbedding(EMBED_DIM // NUM_HEADS, axes=el.positions.AxialAxes(3)),
    "rotary, query scaling": lambda: el.RotaryEmbedding(
        EMBED_DIM // NUM_HEADS,
        scaling=el.positions.NTKAlphaScaling(alpha=50.0),
        interleaved=True,
        rotary_dim=4,
        query_scaling=el.positions.LogQueryScaling(scale=0.1, length=3),
        trailing=True,
    ),
    "query-scaled": lambda: el.positions.QueryScaledPosition(el.positions.PowerQueryScaling(exponent=0.1, length=4)),
    "alibi": lambda: el.AlibiBias(NUM_HEADS),
    "relative": lambda: el.RelativePositionBias(
        NUM_HEADS, num_buckets=8, max_distance=12, bidirectional=False, init_std=1.0
    ),
    "none": el.Position,
}

TIED_HEADS = {f"tied to {name}": name for name in TABLES if name != "row-sparse"}
"""A head's name, and the table that it is tied to: `OutputHead(TABLES[TIED_HEADS[name]]())`."""

UNTIED_HEADS: dict[str, Callable[[], el.OutputHead]] = {
    "untied": lambda: el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM),
    "untied, bias, softcap": lambda: el.OutputHead(
        vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM, bias=True, softcap=5.0, logit_scale=0.5, padding_idx=0
    ),
}

HEAD_SIZES = (20, 18, 12)

STREAM_HEADS: dict[str, Callable[[], StreamHead]] = {
    "one weight": lambda: StreamHead(el.OutputHead(EMBED_DIM, VOCAB_SIZE, bias=True, softcap=5.0), HEAD_SIZES),
    "own rows in int8": lambda: StreamHead(el.OutputHead(rows=quantized(8), bias=True), HEAD_SIZES),
    "own rows, factorised": lambda: StreamHead(el.OutputHead(rows=TABLES["factorised"]()), HEAD_SIZES),
    "own spare rows": lambda: StreamHead(
        el.OutputHead(rows=TABLES["dense, spare rows"]()), HEAD_SIZES[1:], first_rows=(32, 3)
    ),
    "three weights": lambda: StreamHead([el.OutputHead(EMBED_DIM, size, bias=True) for size in HEAD_SIZES]),
    "stacked": lambda: StreamHead(StackedRows(3, 10, EMBED_DIM), hidden_per_stream=True),
    "transposed": lambda: StreamHead(StackedRows(3, 10, EMBED_DIM, transposed=True), hidden_per_stream=True),
    "one weight, one state each": lambda: StreamHead(el.OutputHead(EMBED_DIM, 48), 3, hidden_per_stream=True),
}
"""Heads of two or three streams with rows of their own."""

TIED_STREAM_HEADS = {f"streams of {name}": name for name in TABLES if name != "row-sparse"}
"""A head's name, and the table that its streams are tied to: rows 17 to 34 and 0 to 11."""


def tied_streams(table: el.TokenTable) -> StreamHead:
    return StreamHead(el.OutputHead(table), HEAD_SIZES[1:], first_rows=(17, 0))


def ngrams(**options: object) -> NgramEmbedding:
    token_map = torch.arange(VOCAB_SIZE) // 2
    hash = NgramHash.for_rows(500, VOCAB_SIZE, heads=2, token_map=token_map)
    return NgramEmbedding.dense(hash, EMBED_DIM, init_std=1.0, **options)


INJECTIONS: dict[str, Callable[[], EmbeddingInjection]] = {
    "added": lambda: AddedEmbedding(el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM, init_std=1.0)),
    "added, projected": lambda: AddedEmbedding(el.RowSparseEmbedding(VOCAB_SIZE, 10), EMBED_DIM),
    "value": lambda: ValueEmbedding(
        el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM, init_std=1.0), NUM_HEADS, blocks=(0, 1), gate_channels=8
    ),
    "n-gram, gated": lambda: GatedEmbedding(ngrams(), EMBED_DIM, block=1),
    "n-gram at the input": lambda: AddedEmbedding(ngrams(row_sparse=True)),
    "per-layer": lambda: PerLayerEmbedding(
        PerLayerInputs(el.TokenEmbedding(VOCAB_SIZE, 2 * 6, init_std=1.0, scale=6**0.5), EMBED_DIM, 2)
    ),
}
"""For a decoder of two blocks."""

LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"TransformerEmbedding, {name}": lambda name=name: el.TransformerEmbedding(
            VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, dropout=0.0, position=POSITIONS[name](), padding_idx=0
        )
        for name in POSITIONS
    },
    **{
        f"TransformerEmbedding over {name}": lambda name=name: el.TransformerEmbedding(
            VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN, dropout=0.0, table=TABLES[name]()
        )
        for name in TABLES
    },
    "GPTEmbedding": lambda: el.lessons.GPTEmbedding(VOCAB_SIZE, EMBED_DIM, MAX_SEQ_LEN),
    "DecoderLM": lambda: el.DecoderLM(dense(), POSITIONS["rotary"](), num_layers=1, num_heads=NUM_HEADS),
}
"""From token IDs `(T,)` or `(B, T)` to vectors or logits."""


def with_pending_updates() -> el.RowSparseEmbedding:
    """A row-sparse table after steps that left updates of other rows pending."""
    table = dense(el.RowSparseEmbedding)
    optimizer = el.RowAdamW(table.parameters(), lr=0.1)
    for ids in ([1, 2, 3], [7, 48, 0]):
        optimizer.zero_grad()
        table(torch.tensor(ids)).square().sum().backward()
        optimizer.step()
    return table


SAVED: dict[str, Callable[[], Any]] = {
    "decoder": lambda: el.DecoderLM(el.TokenEmbedding(20, 8), el.RotaryEmbedding(4), num_layers=2, num_heads=2),
    "decoder, scaled rotary": lambda: el.DecoderLM(
        el.QuantizedEmbedding.from_table(torch.randn(20, 8), 4, group_size=4),
        el.RotaryEmbedding(4, scaling=el.positions.YarnScaling(factor=2.0, original_max_seq_len=8)),
        el.OutputHead(vocab_size=20, embed_dim=8, bias=True, softcap=3.0),
        num_layers=1,
        num_heads=2,
    ),
    "factorised": lambda: el.TransformerEmbedding(20, 8, 16, table=el.FactorizedEmbedding(20, 8, 4, padding_idx=0)),
    "sinusoidal": lambda: el.TransformerEmbedding(20, 8, 16, position=el.SinusoidalPositionalEmbedding(16, 8)),
    "gpt": lambda: el.lessons.GPTEmbedding(20, 8, 16),
    "delta": lambda: el.DeltaEmbedding(el.TokenEmbedding(20, 8), [3, 4]),
    "bag": lambda: el.tables.Bag(el.TokenEmbedding(20, 8)),
    "streams": lambda: el.tables.StreamTable(el.TokenEmbedding(20, 8), (2, 3, 15)),
    "layer, learned": lambda: el.EmbeddingLayer(
        el.TokenEmbedding(20, 8, scale="sqrt_dim"),
        el.LearnedPositionalEmbedding(16, 8, offset=2),
        recipe=["types", "position", "norm"],
        types=el.TokenEmbedding(2, 8),
        norm=torch.nn.LayerNorm(8),
        other_positions={"decoder": el.RelativePositionBias(2, num_buckets=8, max_distance=12, bidirectional=False)},
    ),
    "layer, alibi": lambda: el.EmbeddingLayer(el.TokenEmbedding(20, 8), el.AlibiBias(2), family="bloom"),
}
"""Layers with every part that a saved folder describes."""
