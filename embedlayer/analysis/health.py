"""Check every row of a table: zero, NaN or infinite, duplicate, unchanged since initialisation, not learned.

The check also compares the table with chance: which rows differ from random numbers, whether norms are apart from all
others, whether spelling variants are similar, which shows that the tokenizer belongs to the table, and whether all
columns belong to the same rows. Of a training run it also compares the loss with that of the token frequencies: a run
that learned little is not sound, and neither is a table whose rows come from the start of other rows of its run.

A table is called sound only if something shows that it was trained: its spelling variants are similar, or its loss is
known. Otherwise the verdict is withheld, with the reason. What all rows share, such as an offset, is removed before
rows are judged (`analysis.shared_variance`).
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.column_blocks import column_blocks
from embedlayer.analysis.geometry import chance_nearest_cosine
from embedlayer.analysis.health_report import (
    FEWEST_SAMPLED,
    LossOfRun,
    NearestCosine,
    TableHealth,
    written_equal,
)
from embedlayer.analysis.near_duplicates import equal_rows, near_duplicates
from embedlayer.analysis.nearest import nearest_rows
from embedlayer.analysis.norm_outliers import norm_outliers
from embedlayer.analysis.random_rows import random_rows
from embedlayer.analysis.row_reader import RowReader, drawn_ids, row_ids
from embedlayer.analysis.row_verdicts import row_verdicts
from embedlayer.analysis.shared_variance import shared_variance, without_shared_part
from embedlayer.analysis.token_classes import token_kinds
from embedlayer.analysis.tokenizer_fit import tokenizer_fit
from embedlayer.analysis.under_trained import under_trained_scores
from embedlayer.core.errors import ShapeError
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.tables.conversions import TableLike
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tokenization.bytes import row_texts
from embedlayer.tokenization.tokenizer_calls import as_tokenizer

SAMPLED = 512
RELATED = 0.05  # a table comes from its start if a larger share of the rows clearly does
COMPARED = 1024  # rows whose start is searched among all rows before training

AT_THE_MEAN = 0.1  # rows lie at the mean of the others if they differ from it by at most this share of its norm

COARSE_BLOCK, COARSE_LEVELS = 32, 16
"""Numbers are of 4 bits if no block of so many in a row has more than so many different ones."""


@torch.no_grad()
def table_health(
    table: TableLike,
    tokenizer: object = None,
    *,
    before: TableLike | None = None,
    head: TableLike | None = None,
    counts: Int[Tensor, " V"] | None = None,
    validation_loss: float | None = None,
) -> TableHealth:
    """Check every row of a table and return what is wrong with it.

    Args:
        table: A `LookupTable`, an `nn.Embedding`, or a tensor or array `(V, D)`.
        tokenizer: A `tokenizers.Tokenizer` or a fast tokenizer of transformers, from which `kinds` is computed; without
            one `kinds` is `None`.
        before: The same table before training, for `never_touched` and `exchanged`, which are `None` without it.
        head: Rows of an untied head `(V, E)`, as `table`. The softmax moves unused rows of the head, not of the input
            table, so under-trained tokens are then searched in the head; `None` searches the table.
        counts: Number of occurrences of each token in the training text, `(V,)`; see `under_trained_scores`.
        validation_loss: Loss on held-out text of the model that the table belongs to, in nats per token. With `counts`,
            it tells whether the table was trained enough, see `LossOfRun`.

    Raises:
        ShapeError: A tensor or array is not `(V, D)` of floats, `before` differs in size, or `head` or
            `counts` in the number of rows.
        TokenizerError: `tokenizer` is no tokenizer.

    Example:
        >>> health = table_health(torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0], [3.0, torch.nan]]))
        >>> health.zero_rows, health.duplicates, health.nonfinite_rows
        ((0,), ((1, 2),), (3,))
    """
    tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
    rows = RowReader(table)
    norms = rows.norms()
    shared = shared_variance(rows, norms > 0)
    judged = RowReader(without_shared_part(table, shared))
    judged_norms = norms if judged.table is rows.table else judged.norms()
    near, equal = near_duplicates(judged, judged_norms), equal_rows(rows, norms)
    at_mean = _at_mean(rows, norms, max((*near, *equal), key=len, default=()))
    scored: TableLike = judged.table
    if head is not None:
        head_rows = RowReader(head)
        scored = without_shared_part(head, shared_variance(head_rows, head_rows.norms() > 0))
    under_trained = under_trained_scores(scored, counts)
    if head is None and under_trained.flagged.any():  # unused rows share a direction
        shared = shared_variance(rows, (norms > 0) & ~under_trained.flagged)
    kinds = None if tokenizer is None else tuple(token_kinds(tokenizer, rows.vocab_size))
    never_touched = None if before is None else row_ids(_untouched(rows, RowReader(before)))
    factors = RowReader(rows.table.inner.weight) if isinstance(rows.table, FactorizedEmbedding) else judged
    strangers, exchanged = (None, None) if before is None else _start(rows, RowReader(before), norms > 0)
    verdicts = row_verdicts(
        random_rows(factors, (judged_norms > 0) & (norms > 0), strangers),
        under_trained,
        directed=norms > 0,
        counts=counts,
        kinds=kinds,
        at_mean=at_mean,
        equal=written_equal(equal, at_mean, kinds),
        untouched=never_touched or (),
    )
    usual = ~under_trained.flagged
    usual[[row for group in (*equal, at_mean) for row in group]] = False
    learned = usual & ~verdicts.is_unlearned & (norms > 0)
    loss = None
    if validation_loss is not None and counts is not None:
        frequencies = counts[counts > 0].double() / counts.sum()
        loss = LossOfRun(validation_loss, float(-(frequencies * frequencies.log()).sum()))
    return TableHealth(
        vocab_size=rows.vocab_size,
        embed_dim=rows.embed_dim,
        norms=norms.float(),
        zero_rows=row_ids(norms == 0),
        nonfinite_rows=row_ids(norms.isnan()),
        duplicates=equal,
        near_duplicates=near,
        at_mean=at_mean,
        norm_outliers=norm_outliers(judged_norms, usual),
        never_touched=never_touched,
        exchanged=exchanged,
        under_trained=under_trained,
        verdicts=verdicts,
        nearest=_nearest_cosine(judged, judged_norms),
        spelling=None
        if tokenizer is None
        else tokenizer_fit(judged, row_texts(tokenizer, rows.vocab_size), usable=learned),
        columns=None if shared.constant else column_blocks(judged, learned),
        loss=loss,
        kinds=kinds,
        tokenizer=tokenizer,
        shared=shared,
        absent=None if counts is None else row_ids(counts.cpu() == 0),
        is_coarse=_is_coarse(rows, norms),
        is_factorized=isinstance(rows.table, FactorizedEmbedding),
    )


def model_health(opened: OpenedModel) -> TableHealth:
    before = opened.before()
    return table_health(
        opened.table,
        opened.tokenizer,
        before=None if before is None else before.table,
        head=opened.untied_head,
        counts=opened.counts,
        validation_loss=opened.validation_loss,
    )


def _is_coarse(rows: RowReader, norms: Float[Tensor, " V"]) -> bool:
    """Return whether numbers look like 4-bit codes: no sampled block of 32 has more than 16 distinct ones."""
    ids, blocks = drawn_ids(norms > 0, FEWEST_SAMPLED), rows.embed_dim // COARSE_BLOCK
    if not blocks or len(ids) < FEWEST_SAMPLED:
        return False
    ordered = rows.take(ids)[:, : blocks * COARSE_BLOCK].reshape(-1, COARSE_BLOCK).sort(dim=1).values
    return int((ordered.diff(dim=1) != 0).sum(1).max()) < COARSE_LEVELS


def _nearest_cosine(rows: RowReader, norms: Float[Tensor, " V"]) -> NearestCosine:
    """Measure how similar rows are to their nearest row, in a seeded sample of the rows with a positive norm."""
    usable = norms > 0
    ids = drawn_ids(usable, SAMPLED)
    if len(ids) < 2:
        return NearestCosine(len(ids), math.nan, math.nan, math.nan)
    nearest = nearest_rows(rows.table, ids, 1, candidates=usable)
    pairs = (float(F.normalize(rows.take(ids).double()).sum(0).square().sum()) - len(ids)) / (len(ids) * (len(ids) - 1))
    chance = chance_nearest_cosine(int(usable.sum()), rows.embed_dim)
    median, each = float(nearest.cosines.median()), nearest.cosines[:, 0].tolist()
    return NearestCosine(len(ids), median, chance, pairs, tuple(ids.tolist()), tuple(each))


def _at_mean(rows: RowReader, norms: Float[Tensor, " V"], group: tuple[int, ...]) -> tuple[int, ...]:
    """Return the IDs of a group of equal or nearly equal rows if it lies at the mean of all other rows, else none."""
    inside = torch.zeros(len(rows), dtype=torch.bool)
    inside[list(group)] = True
    others = (norms > 0) & ~inside
    if not group or not others.any():
        return ()
    mean = rows.total(others) / int(others.sum())
    distance = torch.linalg.vector_norm(rows.take(torch.tensor(group)).double().mean(0) - mean)
    return group if distance <= AT_THE_MEAN * torch.linalg.vector_norm(mean) else ()


def _untouched(rows: RowReader, before: RowReader) -> Tensor:
    """Return a mask `(V,)` of the rows that differ from the earlier table by a positive factor only.

    Weight decay causes such a factor in rows without gradients. Small differences by rounding are allowed. Zero rows
    are not in the mask.
    """
    now_size, old_size = ((each.vocab_size, each.embed_dim) for each in (rows, before))
    if now_size != old_size:
        raise ShapeError(f"The table is {now_size} and the one before training {old_size}: pass the same table.")
    masks: list[Tensor] = []
    for start, chunk in rows.chunks():
        now, old = chunk.double(), before.read(start, start + len(chunk)).to(chunk.device, torch.float64)
        factor = (now * old).sum(1) / old.square().sum(1).clamp_min(1e-300)
        miss = torch.linalg.vector_norm(now - factor[:, None] * old, dim=1)
        slack = 1e-3 if chunk.dtype in (torch.float32, torch.float64) else 2e-2
        norm = torch.linalg.vector_norm(now, dim=1)
        masks.append(((factor > 0) & (norm > 0) & (miss <= slack * norm)).cpu())
    return torch.cat(masks) if masks else torch.empty(0, dtype=torch.bool)


def _start(
    rows: RowReader, before: RowReader, usable: Bool[Tensor, " V"]
) -> tuple[Bool[Tensor, " V"] | None, float | None]:
    """Compare the usable rows, without the direction that they share, with the rows before training.

    A row clearly comes from a start if their cosine is above the nearest cosine of random rows, but for 1 % of these.
    Return the mask of the rows that are no more similar to their own start than unrelated rows, and the share of a
    sample of rows that clearly come from the start of another row; both `None` with few rows, or if few rows come from
    a start, as after a long training.
    """
    generator = torch.Generator().manual_seed(0)
    sample = drawn_ids(usable, COMPARED, generator)
    if len(sample) < FEWEST_SAMPLED:
        return None, None
    axis = F.normalize(rows.total(usable, F.normalize), dim=0)

    def without_axis(values: Tensor) -> Tensor:
        wide = values.cpu().double()
        return wide - (wide @ axis)[:, None] * axis

    queries = torch.randn(len(sample), rows.embed_dim, generator=generator)
    by_chance = nearest_rows(before.table, queries, 1).cosines[:, 0].quantile(0.99)
    nearest = nearest_rows(before.table, without_axis(rows.take(sample)), 1)
    is_clear = nearest.cosines[:, 0] > by_chance  # such a row comes from a start: its own, or that of another row
    if is_clear.double().mean() < RELATED:
        return None, None
    exchanged = float((nearest.ids[:, 0] != sample)[is_clear].double().mean())
    own, unrelated = [], []
    for place, chunk in rows.chunks():
        now, old = without_axis(chunk), without_axis(before.read(place, place + len(chunk)))
        own.append(F.cosine_similarity(now, old))
        unrelated.append(F.cosine_similarity(now, old.roll(1, 0)))
    chance = torch.cat(unrelated)[sample].quantile(0.99)
    return torch.cat(own) < chance, exchanged
