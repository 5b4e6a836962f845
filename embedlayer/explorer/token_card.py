"""Data of the token card: what is known about one token, and where the other views show it.

Facts about all rows are columns, computed once for a source. An exported page stores the columns themselves.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from jaxtyping import Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.movement import row_movement
from embedlayer.analysis.row_reader import row_ids
from embedlayer.analysis.row_verdicts import VERDICTS, RowVerdicts
from embedlayer.analysis.token_classes import CONTEXTS
from embedlayer.analysis.tokenizer_fit import spelling_variants
from embedlayer.core.errors import SizeError, TextError, TokenizerError
from embedlayer.explorer.answers import TokenFacts, TokenPlaces
from embedlayer.explorer.example_tokens import example_texts
from embedlayer.explorer.health import table_report
from embedlayer.explorer.positions import example_ids
from embedlayer.explorer.text_ids import text_ids, vocabulary_of
from embedlayer.explorer.tokens import EXPORTED_ROWS, Params, token_ids
from embedlayer.io.json_fields import finite_json
from embedlayer.opening.opened_model import OpenedModel

LISTED_EQUAL = 8  # largest number of rows that are listed as equal to a row

TRIED_BEFORE = ("The ", "The", "", *CONTEXTS, *"abcdefghijklmnopqrstuvwxyz")
"""Texts that are tried before a token's own text, to find a text that contains the token."""


def card(source: OpenedModel, params: Params) -> TokenFacts:
    """Return the facts about the token with the ID in the parameter `id`."""
    token = _token(source, params)
    facts: dict[str, Any] = {"id": token}
    facts |= {name: _plain(column[token].item()) for name, column in _numbers(source).items()}
    some = {name: column.get(token) for name, column in _some(source).items()}
    pairs = torch.tensor([[token, other] for other in _variants(source).get(token, [])], dtype=torch.int64)
    variants = _with_cosines(source, pairs.view(-1, 2)).get(token)
    return cast(TokenFacts, facts | some | {"variants": variants} | _of_table(source))


def cards(source: OpenedModel, params: Params) -> bytes:
    """Return the facts about all tokens, as the bytes of a JSON object, for an exported page."""
    every = [[token, other] for token, others in _variants(source).items() for other in others]
    some = {**_some(source), "variants": _with_cosines(source, torch.tensor(every, dtype=torch.int64).view(-1, 2))}
    some["position"] = _first_places(_position_ids(source))
    examples = reversed(_example_ids(source))
    placed = {token: (text, at) for text, ids in examples for token, at in _first_places(ids).items()}
    some["text"] = {token: text for token, (text, _) in placed.items()}
    some["at"] = {token: at for token, (_, at) in placed.items()}
    numbers = {name: [_plain(value) for value in column.tolist()] for name, column in _numbers(source).items()}
    return json.dumps(
        {"numbers": numbers, "some": some, "all": _of_table(source)}, separators=(",", ":"), allow_nan=False
    ).encode()


def places(source: OpenedModel, params: Params) -> TokenPlaces:
    """Return where other views show the token with the ID in the parameter `id`."""
    token = _token(source, params)
    text, ids = next(((text, ids) for text, ids in _texts(source, token) if token in ids), (None, []))
    at = None if text is None else ids.index(token)
    return {"text": text, "at": at, "position": _first_places(_position_ids(source)).get(token)}


def exported_requests(source: OpenedModel) -> list[Params]:
    """Return the requests to `cards` that an exported page stores: one, or none for a large table."""
    return [{}] if source.table.vocab_size <= EXPORTED_ROWS else []


def _token(source: OpenedModel, params: Params) -> int:
    """Read one token ID from the parameter `id`."""
    ids = token_ids(params, "id", source.table.vocab_size)
    if len(ids) != 1:
        raise SizeError(f"id is the ID of one token; found {params.get('id')!r}.")
    return ids[0]


def _numbers(source: OpenedModel) -> dict[str, Tensor]:
    """Return the facts that every row has a number for: name -> `(V,)`; they are computed once."""
    return source.once("card numbers", lambda: _compute_numbers(source))


def _compute_numbers(source: OpenedModel) -> dict[str, Tensor]:
    """Compute `norm`, `norm_share` and `score` of every row, and of a run `count`, `norm_before` and the like."""
    report, before = table_report(source), source.before()
    random = report.verdicts.random
    norms, is_finite = report.norms, report.norms.isfinite()
    ordered = norms[is_finite].sort().values
    shares = torch.searchsorted(ordered, norms) / max(1, len(ordered))
    columns = {"norm": norms, "norm_share": shares.where(is_finite, math.nan), "score": report.under_trained.scores}
    columns |= {"noise_share": random.noise_shares, "nearest": random.nearest}
    if source.counts is not None:
        counts = source.counts.long()
        smaller = torch.searchsorted(counts.sort().values, counts, right=True)
        columns |= {"count": counts, "count_rank": len(counts) - smaller + 1}
    if before is not None:
        moved = row_movement(before.table, source.table)
        columns |= {"cosine_before": moved.cosines, "norm_before": moved.norms[:, 0]}
    return columns


def _some(source: OpenedModel) -> dict[str, dict[int, Any]]:
    """Return the facts that only some rows have: name -> ID -> value; they are computed once."""
    return source.once("card facts", lambda: _compute_some(source))


def _compute_some(source: OpenedModel) -> dict[str, dict[int, Any]]:
    report = table_report(source)
    equal = {token: group for group in report.duplicates for token in group}
    near = {token: group for group in report.near_duplicates for token in group}
    findings: dict[int, list[str]] = {}
    for name, rows in (
        ("broken", report.nonfinite_rows),
        ("zero", report.zero_rows),
        *((verdict.replace(" ", "_"), rows) for verdict, rows in _unlearned(report.verdicts)),
        ("unchanged", report.never_touched or ()),
        ("duplicate", sorted(equal)),
        ("at_mean", report.at_mean),
        ("near_duplicate", sorted(near.keys() - equal - set(report.at_mean))),
        ("norm", [row for group in report.norm_outliers for row in group.ids]),
        ("unlike_variants", () if report.spelling is None else report.spelling.odd_rows),
    ):
        for row in rows:
            findings.setdefault(row, []).append(name)
    judged = {row: report.verdicts.of(row) for row in row_ids(~report.verdicts.is_("learned"))}
    return {
        "findings": findings,
        "verdict": {row: verdict for row, (verdict, _) in judged.items()},
        "because": {row: because for row, (_, because) in judged.items()},
        "equal_rows": {token: _others(token, group) for token, group in equal.items()},
        "near_rows": {token: _others(token, group) for token, group in near.items()},
        "kind": dict(enumerate(report.kinds or ())),
    }


def _unlearned(verdicts: RowVerdicts) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each verdict but "learned", and the IDs of the rows that have it, unless another finding says why."""
    is_named = torch.zeros_like(verdicts.reasons, dtype=torch.bool)
    for reason in ("at the mean", "as before training", "no direction", "equal to another row", "not judged"):
        is_named |= verdicts.has_reason(reason)
    for verdict in VERDICTS[1:]:
        yield verdict, row_ids(verdicts.is_(verdict) & ~is_named)


def _others(token: int, group: tuple[int, ...]) -> dict[str, Any]:
    """Return the other rows of a group of rows: their number, and the first `LISTED_EQUAL` IDs."""
    first = [other for other in group[: LISTED_EQUAL + 1] if other != token]
    return {"rows": len(group) - 1, "ids": first[:LISTED_EQUAL]}


def _of_table(source: OpenedModel) -> dict[str, Any]:
    """Return the facts of `card` that are the same for all tokens: the verdict about the table, and thresholds."""
    report = table_report(source)
    distinct = finite_json(report.verdicts.random.distinct._asdict())
    return {"table_state": report.state, "table_reasons": report.reasons(), "random": distinct}


def _variants(source: OpenedModel) -> dict[int, list[int]]:
    """Return the spelling variants of the tokens of a source, see `spelling_variants`; they are computed once."""
    return source.once(
        "spelling", lambda: spelling_variants(source.token_texts, source.text_tokenizer, special=source.special_ids)
    )


def _with_cosines(source: OpenedModel, pairs: Int[Tensor, "N 2"]) -> dict[int, list[list[Any]]]:
    """Return the second tokens of pairs by the first, each with the cosine of both rows, largest cosine first."""
    cosines = row_movement(source.table, source.table, pairs=pairs).cosines.tolist()
    by_token: dict[int, list[list[Any]]] = {}
    for (token, other), cosine in zip(pairs.tolist(), cosines, strict=True):
        by_token.setdefault(token, []).append([other, _plain(cosine)])
    for listed in by_token.values():
        listed.sort(key=lambda each: -2.0 if each[1] is None else each[1], reverse=True)
    return by_token


def _texts(source: OpenedModel, token: int) -> Iterator[tuple[str, list[int]]]:
    """Yield texts that may contain a token, each with its token IDs."""
    yield from _example_ids(source)
    vocabulary = vocabulary_of(source)
    if not isinstance(vocabulary, Tokenizer):
        yield from _encoded(source, [source.token_texts[token], f"#{token}"])
        return
    own = source.token_texts[token]
    if not own:
        return
    prefix = getattr(vocabulary.model, "continuing_subword_prefix", None) or ""
    bare = own.removeprefix(prefix) or own
    tried = ["The" + own if own.startswith(" ") else "The " + bare, *(before + bare for before in TRIED_BEFORE)]
    yield from _encoded(source, tried)


def _example_ids(source: OpenedModel) -> list[tuple[str, list[int]]]:
    """Return the example texts of the view Pipeline, with its IDs; those that cannot be encoded are left out."""
    return source.once(
        "example texts", lambda: list(_encoded(source, [] if source.table_only else example_texts(source)))
    )


def _encoded(source: OpenedModel, texts: list[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield those of some texts that have tokens, with their IDs, as the view Pipeline encodes them."""
    vocabulary, special = vocabulary_of(source), source.adds_special_tokens
    for text in texts:
        with suppress(TextError, TokenizerError):
            yield text, text_ids(vocabulary, text, source.table.vocab_size, add_special_tokens=special).ids


def _position_ids(source: OpenedModel) -> list[int]:
    """Return the IDs of the tokens that the view Positions shows; none if the source has no input embedding."""
    if source.table_only:
        return []
    return source.once("example positions", lambda: example_ids(source.table.vocab_size, source.text_tokenizer))


def _first_places(ids: list[int]) -> dict[int, int]:
    """Return ID -> index of its first occurrence in a list."""
    return {token: place for place, token in reversed(list(enumerate(ids)))}


def _plain(value: int | float) -> int | float | None:
    """Return a number with six significant digits for JSON; `None` if it is not finite, an integer unchanged."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
