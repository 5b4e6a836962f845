"""What the map shows: of each token its text, place, length and frequency; of several what lies near them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embedlayer.analysis.geometry import Pca, pca
from embedlayer.errors import SizeError, TokenIdError
from embedlayer.explorer.layout import lay_out
from embedlayer.sources import OpenedModel

Params = Mapping[str, str]

COMPONENTS = 6
"""Directions that can be axes."""

BAKED_COMPONENTS = 3
BAKED_NUMBERS = 6_000_000
"""A table of at most so many numbers goes into an exported page whole, as int8."""

BAKED_ROWS = 50_000
"""A larger one of at most so many rows goes with each token's nearest."""

NEAREST = 10
MOST = 500
NUMBERS_AT_ONCE = 1 << 22


def texts(source: OpenedModel, params: Params) -> Any:
    """The readable text of each row, and which are special."""
    return {"texts": source.token_texts, "special": source.special_ids}


def axes(source: OpenedModel, params: Params) -> Any:
    """Share of the variance along each principal component, widest first."""
    return {"explained": principal(source).explained_variance_ratio.tolist()}


def coordinates(source: OpenedModel, params: Params) -> bytes:
    """Places along `count` components, one component after the other, float32 `(count, V)`; NaN where a row is."""
    count = _number(params, "count", COMPONENTS, most=COMPONENTS)
    return _bytes(principal(source).coordinates[:, :count].T)


def baked_coordinates(source: OpenedModel) -> list[Params]:
    """Only the widest components."""
    return [{"count": str(BAKED_COMPONENTS)}]


def layout(source: OpenedModel, params: Params) -> bytes:
    """Places where neighbours stay together, float32 `(2, V)`; see `layout.lay_out`. Slow for large tables."""
    return source.once("layout", lambda: _bytes(lay_out(source.rows, principal(source).coordinates[:, :2]).T))


def baked_layout(source: OpenedModel) -> list[Params]:
    """Only tables that are laid out in seconds."""
    return [{}] if source.table.vocab_size <= BAKED_ROWS and source.table.embed_dim > 1 else []


def norms(source: OpenedModel, params: Params) -> bytes:
    """Euclidean length of each row, float32 `(V,)`."""
    return _bytes(lengths(source))


def frequencies(source: OpenedModel, params: Params) -> bytes:
    """How often each token occurs in the text of the run, float32 `(V,)`."""
    return source.once("frequencies", lambda: _frequencies(source))


def neighbors(source: OpenedModel, params: Params) -> Any:
    """The tokens nearest to the mean of `plus` unit rows and negated `minus` unit rows: `[[id, cosine], ...]`.

    The meaning is that of `TokenVectors.most_similar`: exact, over all rows, without those asked with and without rows
    that no token has.
    """
    plus, minus = _ids(source, params, "plus"), _ids(source, params, "minus")
    if not plus and not minus:
        raise SizeError("Neighbours of what? Name at least one token.")
    found = _number(params, "topn", 20, most=MOST)
    cosines = _cosines(source, plus, minus).nan_to_num_(nan=-torch.inf)
    cosines[_nameless(source)] = -torch.inf
    cosines[[*plus, *minus]] = -torch.inf
    best = cosines.topk(min(found, len(cosines)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[token, round(score, 5)] for token, score in pairs if score > -torch.inf]


def along(source: OpenedModel, params: Params) -> bytes:
    """Cosine of each row with the mean of `plus` and negated `minus` unit rows, float32 `(V,)`."""
    return _bytes(_cosines(source, _ids(source, params, "plus"), _ids(source, params, "minus")))


def vectors(source: OpenedModel, params: Params) -> bytes:
    """All rows as int8: float32 `(V,)`, what 127 stands for in each row, then int8 `(V, D)`."""
    largest, parts = [], []
    for chunk in _chunks(source):
        size = chunk.abs().amax(1)
        parts.append((chunk / size.clamp_min(1e-30)[:, None] * 127).round().to(torch.int8))
        largest.append(size)
    return _bytes(torch.cat(largest)) + torch.cat(parts).numpy().tobytes()


def baked_vectors(source: OpenedModel) -> list[Params]:
    """Only small tables."""
    return [{}] if _is_small(source) else []


def nearest(source: OpenedModel, params: Params) -> bytes:
    """The `NEAREST` nearest of each token: uint32 `(V, NEAREST)`, then float32 cosines of the same shape."""
    return source.once("nearest", lambda: _nearest(source))


def baked_nearest(source: OpenedModel) -> list[Params]:
    """Only tables that are too large to be baked whole, and small enough to compare all with all."""
    return [{}] if not _is_small(source) and source.table.vocab_size <= BAKED_ROWS else []


def left_out(source: OpenedModel) -> list[str]:
    """What an exported page lacks, in sentences."""
    if _is_small(source):
        return ["Neighbours are computed from vectors rounded to 8 bits: cosines are exact to about 0.01."]
    if source.table.vocab_size <= BAKED_ROWS:
        return [f"The vectors are left out: the {NEAREST} nearest of each token are in the page, analogies are not."]
    return ["Vectors and neighbours are left out: this table is too large for one file."]


def _is_small(source: OpenedModel) -> bool:
    return source.table.vocab_size * source.table.embed_dim <= BAKED_NUMBERS


def principal(source: OpenedModel) -> Pca:
    """The widest directions of the table, and where its rows lie along them."""
    return source.once("pca", lambda: _computed_pca(source))


def _computed_pca(source: OpenedModel) -> Pca:
    rows = source.rows
    count = min(COMPONENTS, source.table.embed_dim)
    broken = ~torch.cat([chunk.isfinite().all(1) for chunk in rows.split(NUMBERS_AT_ONCE // rows.shape[1] + 1)])
    if not broken.any():
        return pca(rows, count)
    found = pca(rows[~broken], count)
    everywhere = torch.full((len(rows), count), torch.nan, dtype=found.coordinates.dtype)
    everywhere[~broken] = found.coordinates
    return Pca(everywhere, found.components, found.explained_variance_ratio, found.mean)


def lengths(source: OpenedModel) -> Float[Tensor, " V"]:
    """Euclidean length of each row; NaN where one holds NaN."""
    return source.once("norms", lambda: torch.cat([chunk.norm(dim=1) for chunk in _chunks(source)]))


def _nameless(source: OpenedModel) -> Bool[Tensor, " V"]:
    return source.once("nameless", lambda: torch.tensor([text == "" for text in source.token_texts]))


def _frequencies(source: OpenedModel) -> bytes:
    assert source.run is not None
    counts = source.counts
    assert counts is not None
    return _bytes(counts)


@torch.no_grad()
def _cosines(source: OpenedModel, plus: list[int], minus: list[int]) -> Float[Tensor, " V"]:
    query = torch.zeros(source.table.embed_dim)
    for sign, ids in ((1, plus), (-1, minus)):
        for row in ids:
            vector = source.rows[row].float()
            query += sign * vector / vector.norm().clamp_min(torch.finfo(torch.float32).tiny)
    query /= query.norm().clamp_min(torch.finfo(torch.float32).tiny)
    products = torch.cat([chunk @ query for chunk in _chunks(source)])
    return products / lengths(source).clamp_min(torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _nearest(source: OpenedModel) -> bytes:
    """All with all, a block of queries against a chunk of rows at a time."""
    count = min(NEAREST, source.table.vocab_size - 1)
    norms, nameless = lengths(source).clamp_min(torch.finfo(torch.float32).tiny), _nameless(source)
    ids = torch.zeros(source.table.vocab_size, NEAREST, dtype=torch.int32)
    scores = torch.full((source.table.vocab_size, NEAREST), -2.0)
    step = max(1, NUMBERS_AT_ONCE // source.table.vocab_size)
    for start in range(0, source.table.vocab_size, step):
        stop = min(start + step, source.table.vocab_size)
        queries = source.rows[start:stop].float() / norms[start:stop, None]
        cosines = torch.cat([queries @ chunk.T for chunk in _chunks(source)], dim=1) / norms
        cosines.nan_to_num_(nan=-2.0)[:, nameless] = -2.0
        cosines[torch.arange(stop - start), torch.arange(start, stop)] = -2.0
        best = cosines.topk(count)
        scores[start:stop, :count], ids[start:stop, :count] = best.values, best.indices.int()
    return ids.numpy().tobytes() + _bytes(scores)


@torch.no_grad()
def _chunks(source: OpenedModel) -> Iterator[Float[Tensor, "rows D"]]:
    step = max(1, NUMBERS_AT_ONCE // source.table.embed_dim)
    for chunk in source.rows.split(step):
        yield chunk.float()


def _ids(source: OpenedModel, params: Params, name: str) -> list[int]:
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
    text = params.get(name, str(default))
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise SizeError(f"{name} is a number from 1 to {most}; found {text!r}.")
    return int(text)


def _bytes(values: Tensor) -> bytes:
    return values.detach().cpu().float().contiguous().numpy().tobytes()
