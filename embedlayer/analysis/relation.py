"""Tell whether two tables are related: by a rotation that is fitted on half of their tokens and tested on the others.

An alignment always finds something: of two tables of 1,000 x 384 random numbers, the rows have a mean cosine of about
0.5 after the rotation that fits them best. The rotation is therefore tested on tokens that it was not fitted on, beside
the same test with shuffled tokens. Directions that all rows of a table share are the same in both.

A mean cosine does not tell a table in which all rows moved a little from one in which a few were overwritten. Rows that
are equal in both tables are therefore counted, and so are rows that are equal to the row of another token, and rows
that only one of the tables has. A row without a direction, because it is zero or holds NaN or infinity, has no cosine:
such rows are named, and are in no mean.

Tables are called the same only if all rows of both were compared and are equal.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.analysis.movement import align_tables, paired, row_movement, shared_tokens
from embedlayer.analysis.near_duplicates import row_hashes
from embedlayer.analysis.row_reader import RowReader, drawn_ids, listed_ids
from embedlayer.core.formatting import count_of
from embedlayer.io.files import JsonObject
from embedlayer.opening.opened_model import OpenedModel
from embedlayer.tables.conversions import TableLike

MARGIN = 0.05
"""Tables are related if `(c - s) / (1 - s)` exceeds this, for mean cosines `c` of tokens, `s` of shuffled tokens."""

ERRORS = 5.0  # the difference must also exceed its standard error by this factor

ROTATED = 0.999
"""Tables are a rotation of each other if the mean cosine of the rows that it was not fitted on is at least this."""

CLOSE = 0.25
"""Related tables have little in common if `(c - s) / (1 - s)` is below this."""

SIMILAR = 0.5  # rows of a changed table point in similar directions if their mean cosine is at least this

SHIFTED = 0.9  # rows are shifted if more than this share of the exchanged ones moved by the same number of places
FEWEST_SHIFTED = 5  # of fewer exchanged rows no shift is told

FEWEST_TOKENS = 20
MOST_TOKENS = 20_000
NAMED_ONLY = 8

Verdict = Literal["same", "changed", "related", "unrelated", "unknown"]


@dataclass(frozen=True)
class TableRelation:
    """Whether two tables are related.

    Attributes:
        verdict: `"same"`: all rows of both tables were compared, and are equal. `"changed"`: most rows are equal, or
            similar as they are stored, as two checkpoints of one training are. `"related"`: they are similar after
            a rotation. `"unrelated"`: they are no more similar than shuffled tokens. `"unknown"`: there are too few
            tokens to tell.
        tokens: Number of tokens compared, at most `MOST_TOKENS`.
        as_stored: Mean cosine of the two rows of a token as they are stored; `None` if the widths differ, or with
            fewer than `FEWEST_TOKENS` tokens.
        as_stored_shuffled: The same with shuffled tokens.
        held_out: Mean cosine of the two rows of tokens that the rotation was not fitted on; `None` with fewer than
            `FEWEST_TOKENS` tokens.
        shuffled: The same with shuffled tokens.
        width: Smaller width of the two tables.
        shared: Number of tokens that both tables have, with those that are not compared.
        equal: Number of them whose two rows are equal.
        exchanged: Number of the others whose second row is equal to the first row of another token; both rows have a
            direction.
        shift: Number of places by which nearly all exchanged rows moved, in the order of the tokens; 0 if they moved
            by different ones, or if there are fewer than `FEWEST_SHIFTED`.
        differing: Number of tokens whose two rows are not equal, and have a direction both; 0 where `as_stored` is
            `None`.
        differing_cosine: Mean cosine of the two rows of these tokens; `None` without any.
        differing_scale: Median ratio of the norms of these rows.
        no_direction_before: IDs of the rows of the first table that are zero or hold NaN or infinity, of tokens whose
            two rows are not equal.
        no_direction_after: The same of the second table.
        only_before: Number of rows of the first table that are not compared: the second has none of their tokens.
        only_after: The same of the second table.
    """

    verdict: Verdict
    tokens: int
    as_stored: float | None
    as_stored_shuffled: float | None
    held_out: float | None
    shuffled: float | None
    width: int
    shared: int = 0
    equal: int = 0
    exchanged: int = 0
    shift: int = 0
    differing: int = 0
    differing_cosine: float | None = None
    differing_scale: float | None = None
    no_direction_before: tuple[int, ...] = ()
    no_direction_after: tuple[int, ...] = ()
    only_before: int = 0
    only_after: int = 0

    @property
    def is_as_stored(self) -> bool:
        """Return whether the rows are compared as they are stored, without a rotation: the same or a changed table."""
        return self.verdict in ("same", "changed")

    @property
    def _is_counted(self) -> bool:
        """Return whether equal or exchanged rows say how the tables are related, rather than cosines."""
        return self.equal > 0 or self.exchanged > self.shared / 2

    def headline(self) -> str:
        """Return in one plain sentence how much the two tables have in common.

        Example:
            >>> table_relation(torch.randn(2000, 32), torch.randn(2000, 32)).headline()
            'Unrelated: no rotation brings the two tables together.'
        """
        if self.verdict == "same":
            return f"The same table: all {self.shared:,} rows are equal."
        if self.verdict == "changed" and self.equal == self.shared:
            return f"All {self.shared:,} common rows are equal."
        if self.verdict == "changed" and self._is_counted:
            start = "Changed in part" if self.equal else "Rows exchanged"
            return f"{start}: {self.equal:,} of {self.shared:,} common rows are equal."
        if self.as_stored is not None and self.verdict == "changed":
            if self.as_stored >= SIMILAR:
                return "Changed: on average, a token still points in a similar direction."
            return "Strongly changed: on average, a token points in a new direction."
        if self.held_out is None or self.shuffled is None or self.verdict == "unknown":
            return f"Cannot tell whether they are related: {self.tokens:,} common tokens are too few."
        if self.held_out >= ROTATED:
            return "Rotated: one rotation maps each row of one table to the row of the other."
        if self.verdict == "related" and (self.held_out - self.shuffled) / (1 - self.shuffled) >= CLOSE:
            return "Related: after a rotation, a token points in a similar direction in both, on average."
        if self.verdict == "related":
            return "Little in common: even after the best rotation, a token points in different directions in the two."
        return "Unrelated: no rotation brings the two tables together."

    def sentence(self, before: str = "A", after: str = "B") -> str:
        """Return `headline`, and what was measured, in a few sentences.

        The last ones name the rows without a direction, and count those that only one table has.

        Args:
            before: Name of the first table.
            after: Name of the second table.
        """
        return " ".join([self.headline(), *self.details(before, after)])

    def details(self, before: str = "A", after: str = "B") -> list[str]:
        """Return the sentences of `sentence` after the first one."""
        sentences, differ = [], self.shared - self.equal
        if not self.is_as_stored and self.held_out is not None:
            sentences.append(
                f"The rotation was fitted on half of the {self.tokens:,} common tokens, in {self.width:,} dimensions: "
                f"rows of the other half have a mean cosine of {self.held_out:.3f}, and of {self.shuffled:z.3f} with "
                f"shuffled tokens."
            )
        elif self.is_as_stored and differ and not self._is_counted:
            sentences.append(
                f"As stored, the two rows of {self.tokens:,} tokens have a mean cosine of {self.as_stored:.3f}, and of "
                f"{self.as_stored_shuffled:z.3f} with shuffled tokens."
            )
        elif self.is_as_stored and differ:
            sentences.append(self._counted(differ, before, after))
        for name, rows in ((before, self.no_direction_before), (after, self.no_direction_after)):
            if rows:
                named = ", ".join(map(str, rows[:NAMED_ONLY])) + ", ..." * (len(rows) > NAMED_ONLY)
                have = "row has" if len(rows) == 1 else "rows have"
                sentences.append(f"{len(rows):,} {have} no direction in {name}: {named} (zero or NaN).")
        only = [
            f"{count_of(count, 'row')} only in {name}"
            for count, name in ((self.only_before, before), (self.only_after, after))
            if count
        ]
        return [*sentences, f"{', '.join(only)}."] if only else sentences

    def _counted(self, differ: int, before: str, after: str) -> str:
        """Return the figures of the rows that differ, and of those that are equal to the row of another token."""
        clause = f"{differ:,} {'differ' if differ > 1 else 'differs'}"
        if self.differing_cosine is not None and self.as_stored_shuffled is not None:
            if self.differing < differ:
                have = "has" if self.differing == 1 else "have"
                clause += f"; {self.differing:,} {have} a direction in both tables"
            clause += (
                f", with {'a mean' if self.differing > 1 else 'a'} cosine of {self.differing_cosine:.3f} (shuffled "
                f"tokens: {self.as_stored_shuffled:z.3f}) and norms × {self.differing_scale:.3g} in the median"
            )
        if self.exchanged:
            rows_are = "rows of {} are" if self.exchanged > 1 else "row of {} is"
            other = f"equal to the row of another token in {before}"
            clause += f"; {self.exchanged:,} {rows_are.format(after)} {other}"
        if self.exchanged and self.shift:
            places = f"{abs(self.shift)} {'place' if abs(self.shift) == 1 else 'places'}"
            clause += f", in nearly all cases {places} {'later' if self.shift > 0 else 'earlier'} than there"
        return f"{clause}."

    def to_json(self, limit: int = 100) -> JsonObject:
        """Return the result as a JSON object; rows without a direction are `{"rows": number, "ids": first IDs}`.

        Args:
            limit: Largest number of IDs in each list.
        """
        lists = {name: getattr(self, name) for name in ("no_direction_before", "no_direction_after")}
        return asdict(self) | {name: listed_ids(ids, limit) for name, ids in lists.items()}


def common_rows(before: OpenedModel, after: OpenedModel) -> Int[Tensor, "N 2"] | None:
    """Return the rows of two models to compare: ID in `before` and in `after`, `(N, 2)`; `None` pairs equal IDs."""
    # rows of the tokens that both models have; with equal vocabularies also rows without a token
    one, other = before.tokenizer, after.tokenizer
    if one is None or other is None:
        return None
    sizes = before.table.vocab_size, after.table.vocab_size
    if one.get_vocab(with_added_tokens=True) == other.get_vocab(with_added_tokens=True):
        return torch.arange(min(sizes))[:, None].expand(-1, 2)
    pairs = shared_tokens(one, other)
    return pairs[(pairs < torch.tensor(sizes)).all(1)]


def rows_left_out(pairs: Int[Tensor, "N 2"] | None, vocab_sizes: tuple[int, int]) -> tuple[list[int], list[int]]:
    """Return the IDs of the rows of each of two tables that are in no pair; none if `pairs` is `None`."""
    if pairs is None:
        return [], []
    first, second = (
        torch.ones(size, dtype=torch.bool).index_fill_(0, ids, False).nonzero()[:, 0].tolist()
        for size, ids in zip(vocab_sizes, pairs.T, strict=True)
    )
    return first, second


@torch.no_grad()
def table_relation(before: TableLike, after: TableLike, *, pairs: Int[Tensor, "N 2"] | None = None) -> TableRelation:
    """Tell whether two tables are related, see this module's docstring. The halves and the shuffling are seeded.

    Args:
        before: The first table.
        after: The second table; its width may differ.
        pairs: ID in `before` and ID in `after` of each shared token, `(N, 2)`; `None` pairs equal IDs.

    Raises:
        ShapeError: The tables differ in length and `pairs` is `None`, an ID in `pairs` is outside its table, or a
            tensor or array is not `(V, D)` of floats.

    Example:
        >>> rows, rotation = torch.randn(500, 8), torch.linalg.qr(torch.randn(8, 8)).Q
        >>> table_relation(rows, rows @ rotation).verdict, table_relation(rows, torch.randn(500, 8)).verdict
        ('related', 'unrelated')
    """
    readers, pairs = paired(before, after, pairs)
    shared = len(pairs)
    norms = torch.stack([table.norms()[ids] for table, ids in zip(readers, pairs.T, strict=True)])
    has_direction = norms > 0
    usable = has_direction.all(0)
    widths = [table.embed_dim for table in readers]
    has_same_width = widths[0] == widths[1]
    is_equal = is_exchanged = torch.zeros(shared, dtype=torch.bool)
    shift = 0
    if has_same_width:
        is_equal, is_exchanged, shift = _equal(readers, pairs, usable)
    is_named = ~is_equal & ~(norms == 0).all(0)
    no_direction = [tuple(ids[is_named & ~each].tolist()) for ids, each in zip(pairs.T, has_direction, strict=True)]
    left_out = rows_left_out(pairs, (len(readers[0]), len(readers[1])))
    all_equal = 0 < shared == int(is_equal.sum()) and not any(left_out)
    is_same = int(((is_equal | is_exchanged) & usable).sum()) > int(usable.sum()) / 2
    chosen = pairs[drawn_ids(usable, MOST_TOKENS)]
    shuffled = torch.stack([chosen[:, 0], chosen[:, 1].roll(1)], dim=1)  # the order is random already
    as_stored = held_out = differing = None
    if len(chosen) >= FEWEST_TOKENS:
        held_out = [_held_out(before, after, each) for each in (chosen, shuffled)]
        if has_same_width:
            as_stored = [row_movement(before, after, pairs=each).cosines for each in (chosen, shuffled)]
            differing = row_movement(before, after, pairs=pairs[usable & ~is_equal])
    verdict: Verdict = "unrelated"
    if as_stored is not None and (is_same or _exceeds(*as_stored)):
        verdict = "same" if all_equal else "changed"
    elif held_out is None:
        verdict = "same" if all_equal else "unknown"
    elif _exceeds(*held_out):
        verdict = "related"
    elif len(chosen) < 2 * min(widths):
        verdict = "unknown"
    means: list[list[float | None]] = [
        [None, None] if each is None else [float(cosines.mean()) for cosines in each] for each in (as_stored, held_out)
    ]
    has_differing = differing is not None and len(differing.pairs) > 0
    return TableRelation(
        verdict,
        len(chosen),
        as_stored=means[0][0],
        as_stored_shuffled=means[0][1],
        held_out=means[1][0],
        shuffled=means[1][1],
        width=min(widths),
        shared=shared,
        equal=int(is_equal.sum()),
        exchanged=int(is_exchanged.sum()),
        shift=shift,
        differing=0 if differing is None else len(differing.pairs),
        differing_cosine=float(differing.cosines.mean()) if differing is not None and has_differing else None,
        differing_scale=differing.scale if differing is not None and has_differing else None,
        no_direction_before=no_direction[0],
        no_direction_after=no_direction[1],
        only_before=len(left_out[0]),
        only_after=len(left_out[1]),
    )


def _equal(
    readers: Sequence[RowReader], pairs: Int[Tensor, "N 2"], usable: Bool[Tensor, " N"]
) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"], int]:
    """Return which tokens have equal rows, which usable others the first row of another token, and their shift.

    Rows are compared by `row_hashes`; in tables of different widths none are equal.
    """
    old, new = (row_hashes(table)[ids] for table, ids in zip(readers, pairs.T, strict=True))
    equal = old == new
    exchanged = torch.isin(new, old) & ~equal & usable
    if int(exchanged.sum()) < FEWEST_SHIFTED:
        return equal, exchanged, 0
    ordered = old.sort()
    places = ordered.indices[torch.searchsorted(ordered.values, new[exchanged])]
    shifts = torch.nonzero(exchanged)[:, 0] - places
    shift = int(shifts.mode().values)
    return equal, exchanged, shift if int((shifts == shift).sum()) > SHIFTED * len(shifts) else 0


def _held_out(before: TableLike, after: TableLike, pairs: Int[Tensor, "N 2"]) -> Float[Tensor, " N"]:
    """Return the cosines of all pairs, each after the rotation that was fitted on the half that it is not in.

    The cosines of the second half come first. The order of the pairs must be random.
    """
    halves = pairs.tensor_split(2)
    cosines = []
    for fitted, tested in (halves, halves[::-1]):
        alignment = align_tables(before, after, pairs=fitted)
        cosines.append(row_movement(before, after, alignment=alignment, pairs=tested).cosines)
    return torch.cat(cosines)


def _exceeds(cosines: Float[Tensor, " N"], shuffled: Float[Tensor, " N"]) -> bool:
    """Return whether the mean of some cosines exceeds the mean `s` of shuffled tokens clearly.

    The difference must be above `MARGIN * (1 - s)` and above `ERRORS` standard errors.
    """
    error = float(((cosines.var() + shuffled.var()) / len(cosines)).sqrt())
    chance = float(shuffled.mean())
    return float(cosines.mean()) - chance > max(MARGIN * (1 - chance), ERRORS * error)
