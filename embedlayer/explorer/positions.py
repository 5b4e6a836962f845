"""Data about a source's position schemes: the schemes, and the vectors of a few tokens.

The page computes sinusoids and ALiBi itself, from their arguments; tests compare `page/math.js` with this library. All
other schemes are sent as numbers: the vectors that they add, the cosines and sines of their rotations, or their biases.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.explorer.pipeline_steps import Model, packed, parts_of, queries_and_keys
from embedlayer.explorer.rotation import pair_rotation, width_of
from embedlayer.explorer.text_answers import DescribedScheme, PlacedToken, PositionsData
from embedlayer.explorer.text_ids import shown_tokens
from embedlayer.io.files import JsonObject
from embedlayer.models.decoder import DecoderLM
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.tokenization.tokenizer_calls import encode

MOST_NUMBERS = 1_200_000
MOST_TOKENS = 12
DISTANCES = 512

ROTATED = 1024  # number of positions whose rotations are sent: as many as the page shows at most

TEXT = "The cat sat on the mat and the dog sat on the cat."


def answer(source: OpenedModel, params: Mapping[str, str]) -> PositionsData:
    """Return the position schemes of a source and some example tokens; see `positions_data`."""
    model = source.require_input()
    run = source.run
    trained = run.read()["options"]["max_length"] if run is not None and run.contains_run else None
    return positions_data(
        model, source.text_tokenizer, trained, names=() if source.text_tokenizer else source.token_texts
    )


@torch.no_grad()
def positions_data(
    model: Model, tokenizer: Tokenizer | None, trained_length: int | None = None, *, names: Sequence[str] = ()
) -> PositionsData:
    """Describe the position schemes of a model, with some tokens that the page places at two positions."""
    table, position = parts_of(model)
    schemes = [described(position, "", trained_length)]
    if isinstance(model, EmbeddingLayer):
        schemes += [described(model.position_of(kind), kind, trained_length) for kind in model.other_positions]
    ids = example_ids(table.vocab_size, tokenizer)
    if tokenizer is None:
        tokens: list[PlacedToken] = [
            {"id": number, "text": name, "kind": "text"}
            for number, name in zip(ids, names or map("#{}".format, ids), strict=False)
        ]
    else:
        tokens = [PlacedToken(id=t["id"], text=t["text"], kind=t["kind"]) for t in shown_tokens(tokenizer, ids)]
    vectors = table(torch.tensor(ids, device=table.device))
    content: PositionsData = {
        "schemes": schemes,
        "embed_dim": table.embed_dim,
        "tokens": tokens,
        "vectors": packed(vectors),
    }
    if isinstance(model, DecoderLM) and len(model.blocks) and position.hook != "add":
        queries, keys = queries_and_keys(model, vectors)
        content["queries"], content["keys"] = packed(queries), packed(keys)
    return content


def example_ids(vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    """Return the IDs of the example tokens: the first tokens of `TEXT`, or the first rows without a tokenizer."""
    if tokenizer is None:
        return list(range(min(MOST_TOKENS, vocab_size)))
    return encode(tokenizer, TEXT).ids[:MOST_TOKENS]


def described(position: Position, layers: str = "", trained_length: int | None = None) -> DescribedScheme:
    """Describe a position scheme with all that the page needs to compute or draw it."""
    limit = None
    content: JsonObject = {"kind": "none"}
    if isinstance(position, SinusoidalPositionalEmbedding):
        scale = 1.0 if position.scale is None else position.scale.item()
        content = {"kind": "sinusoidal", **position.config, "scale": scale, **_distinct(position.waves)}
    elif isinstance(position, AdditivePosition):
        rows = position.vectors(torch.arange(position.max_seq_len or DISTANCES, device=position.device))
        shown = rows[: max(1, MOST_NUMBERS // rows.shape[1])]
        content = {"kind": "learned", "embed_dim": rows.shape[1], "rows": packed(shown), **_distinct(rows)}
    elif position.hook == "rotate":
        limit = getattr(getattr(position, "scaling", None), "original_max_seq_len", None)
        content = _rotation(position)
    elif isinstance(position, AlibiBias):
        content = {"kind": "alibi", **position.config, "slopes": position.slopes.tolist()}
    elif position.hook == "bias":
        causal = not getattr(position, "bidirectional", False)
        content = {"kind": "relative", "causal": causal, "biases": packed(_biases(position))}
    name = "none" if type(position) is Position else f"{type(position).__name__}({position.extra_repr()})"
    limit = limit or position.max_seq_len or trained_length
    return cast(DescribedScheme, {"name": name, "layers": layers, "trained_length": limit, **content})


def _rotation(position: Position) -> JsonObject:
    """Describe a scheme that rotates queries and keys, by its numbers at the first `ROTATED` positions."""
    scaling, note = getattr(position, "scaling", None), ""
    if isinstance(position, RotaryEmbedding) and scaling is not None:
        note = f"{scaling}."
        if scaling.limit is not None:
            position, note = position.at_length(scaling.limit), f"{scaling}; shown for texts of the trained length."
    length = min(ROTATED, position.max_seq_len or ROTATED)
    rotation = pair_rotation(position, torch.arange(length, device=position.device))
    if rotation is None:
        return {"kind": "undrawn"}
    return {
        "kind": "rotation",
        "head_dim": width_of(position),
        "channels": rotation.channels.tolist(),
        "queries": packed(rotation.queries),
        "keys": None if rotation.keys.equal(rotation.queries) else packed(rotation.keys),
        "note": note,
    }


def _distinct(rows: Float[Tensor, "T D"]) -> JsonObject:
    """Return `{"checked": number of position vectors, "distinct": number of different ones}`."""
    return {"checked": len(rows), "distinct": len(torch.unique(rows, dim=0))}


def _biases(position: Position) -> Float[Tensor, "H distances"]:
    """Return the bias of each head for each distance between query and key, `(H, 2 * DISTANCES - 1)`."""
    positions = torch.arange(2 * DISTANCES - 1, device=position.device)
    biases = position.bias(positions[DISTANCES - 1 : DISTANCES], positions)
    assert biases is not None  # the scheme overrides this hook
    return biases[0, :, 0]
