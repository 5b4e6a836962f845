"""Records of the data that the page requests: what each route returns, if it returns no bytes.

`python tools/page_types.py --write` generates `page/answers.d.ts` from these records and the routes, so that tsc checks
the page against them.
"""

from typing import Literal, NotRequired, TypedDict

TokenKind = Literal["text", "byte", "special"]  # how the page marks a token; `"byte"` is one byte of a character
Neighbor = tuple[int, float]  # ID of a row, and its cosine with the query


class PackedTensor(TypedDict):
    """A float32 tensor in base64, little-endian; see `unpack` of the page."""

    shape: list[int]
    float32: str


class ShownToken(TypedDict):
    """A token as the page shows it.

    Attributes:
        decoded: Readable text of the token; empty if the tokenizer does not know the ID.
        text: The readable text with spaces and invisible characters in visible form, or `row ID`.
    """

    id: int
    decoded: str
    text: str
    kind: TokenKind


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
        left_out: What an exported page lacks, as sentences.
    """

    version: str
    command: str
    exported: bool
    left_out: NotRequired[list[str]]
    sources: list[SourceManifest]


# Map


class TokenTexts(TypedDict):
    """The readable text of each row, and the IDs of the special tokens."""

    texts: list[str]
    special: list[int]


class AxisShares(TypedDict):
    """The share of the variance along each principal component, largest first."""

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
    """A cluster of the map: IDs of the tokens that name it, and its densest place."""

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
"""The verdict about a table; `"undecided"` if nothing shows that it was trained."""


class TokenFacts(TypedDict):
    """Facts about a token; null where there is nothing to say, or where a number is not finite.

    Attributes:
        kind: One of `analysis.token_classes.KINDS`; null without a tokenizer.
        norm_share: Share of the rows, of those without NaN, that have a smaller norm.
        score: Under-training score, see `UnderTrained.scores`.
        findings: "broken" (NaN or infinity), "zero", "under_trained", "never_looked_up" (it does not occur in the
            corpus of the run), "unchanged" (the row equals the one before training, up to a factor), "duplicate",
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


# Pipeline


class TinyChoices(TypedDict):
    """What can be chosen for the tiny layer."""

    texts: list[str]
    words: list[str]
    positions: list[str]
    embed_dim: int


class PipelineChoices(TypedDict):
    """What the view Pipeline lets the user choose.

    Attributes:
        texts: Example texts of the model.
        reads: How the model reads texts.
        refused: Why only the tiny layer can be shown; "" if the model can.
    """

    texts: list[str]
    reads: Literal["tokenizer", "names", "ids"]
    refused: str
    tiny: TinyChoices


class TablePart(TypedDict):
    """Consecutive rows of a table: the ID of the first, and the text of each."""

    first: int
    names: list[str]


class RowsFacts(TypedDict):
    """The rows around the looked-up ones.

    Attributes:
        part_of: Index of each token's part.
        whole: Whether the part is the whole table.
    """

    parts: list[TablePart]
    part_of: list[int]
    whole: bool


class ScaleFacts(TypedDict):
    """The factor on the rows; 1 if the model does not scale."""

    factor: float
    scaled: bool


class PositionsFacts(TypedDict):
    """Where the position scheme is applied, and its class."""

    kind: Literal["added", "rotation", "bias", "none"]
    scheme: str


class DropoutFacts(TypedDict):
    """The probability of dropout; `shown_p` is that of the example."""

    p: float | None
    shown_p: float


class RotationFacts(TypedDict):
    """The two channels of each pair, and the width of a head."""

    channels: list[tuple[int, int]]
    head_dim: int


class BiasFacts(TypedDict):
    """The number of heads with a bias, and whether it is for keys before the query only."""

    causal: bool
    heads: int


class LikelyToken(ShownToken):
    """A token with its probability."""

    chance: float | None


class HeadFacts(TypedDict):
    """The most likely next tokens.

    Attributes:
        top_tokens: The most likely tokens after each token of the text.
        next: Probability of the token that follows each token of the text.
        candidates: The tokens that can be appended, of a whole decoder.
        room: Number of tokens by which the text can be longer, of a whole decoder.
    """

    top_tokens: list[list[LikelyToken]]
    next: list[float | None]
    tied: bool
    candidates: NotRequired[list[ShownToken]]
    room: NotRequired[int]


class RowGradient(ShownToken):
    """The norm of the gradient of one looked-up row, in all and through the look-up and the head."""

    norm: float | None
    through_rows: float | None
    through_head: float | None
    times: int


class GradientFacts(TypedDict):
    """The gradient of the loss for the rows of the table.

    Attributes:
        loss: Nats per token.
        touched: Number of rows with a gradient.
        used: Number of rows that were looked up.
        rows: The looked-up rows, largest gradient first.
        rows_a_bin: Number of rows in one bin of the picture of all rows.
    """

    loss: float | None
    touched: int
    used: int
    touched_by_look_up: int
    touched_by_head: int
    tied: bool
    rows: list[RowGradient]
    rows_a_bin: int


class NoFacts(TypedDict):
    """Nothing beside the values."""


class StepFacts(TypedDict):
    """The facts of each step that has some, by the name of the step."""

    look_up: RowsFacts
    scale: ScaleFacts
    position: PositionsFacts
    dropout: DropoutFacts
    rotation: RotationFacts
    bias: BiasFacts
    head: HeadFacts
    gradient: GradientFacts


class PipelineStep(TypedDict):
    """One step from text to gradient.

    Attributes:
        idle: Whether the step changes nothing in this model.
        facts: The entry of `StepFacts` with the name of the step.
    """

    name: str
    title: str
    formula: str
    sentence: str
    note: str
    idle: bool
    values: dict[str, PackedTensor]
    facts: (
        RowsFacts
        | ScaleFacts
        | PositionsFacts
        | DropoutFacts
        | RotationFacts
        | BiasFacts
        | HeadFacts
        | GradientFacts
        | NoFacts
    )


class Pipeline(TypedDict):
    """A text and all steps from its tokens to the gradient of its loss.

    Attributes:
        how: How the text was split, as sentences; "" for a tokenizer.
        left_out: Number of later tokens, which are not shown.
        appended: IDs of tokens that follow those of the text.
    """

    text: str
    how: str
    tokens: list[ShownToken]
    left_out: int
    vocab_size: int
    embed_dim: int
    steps: list[PipelineStep]
    appended: list[int]


class LogitLens(TypedDict):
    """The most likely next tokens after each block, see `explorer.logit_lens.LogitLens`.

    Attributes:
        top_ids: IDs by layer, position and rank.
        top_probs: Their probabilities, with layers and positions in one dimension.
        entropy: Entropy of the probabilities by layer and position, in nats.
        next_probs: Probability of the following token.
        next_ranks: Rank of the following token, from 1 on.
        tokens: Every listed token.
    """

    top_ids: list[list[list[int]]]
    top_probs: PackedTensor
    entropy: PackedTensor
    next_probs: PackedTensor
    next_ranks: list[list[int]]
    tokens: list[ShownToken]


# Positions


class SchemeFacts(TypedDict):
    """What the page shows of every position scheme.

    Attributes:
        name: Class and arguments.
        layers: Type of the layers that use it, in a model with several schemes; else "".
        trained_length: Number of positions that it has rows for or was trained on; null if unknown.
    """

    name: str
    layers: str
    trained_length: int | None


class NoScheme(SchemeFacts):
    """No position scheme."""

    kind: Literal["none"]


class UndrawnScheme(SchemeFacts):
    """A rotation that mixes more than two channels, which the page does not draw."""

    kind: Literal["undrawn"]


class AdditiveScheme(SchemeFacts):
    """The vectors that are added at the first positions.

    Attributes:
        checked: Number of position vectors.
        distinct: Number of different ones.
    """

    kind: Literal["learned"]
    embed_dim: int
    rows: PackedTensor
    checked: int
    distinct: int


class SinusoidalScheme(SchemeFacts):
    """The arguments of `SinusoidalPositionalEmbedding`; `checked` and `distinct` as in `AdditiveScheme`."""

    kind: Literal["sinusoidal"]
    embed_dim: int
    base: float
    layout: Literal["interleaved", "concatenated"]
    endpoint: bool
    offset: int
    padding_idx: int | None
    scale: float
    checked: int
    distinct: int


class RotationScheme(SchemeFacts):
    """Rotations of pairs of channels, `(a, b) -> (a cos - b sin, a sin + b cos)`, see `explorer.rotation`.

    Attributes:
        head_dim: Width of a head.
        channels: The two channels of each pair.
        queries: For each position the cosine and the sine of each pair, and the factor of all other channels.
        keys: The same of keys; null if it is equal.
        note: What the numbers are for, if they depend on the length of the text.
    """

    kind: Literal["rotation"]
    head_dim: int
    channels: list[tuple[int, int]]
    queries: PackedTensor
    keys: PackedTensor | None
    note: str


class AlibiScheme(SchemeFacts):
    """The slope of each head."""

    kind: Literal["alibi"]
    num_heads: int
    slopes: list[float]


class BiasScheme(SchemeFacts):
    """The bias of each head by distance; the middle column is distance 0, later ones are keys after the query."""

    kind: Literal["relative"]
    biases: PackedTensor
    causal: bool


DescribedScheme = (
    NoScheme | UndrawnScheme | AdditiveScheme | SinusoidalScheme | RotationScheme | AlibiScheme | BiasScheme
)


class PlacedToken(TypedDict):
    """A token that the view Positions places at two positions."""

    id: int
    text: str
    kind: TokenKind


class PositionsData(TypedDict):
    """The position schemes of a model, that of the first block first, and N example tokens.

    Attributes:
        vectors: Rows of the tokens with the scale applied, `(N, D)`.
        queries: Queries of the first block before positions are applied, `(H, N, K)`; of a decoder with a scheme inside
            attention.
        keys: Keys of the same block, `(G, N, K)`.
    """

    schemes: list[DescribedScheme]
    embed_dim: int
    tokens: list[PlacedToken]
    vectors: PackedTensor
    queries: NotRequired[PackedTensor]
    keys: NotRequired[PackedTensor]


# Health


class RowGroups(TypedDict):
    """Groups of equal rows, with the IDs of the first."""

    rows: int
    groups: int
    ids: list[list[int]]


class SharedVariance(TypedDict):
    """What the rows of a table share, see `SharedVariance` of the analysis; null of fewer rows than can be measured.

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
    """Values from which on measures in `shared` are at fault; `scale` is a range."""

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
    """Cosine of a row with its nearest row; null without two usable rows."""

    rows: int
    median: float | None
    by_chance: float | None
    mean_pair: float | None


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
    """Rows whose norms differ from those of all others."""

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
    """An under-trained row."""

    id: int
    text: str
    kind: str | None
    score: float
    norm: float


class KindCount(TypedDict):
    """The rows of one kind of token, and how many of them are under-trained."""

    kind: str
    rows: int
    under_trained: int


class UnderTrained(TypedDict):
    """Rows inside a cone; rows that are named as equal, or at the mean, are not counted."""

    rows: int
    threshold: float
    explanation: str
    tokens: list[UnderTrainedToken]
    by_kind: list[KindCount]
    cones: list[Cone]
    undecided: list[Cone]


class Health(TypedDict):
    """The report of `table_health`.

    Attributes:
        summary: Sentences that say what is wrong, worst first.
        at_fault: Names of measures in `shared`, and "loss", because of which the table is not sound.
        absent: Tokens that never occur in the training text; null if the occurrences are unknown.
        loss: Null for a table that is not of a run.
        texts: Texts of the listed rows, by ID.
    """

    zero_rows: RowList
    nonfinite_rows: RowList
    at_mean: RowList
    never_touched: RowList | None
    duplicates: RowGroups
    near_duplicates: RowGroups
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
    sentence: str
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
