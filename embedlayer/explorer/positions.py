"""What the page needs to show a source's positions: its scheme, and true vectors of a few of its tokens.

Schemes that follow from a formula are sent as its arguments, and the page computes them itself (`page/math.js`, tested
equal to this library). Only what was learned is sent as numbers.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.explorer.pipeline import Model, packed, parts_of, queries_and_keys, shown_tokens
from embedlayer.explorer.source import Source
from embedlayer.files import JsonObject
from embedlayer.models.decoder import DecoderLM
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.learned import LearnedPositionalEmbedding
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.positions.relative import RelativePositionBias
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.text.tokenizer import without_limits

MOST_NUMBERS = 1_200_000
MOST_TOKENS = 12
DISTANCES = 512
TEXT = "The cat sat on the mat and the dog sat on the cat."


def answer(source: Source, params: Mapping[str, str]) -> JsonObject:
    """What the page asks for: `positions_data` of a source; a run's texts have the length it was trained on."""
    model = source.table if source.model is None else source.model
    run = source.run
    trained = run.read()["options"]["max_length"] if run is not None and run.contains_run else None
    return positions_data(model, source.tokenizer, trained, names=source.tokens if source.tokenizer is None else ())


@torch.no_grad()
def positions_data(
    model: Model, tokenizer: Tokenizer | None, trained_length: int | None = None, *, names: Sequence[str] = ()
) -> JsonObject:
    """The position schemes of a source, and the tokens that the page puts at two places.

    Args:
        model: What is looked at.
        tokenizer: Text to IDs; without one the first rows of the table stand for tokens.
        trained_length: Longest text that it was trained on, where the scheme itself does not say.
        names: What the first rows are called, where there is no tokenizer.

    Returns:
        `schemes`: each with its `kind` and arguments, the first block's first. `tokens`: some tokens in the order of
        a sentence, `vectors`: their rows with the scale applied, `(N, D)`. `queries`, `keys`: the same tokens in the
        first block before positions act, `(H, N, K)`, for models whose positions act there.
    """
    table, position = parts_of(model)
    schemes = [described(position, "", trained_length)]
    if isinstance(model, EmbeddingLayer):
        schemes += [described(model.position_of(kind), kind, trained_length) for kind in model.other_positions]
    if tokenizer is None:
        ids = list(range(min(MOST_TOKENS, table.vocab_size)))
        tokens = [
            {"id": number, "text": name, "kind": "text"}
            for number, name in zip(ids, names or map("#{}".format, ids), strict=False)
        ]
    else:
        ids = without_limits(tokenizer).encode(TEXT, add_special_tokens=False).ids[:MOST_TOKENS]
        tokens = [{"id": token.id, "text": token.text, "kind": token.kind} for token in shown_tokens(tokenizer, ids)]
    batch = torch.tensor(ids, device=table.device)
    vectors = table(batch)
    content: JsonObject = {
        "schemes": schemes,
        "embed_dim": table.embed_dim,
        "tokens": tokens,
        "vectors": packed(vectors),
    }
    if isinstance(model, DecoderLM) and len(model.blocks) and not isinstance(position, AdditivePosition):
        queries, keys = queries_and_keys(model, vectors)
        content |= {"queries": packed(queries), "keys": packed(keys)}
    return content


def described(position: Position, layers: str = "", trained_length: int | None = None) -> JsonObject:
    """A scheme as the page computes or draws it.

    Args:
        position: Any scheme.
        layers: Kind of layers it belongs to, where a model has several.
        trained_length: Used where the scheme has no longest sequence of its own.

    Example:
        >>> described(AlibiBias(8))["kind"]
        'alibi'
    """
    describe: dict[type[Position], Callable[..., JsonObject]] = {
        SinusoidalPositionalEmbedding: _sinusoidal,
        LearnedPositionalEmbedding: _learned,
        RotaryEmbedding: _rotary,
        AlibiBias: _alibi,
        RelativePositionBias: _relative,
    }
    content = describe.get(type(position), _none)(position)
    limit = content.pop("limit", None) or position.max_seq_len or trained_length
    name = "none" if type(position) is Position else f"{type(position).__name__}({position.extra_repr()})"
    return {"name": name, "layers": layers, "trained_length": limit, **content}


def _none(position: Position) -> JsonObject:
    return {"kind": "none"}


def _sinusoidal(position: SinusoidalPositionalEmbedding) -> JsonObject:
    scale = 1.0 if position.scale is None else position.scale.item()
    return {"kind": "sinusoidal", **position.config, "scale": scale, **_distinct(position.waves)}


def _learned(position: LearnedPositionalEmbedding) -> JsonObject:
    rows = position.weight[position.offset :]
    shown = rows[: max(1, MOST_NUMBERS // rows.shape[1])]
    return {"kind": "learned", "embed_dim": rows.shape[1], "rows": packed(shown), **_distinct(rows)}


def _distinct(rows: Float[Tensor, "T D"]) -> JsonObject:
    """How many of a scheme's vectors there are, and how many different ones."""
    return {"checked": len(rows), "distinct": len(torch.unique(rows, dim=0))}


def _rotary(position: RotaryEmbedding) -> JsonObject:
    """Frequencies in radians per position: those of the trained length, where they depend on the length."""
    scaling = position.scaling
    turns = position.turns_at(0).double() * (2 * torch.pi / 2**53)
    return {
        "kind": "rotary",
        "head_dim": position.head_dim,
        "rotary_dim": position.rotary_dim,
        "base": position.base,
        "interleaved": position.interleaved,
        "magnitude": position.magnitude,
        "scaling": None if scaling is None else str(scaling),
        "varies": scaling is not None and scaling.limit is not None,
        "frequencies": turns.tolist(),
        "limit": getattr(scaling, "original_max_seq_len", None),
    }


def _alibi(position: AlibiBias) -> JsonObject:
    return {"kind": "alibi", **position.config, "slopes": position.slopes.tolist()}


def _relative(position: RelativePositionBias) -> JsonObject:
    """The bias of each distance: keys from `DISTANCES - 1` before the query to as many after it."""
    places = torch.arange(2 * DISTANCES - 1, device=position.weight.device)
    bias = position.bias(places[DISTANCES - 1 : DISTANCES], places)[0, :, 0]
    return {"kind": "relative", **position.config, "biases": packed(bias)}
