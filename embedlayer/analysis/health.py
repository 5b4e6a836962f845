"""What is wrong with a table, row by row: zeros, NaN, duplicates, rows never touched or hardly reached by training."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.rows import Rows
from embedlayer.analysis.token_kinds import BYTE_PIECE, KINDS, token_kinds
from embedlayer.analysis.under_trained import UnderTrained
from embedlayer.analysis.under_trained import under_trained_scores as under_trained_scores
from embedlayer.errors import ShapeError
from embedlayer.io.files import JsonObject
from embedlayer.short_repr import short_repr
from embedlayer.tables.dense import TableLike
from embedlayer.data.tokenizer import token_text


@dataclass(frozen=True)
class Finding:
    """One under-trained row, with the evidence.

    Attributes:
        id: Row.
        text: See `Health.text_of`.
        kind: One of `token_kinds.KINDS`; `None` without a tokenizer.
        score: See `UnderTrained.scores`.
        norm: Length of the row.
    """

    id: int
    text: str
    kind: str | None
    score: float
    norm: float


@dataclass(frozen=True)
class KindCount:
    """How many rows of a kind there are, and how many of these are under-trained."""

    kind: str
    rows: int
    under_trained: int


@dataclass(frozen=True)
class Health:
    """What `health` found.

    Attributes:
        vocab_size: Rows, V.
        embed_dim: Their width, D.
        norms: Length of each row `(V,)`; NaN where a row holds NaN or infinity.
        zero_rows: IDs of rows that are all zero: padding, or rows that were added and never trained.
        nonfinite_rows: IDs of rows with NaN or infinity.
        duplicates: Groups of IDs whose rows are equal (zero rows apart), by their first ID.
        never_touched: IDs of rows that are what they were before training, up to one factor (weight decay shrinks rows
            that nothing else touches); `None` where the earlier table was not given.
        under_trained: Scores, threshold and cones.
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
        """Rows and under-trained rows of each kind that occurs; empty without a tokenizer."""
        flagged = self.under_trained.flagged.tolist()
        kinds = self.kinds or ()
        rows = {kind: [flag for flag, own in zip(flagged, kinds, strict=True) if own == kind] for kind in set(kinds)}
        return tuple(KindCount(kind, len(rows[kind]), sum(rows[kind])) for kind in KINDS if kind in rows)

    def findings(self, limit: int | None = None, *, kind: str | None = None) -> list[Finding]:
        """The under-trained rows, least trained first; at most `limit`, of one `kind`.

        Rows whose scores agree in three digits, as they are shown, stand by ID: rows that nothing ever told apart.
        """
        scores = self.under_trained.scores
        ids = torch.nonzero(self.under_trained.flagged)[:, 0]
        ids = ids[scores[ids].round(decimals=3).argsort(descending=True, stable=True)]
        chosen = [row for row in ids.tolist() if kind is None or (self.kinds or [None] * self.vocab_size)[row] == kind]
        return [
            Finding(
                row,
                self.text_of(row),
                None if self.kinds is None else self.kinds[row],
                float(scores[row]),
                float(self.norms[row]),
            )
            for row in chosen[:limit]
        ]

    def text_of(self, row: int) -> str:
        """What a row's token stands for, `<0x41>` for a byte piece, or `row 512` where there is no token."""
        piece = None if self.tokenizer is None else self.tokenizer.id_to_token(row)
        if self.tokenizer is None or piece is None:
            return f"row {row}"
        return piece if BYTE_PIECE.fullmatch(piece) else token_text(self.tokenizer, row)

    def to_json(self, limit: int = 100) -> JsonObject:
        """Counts, and the first `limit` IDs of each list, as JSON has it."""
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
                    {
                        "rows": cone.size,
                        "median_angle": cone.angle,
                        "edge_angle": cone.edge,
                        "mean_cosine": cone.similarity,
                    }
                    for cone in self.under_trained.cones
                ],
                "by_kind": [
                    {"kind": count.kind, "rows": count.rows, "under_trained": count.under_trained}
                    for count in self.by_kind
                ],
                "tokens": [
                    {
                        "id": found.id,
                        "text": found.text,
                        "kind": found.kind,
                        "score": found.score,
                        "norm": found.norm,
                    }
                    for found in self.findings(limit)
                ],
            },
        }


@torch.no_grad()
def health(
    table: TableLike,
    tokenizer: Tokenizer | None = None,
    *,
    before: TableLike | None = None,
    head: Tensor | None = None,
) -> Health:
    """Look at every row of a table.

    Args:
        table: A `TokenTable`, or a plain tensor `(V, D)`.
        tokenizer: Its tokenizer, for the kinds of tokens.
        before: The same table before training, for `never_touched`.
        head: The rows of a free head `(V, E)`. Training pushes them where it does not push the table's, so
            under-trained tokens are looked for among them.

    Raises:
        ShapeError: A plain tensor that is not `(V, D)`, or tables of different sizes.

    Example:
        >>> found = health(torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 2.0], [3.0, torch.nan]]))
        >>> found.zero_rows, found.duplicates, found.nonfinite_rows
        ((0,), ((1, 2),), (3,))
    """
    rows = Rows(table)
    if head is not None and len(head) != len(rows):
        raise ShapeError(f"The table has {len(rows)} rows and the head {len(head)}: give the head of this table.")
    norms = torch.cat([_norms(chunk) for _, chunk in rows.chunks()]) if len(rows) else torch.empty(0)
    return Health(
        vocab_size=rows.vocab_size,
        embed_dim=rows.embed_dim,
        norms=norms,
        zero_rows=_ids(norms == 0),
        nonfinite_rows=_ids(norms.isnan()),
        duplicates=_duplicates(rows, norms),
        never_touched=None if before is None else _ids(_untouched(rows, Rows(before))),
        under_trained=under_trained_scores(table if head is None else head),
        kinds=None if tokenizer is None else tuple(token_kinds(tokenizer, rows.vocab_size)),
        tokenizer=tokenizer,
    )


def _norms(chunk: Float[Tensor, "rows D"]) -> Float[Tensor, " rows"]:
    wide = torch.promote_types(chunk.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(chunk, dim=1, dtype=wide).cpu()
    broken = ~chunk.isfinite().all(dim=1).cpu()
    return norms.float().where(~broken, torch.tensor(math.nan))


def _duplicates(rows: Rows, norms: Float[Tensor, " V"]) -> tuple[tuple[int, ...], ...]:
    """Groups of equal rows, by a random linear hash of their bits, 64 wide."""
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


def _untouched(rows: Rows, before: Rows) -> Tensor:
    """Rows that are a positive multiple of what they were, to within the rounding of many steps of decay."""
    if (rows.vocab_size, rows.embed_dim) != (before.vocab_size, before.embed_dim):
        raise ShapeError(
            f"The table is {rows.vocab_size} x {rows.embed_dim} and the one before training is "
            f"{before.vocab_size} x {before.embed_dim}: give the same table at two times."
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
    return tuple(torch.nonzero(mask)[:, 0].tolist())


def _listed(ids: tuple[int, ...], limit: int) -> JsonObject:
    return {"rows": len(ids), "ids": list(ids[:limit])}


def _spread(values: Float[Tensor, " N"]) -> dict[str, float] | None:
    if not len(values):
        return None
    places: Int[Tensor, " 5"] = (torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]) * (len(values) - 1)).round().long()
    low, tenth, median, ninetieth, high = values.sort().values[places].tolist()
    return {"min": low, "p10": tenth, "median": median, "p90": ninetieth, "max": high, "mean": float(values.mean())}
