"""Data about a source's position schemes: the schemes, and the vectors of a few tokens.

The page computes schemes that follow from a formula itself, from their arguments; tests compare `page/math.js` with
this library. Learned numbers, and schemes that the page has no formula for, are sent as numbers.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
from embedlayer.explorer.pipeline_steps import Model, packed, parts_of, queries_and_keys
from embedlayer.explorer.text_ids import shown_tokens
from embedlayer.io.files import JsonObject
from embedlayer.models.decoder import DecoderLM
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.positions.alibi import AlibiBias
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.positions.query_scaling import QueryScaledPosition
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding
from embedlayer.pretrained import describe
from embedlayer.tokenization.tokenizer_calls import encode

MOST_NUMBERS = 1_200_000
MOST_TOKENS = 12
DISTANCES = 512
TEXT = "The cat sat on the mat and the dog sat on the cat."


def answer(source: OpenedModel, params: Mapping[str, str]) -> JsonObject:
    """Return the position schemes of a source and some example tokens, for JSON; see `positions_data`.

    For a run, the trained length is the sequence length of its training.

    Raises:
        CheckpointError: Only the table of a checkpoint could be read, so its positions are not known.
    """
    model = source.require_input()
    run = source.run
    trained = run.read()["options"]["max_length"] if run is not None and run.contains_run else None
    return positions_data(
        model, source.text_tokenizer, trained, names=() if source.text_tokenizer else source.token_texts
    )


@torch.no_grad()
def positions_data(
    model: Model, tokenizer: Tokenizer | None, trained_length: int | None = None, *, names: Sequence[str] = ()
) -> JsonObject:
    """Describe the position schemes of a model, with some tokens that the page places at two positions.

    Args:
        model: Model, layer or table.
        tokenizer: Tokenizer of the example text; `None` uses the first rows of the table as tokens.
        trained_length: Longest sequence of the training, for schemes that have no limit themselves.
        names: Texts of the first rows; only read without a tokenizer, and `#0`, `#1`, ... by default.

    Returns:
        `schemes`: what `described` returns for each scheme; the scheme of the first block is the first.
        `embed_dim`: width of the table, D. `tokens`: the example tokens, N of them. `vectors`: their rows with
        the scale applied, `(N, D)`. For a decoder with a scheme inside attention also `queries` and `keys`:
        those that the first block computes from `vectors`, before positions are applied, `(H, N, K)`.
    """
    table, position = parts_of(model)
    schemes = [described(position, "", trained_length)]
    if isinstance(model, EmbeddingLayer):
        schemes += [described(model.position_of(kind), kind, trained_length) for kind in model.other_positions]
    ids = example_ids(table.vocab_size, tokenizer)
    if tokenizer is None:
        tokens = [
            {"id": number, "text": name, "kind": "text"}
            for number, name in zip(ids, names or map("#{}".format, ids), strict=False)
        ]
    else:
        tokens = [{"id": token.id, "text": token.text, "kind": token.kind} for token in shown_tokens(tokenizer, ids)]
    vectors = table(torch.tensor(ids, device=table.device))
    content: JsonObject = {
        "schemes": schemes,
        "embed_dim": table.embed_dim,
        "tokens": tokens,
        "vectors": packed(vectors),
    }
    if isinstance(model, DecoderLM) and len(model.blocks) and position.hook != "add":
        queries, keys = queries_and_keys(model, vectors)
        content |= {"queries": packed(queries), "keys": packed(keys)}
    return content


def example_ids(vocab_size: int, tokenizer: Tokenizer | None) -> list[int]:
    """Return the IDs of the example tokens: the first tokens of `TEXT`, or the first rows without a tokenizer.

    Args:
        vocab_size: Rows of the table.
        tokenizer: Tokenizer of the table, or `None`.
    """
    if tokenizer is None:
        return list(range(min(MOST_TOKENS, vocab_size)))
    return encode(tokenizer, TEXT).ids[:MOST_TOKENS]


def described(position: Position, layers: str = "", trained_length: int | None = None) -> JsonObject:
    """Describe a position scheme as a JSON object, with all that the page needs to compute or draw it.

    The page computes sinusoidal, rotary and ALiBi positions from their arguments. For learned and relative positions
    the object contains the numbers: vectors of positions, or biases by distance.

    Args:
        position: Any scheme.
        layers: Type of the layers that use it, in a model with several schemes.
        trained_length: Longest sequence of the training, for a scheme that has no limit itself.

    Example:
        >>> described(AlibiBias(8))["kind"]
        'alibi'
    """
    limit = None
    content: JsonObject = {"kind": "none"}
    if isinstance(position, SinusoidalPositionalEmbedding):
        scale = 1.0 if position.scale is None else position.scale.item()
        content = {"kind": "sinusoidal", **position.config, "scale": scale, **_distinct(position.waves)}
    elif isinstance(position, AdditivePosition):
        rows = position.vectors(torch.arange(position.max_seq_len or DISTANCES, device=position.device))
        shown = rows[: max(1, MOST_NUMBERS // rows.shape[1])]
        content = {"kind": "learned", "embed_dim": rows.shape[1], "rows": packed(shown), **_distinct(rows)}
    elif isinstance(position, RotaryEmbedding):
        scaling = position.scaling
        limit = getattr(scaling, "original_max_seq_len", None)
        content = {
            "kind": "rotary",
            **{name: getattr(position, name) for name in ("head_dim", "rotary_dim", "base", "interleaved")},
            "channels": position.pair_channels().tolist(),
            "query_scaling": None if position.query_scaling is None else describe(position.query_scaling),
            "magnitude": position.attention_scaling,
            "scaling": None if scaling is None else str(scaling),
            "varies": scaling is not None and scaling.limit is not None,
            "frequencies": position.frequencies(0).tolist(),  # of the trained length, where they depend on it
        }
    elif isinstance(position, QueryScaledPosition):
        content = {"kind": "query_scaled", "query_scaling": describe(position.query_scaling)}
    elif isinstance(position, AlibiBias):
        content = {"kind": "alibi", **position.config, "slopes": position.slopes.tolist()}
    elif position.hook == "bias":
        content = {"kind": "relative", **position.config, "biases": packed(_biases(position))}
    name = "none" if type(position) is Position else f"{type(position).__name__}({position.extra_repr()})"
    limit = limit or position.max_seq_len or trained_length
    return {"name": name, "layers": layers, "trained_length": limit, **content}


def _distinct(rows: Float[Tensor, "T D"]) -> JsonObject:
    """Return `{"checked": number of position vectors, "distinct": number of different ones}`."""
    return {"checked": len(rows), "distinct": len(torch.unique(rows, dim=0))}


def _biases(position: Position) -> Float[Tensor, "H distances"]:
    """Return the bias of each head for each distance between query and key, `(H, 2 * DISTANCES - 1)`.

    Column 0 is a key `DISTANCES - 1` positions before the query; the last column is a key as far after it.
    """
    positions = torch.arange(2 * DISTANCES - 1, device=position.device)
    biases = position.bias(positions[DISTANCES - 1 : DISTANCES], positions)
    assert biases is not None  # the scheme overrides this hook
    return biases[0, :, 0]
