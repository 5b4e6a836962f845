"""A small decoder with each position scheme, its caches, and a small patched model of transformers."""

from functools import partial

import torch
from kinds import EMBED_DIM, NUM_HEADS, POSITIONS, VOCAB_SIZE
from torch import nn

from embedlayer import DecoderLM, KeyValueCache, TokenEmbedding, patch

CACHES = {"growing": KeyValueCache, "of a fixed size": partial(KeyValueCache, 17)}


def small(position="rotary", *, table=None, head=None, **options) -> DecoderLM:
    table = TokenEmbedding(VOCAB_SIZE, EMBED_DIM, scale="sqrt_dim", padding_idx=0) if table is None else table
    return DecoderLM(table, POSITIONS[position](), head, **{"num_layers": 2, "num_heads": NUM_HEADS, **options}).eval()


def gpt2(**options: object) -> nn.Module:
    """GPT-2 of 99 tokens and 16 positions, patched, in evaluation mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return patch(GPT2LMHeadModel(GPT2Config(**sizes, **options))).eval()
