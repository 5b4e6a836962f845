"""A small decoder with each position scheme."""

from kinds import EMBED_DIM, NUM_HEADS, POSITIONS, VOCAB_SIZE

from embedlayer import DecoderLM, TokenEmbedding


def small(position="rotary", *, table=None, head=None, **options) -> DecoderLM:
    table = TokenEmbedding(VOCAB_SIZE, EMBED_DIM, scale="sqrt_dim", padding_idx=0) if table is None else table
    return DecoderLM(table, POSITIONS[position](), head, **{"num_layers": 2, "num_heads": NUM_HEADS, **options}).eval()
