"""One verdict about each row of a table: learned, not learned, never seen, or that it cannot be told.

Every place that says whether a row was learned asks here: `inspect`, the health report, the token card and the map of
the explorer, and the last lines of a training run. Each verdict has a reason with its measure and threshold.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from embedlayer.analysis.random_rows import RandomRows
from embedlayer.analysis.row_reader import listed_ids, row_ids
from embedlayer.analysis.under_trained import UnderTrained
from embedlayer.core.formatting import count_of
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import finite_json

Verdict = Literal["learned", "not learned", "never seen", "cannot tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)

Reason = Literal[
    "differs from random rows",
    "as random rows",
    "in doubt",
    "not judged",
    "undecided cone",
    "cone",
    "at the mean",
    "as before training",
    "equal to another row",
    "no direction",
    "not in the training text",
    "no text has its token",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

NO_TEXT = ("unreachable", "no token")
"""Kinds of rows whose token no text has, see `analysis.token_classes`."""


class RowVerdict(NamedTuple):
    """The verdict about one row, and why, as a sentence with the measure and the threshold that decided."""

    verdict: Verdict
    because: str


@dataclass(frozen=True)
class RowVerdicts:
    """The verdicts about all rows of a table.

    Attributes:
        verdicts: Index in `VERDICTS` of each row's verdict, `(V,)`.
        reasons: Index in `REASONS` of why, `(V,)`.
        random: How the rows compare with random ones.
        scores: Under-training scores, see `UnderTrained.scores`.
    """

    verdicts: UInt8[Tensor, " V"]
    reasons: UInt8[Tensor, " V"]
    random: RandomRows
    scores: Float[Tensor, " V"]

    def is_(self, verdict: Verdict) -> Bool[Tensor, " V"]:
        """Return a mask of the rows with a verdict."""
        return self.verdicts == VERDICTS.index(verdict)

    def has_reason(self, reason: Reason) -> Bool[Tensor, " V"]:
        """Return a mask of the rows whose verdict has a reason."""
        return self.reasons == REASONS.index(reason)

    def count(self, verdict: Verdict) -> int:
        """Return how many rows have a verdict."""
        return int(self.is_(verdict).sum())

    @property
    def is_unlearned(self) -> Bool[Tensor, " V"]:
        """Return a mask of the rows that are not learned or were never seen."""
        return self.is_("not learned") | self.is_("never seen")

    def of(self, row: int) -> RowVerdict:
        """Return the verdict about a row.

        Example:
            >>> from embedlayer.analysis.health import table_health
            >>> table_health(torch.zeros(2, 2)).verdicts.of(0)
            RowVerdict(verdict='cannot tell', because='The row is zero, or holds NaN or infinity.')
        """
        noise, nearest = float(self.random.noise_shares[row]), float(self.random.nearest[row])
        distinct = self.random.distinct
        near = "" if nearest != nearest else f" and its nearest cosine {nearest:.2f}"
        as_random = f"Its noise share is {noise:.2f}{near}, as of random rows ({self.random_range()})"
        differs = f"Its nearest cosine is {nearest:.2f}; random rows have at most {distinct.nearest:.2f}."
        if noise < distinct.noise_share:
            differs = f"Its noise share is {noise:.2f}; random rows have {distinct.noise_share:.2f} or more."
        cone = f"(score {float(self.scores[row]):.2f}, threshold 0)"
        because: dict[Reason, str] = {
            "differs from random rows": differs,
            "as random rows": f"{as_random}.",
            "in doubt": f"{as_random}, but learned rows of this table look alike.",
            "not judged": "The table has too few rows or dimensions to compare its rows with random ones.",
            "undecided cone": "It is in a narrow group of rows that may be a cluster of trained tokens.",
            "cone": f"Its direction is inside a narrow cone of rows that no text has moved {cone}.",
            "at the mean": "It equals the mean of the other rows within 1 %, as a resize adds it.",
            "as before training": "It has the direction that it had before training.",
            "equal to another row": "It equals another row, so nothing shows whether it was trained.",
            "no direction": "The row is zero, or holds NaN or infinity.",
            "not in the training text": "Its token occurs 0 times in the training text.",
            "no text has its token": "The tokenizer gives its token for no text, and its row was not learned.",
        }
        return RowVerdict(VERDICTS[int(self.verdicts[row])], because[REASONS[int(self.reasons[row])]])

    def random_range(self) -> str:
        """Return what random rows have: "noise share 0.55 or more, nearest cosine at most 0.25"."""
        noise, nearest = self.random.distinct
        return f"noise share {noise:.2f} or more, nearest cosine at most {nearest:.2f}"

    def sentence(self) -> str:
        """Return how many rows have each verdict: "Of 4,096 rows, 3,570 are learned, 40 not learned and ..."."""
        learned, unlearned, unseen, doubt = (f"{self.count(verdict):,}" for verdict in VERDICTS)
        rows = count_of(len(self.verdicts), "row")
        told = f"{learned} are learned, {unlearned} not learned and {unseen} never seen"
        more = f"; of {doubt} it cannot be told" if doubt != "0" else ""
        return f"Of {rows}, {told}{more}."

    def to_json(self, limit: int) -> JsonObject:
        """Return the number of rows with each verdict, at most `limit` of their IDs, and the thresholds."""
        counts: JsonObject = {}
        for verdict in VERDICTS:
            counts[verdict.replace(" ", "_")] = listed_ids(row_ids(self.is_(verdict)), limit)
        del counts["learned"]["ids"]
        random = {
            "share": self.random.share,
            "noise_share": self.random.distinct.noise_share,
            "nearest": self.random.distinct.nearest,
        }
        return {**counts, "sentence": self.sentence(), "random": finite_json(random)}


def row_verdicts(
    random: RandomRows,
    under_trained: UnderTrained,
    *,
    directed: Bool[Tensor, " V"],
    counts: Tensor | None,
    kinds: Sequence[str] | None,
    at_mean: Collection[int],
    equal: Collection[int],
    untouched: Collection[int],
) -> RowVerdicts:
    """Judge each row of a table by all that is known of it. Later rules replace the result of earlier ones.

    `directed` marks the rows that are neither zero nor hold NaN or infinity. The others are IDs of rows: `at_mean` have
    the mean of the other rows, as new rows after a resize; `equal` equal another row; `untouched` are as before
    training.
    """
    verdicts = torch.zeros(len(directed), dtype=torch.uint8)
    reasons = torch.zeros(len(directed), dtype=torch.uint8)

    def judge(rows: Tensor, verdict: Verdict, reason: Reason) -> None:
        verdicts[rows] = VERDICTS.index(verdict)
        reasons[rows] = REASONS.index(reason)

    judge(~random.is_distinct, "cannot tell", "in doubt")
    judge(random.is_random, "not learned", "as random rows")
    judge(~random.is_judged, "cannot tell", "not judged")
    judge(under_trained.is_undecided, "cannot tell", "undecided cone")
    judge(under_trained.flagged, "not learned", "cone")
    judge(torch.tensor([*equal], dtype=torch.int64), "cannot tell", "equal to another row")
    judge(torch.tensor([*at_mean], dtype=torch.int64), "not learned", "at the mean")
    judge(torch.tensor([*untouched], dtype=torch.int64), "not learned", "as before training")
    judge(~directed, "cannot tell", "no direction")
    if kinds is not None:
        no_text = torch.tensor([kind in NO_TEXT for kind in kinds], dtype=torch.bool)
        is_learned = (verdicts == VERDICTS.index("learned")) | (reasons == REASONS.index("not judged"))
        judge(no_text & ~is_learned, "never seen", "no text has its token")
    if counts is not None:
        judge(counts.cpu() == 0, "never seen", "not in the training text")
    return RowVerdicts(verdicts, reasons, random, under_trained.scores)


def id_ranges(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending IDs as ranges, first and last ID of each; up to two missing IDs do not end a range."""
    ranges: list[tuple[int, int]] = []
    for row in ids:
        if ranges and row - ranges[-1][1] <= 3:
            ranges[-1] = (ranges[-1][0], row)
        else:
            ranges.append((row, row))
    return ranges
