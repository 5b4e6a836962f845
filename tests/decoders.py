"""A small decoder with each position scheme."""

from embedlayer import (
    AlibiBias,
    DecoderLM,
    DynamicNTK,
    LearnedPositionalEmbedding,
    Position,
    RelativePositionBias,
    RotaryEmbedding,
    SinusoidalPositionalEmbedding,
    TokenEmbedding,
)

POSITIONS = {
    "learned": lambda: LearnedPositionalEmbedding(16, 24),
    "sinusoidal": lambda: SinusoidalPositionalEmbedding(16, 24),
    "scaled-sinusoidal": lambda: SinusoidalPositionalEmbedding(16, 24, init_scale=0.2),
    "rotary": lambda: RotaryEmbedding(6),
    "dynamic": lambda: RotaryEmbedding(6, scaling=DynamicNTK(factor=2.0, original_max_seq_len=6, length=16)),
    "alibi": lambda: AlibiBias(4),
    "relative": lambda: RelativePositionBias(4, num_buckets=8, max_distance=12, bidirectional=False, init_std=1.0),
    "none": Position,
}


def small(position="rotary", *, table=None, head=None, **options) -> DecoderLM:
    table = TokenEmbedding(50, 24, scale="sqrt_dim", padding_idx=0) if table is None else table
    return DecoderLM(table, POSITIONS[position](), head, **{"num_layers": 2, "num_heads": 4, **options}).eval()
