"""What a check of a table found, in sentences: its faults, notes and verdict."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Literal

import torch
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor

from embedlayer.analysis.column_blocks import ColumnBlocks
from embedlayer.analysis.norm_outliers import NormOutliers
from embedlayer.analysis.random_rows import NO_ROW, UNTRAINED
from embedlayer.analysis.row_reader import listed_ids, row_ids
from embedlayer.analysis.row_verdicts import RowVerdicts, Verdict, id_ranges
from embedlayer.analysis.shared_variance import SharedVariance
from embedlayer.analysis.token_classes import KINDS
from embedlayer.analysis.tokenizer_fit import ERRORS, FEWEST_PAIRS, MIXED, TokenizerFit
from embedlayer.analysis.under_trained import UnderTrained
from embedlayer.core.formatting import count_of, short_repr
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import finite_json
from embedlayer.tokenization.bytes import BYTE_ENTRY, token_text

NAMED = 3  # tokens that a sentence of the summary names

NOT_WRITTEN = ("special", "unreachable", "no token")
"""Kinds of rows that no text looks up; equal or zero rows of these kinds are usual."""

FEWEST_SAMPLED = 64

MOST_RANDOM = 0.01  # rows as random rows are a fault of a table if they are a larger share of its rows
LONGEST_RANDOM = 16  # or if so many of them have consecutive IDs
MOST_RANDOM_UNNAMED = 0.05
"""Share of the rows that may look random in a table in which it cannot be told which ones these are."""

MOST_EXCHANGED = 0.05
"""Rows that come from the start of another row are a fault of a run if they are a larger share of its rows."""

LEAST_GAIN = 0.2
"""A run learned little if context lowers the loss by a smaller share: in the demo neighbours make sense from 0.2 on."""

MOST_UNLIKE = 0.5
"""A table is barely trained if a larger share of the spelling variants is as unlike as unrelated tokens."""

MOST_UNLEARNED = 0.1  # words that were not learned are a fault of a table if they are a larger share of its words

MOST_ABSENT = 0.25
"""Words that never occur in the training text are a fault of a run if they are a larger share of its words."""

NEAREST_JSON = ("rows", "median", "by_chance", "mean_pair")
"""Fields of `NearestCosine` in the report as JSON; its other ones have a number for each row of the sample."""

State = Literal["sound", "faulty", "undecided"]

_rows = partial(count_of, noun="row")


@dataclass(frozen=True)
class LossOfRun:
    """How much the run that trained a table learned beyond the frequencies of the tokens.

    Attributes:
        validation_loss: Loss on held-out text of the run's weights, in nats per token.
        unigram_entropy: Entropy `-sum_i p_i ln p_i` of the frequencies `p_i` of the tokens in the corpus, in nats: the
            least loss of a prediction that ignores the context.
    """

    validation_loss: float
    unigram_entropy: float

    @property
    def gain(self) -> float:
        """Return the share of `unigram_entropy` by which context lowers the loss; 0 if all tokens are the same one."""
        entropy = self.unigram_entropy
        return (entropy - self.validation_loss) / entropy if entropy > 0 else 0.0

    @property
    def is_little(self) -> bool:
        """Return whether the run learned little: `gain` is below `LEAST_GAIN`, or NaN."""
        return not self.gain >= LEAST_GAIN


@dataclass(frozen=True)
class UnderTrainedRow:
    """One row that is not learned or was never seen.

    Attributes:
        id: Row ID.
        text: Readable text of its token, see `TableHealth.text_of`.
        kind: One of `analysis.token_classes.KINDS`; `None` without a tokenizer.
        score: Under-training score, see `UnderTrained.scores`.
        norm: Euclidean norm of the row.
        verdict: "not learned" or "never seen".
    """

    id: int
    text: str
    kind: str | None
    score: float
    norm: float
    verdict: str


@dataclass(frozen=True)
class KindCount:
    """The number of rows of one kind (see `token_kinds`), and how many of them are not learned or were never seen."""

    kind: str
    rows: int
    under_trained: int


@dataclass(frozen=True)
class NearestCosine:
    """How similar rows are to their nearest row, in a random sample of at most `analysis.health.SAMPLED` rows.

    Attributes:
        rows: Number of rows in the sample.
        median: Median cosine of a row with its nearest other row; NaN without two usable rows.
        by_chance: The same of random directions, as many and of the same width.
        mean_pair: Mean cosine of two different rows of the sample.
        ids: IDs of the rows of the sample.
        cosines: Cosine of each of them with its nearest other row.
    """

    rows: int
    median: float
    by_chance: float
    mean_pair: float
    ids: tuple[int, ...] = ()
    cosines: tuple[float, ...] = ()


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
        near_duplicates: Groups of IDs whose rows differ by 1 % or less, and not all by 0, after a dominant part that
            all rows share is removed.
        at_mean: IDs of the largest group of equal or nearly equal rows if it lies at the mean of all other rows, where
            a resize adds rows; else empty.
        norm_outliers: Rows that are longer or shorter than all others by a gap, see `norm_outliers`; equal rows and
            rows in a cone of unused rows are left out.
        never_touched: IDs of rows that equal the earlier table up to one factor per row (weight decay scales rows
            without gradients); `None` if no earlier table was passed.
        exchanged: Estimated share of the rows that come from another row of the earlier table; `None` without one, or
            if the training was too long to tell.
        under_trained: Under-training scores, threshold and cones.
        verdicts: Whether each row was learned, and why.
        nearest: How similar rows are to their nearest row, beside chance.
        spelling: How similar the rows of spelling variants are; `None` without a tokenizer or with few pairs.
        columns: Whether all columns belong to the same rows; `None` if that cannot be told.
        loss: What the run that trained the table learned; `None` if its loss or the token counts are not known.
        kinds: The kind of each row, see `token_kinds`; `None` without a tokenizer.
        tokenizer: The tokenizer, or `None`.
        shared: What all rows share: offset, dominant dimension or direction, constant columns, scale.
        absent: IDs of tokens that never occur in the training text; `None` if their numbers are not known.
        is_coarse: Whether the numbers look like those of 4 bits, which round similar rows to equal ones.
        is_factorized: Whether the table is stored as two factors, so that its rows span few directions by design.
    """

    __repr__ = short_repr

    vocab_size: int
    embed_dim: int
    norms: Float[Tensor, " V"]
    zero_rows: tuple[int, ...]
    nonfinite_rows: tuple[int, ...]
    duplicates: tuple[tuple[int, ...], ...]
    near_duplicates: tuple[tuple[int, ...], ...]
    at_mean: tuple[int, ...]
    norm_outliers: tuple[NormOutliers, ...]
    never_touched: tuple[int, ...] | None
    exchanged: float | None
    under_trained: UnderTrained
    verdicts: RowVerdicts
    nearest: NearestCosine
    spelling: TokenizerFit | None
    columns: ColumnBlocks | None
    loss: LossOfRun | None
    kinds: tuple[str, ...] | None
    tokenizer: Tokenizer | None = field(repr=False)
    shared: SharedVariance
    absent: tuple[int, ...] | None
    is_coarse: bool
    is_factorized: bool

    @property
    def by_kind(self) -> tuple[KindCount, ...]:
        """Return for each kind of token its rows, and how many of them were not learned; empty without a tokenizer."""
        kinds = self.kinds or ()
        rows, flagged = Counter(kinds), Counter(kinds[row] for row in row_ids(self.verdicts.is_unlearned) if kinds)
        return tuple(KindCount(kind, rows[kind], flagged[kind]) for kind in KINDS if kind in rows)

    def summary(self) -> str:
        """Return the result in sentences: "Sound.", "Faulty." with the faults, or why neither is certain; then notes.

        Example:
            >>> words = torch.randn(900, 16) @ torch.randn(16, 64) + torch.randn(900, 64)
            >>> rows = torch.cat([words, torch.randn(64) + 0.1 * torch.randn(100, 64)])
            >>> table_health(rows).summary()
            'Not decided, because no tokenizer says which rows should be similar. 100 rows are not learned.'
        """
        faulty = ["Faulty."] if self.state == "faulty" else []
        return " ".join([*faulty, *(self.reasons() or ["Sound."]), *self.notes()])

    def reasons(self) -> list[str]:
        """Return why the table is not called sound, in sentences: its faults, worst first, or why it is undecided.

        The list is empty for a sound table.
        """
        faults, doubt = list(self._faults()), self._doubt()
        return faults or ([f"Not decided, because {doubt}."] if doubt else [])

    @property
    def state(self) -> State:
        """Return `"faulty"` with a fault, else `"undecided"` if there is a doubt, else `"sound"`.

        A doubt is that nothing shows that the table was trained, or that the rows of a table that is not stored as two
        factors span few directions.
        """
        if next(self._faults(), None) is not None:
            return "faulty"
        return "undecided" if self._doubt() else "sound"

    @property
    def is_sound(self) -> bool:
        """Return whether the table was trained and has no fault; a few rows that were not learned are none."""
        return self.state == "sound"

    def _doubt(self) -> str:
        """Return why a table without faults cannot be called sound, as a clause; `""` if it can."""
        shared = self.shared
        if shared.has_few_directions and not self.is_factorized:
            return f"the rows span only {shared.rank} of {shared.most_rank} directions, as a low-rank copy does"
        if self.loss is not None:
            return ""
        if self.kinds is None:
            return "no tokenizer says which rows should be similar"
        if self.spelling is None:
            return f"the vocabulary has fewer than {FEWEST_PAIRS} pairs of spelling variants, which should be similar"
        return ""

    def _faults(self) -> Iterator[str]:
        """Yield one sentence for each fault, worst first."""
        if self.nonfinite_rows:
            yield self._sentence(self.nonfinite_rows, "holds", "NaN or infinity")
        yield from self.table_faults()
        if zero := _written(self.zero_rows, self.kinds):
            yield self._sentence(zero, "is", "zero")
        equal = self.written_equal
        if at_fault := self._without_rounded(equal):
            yield self._sentence(at_fault, "equals", "another row")
        if self.at_mean:
            at_mean = "equal to the mean of the others within 1 %, as a resize adds them untrained"
            yield self._sentence(self.at_mean, "is", at_mean)
        if random := self._random_fault:
            yield random
        for group in self.norm_outliers:
            if any(_written(group.ids, self.kinds)):
                what, most = ("longer", "at most") if group.low > group.nearest else ("shorter", "at least")
                norms = f"norms of {group.low:.3g} to {group.high:.3g}, the others {most} {group.nearest:.3g}"
                gap = f"{what} than all others by a gap: {norms}, {group.median:.3g} in the median"
                yield self._sentence(group.ids, "is", gap)
        learned = ~self.under_trained.flagged
        near = {row for group in self.near_duplicates for row in group if learned[row]} - {*self.at_mean, *equal}
        if near_rows := _written(sorted(near), self.kinds):
            yield self._sentence(near_rows, "is", "nearly equal to another row, within 1 %")
        if self._are_many_unlearned:
            ids, words = self._ids("not learned"), self._words(range(self.vocab_size))
            yield f"{_rows(len(ids))} are not learned, {self._words(ids):,} of the {words:,} words."

    def _ids(self, verdict: Verdict) -> tuple[int, ...]:
        return row_ids(self.verdicts.is_(verdict))

    @property
    def has_unlearned_fault(self) -> bool:
        """Return whether rows that are not learned are a fault of the table."""
        return self.is_untrained or bool(self._random_fault) or self._are_many_unlearned

    @property
    def _are_many_unlearned(self) -> bool:
        """Return whether many words are not learned; `False` without a tokenizer that fits, or if they are random."""
        unlearned, words = self._words(self._ids("not learned")), self._words(range(self.vocab_size))
        is_named = self.is_untrained or bool(self._random_fault)
        return self._fits_tokenizer and unlearned > MOST_UNLEARNED * words and not is_named

    @property
    def is_untrained(self) -> bool:
        """Return whether nearly all rows are as random rows."""
        judged = int(self.verdicts.random.is_judged.sum())
        return judged > 0 and int(self.verdicts.random.is_random.sum()) >= UNTRAINED * judged

    @cached_property
    def _random_fault(self) -> str:
        """Return which rows are as random rows, as a sentence; `""` if there are few, or nearly all are."""
        found, random = row_ids(self.verdicts.has_reason("as random rows")), self.verdicts.random
        ids = _written(found, self.kinds)
        if not ids and random.random == NO_ROW and random.share > MOST_RANDOM_UNNAMED:
            return (
                f"About {100 * random.share:.0f} % of the rows look like random rows. Which ones cannot be told, "
                f"because learned rows of this table look alike."
            )
        counted = torch.zeros(self.vocab_size, dtype=torch.bool)
        counted[ids] = True
        ranges = [
            (start, stop, int(counted[start : stop + 1].sum())) for start, stop in id_ranges(row_ids(random.is_random))
        ]
        longest = max((rows for _, _, rows in ranges), default=0)
        is_fault = len(ids) > MOST_RANDOM * self.vocab_size or longest >= LONGEST_RANDOM
        if not is_fault or self.is_untrained:
            return ""
        ranges = [each for each in ranges if each[2] >= min(longest, LONGEST_RANDOM)]
        named = sorted(sorted(ranges, key=lambda each: -each[2])[:NAMED])
        where = ", ".join(f"{start:,}" if start == stop else f"{start:,} to {stop:,}" for start, stop, _ in named)
        where += ", ..." * (len(ranges) > NAMED)
        if 2 * sum(rows for _, _, rows in named) < len(ids):
            where = f"scattered from {ids[0]:,} to {ids[-1]:,}"
        return (
            f"{_rows(len(ids))}, {100 * len(ids) / self.vocab_size:.0f} % of the table, {_verb('is', len(ids))} not "
            f"learned: nothing tells them from random rows ({where}; {self.verdicts.random_range()})."
        )

    @property
    def _fits_tokenizer(self) -> bool:
        """Return whether there is a tokenizer, and no sign that the rows are not those of its tokens."""
        fit = self.spelling
        is_odd = fit is not None and (fit.shift != 0 or fit.is_mixed or not self._shows_training(fit))
        return bool(self.kinds) and not is_odd

    def _without_rounded(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the IDs of equal rows that are a fault.

        If the table looks rounded to 4 bits (`is_coarse`), under-trained rows are left out: they were similar, and
        rounding made them equal.
        """
        if not self.is_coarse:
            return ids
        flagged = self.under_trained.flagged
        return tuple(row for row in ids if not flagged[row])

    def table_faults(self) -> Iterator[str]:
        """Yield one sentence for each fault of the table as a whole, which the numbers of one row cannot show."""
        yield from self.shared.faults()
        fit = self.spelling
        if fit is not None and fit.shift:
            there = f"ID {'+' if fit.shift > 0 else '-'} {abs(fit.shift)}"
            yield (
                f"The tokenizer does not fit the rows: spelling variants such as {_pair(fit.example)} have a "
                f"mean cosine of {fit.cosine:.2f} in the rows at their IDs, and of {fit.shifted_cosine:.2f} at {there}."
            )
        elif fit is not None and fit.is_mixed:
            yield (
                f"Part of the rows do not fit the tokenizer: {100 * fit.unlike:.0f} % of the pairs of spelling "
                f"variants, such as {_pair(fit.unlike_example)}, are as unlike as unrelated tokens, and the other "
                f"pairs have a mean cosine of {fit.alike_cosine:.2f}. About {100 * fit.misplaced:.0f} % of the rows "
                f"were exchanged."
            )
        elif fit is not None and not self.is_untrained and not self._shows_training(fit):
            unlike = f"; {100 * fit.unlike:.0f} % of them are as unlike as unrelated tokens" if fit.unlike else ""
            yield (
                f"Barely trained: neighbours mean little yet. Spelling variants such as {_pair(fit.example)} have a "
                f"mean cosine of {fit.cosine:.2f} (unrelated tokens: 0.00 ± {fit.error:.2g}){unlike}. The tokenizer of "
                f"another table looks the same."
            )
        if self.loss is not None and self.loss.is_little:
            entropy = self.loss.unigram_entropy
            yield (
                f"Barely trained: the run recorded a loss on held-out text of {self.loss.validation_loss:.2f} nats per "
                f"token, and token frequencies alone give {entropy:.2f}. Above {(1 - LEAST_GAIN) * entropy:.2f}, "
                f"neighbours mean little."
            )
        if self.absent is not None and self.kinds is not None:
            absent, words = self._words(self.absent), self._words(range(self.vocab_size))
            if absent > MOST_ABSENT * words and words >= FEWEST_SAMPLED:
                yield f"{absent:,} of {words:,} words never occur in the training text, so their rows mean nothing."
        if self.columns is not None and self.columns.is_fault:
            yield self.columns.sentence()
        if self.exchanged is not None and self.exchanged > MOST_EXCHANGED:
            yield (
                f"About {100 * self.exchanged:.0f} % of the rows were exchanged: they come from the rows that other "
                f"tokens had before training."
            )
        if self.is_untrained:
            random = int(self.verdicts.random.is_random.sum())
            yield (
                f"The rows look untrained: nothing tells {random:,} of {_rows(self.vocab_size)} from random rows "
                f"({self.verdicts.random_range()})."
            )

    def _shows_training(self, fit: TokenizerFit) -> bool:
        """Return whether the table was trained: spelling variants are similar, or else the loss of its run is known."""
        # the loss tells more: rare tokens, most of the pairs, have neighbours at random in a short run
        return self.loss is not None or (fit.cosine > ERRORS * fit.error and fit.unlike <= MOST_UNLIKE)

    @property
    def written_equal(self) -> tuple[int, ...]:
        """Return the IDs of equal rows, of the groups in which a text can look up a row; rows at the mean left out."""
        return written_equal(self.duplicates, self.at_mean, self.kinds)

    def notes(self) -> Iterator[str]:
        """Yield one sentence for each finding that is no fault."""
        unlearned, unseen = self._ids("not learned"), self._ids("never seen")
        parts = []
        other = ""
        if self._random_fault:
            random = set(_written(row_ids(self.verdicts.has_reason("as random rows")), self.kinds))
            unlearned, other = tuple(row for row in unlearned if row not in random), "other "
        if unlearned and not self._are_many_unlearned and not self.is_untrained:
            words = self._words(unlearned)
            some = f", {f'{words:,}' if words else 'none'} of them {'a word' if words == 1 else 'words'}"
            some = ", all of them words" if words == len(unlearned) > 1 else some
            some *= self._fits_tokenizer
            rows = count_of(len(unlearned), f"{other}row")
            parts.append(f"{rows} {_verb('is', len(unlearned))} not learned{some}")
        if unseen:
            parts.append(f"{_rows(len(unseen))} {'was' if len(unseen) == 1 else 'were'} never seen")
        if parts:
            yield f"{'; '.join(parts)}."
        if rounded := len(self.written_equal) - len(self._without_rounded(self.written_equal)):
            yield f"{_rows(rounded)} that never learned {_verb('equals', rounded)} another one by rounding to 4 bits."
        if doubtful := int(self.verdicts.has_reason("undecided cone").sum()):
            groups = len(self.under_trained.undecided)
            named = "one narrow group" if groups == 1 else f"{groups} narrow groups"
            yield f"{_rows(doubtful)} in {named} cannot be told from clusters of trained tokens."
        if doubtful := int(self.verdicts.has_reason("in doubt").sum()):
            yield f"{_rows(doubtful)} cannot be told from random rows, and learned rows of this table look alike."
        if self.never_touched:
            yield f"{_rows(len(self.never_touched))} {_verb('is', len(self.never_touched))} as before training."
        least = None  # share of exchanged rows from which on they would be a fault
        if self.exchanged is not None:
            least = MOST_EXCHANGED
        elif self.spelling is not None and self.spelling.unlike <= MIXED:
            least = self.spelling.least_misplaced
        if least is not None and self.is_sound:
            yield f"No exchanged rows were found; fewer than about {100 * least:.0f} % cannot be seen."

    def _sentence(self, ids: Collection[int], verb: str, what: str) -> str:
        """Return "3 rows hold NaN (2 words: dog, cat, ...).": how many rows, what is wrong, and which."""
        count = len(ids)
        if self.kinds is None:
            first, rest = "", sorted(ids)
        else:
            kinds = self.kinds
            rest = sorted(ids, key=lambda row: (kinds[row] != "word", row))
            words = self._words(ids)
            first = {0: "no word: ", 1: "1 word: "}.get(words, f"{words:,} words: ")
        named = [f"row {row}" if self.tokenizer is None else repr(self.text_of(row)) for row in rest[:NAMED]]
        return f"{_rows(count)} {_verb(verb, count)} {what} ({first}{', '.join(named)}{', ...' * (count > NAMED)})."

    def _words(self, ids: Collection[int]) -> int:
        """Return how many rows of a list are words; 0 without a tokenizer."""
        return 0 if self.kinds is None else sum(self.kinds[row] == "word" for row in ids)

    def findings(self, limit: int | None = None, *, kind: str | None = None) -> list[UnderTrainedRow]:
        """Return the rows that are not learned or were never seen, highest under-training score first.

        Rows whose scores are equal to three decimals, as they are printed, are ordered by ID.

        Args:
            limit: Return at most so many rows; `None` for all.
            kind: Return only rows of this kind; `None` for all kinds.
        """
        scores = self.under_trained.scores
        ids = torch.nonzero(self.verdicts.is_unlearned)[:, 0]
        ids = ids[scores[ids].round(decimals=3).argsort(descending=True, stable=True)]
        kinds = self.kinds or [None] * self.vocab_size
        chosen = [row for row in ids.tolist() if kind in (None, kinds[row])]
        return [
            UnderTrainedRow(
                row,
                self.text_of(row),
                kinds[row],
                float(scores[row]),
                float(self.norms[row]),
                self.verdicts.of(row).verdict,
            )
            for row in chosen[:limit]
        ]

    def text_of(self, row: int) -> str:
        """Return the readable text of a row's token, `<0x41>` for a byte token, or `row 512` without a token."""
        entry = None if self.tokenizer is None else self.tokenizer.id_to_token(row)
        if self.tokenizer is None or entry is None:
            return f"row {row}"
        return entry if BYTE_ENTRY.fullmatch(entry) else token_text(self.tokenizer, row)

    @property
    def is_shared_of_learned(self) -> bool:
        """Return whether `shared` leaves out unused rows, besides those that are zero or hold NaN."""
        return self.shared.rows < self.vocab_size - len(self.zero_rows) - len(self.nonfinite_rows)

    def to_json(self, limit: int = 100) -> JsonObject:
        """Return the report as a JSON object: verdict and summary, the rows of each finding, norms, and cones.

        Args:
            limit: Largest number of IDs, groups or under-trained rows in each list; the numbers count all rows.
        """
        finite, norms = self.norms[self.norms.isfinite()].double(), None
        if len(finite):
            shares = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0]).to(finite)
            places = finite.quantile(shares, interpolation="nearest").tolist()
            norms = dict(zip(("min", "p10", "median", "p90", "max"), places, strict=True), mean=float(finite.mean()))
        groups = {
            name: {
                "groups": len(found),
                "rows": sum(map(len, found)),
                "ids": [group[:limit] for group in found[:limit]],
            }
            for name, found in (("duplicates", self.duplicates), ("near_duplicates", self.near_duplicates))
        }
        cones = {  # without their axes
            name: [finite_json({key: each for key, each in vars(cone).items() if key != "axis"}) for cone in found]
            for name, found in (("cones", self.under_trained.cones), ("undecided", self.under_trained.undecided))
        }
        spelling = None
        if self.spelling is not None:
            spelling = finite_json(asdict(self.spelling)) | {"odd_rows": listed_ids(self.spelling.odd_rows, limit)}
        return {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "norms": norms,
            "zero_rows": listed_ids(self.zero_rows, limit),
            "nonfinite_rows": listed_ids(self.nonfinite_rows, limit),
            **groups,
            "at_mean": listed_ids(self.at_mean, limit),
            "norm_outliers": [asdict(group) | listed_ids(group.ids, limit) for group in self.norm_outliers],
            "summary": self.summary(),
            "is_sound": self.is_sound,
            "state": self.state,
            "shared": {**finite_json(asdict(self.shared)), "learned_only": self.is_shared_of_learned},
            "absent": None if self.absent is None else listed_ids(self.absent, limit),
            "verdicts": self.verdicts.to_json(limit),
            "exchanged": self.exchanged,
            "columns": None if self.columns is None else asdict(self.columns),
            "nearest": finite_json({name: getattr(self.nearest, name) for name in NEAREST_JSON}),
            "spelling": spelling,
            "loss": None if self.loss is None else {**asdict(self.loss), "gain": self.loss.gain},
            "never_touched": None if self.never_touched is None else listed_ids(self.never_touched, limit),
            "under_trained": {
                "rows": int(self.verdicts.is_unlearned.sum()),
                "threshold": self.under_trained.threshold,
                "explanation": self.under_trained.explain(),
                **cones,
                "by_kind": [asdict(count) for count in self.by_kind],
                "tokens": [asdict(row) for row in self.findings(limit)],
            },
        }


def _pair(texts: tuple[str, str]) -> str:
    """Return "'dog' and 'dogs'"."""
    return " and ".join(map(repr, texts))


def _verb(singular: str, count: int) -> str:
    """Return `"is"`, `"holds"` or `"equals"` in the form for `count` rows: "are", "hold", "equal" unless it is 1."""
    return singular if count == 1 else {"is": "are", "holds": "hold", "equals": "equal"}[singular]


def written_equal(
    duplicates: Sequence[tuple[int, ...]], at_mean: Collection[int], kinds: Sequence[str] | None
) -> tuple[int, ...]:
    """Return the IDs of equal rows, of the groups in which a text can look up a row; rows at the mean left out."""
    mean = set(at_mean)
    groups = [group for group in duplicates if _written(group, kinds) and not mean.issuperset(group)]
    return tuple(row for group in groups for row in group)


def _written(ids: Collection[int], kinds: Sequence[str] | None) -> list[int]:
    """Return the IDs of rows that a text can look up."""
    if kinds is None:  # a single row may be a padding row
        return list(ids) if len(ids) > 1 else []
    return [row for row in ids if kinds[row] not in NOT_WRITTEN]
