"""A decoder small enough that all its numbers can be read: ten rows, four dimensions, any of four position schemes."""

from functools import cache
from typing import Literal, get_args

import torch

from embedlayer.core.errors import SizeError
from embedlayer.explorer.text_ids import NamedRows
from embedlayer.heads.output import OutputHead
from embedlayer.models.decoder import DecoderLM
from embedlayer.tables.dense import TokenEmbedding

TinyPosition = Literal["learned", "sinusoidal", "rotary", "alibi"]

WORDS = NamedRows(("<unk>", "I", "love", "dogs", "and", "the", "cat", "sat", "on", "mat"))
TEXTS = (
    "I love dogs and dogs love the cat",
    "the cat sat on the mat",
    "dogs love dogs and dogs love the cat",
    "I love dogs and dogs love me",
)
"""Example texts; the last one has a word without a row, which becomes `<unk>`."""

DIM = 4
HEADS = 2
LENGTH = 16
STD = 0.5
_SEEDS = {"table": 29, "position": 38, "blocks": 6, "head": 7}


@cache
def tiny_layer(position: str, *, tied: bool) -> DecoderLM:
    """Return the decoder of one block with a table of 10 x 4, untrained; the same object at each call."""
    # Parameters are rounded to two digits, so that the page shows them exactly. All choices share one table.
    if position not in get_args(TinyPosition):
        raise SizeError(f"The tiny layer has no positions {position!r}; it has {', '.join(get_args(TinyPosition))}.")
    with torch.device("meta"):
        model = DecoderLM(
            TokenEmbedding(len(WORDS.names), DIM, scale="sqrt_dim"),
            position,  # type: ignore[arg-type]  # a name was checked above
            None if tied else OutputHead(vocab_size=len(WORDS.names), embed_dim=DIM),
            num_layers=1,
            num_heads=HEADS,
            head_dim=DIM,
            mlp_dim=2 * DIM,
            max_seq_len=LENGTH,
        )
    model.to_empty(device="cpu")
    generators = {part: torch.Generator().manual_seed(seed) for part, seed in _SEEDS.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                drawn = torch.randn(parameter.shape, generator=generators[name.split(".")[0]])
                parameter.copy_((STD * drawn).mul(100).round().div(100))
    return model.eval()
