"""Check every row of a table: zero, NaN or infinite, duplicate, unchanged since initialisation, under-trained."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import compress

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.kinds import BYTE_ENTRY, KINDS, token_kinds
from embedlayer.analysis.row_reader import RowReader
from embedlayer.analysis.under_trained import UnderTrained, under_trained_scores
from embedlayer.data.tokenizer import token_text
from embedlayer.errors import ShapeError
from embedlayer.io.files import JsonObject
from embedlayer.short_repr import short_repr
from embedlayer.tables.dense import TableLike


@dataclass(frozen=True)
class UnderTrainedRow:
    """One under-trained row.

    Attributes:
        id: Row ID.
        text: Readable text of its token, see `TableHealth.text_of`.
        kind: One of `analysis.kinds.KINDS`; `None` without a tokenizer.
        score: Under-training score, see `UnderTrained.scores`.
        norm: Euclidean norm of the row.
    """

    id: int
    text: str
    kind: str | None
    score: float
    norm: float


@dataclass(frozen=True)
class KindCount:
    """The number of rows of one kind (see `token_kinds`), and how many of them are under-trained."""

    kind: str
    rows: int
    under_trained: int


@dataclass(frozen=True)
class TableHealth:
    """The result of `table_health`.

    Attributes:
        vocab_size: Number of rows, V.
        embed_dim: Width of a row, D.
        norms: Euclidean norm of each row `(V,)`; NaN if a row holds NaN or infinity.
        zero_rows: IDs of rows that are all zero: padding, or rows that were added and never trained.
        nonfinite_rows: IDs of rows with NaN or infinity.
        duplicates: Groups of IDs whose rows are equal, ordered by their first ID; zero rows are not listed here.
        never_touched: IDs of rows that equal the earlier table up to one factor per row (weight decay scales rows
            without gradients); `None` if no earlier table was passed.
        under_trained: Under-training scores, threshold and cones.
        kinds: The kind of each row, see `token_kinds`; `None` without a tokenizer.
        tokenizer: The tokenizer, or `None`.
    """

    __repr__ = short_repr

    vocab_size: int
    embed_dim: int
    norms: Float[Tensor, " V"]
    zero_rows: tuple[int, ...]
    nonfinite_rows: tuple[int, ...]
    duplicates: tuple[tuple[int, ...], ...]
    never_touched: tuple[int, ...] | None
    under_trained: UnderTrained
    kinds: tuple[str, ...] | None
    tokenizer: Tokenizer | None = field(repr=False)

    @property
    def by_kind(self) -> tuple[KindCount, ...]:
        """Return for each kind of token its number of rows and of under-trained rows; empty without a tokenizer."""
        kinds = self.kinds or ()
        rows, flagged = Counter(kinds), Counter(compress(kinds, self.under_trained.flagged.tolist()))
        return tuple(KindCount(kind, rows[kind], flagged[kind]) for kind in KINDS if kind in rows)

    def findings(self, limit: int | None = None, *, kind: str | None = None) -> list[UnderTrainedRow]:
        """Return the under-trained rows, highest score first.

        Rows whose scores are equal to three decimals, as they are printed, are ordered by ID.

        Args:
            limit: Return at most so many rows; `None` for all.
            kind: Return only rows of this kind; `None` for all kinds.
        """
        scores = self.under_trained.scores
        ids = torch.nonzero(self.under_trained.flagged)[:, 0]
        ids = ids[scores[ids].round(decimals=3).argsort(descending=True, stable=True)]
        kinds = self.kinds or [None] * self.vocab_size
        chosen = [row for row in ids.tolist() if kind in (None, kinds[row])]
        return [
            UnderTrainedRow(row, self.text_of(row), kinds[row], float(scores[row]), float(self.norms[row]))
            for row in chosen[:limit]
        ]

    def text_of(self, row: int) -> str:
        """Return the readable text of a row's token, `<0x41>` for a byte token, or `row 512` without a token."""
        entry = None if self.tokenizer is None else self.tokenizer.id_to_token(row)
        if self.tokenizer is None or entry is None:
            return f"row {row}"
        return entry if BYTE_ENTRY.fullmatch(entry) else token_text(self.tokenizer, row)

    def to_json(self, limit: int = 100) -> JsonObject:
        """Return the report as a JSON object: numbers of rows, norms, and cones.

        Args:
            limit: Largest number of IDs, groups or under-trained rows in each list; the numbers count all rows.
        """
        norms = self.norms[self.norms.isfinite()].double()
        return {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "norms": _spread(norms),
            "zero_rows": _listed(self.zero_rows, limit),
            "nonfinite_rows": _listed(self.nonfinite_rows, limit),
            "duplicates": {
                "groups": len(self.duplicates),
                "rows": sum(map(len, self.duplicates)),
                "ids": [list(group[:limit]) for group in self.duplicates[:limit]],
            },
            "never_touched": None if self.never_touched is None else _listed(self.never_touched, limit),
            "under_trained": {
                "rows": int(self.under_trained.flagged.sum()),
                "threshold": self.under_trained.threshold,
                "explanation": self.under_trained.explain(),
                "cones": [
                    {name: value for name, value in vars(cone).items() if name != "axis"}
                    for cone in self.under_trained.cones
                ],
                "by_kind": [asdict(count) for count in self.by_kind],
                "tokens": [asdict(found) for found in self.findings(limit)],
            },
        }


@torch.no_grad()
def table_health(
    table: TableLike,
    tokenizer: Tokenizer | None = None,
    *,
    before: TableLike | None = None,
    head: Tensor | None = None,
) -> TableHealth:
    """Check every row of a table and return what is wrong with it.

    Args:
        table: A `LookupTable`, or a plain tensor `(V, D)`.
        tokenizer: The tokenizer, from which `kinds` is computed; without one `kinds` is `None`.
        before: The same table before training, for `never_touched`, which is `None` without it.
        head: Rows of an untied head `(V, E)`. The softmax moves unused rows of the head, not of the input table, so
            under-trained tokens are then searched in the head; `None` searches the table.

    Raises:
        ShapeError: A plain tensor is not `(V, D)`, `before` differs in size, or `head` in its number of rows.

    Example:
        >>> found = table_health(torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0], [3.0, torch.nan]]))
        >>> found.zero_rows, found.duplicates, found.nonfinite_rows
        ((0,), ((1, 2),), (3,))
    """
    rows = RowReader(table)
    if head is not None and len(head) != len(rows):
        raise ShapeError(f"The table has {len(rows)} rows and the head {len(head)}: pass the head of this table.")
    norms = rows.norms()
    return TableHealth(
        vocab_size=rows.vocab_size,
        embed_dim=rows.embed_dim,
        norms=norms.float(),
        zero_rows=_ids(norms == 0),
        nonfinite_rows=_ids(norms.isnan()),
        duplicates=_duplicates(rows, norms),
        never_touched=None if before is None else _ids(_untouched(rows, RowReader(before))),
        under_trained=under_trained_scores(table if head is None else head),
        kinds=None if tokenizer is None else tuple(token_kinds(tokenizer, rows.vocab_size)),
        tokenizer=tokenizer,
    )


def _duplicates(rows: RowReader, norms: Float[Tensor, " V"]) -> tuple[tuple[int, ...], ...]:
    """Return groups of IDs whose rows are equal, ordered by their first ID, without zero rows and rows with NaN.

    Rows count as equal if a random linear 64-bit hash of their bits is equal.

    Args:
        rows: The table.
        norms: Norm of each row; only rows with a positive norm are compared.
    """
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(-(1 << 62), 1 << 62, (2 * rows.embed_dim,), generator=generator) * 2 + 1
    hashes = []
    for _, chunk in rows.chunks():
        wide = chunk.to("cpu", torch.promote_types(chunk.dtype, torch.float32)) + 0.0  # -0.0 is 0.0
        bits = wide.contiguous().view(torch.int32).long()
        hashes.append((bits * weights[: bits.shape[1]]).sum(1))
    ids = torch.nonzero(norms > 0)[:, 0]
    if not len(ids):
        return ()
    _, group, sizes = torch.cat(hashes)[ids].unique(return_inverse=True, return_counts=True)
    repeated = sizes[group] > 1
    groups: dict[int, list[int]] = {}
    for row, number in zip(ids[repeated].tolist(), group[repeated].tolist(), strict=True):
        groups.setdefault(number, []).append(row)
    return tuple(map(tuple, groups.values()))


def _untouched(rows: RowReader, before: RowReader) -> Tensor:
    """Return a mask `(V,)` of the rows that differ from the earlier table by a positive factor only.

    Weight decay causes such a factor in rows without gradients. Small differences by rounding are allowed.

    Raises:
        ShapeError: The two tables differ in size.
    """
    if (rows.vocab_size, rows.embed_dim) != (before.vocab_size, before.embed_dim):
        raise ShapeError(
            f"The table is {rows.vocab_size} x {rows.embed_dim} and the one before training is "
            f"{before.vocab_size} x {before.embed_dim}: pass the same table at two times."
        )
    found: list[Tensor] = []
    for start, chunk in rows.chunks():
        now, old = chunk.double(), before.read(start, start + len(chunk)).to(chunk.device, torch.float64)
        factor = (now * old).sum(1) / old.square().sum(1).clamp_min(1e-300)
        miss = torch.linalg.vector_norm(now - factor[:, None] * old, dim=1)
        slack = 1e-3 if chunk.dtype in (torch.float32, torch.float64) else 2e-2
        norm = torch.linalg.vector_norm(now, dim=1)
        found.append(((factor > 0) & (norm > 0) & (miss <= slack * norm)).cpu())
    return torch.cat(found) if found else torch.empty(0, dtype=torch.bool)


def _ids(mask: Tensor) -> tuple[int, ...]:
    """Return the IDs of the rows whose entry in the mask is true, in ascending order."""
    return tuple(torch.nonzero(mask)[:, 0].tolist())


def _listed(ids: tuple[int, ...], limit: int) -> JsonObject:
    """Return the JSON object `{"rows": number of IDs, "ids": the first IDs}` with at most `limit` IDs."""
    return {"rows": len(ids), "ids": list(ids[:limit])}


def _spread(values: Float[Tensor, " N"]) -> dict[str, float] | None:
    """Return the distribution of the values as a dictionary, or `None` without values.

    Its keys are `min`, `p10`, `median`, `p90` and `max` (percentiles), and `mean`.
    """
    if not len(values):
        return None
    places = values.quantile(torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]).to(values), interpolation="nearest").tolist()
    return {**dict(zip(("min", "p10", "median", "p90", "max"), places, strict=True)), "mean": float(values.mean())}
