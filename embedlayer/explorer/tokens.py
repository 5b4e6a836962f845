"""Data of the Map view: text, coordinates, norm and frequency of each token, and nearest neighbours."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from embedlayer.analysis.geometry import PrincipalComponents, principal_components
from embedlayer.analysis.nearest import nearest_rows, table_cosines
from embedlayer.analysis.row_reader import RowReader
from embedlayer.errors import SizeError, TokenIdError
from embedlayer.explorer.layout import Layout, compute_layout
from embedlayer.sources import OpenedModel

Params = Mapping[str, str]
"""Parameters of a request, by name."""

COMPONENTS = 6
"""Number of principal components that can be axes of the map."""

BAKED_COMPONENTS = 3
BAKED_NUMBERS = 6_000_000
"""An exported page holds all vectors, as int8, of a table with at most so many numbers."""

BAKED_ROWS = 50_000
"""Of a larger table with at most so many rows, an exported page holds the nearest neighbours of each token."""

NEAREST = 10
MOST = 500


def texts(source: OpenedModel, params: Params) -> Any:
    """Return the readable text of each row, and the IDs of the special tokens."""
    return {"texts": source.token_texts, "special": source.special_ids}


def axes(source: OpenedModel, params: Params) -> Any:
    """Return the share of the variance along each principal component, largest first."""
    return {"explained": principal(source).explained_variance_ratio.tolist()}


def coordinates(source: OpenedModel, params: Params) -> bytes:
    """Return coordinates along the first `count` principal components, as the bytes of float32 `(count, V)`.

    A row with NaN has NaN coordinates.
    """
    count = _number(params, "count", COMPONENTS, most=COMPONENTS)
    return _bytes(principal(source).coordinates[:, :count].T)


def baked_coordinates(source: OpenedModel) -> list[Params]:
    """Return the parameters of the coordinates that an exported page holds: the first components only."""
    return [{"count": str(BAKED_COMPONENTS)}]


def layout(source: OpenedModel, params: Params) -> bytes:
    """Return 2-D coordinates that keep nearest neighbours close, as the bytes of float32 `(2, V)`.

    They are computed once; a large table takes minutes.
    """
    return _bytes(_layout(source).places.T)


def layout_recall(source: OpenedModel, params: Params) -> Any:
    """Return the share of true nearest neighbours in the graph of the layout: 1 if the graph is exact."""
    return {"recall": round(_layout(source).recall, 4)}


def _layout(source: OpenedModel) -> Layout:
    """Return the two-dimensional layout that keeps nearest neighbours close; it is computed once per source."""
    return source.once("layout", lambda: compute_layout(source.rows, principal(source).coordinates[:, :2]))


def baked_layout(source: OpenedModel) -> list[Params]:
    """Return the parameters of the layouts that an exported page holds: none for a large table."""
    return [{}] if source.table.vocab_size <= BAKED_ROWS and source.table.embed_dim > 1 else []


def norms(source: OpenedModel, params: Params) -> bytes:
    """Return the Euclidean norm of each row, float32 `(V,)`; NaN for a row with NaN or infinity."""
    return _bytes(source.once("norms", lambda: RowReader(source.rows).norms()))


def frequencies(source: OpenedModel, params: Params) -> bytes:
    """Return how often each token occurs in the training text of the run, as the bytes of float32 `(V,)`."""
    return source.once("frequencies", lambda: _frequencies(source))


def neighbors(source: OpenedModel, params: Params) -> Any:
    """Answer a request for the rows nearest to a query, as `[[id, cosine], ...]`, nearest first.

    The query is the sum of the rows that the parameter `plus` lists, less those in `minus`; each of these
    rows is normalised to length 1 first. As in `TokenVectors.most_similar` the result is exact, over all
    rows, without the tokens of the query and without rows that have no token.

    Raises:
        SizeError: `plus` and `minus` are both empty, or a parameter is no valid number or list.
        TokenIdError: An ID is outside the table.
    """
    plus, minus = _ids(source, params, "plus"), _ids(source, params, "minus")
    if not plus and not minus:
        raise SizeError("neighbors needs at least one token ID in plus or minus; found none.")
    found = _number(params, "topn", 20, most=MOST)
    own = torch.tensor([[*plus, *minus]])
    near = nearest_rows(source.rows, _query(source, plus, minus), found, candidates=~_nameless(source), exclude=own)
    pairs = zip(near.ids[0].tolist(), near.cosines[0].tolist(), strict=True)
    return [[token, round(score, 5)] for token, score in pairs if token >= 0]


def along(source: OpenedModel, params: Params) -> bytes:
    """Answer a request for the cosine of every row with a query, as the bytes of float32 `(V,)`.

    The query is the sum of the rows that the parameter `plus` lists, less those in `minus`; each of these
    rows is normalised to length 1 first.
    """
    query = _query(source, _ids(source, params, "plus"), _ids(source, params, "minus"))
    return _bytes(table_cosines(RowReader(source.rows), query)[0])


def vectors(source: OpenedModel, params: Params) -> bytes:
    """Return all rows rounded to int8, as bytes: the scale of each row, then the rows.

    The scales are float32 `(V,)`, the value that 127 represents in each row. The rows are int8 `(V, D)`.
    """
    largest, parts = [], []
    for _, chunk in RowReader(source.rows).chunks():
        chunk = chunk.float()
        size = chunk.abs().amax(1)
        parts.append((chunk / size.clamp_min(1e-30)[:, None] * 127).round().to(torch.int8))
        largest.append(size)
    return _bytes(torch.cat(largest)) + torch.cat(parts).numpy().tobytes()


def baked_vectors(source: OpenedModel) -> list[Params]:
    """Return the parameters of the vectors that an exported page holds: none for a large table."""
    return [{}] if _is_small(source) else []


def nearest(source: OpenedModel, params: Params) -> bytes:
    """Return the `NEAREST` nearest rows of each row: uint32 `(V, NEAREST)`, then float32 cosines of that shape."""
    return source.once("nearest", lambda: _nearest(source))


def baked_nearest(source: OpenedModel) -> list[Params]:
    """Return the parameters of the neighbour lists that an exported page holds: only for tables of medium size."""
    return [{}] if not _is_small(source) and source.table.vocab_size <= BAKED_ROWS else []


def left_out(source: OpenedModel) -> list[str]:
    """Return sentences that say which data an exported page lacks."""
    if _is_small(source):
        return ["Neighbours are computed from vectors rounded to 8 bits: cosines are exact to about 0.01."]
    if source.table.vocab_size <= BAKED_ROWS:
        return [f"Sums of tokens are not in this file: it contains the {NEAREST} nearest neighbours of each token."]
    return ["This file contains neither vectors nor neighbours: the table is too large for one file."]


def _is_small(source: OpenedModel) -> bool:
    """Return whether the table is small enough that an exported page holds all its vectors."""
    return source.table.vocab_size * source.table.embed_dim <= BAKED_NUMBERS


def principal(source: OpenedModel) -> PrincipalComponents:
    """Return the principal components of the table and the coordinates of its rows; NaN for rows with NaN."""
    count = min(COMPONENTS, source.table.embed_dim)
    return source.once("principal_components", lambda: principal_components(source.rows, count, skip_nonfinite=True))


def _nameless(source: OpenedModel) -> Bool[Tensor, " V"]:
    """Return a mask of the rows without a token, `(V,)`."""
    return source.once("nameless", lambda: torch.tensor([text == "" for text in source.token_texts]))


def _frequencies(source: OpenedModel) -> bytes:
    """Return the token counts of the run's training text as the bytes of float32 `(V,)`; requires a run."""
    assert source.run is not None
    counts = source.counts
    assert counts is not None
    return _bytes(counts)


@torch.no_grad()
def _query(source: OpenedModel, plus: list[int], minus: list[int]) -> Float[Tensor, "1 D"]:
    """Return the sum of the rows `plus` less the sum of the rows `minus`, each row normalised first, in float64."""
    units = F.normalize(source.rows[[*plus, *minus]].double(), dim=1)
    return units[: len(plus)].sum(0, keepdim=True) - units[len(plus) :].sum(0, keepdim=True)


def _nearest(source: OpenedModel) -> bytes:
    """Compute the `NEAREST` nearest rows of every row; a missing neighbour has ID 0 and cosine -2."""
    V = source.table.vocab_size
    found = nearest_rows(source.rows, torch.arange(V), NEAREST, candidates=~_nameless(source))
    missing = (0, NEAREST - found.ids.shape[1])
    ids = F.pad(found.ids.clamp_min(0).int(), missing)
    return ids.numpy().tobytes() + _bytes(F.pad(found.cosines.clamp_min(-2.0), missing, value=-2.0))


def _ids(source: OpenedModel, params: Params, name: str) -> list[int]:
    """Return the token IDs in a parameter, such as `17,4`; an empty list without it.

    Raises:
        SizeError: The parameter is not a list of at most 100 IDs.
        TokenIdError: An ID is outside the table.
    """
    parts = [part for part in params.get(name, "").split(",") if part]
    if len(parts) > 100 or not all(part.isdecimal() for part in parts):
        raise SizeError(f"{name} is a list of at most 100 token IDs, 17,4; found {params.get(name)!r}.")
    ids = [int(part) for part in parts]
    for token in ids:
        if token >= source.table.vocab_size:
            raise TokenIdError(
                f"Token {token} is outside this table of {source.table.vocab_size} rows "
                f"(0..{source.table.vocab_size - 1})."
            )
    return ids


def _number(params: Params, name: str, default: int, *, most: int) -> int:
    """Return the whole number in a parameter, or `default` without it.

    Raises:
        SizeError: The parameter is not a number from 1 to `most`.
    """
    text = params.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise SizeError(f"{name} is a number from 1 to {most}; found {text!r}.")
    return int(text)


def _bytes(values: Tensor) -> bytes:
    """Return the values as float32 bytes."""
    return values.detach().cpu().float().contiguous().numpy().tobytes()
