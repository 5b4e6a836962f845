"""Records of the data about a text: the views Pipeline and Positions, and the logit lens; see `explorer.answers`."""

from typing import Literal, NotRequired, TypedDict

TokenKind = Literal["text", "byte", "special"]  # how the page marks a token; `"byte"` is one byte of a character


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


# Tokens of a text


class TracedToken(ShownToken):
    """A token, and its bytes `start:stop` of the text in UTF-8, which are equal for a token without bytes."""

    start: int
    stop: int


class TracedMerge(TypedDict):
    """One merge of byte-pair encoding.

    Attributes:
        index: Place of the left symbol among the symbols before this merge.
        rank: Place of the pair in the list of merges, from 0 on.
        result: The symbol that replaces the pair, as it is written in the vocabulary.
    """

    index: int
    rank: int
    result: str


class BpeTrace(TypedDict):
    """How byte-pair encoding splits a pre-token; symbols are as they are written in the vocabulary.

    Attributes:
        symbols: The symbols before the first merge.
        pairs: Every pair that was adjacent at some moment and is in the list of merges, with its rank.
        shown: Visible form of each symbol.
        whole: Whether the pre-token is a token of the vocabulary, and the model ignores merges then (`ignore_merges`).
    """

    kind: Literal["bpe"]
    symbols: list[str]
    merges: list[TracedMerge]
    pairs: list[tuple[str, str, int]]
    shown: dict[str, str]
    whole: bool


class WordPieceTry(TypedDict):
    """One look-up: characters `start:stop` of the pre-token, in visible form, and the ID; null without such a token."""

    start: int
    stop: int
    text: str
    id: int | None


class WordPieceTrace(TypedDict):
    """How WordPiece splits a pre-token: all look-ups, in order.

    Attributes:
        too_long: Whether the pre-token has more characters than are read, so that it is the unknown token.
    """

    kind: Literal["wordpiece"]
    tries: list[WordPieceTry]
    too_long: bool


class ScoredPart(TypedDict):
    """A part of a pre-token in visible form, its log-probability, and the IDs of its tokens."""

    text: str
    score: float
    ids: list[int]


class UnigramPath(TypedDict):
    """One segmentation of a pre-token, and the sum of the scores of its parts."""

    pieces: list[ScoredPart]
    score: float


class UnigramTrace(TypedDict):
    """How a Unigram model splits a pre-token: the best segmentation, then the best of all others if there is one."""

    kind: Literal["unigram"]
    paths: list[UnigramPath]


class WholeTrace(TypedDict):
    """A pre-token that is looked up whole, and the ID of its token; null if it has none and is unknown, or left out."""

    kind: Literal["whole"]
    id: int | None


ModelTrace = BpeTrace | WordPieceTrace | UnigramTrace | WholeTrace

TokenModel = Literal["BPE", "WordPiece", "Unigram", "WordLevel", "names", "ids"]
"""The model of a tokenizer; `"names"` of rows, or `"ids"` that were typed."""


class TracedPiece(TypedDict):
    """A pre-token, a part of a text that the model splits by itself; or an added token.

    Attributes:
        start: First byte in the text in UTF-8.
        stop: First byte behind it.
        text: The pre-token as the model gets it, in visible form.
        added: Whether it is an added token, which is cut out of the text before all else.
        first: Index of its first token.
        behind: Index behind its last token.
        trace: How the model splits it; null for an added token.
    """

    start: int
    stop: int
    text: str
    added: bool
    first: int
    behind: int
    trace: ModelTrace | None


class Tokenization(TypedDict):
    """How a text becomes tokens.

    Attributes:
        title: Name of the source or of the page's own tokenizer.
        vocab_size: Rows of the table, or tokens of a tokenizer without a table.
        embed_dim: Width of a row of the source.
        text: The text in visible form.
        normalized: The text after normalisation, in visible form; the text itself if `refused` is not "".
        left_out: Number of later tokens, which are not shown.
        text_tokens: Number of all tokens of the text, without those that the tokenizer adds around it.
        refused: Why there are no pre-tokens; "" if there are.
    """

    title: str
    model: TokenModel
    vocab_size: int
    embed_dim: int
    text: str
    normalized: str
    tokens: list[TracedToken]
    pieces: list[TracedPiece]
    left_out: int
    text_tokens: int
    refused: str


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
        pieces: Words, with and without a space before them, whose tokens by the page's small tokenizer are known.
    """

    texts: list[str]
    reads: Literal["tokenizer", "names", "ids"]
    refused: str
    tiny: TinyChoices
    pieces: list[str]


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
    """The probability of dropout, null if the source states none; `shown_p` is that of the example."""

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


class BlockVector(TypedDict):
    """One vector inside of a block: its value in the step, its symbol, its formula, and how many numbers it has."""

    name: str
    symbol: str
    formula: str
    size: int


class BlockFacts(TypedDict):
    """What the first block of a decoder computes.

    Attributes:
        vectors: The vectors in the order of the computation.
        eps: Term that RMSNorm adds to the mean square.
        heads: Query heads, H.
        kv_heads: Key/value heads, G.
        units_a_column: How many units of SwiGLU one column of `gate`, `up` and `product` is chosen from.
        blocks: Number of blocks.
    """

    vectors: list[BlockVector]
    eps: float
    heads: int
    kv_heads: int
    units_a_column: int
    blocks: int


class LikelyToken(ShownToken):
    """A token with its probability and its logit."""

    chance: float | None
    logit: float | None


class HeadFacts(TypedDict):
    """The most likely next tokens.

    Attributes:
        top_tokens: The most likely tokens after each token of the text.
        next: Probability of the token that follows each token of the text but the last.
        candidates: The tokens that can be appended, of a whole decoder.
        tokens_left: Number of tokens by which the text can be longer, of a whole decoder.
        norm_eps: Term that the final norm adds to the mean square, of a whole decoder.
    """

    top_tokens: list[list[LikelyToken]]
    next: list[float | None]
    tied: bool
    candidates: NotRequired[list[ShownToken]]
    tokens_left: NotRequired[int]
    norm_eps: NotRequired[float]


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
    block: BlockFacts
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
        | BlockFacts
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


class UndrawnScheme(SchemeFacts):
    """No scheme, or one that does more to queries and keys than rotate pairs of channels: the page draws none."""

    kind: Literal["none", "undrawn"]


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
    layout: Literal["interleaved", "concatenated", "cosines_first"]
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


DescribedScheme = UndrawnScheme | AdditiveScheme | SinusoidalScheme | RotationScheme | AlibiScheme | BiasScheme


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
