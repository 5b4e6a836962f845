"""Records of the data that the page requests: what each route returns, if it returns no bytes.

`python tools/page_types.py --write` generates `page/answers.d.ts` from these records and the routes, so that tsc checks
the page against them.
"""

from typing import Literal, NotRequired, TypedDict

from embedlayer.explorer.text_answers import PackedTensor, ShownToken

Neighbor = tuple[int, float]  # ID of a row, and its cosine with the query


# The page as a whole


class SourceManifest(TypedDict):
    """A source of the page.

    Attributes:
        path: Path of its files; "" if there is none.
        has: Kinds of data that it has, see `page_facts`.
        position: Class and arguments of the position scheme.
        scale: Factor on the rows.
        kind: Class of the table.
    """

    title: str
    path: str
    vocab_size: int
    embed_dim: int
    has: list[str]
    position: dict[str, object] | None
    scale: float | None
    tied: bool
    kind: str


class Manifest(TypedDict):
    """What the page requests first.

    Attributes:
        command: How the user types the command that opened the page.
        course: Address of the course; `""` if the package states no address of its documentation.
        left_out: What an exported page lacks, as sentences.
    """

    version: str
    command: str
    course: str
    exported: bool
    left_out: NotRequired[list[str]]
    sources: list[SourceManifest]


# Map


class TokenTexts(TypedDict):
    """The readable text of each row, and the IDs of the special tokens."""

    texts: list[str]
    special: list[int]


class AxisShares(TypedDict):
    """The share of the variance along each of the first `tokens.COMPONENTS` principal components, largest first."""

    explained: list[float]


LayoutState = Literal["absent", "running", "ready", "failed", "cancelled"]  # the state of the computation of the map


class LayoutProgress(TypedDict):
    """The state of the computation of the map, the share of the work that is done, and the error if it failed."""

    state: LayoutState
    stage: str
    share: float
    error: str | None


class LayoutRecall(TypedDict):
    """The share of the true nearest neighbours that the layout used; 1 if it was exact."""

    recall: float


class Cluster(TypedDict):
    """A cluster of the map: IDs of the tokens that name it, number of its rows, densest place, and level from 0 on."""

    names: list[int]
    size: int
    x: float
    y: float
    level: int


class Clusters(TypedDict):
    """All clusters of the map, those of the first level first."""

    clusters: list[Cluster]


class TokenSum(TypedDict):
    """IDs of tokens that are added, and of tokens that are subtracted."""

    plus: list[int]
    minus: list[int]


class AnsweredSum(TokenSum):
    """A sum of tokens, and the ID of the nearest of all rows except the terms."""

    answer: int


class Examples(TypedDict):
    """Examples of a source; all are tokens of it.

    Attributes:
        words: IDs of tokens.
        is_everyday: Whether these are words of everyday language.
    """

    words: list[int]
    is_everyday: bool
    sums: list[AnsweredSum]


class OwnColumn(TypedDict):
    """A column of the user's own: numbers, or texts as groups."""

    name: str
    groups: list[str] | None


# The token card


class RowList(TypedDict):
    """A number of rows, and the IDs of the first."""

    rows: int
    ids: list[int]


TableState = Literal["sound", "faulty", "undecided"]
"""The verdict about a table, see `TableHealth.state`."""


class RandomRange(TypedDict):
    """What random rows of a table have; null if the rows are too few to tell."""

    noise_share: float | None
    nearest: float | None


class TokenFacts(TypedDict):
    """Facts about a token; null where there is nothing to say, or where a number is not finite.

    Attributes:
        kind: One of `analysis.token_classes.KINDS`; null without a tokenizer.
        norm_share: Share of the rows, of those without NaN, that have a smaller norm.
        score: Under-training score, see `UnderTrained.scores`.
        noise_share: Share of the row that is noise, see `analysis.random_rows`.
        nearest: Cosine with the nearest row; null if the noise share shows that the row was trained.
        verdict: "not learned", "never seen" or "cannot tell", see `RowVerdicts`; null for a learned row.
        because: Why, as a sentence; null for a learned row.
        random: What random rows have: a noise share of this or more, and a nearest cosine of this at most.
        findings: "broken" (NaN or infinity), "zero", "not_learned", "never_seen", "cannot_tell", "unchanged" (the
            row equals the one before training, up to a factor), "duplicate",
            "at_mean", "near_duplicate", "norm" (see `TableHealth`) and "unlike_variants" (see `TokenizerFit`).
        table_state: The verdict about the whole table, see `TableHealth.state`.
        table_reasons: Sentences that say why the table is not sound; empty if it is.
        equal_rows: Rows that are equal to this one.
        near_rows: Rows that are nearly equal.
        variants: ID and cosine of the spelling variants, largest cosine first.
        count: Occurrences in the corpus of a run.
        count_rank: 1 plus the number of tokens that occur more often.
        cosine_before: Cosine of the rows before and after the training of a run.
        norm_before: Norm before the training of a run.
    """

    id: int
    kind: str | None
    norm: float | None
    norm_share: float | None
    score: float | None
    noise_share: float | None
    nearest: float | None
    verdict: str | None
    because: str | None
    random: RandomRange
    findings: list[str] | None
    table_state: TableState
    table_reasons: list[str]
    equal_rows: RowList | None
    near_rows: RowList | None
    variants: list[tuple[int, float | None]] | None
    count: NotRequired[int]
    count_rank: NotRequired[int]
    cosine_before: NotRequired[float | None]
    norm_before: NotRequired[float | None]


class TokenPlaces(TypedDict):
    """Where other views show a token; null where they do not.

    Attributes:
        text: A text for the view Pipeline that is split into this token and others.
        at: Index of the token in that text.
        position: Index among the tokens of the view Positions.
    """

    text: str | None
    at: int | None
    position: int | None


# Learn

ModelPart = Literal["table", "position", "input", "blocks", "norm", "head", "buffer", "other"]  # where a tensor is used


class ModelTensor(TypedDict):
    """A tensor of a model, or those of all blocks that have the same name and shape.

    Attributes:
        name: Name in the checkpoint, with `*` in place of numbers.
        count: How many tensors these are.
        size: Numbers or bytes of all of them, see `ModelTensors`.
        part: Where the model uses it; `"buffer"` for numbers that are no parameters.
        is_copy: Whether it repeats the numbers of the table, so that it is not counted.
    """

    name: str
    count: int
    shape: list[int]
    size: int
    part: ModelPart
    is_copy: bool


class LookedUpRow(TypedDict):
    """One row of a table, read twice.

    Attributes:
        inside: Result of the model's first step, `(D,)`.
        outside: Row of the table's tensor, read without the model, `(D,)`.
        difference: Largest absolute difference of the two; null if a number is not finite.
    """

    token: ShownToken
    inside: PackedTensor
    outside: PackedTensor
    difference: float | None


class ModelTensors(TypedDict):
    """The tensors of a model, by name.

    Attributes:
        refused: Why there is no list; "" if there is one.
        unit: What `size` counts: bytes where rows or weights are stored in a packed form.
        is_tied: Whether the head is the table.
        is_file: Whether the rows outside are read from a file; if not, from the table, which decodes packed rows.
        rows: Empty where only the sizes of a model are known, or an ID reads several rows.
    """

    title: str
    refused: str
    unit: Literal["parameters", "bytes"]
    is_tied: bool
    is_file: bool
    tensors: list[ModelTensor]
    rows: list[LookedUpRow]


# Health


class RowGroups(TypedDict):
    """Groups of equal rows, with the IDs of the first."""

    rows: int
    groups: int
    ids: list[list[int]]


class SharedVariance(TypedDict):
    """What the rows of a table share, see `SharedVariance` of the analysis; null without rows, or without variance.

    Attributes:
        learned_only: Whether rows that never learned are left out.
    """

    rows: int
    scale: float | None
    offset_share: float | None
    dimension: int
    dimension_share: float | None
    component_share: float | None
    constant: list[int]
    rank: int
    most_rank: int
    is_measured: bool
    learned_only: bool


class HealthLimits(TypedDict):
    """Values from which on measures are at fault; `scale` is a range, and `nearest` the cosine of nearly equal rows."""

    nearest: float
    gap: float
    variance: float
    offset: float
    rank: float
    scale: tuple[float, float]


class LossOfRun(TypedDict):
    """What a run learned, in nats per token."""

    validation_loss: float
    unigram_entropy: float
    gain: float


class NearestCosines(TypedDict):
    """Cosine of a row with its nearest row, of each row of a sample; null without two usable rows."""

    rows: int
    median: float | None
    by_chance: float | None
    mean_pair: float | None
    ids: list[int]
    cosines: list[float]


class SpellingFit(TypedDict):
    """How alike the rows of spelling variants are, see `TokenizerFit`.

    Attributes:
        unlike: Share of the pairs that are as unlike as unrelated tokens; by chance 1.
    """

    pairs: int
    cosine: float | None
    error: float | None
    shift: int | None
    shifted_cosine: float | None
    unlike: float | None
    is_mixed: bool
    odd_rows: RowList


class NormOutliers(RowList):
    """A group of rows whose norms are beyond a gap, see `NormOutliers` of the analysis."""

    low: float
    high: float
    nearest: float
    median: float


class Cone(TypedDict):
    """A group of rows with nearly one direction, see `Cone` of the analysis."""

    rows: int
    median_angle: float
    edge_angle: float
    mean_cosine: float
    outside_cosine: float | None
    peak: float
    valley: float
    contrast: float | None
    never_occur: float | None
    doubt: str


class UnderTrainedToken(TypedDict):
    """A row that is not learned or was never seen."""

    id: int
    text: str
    kind: str | None
    score: float
    norm: float
    verdict: str


class KindCount(TypedDict):
    """The rows of one kind of token, and how many of them are not learned or were never seen."""

    kind: str
    rows: int
    under_trained: int


class UnderTrained(TypedDict):
    """Rows that are not learned or were never seen, and the cones that unused rows form."""

    rows: int
    threshold: float
    explanation: str
    tokens: list[UnderTrainedToken]
    by_kind: list[KindCount]
    cones: list[Cone]
    undecided: list[Cone]


class RowCount(TypedDict):
    """A number of rows."""

    rows: int


class RandomShare(RandomRange):
    """How the rows compare with random ones; `share` is the estimated share of random rows."""

    share: float | None


class Verdicts(TypedDict):
    """The rows with each verdict, see `RowVerdicts`; `sentence` states their numbers."""

    learned: RowCount
    not_learned: RowList
    never_seen: RowList
    cannot_tell: RowList
    sentence: str
    random: RandomShare


class ColumnBlocks(TypedDict):
    """Whether the columns of a table belong to the same rows, see `ColumnBlocks` of the analysis."""

    correlation: float
    apart: float
    start: int
    stop: int
    shift: int
    shifted_correlation: float


class Health(TypedDict):
    """The report of `table_health`.

    Attributes:
        summary: Sentences that say what is wrong, worst first, or that the table is sound, then notes.
        reasons: Sentences that say why the table is not sound; empty if it is.
        notes: Sentences about what is no fault.
        at_fault: Names of measures in `shared`, "loss" and "rows" (not learned), because of which it is not sound.
        absent: Tokens that never occur in the training text; null if the occurrences are unknown.
        loss: Null for a table that is not of a run.
        exchanged: Share of the rows that come from the start of another row; null if that cannot be told.
        columns: Null if that cannot be told.
        texts: Texts of the listed rows, by ID.
    """

    zero_rows: RowList
    nonfinite_rows: RowList
    at_mean: RowList
    never_touched: RowList | None
    duplicates: RowGroups
    near_duplicates: RowGroups
    reasons: list[str]
    notes: list[str]
    summary: str
    is_sound: bool
    state: TableState
    shared: SharedVariance
    at_fault: list[str]
    limits: HealthLimits
    absent: RowList | None
    loss: LossOfRun | None
    nearest: NearestCosines
    spelling: SpellingFit | None
    norm_outliers: list[NormOutliers]
    texts: dict[str, str]
    under_trained: UnderTrained
    verdicts: Verdicts
    exchanged: float | None
    columns: ColumnBlocks | None


class ChanceMeasures(TypedDict):
    """The measures of `Spectrum` for random numbers, see `ChanceGeometry`."""

    effective_rank: float
    isotropy: float
    isotropy_rows: int
    mean_cosine_deviation: float


class Spectrum(TypedDict):
    """Measures of the table's geometry, see `TableGeometry`.

    Attributes:
        explained: Share of the variance along each principal direction, largest first.
    """

    explained: list[float]
    effective_rank: float
    isotropy: float
    mean_cosine: float
    chance: ChanceMeasures


# Training


class Monitored(TypedDict):
    """What a monitor read at a step, see `MonitorReport`; lists have the deciles of token frequency, rarest first.

    A number that is missing or null was not read, or is not finite.
    """

    never_seen: float
    norms: list[float | None]
    update_ratios: list[float | None]
    losses: list[float | None]
    new_loss: NotRequired[float | None]
    rows_not_finite: int
    tokens_not_finite: list[str]
    gradients_not_finite: NotRequired[int]
    tokens_of_gradients: list[str]
    logit_std: NotRequired[float | None]
    log_z: NotRequired[float | None]
    largest_logit: NotRequired[float | None]


class MetricsLine(TypedDict):
    """One line of a run's `metrics.jsonl`.

    Attributes:
        validation_losses: The loss of each corpus of a mixture.
    """

    step: int
    loss: float
    lr: NotRequired[float]
    validation_loss: NotRequired[float]
    validation_bits_per_byte: NotRequired[float]
    validation_losses: NotRequired[list[float]]
    rows_touched: NotRequired[int]
    tokens_per_second: NotRequired[float]
    monitor: NotRequired[Monitored]


class MadeOf(TypedDict):
    """The parts of a run's model; "" for what is not known."""

    table: str
    position: str
    head: str
    layers: int | Literal[""]
    heads: int | Literal[""]
    parameters: int | Literal[""]


class ProbedToken(TypedDict):
    """A token, and the text and the cosine of its nearest tokens before training."""

    id: int
    token: str
    near: list[tuple[str, float]]


class Metrics(TypedDict):
    """The training progress of a run, and its options.

    Attributes:
        lines: Lines of `metrics.jsonl`, evenly spaced, with the last one.
        uniform_loss: `ln V`, the loss in nats per token of a uniform distribution.
    """

    lines: list[MetricsLine]
    uniform_loss: float
    options: dict[str, object]
    made_of: MadeOf
    neighbors_before: list[ProbedToken]


# Compare


MovedRow = tuple[int, int, float, float]
"""ID, ID in the other table, cosine, and ratio of the row's norms over the median ratio."""


class Relation(TypedDict):
    """Whether two tables are related, see `TableRelation`."""

    verdict: Literal["same", "changed", "related", "unrelated", "unknown"]
    headline: str
    details: str
    held_out: float | None
    shuffled: float | None
    as_stored: float | None
    as_stored_shuffled: float | None


class RowsOfOne(TypedDict):
    """Rows that only one of two tables has: their number, and the first tokens."""

    title: str
    rows: int
    tokens: list[str]


class Comparison(TypedDict):
    """How far the tokens that two tables share moved.

    Attributes:
        title: Title of the other source.
        shared: Number of these tokens.
        residual: Residual of the alignment; null without one.
        scale: Median ratio of a row's norm to that in the other table.
        only: Rows that only this table has, and rows that only the other one has.
        moved_most: Tokens of the training text if the occurrences are known, else all.
        moved_never: Tokens that never occur in the training text; null if the occurrences are unknown.
    """

    title: str
    shared: int
    mean_cosine: float
    residual: float | None
    scale: float
    relation: Relation
    only: list[RowsOfOne]
    moved_most: list[MovedRow]
    moved_least: list[MovedRow]
    moved_never: list[MovedRow] | None
