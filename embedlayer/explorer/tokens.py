"""Data of the Map view: text, coordinates, norm and frequency of each token, and nearest neighbours."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.geometry import PrincipalComponents, principal_components
from embedlayer.analysis.nearest import nearest_rows, table_cosines
from embedlayer.analysis.row_reader import RowReader
from embedlayer.core.errors import SizeError, TokenIdError
from embedlayer.explorer.answers import AxisShares, Neighbor, TokenTexts
from embedlayer.explorer.text_ids import vocabulary_of, whole_number
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.tokenization.tokenizer_calls import encode as encode_text

Params = Mapping[str, str]  # parameters of a request, by name
COMPONENTS = 6  # number of principal components that can be axes of the map
EXPORTED_COMPONENTS = 3  # number of principal components of which an exported page stores the coordinates
EXPORTED_NUMBERS = 6_000_000  # an exported page holds all vectors, as int8, of a table with at most so many numbers

EXPORTED_ROWS = 50_000
"""Of a larger table with at most so many rows, an exported page holds the nearest neighbours of each token."""

NEAREST = 10
QUERIES_AT_ONCE = 1024
MOST = 500


def texts(source: OpenedModel, params: Params) -> TokenTexts:
    """Return the readable text of each row and the IDs of the special tokens."""
    return {"texts": source.token_texts, "special": source.special_ids}


def axes(source: OpenedModel, params: Params) -> AxisShares:
    """Return the share of the variance along each of the first `COMPONENTS` principal components, largest first."""
    return {"explained": principal(source).explained_variance_ratio.tolist()}


def coordinates(source: OpenedModel, params: Params) -> bytes:
    """Return the coordinates of all rows along the first principal components, as the bytes of float32 `(count, V)`."""
    count = _number(params, "count", COMPONENTS, most=COMPONENTS)
    return to_bytes(principal(source).coordinates[:, :count].T)


def norms(source: OpenedModel, params: Params) -> bytes:
    """Return the Euclidean norm of each row as float32 bytes, `(V,)`; NaN for a row with NaN or infinity."""
    return to_bytes(source.once("norms", lambda: RowReader(source.rows).norms()))


def frequencies(source: OpenedModel, params: Params) -> bytes:
    """Return how often each token occurs in the training text of the run, as the bytes of float32 `(V,)`."""
    assert source.counts is not None
    return to_bytes(source.counts)


def neighbors(source: OpenedModel, params: Params) -> list[Neighbor]:
    """Return ID and cosine of the rows nearest to a query, nearest first; the result is exact, over all rows."""
    plus, minus = (token_ids(params, name, source.table.vocab_size) for name in ("plus", "minus"))
    if not plus and not minus:
        raise SizeError("neighbors needs at least one token ID in plus or minus; found none.")
    count = _number(params, "topn", 20, most=MOST)
    own = torch.tensor([[*plus, *minus]])
    near = nearest_rows(source.rows, sum_of_rows(source, plus, minus), count, candidates=~nameless(source), exclude=own)
    pairs = zip(near.ids[0].tolist(), near.cosines[0].tolist(), strict=True)
    return [(token, round(score, 5)) for token, score in pairs if token >= 0]


def along(source: OpenedModel, params: Params) -> bytes:
    """Return the cosine of every row with a query, as the bytes of float32 `(V,)`."""
    query = sum_of_rows(source, *(token_ids(params, name, source.table.vocab_size) for name in ("plus", "minus")))
    return to_bytes(table_cosines(RowReader(source.rows), query)[0])


def encode(source: OpenedModel, params: Params) -> list[int]:
    """Return the IDs of the tokens that the text in the parameter `text` is split into, without special tokens."""
    tokenizer = vocabulary_of(source)
    assert isinstance(tokenizer, Tokenizer)
    text = params.get("text", "")
    if not 0 < len(text) <= MOST:
        raise SizeError(f"text has 1 to {MOST} characters; found {len(text)}.")
    return encode_text(tokenizer, text).ids


def vectors(source: OpenedModel, params: Params) -> bytes:
    """Return all rows rounded to int8, as bytes: first the scale of each row, then the rows."""
    # First the scales, float32 `(V,)`, the largest absolute value of each row, for which 127 stands; then the rows,
    # int8 `(V, D)`. A row with NaN or infinity has a scale that is not finite.
    largest, parts = [], []
    for _, chunk in RowReader(source.rows).chunks():
        chunk = chunk.float()
        size = chunk.abs().amax(1)
        parts.append((chunk / size.clamp_min(1e-30)[:, None] * 127).round().to(torch.int8))
        largest.append(size)
    return to_bytes(torch.cat(largest)) + torch.cat(parts).numpy().tobytes()


def exported_vectors(source: OpenedModel) -> list[Params]:
    """Return the parameters of those requests to `vectors` whose answers are stored in an exported page."""
    return [{}] if _is_small(source) else []


def nearest(source: OpenedModel, params: Params, on_progress: Callable[[float], None] = lambda share: None) -> bytes:
    """Return the `NEAREST` nearest rows of every row, as bytes: IDs, int32 `(V, NEAREST)`, then cosines, float32."""
    # IDs, int32 `(V, NEAREST)`, then cosines, float32; a missing neighbour has ID 0 and cosine -2.

    def compute() -> bytes:
        V, candidates, parts = source.table.vocab_size, ~nameless(source), []
        for ids in torch.arange(V).split(QUERIES_AT_ONCE):
            on_progress(int(ids[0]) / V)
            parts.append(nearest_rows(source.rows, ids, NEAREST, candidates=candidates))
        ids, cosines = (torch.cat(each) for each in zip(*parts, strict=True))
        missing = (0, NEAREST - ids.shape[1])
        padded = F.pad(ids.clamp_min(0).int(), missing).numpy().tobytes()
        return padded + to_bytes(F.pad(cosines.clamp_min(-2.0), missing, value=-2.0))

    return source.once("nearest", compute)


def exported_nearest(source: OpenedModel) -> list[Params]:
    """Return the requests for lists of nearest rows that an exported page stores: one or none."""
    return [{}] if not _is_small(source) and source.table.vocab_size <= EXPORTED_ROWS else []


def left_out(source: OpenedModel) -> list[str]:
    """Return a list with the sentence that says what an exported page of this source lacks."""
    if _is_small(source):
        return ["Neighbours are computed from vectors rounded to 8 bits: cosines are exact to about 0.01."]
    if source.table.vocab_size <= EXPORTED_ROWS:
        return [f"Sums of tokens are not in this file: it contains the {NEAREST} nearest neighbours of each token."]
    return ["This file contains neither vectors nor neighbours: the table is too large for one file."]


def _is_small(source: OpenedModel) -> bool:
    """Return whether the table is so small that an exported page stores all its vectors."""
    return source.table.vocab_size * source.table.embed_dim <= EXPORTED_NUMBERS


def principal(source: OpenedModel) -> PrincipalComponents:
    """Return the principal components of a source's table, and the coordinates of its rows along them."""
    count = min(COMPONENTS, source.table.embed_dim)
    return source.once("principal_components", lambda: principal_components(source.rows, count, skip_nonfinite=True))


def nameless(source: OpenedModel) -> Bool[Tensor, " V"]:
    """Return a mask of the rows without a token, `(V,)`; it is stored in the source."""
    return source.once("nameless", lambda: torch.tensor([text == "" for text in source.token_texts]))


@torch.no_grad()
def sum_of_rows(source: OpenedModel, plus: list[int], minus: list[int]) -> Float[Tensor, "1 D"]:
    """Return the sum of some rows minus the sum of others, each normalised to length 1 first, in float64."""
    units = F.normalize(source.rows[[*plus, *minus]].double(), dim=1)
    return units[: len(plus)].sum(0, keepdim=True) - units[len(plus) :].sum(0, keepdim=True)


def token_ids(params: Params, name: str, vocab_size: int) -> list[int]:
    """Read token IDs such as `17,4` from a parameter of a request; a missing parameter gives an empty list."""
    parts = [part for part in params.get(name, "").split(",") if part]
    if len(parts) > 100 or not all(part.isdecimal() for part in parts):
        raise SizeError(f"{name} is a list of at most 100 token IDs, 17,4; found {params.get(name)!r}.")
    ids = [whole_number(part) for part in parts]
    for token in ids:
        if token >= vocab_size:
            raise TokenIdError(f"Token {token} is outside this table of {vocab_size} rows (0..{vocab_size - 1}).")
    return ids


def _number(params: Params, name: str, default: int, *, most: int) -> int:
    """Read a whole number from a parameter of a request; a missing parameter gives `default`."""
    text = params.get(name, str(default))
    if not text.isdecimal() or not 1 <= whole_number(text) <= most:
        raise SizeError(f"{name} is a number from 1 to {most}; found {text!r}.")
    return whole_number(text)


def to_bytes(values: Tensor) -> bytes:
    """Return the numbers of a tensor as the bytes of float32, row by row."""
    return values.detach().cpu().float().contiguous().numpy().tobytes()
