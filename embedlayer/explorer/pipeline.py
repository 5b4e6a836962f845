"""A text in a model, step by step: the numbers that the page and `embedlayer embed` show.

The model traces its input embedding itself. Tests compare the last vectors with the model's own, and the gradient of
each row with autograd's.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from itertools import product
from typing import cast, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
from embedlayer.data.tokenizer import token_text
from embedlayer.explorer import answers
from embedlayer.explorer.appended import longer_text
from embedlayer.explorer.example_texts import example_texts
from embedlayer.explorer.rotation import PairRotation, pair_rotation, width_of
from embedlayer.explorer.text_ids import Vocabulary, text_ids, vocabulary_of
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.explorer.tiny_layer import WORDS as TINY_WORDS
from embedlayer.explorer.tiny_layer import TinyPosition, tiny_layer
from embedlayer.explorer.tokens import Params, token_ids
from embedlayer.families import FAMILIES, HUGGING_FACE_TENSORS
from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import finite_json
from embedlayer.layers.input import TransformerEmbedding
from embedlayer.layers.output import OutputHead
from embedlayer.layers.prediction_head import PredictionHead
from embedlayer.layers.steps import TokenBatch, TracedStep, input_steps, trace_steps
from embedlayer.losses.definition import finish_logits
from embedlayer.losses.largest import top_k
from embedlayer.models.decoder import Attention, DecoderLM
from embedlayer.plots import visible_text
from embedlayer.positions.position import Position, positions_of
from embedlayer.sources import OpenedModel
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.table import TokenTable

MOST_TOKENS = 64
MOST_HEADS = 8
TOP_TOKENS = 8
CANDIDATES = 12
BINS = 1024
ROWS_AT_ONCE = 8192
SHOWN_DROPOUT = 0.1
WHOLE_TABLE = 12
NEAR_ROWS = 3
NEAR_COLUMNS = 64

Model = DecoderLM | EmbeddingLayer | TransformerEmbedding | TokenTable
"""What can be shown: a decoder, the embedding layer of a checkpoint, an input embedding, or only a table."""

_TITLES = {
    "one_hot": ("One-hot", "e[t, v] = 1 if v = id[t], else 0"),
    "rows": ("Rows", "e · W, which is W[id[t]]"),
    "scale": ("Scale", "x = s · W[id[t]]"),
    "types": ("Types", "x + types[0]"),
    "positions": ("Positions", "p[t]"),
    "sum": ("Sum", "x[t] + p[t]"),
    "injections": ("Other tables", "x[t] + vectors of other tables"),
    "mask": ("Mask", "0 for padding"),
    "token_dropout": ("Token dropout", "0 for the mask token, the others rescaled"),
    "streams": ("Streams", "x and the vectors that predict later tokens"),
    "norm": ("Normalise", "LayerNorm(x)"),
    "project": ("Project", "x · P"),
    "dropout": ("Dropout", "0 with probability p, else x / (1 − p)"),
    "rotation": ("Rotation", "(a, b) → (a cos θ − b sin θ, a sin θ + b cos θ), θ = t · base^(−2i/K)"),
    "bias": ("Bias", "q[i] · k[j] / √K + bias[h, i, j]"),
    "head": ("Next token", "p = softmax(z / temperature), z = h · Wᵀ"),
    "head only": ("Head", "softmax(x · Wᵀ)"),
    "lens": ("Logit lens", "softmax(head(norm(x[l, t])))"),
    "gradient": ("Gradient", "∂loss / ∂W"),
}
"""Title and formula of each step; a sentence may have its own."""

_SENTENCES = {
    "one_hot": "Each token is a vector with a 1 at its ID and zeros at all other entries of the vocabulary.",
    "rows": "All products but those of one row are 0, so the sum is that row. Therefore nothing is multiplied in "
    "practice: the row is read from the table.",
    "scale": "Every number of the row is multiplied by the same factor.",
    "no scale": "This model uses its rows without a factor; others multiply them, often by √D.",
    "types": "A vector for the token's segment is added; here all tokens are in the first segment.",
    "positions": "Each position in the text has its own vector, the same for every token.",
    "positions none": "This model adds no information about positions to the input.",
    "positions rotate": "Nothing is added here: this scheme rotates queries and keys inside attention, in the step "
    "Rotation.",
    "positions bias": "Nothing is added here: this scheme is a bias on the scores inside attention, in the step Bias.",
    "sum": "Token and position become one vector: the same token at two positions now has two vectors.",
    "injections": "The vectors of further tables are added, such as those of the n-gram that ends at the token.",
    "mask": "The vectors of padding become zero; this text has no padding.",
    "token_dropout": "The vector of the mask token becomes zero, and the others are multiplied to make up for it.",
    "streams": "Vectors that predict later tokens are appended.",
    "norm": "Each vector is shifted to mean 0 and scaled to variance 1; each dimension has its own weight and bias.",
    "project": "Narrow rows are projected to the width of the blocks.",
    "dropout": "In training only: random numbers become 0, others in each step, and the rest grow to keep the mean. "
    "In use, nothing is dropped.",
    "no dropout": "This model drops nothing. Others set random numbers to 0 in training, as in this example.",
    "rotation": "Inside attention, each pair of numbers of a query or key is rotated by an angle that grows with the "
    "position: the first pairs fast, the last slowly.",
    "bias": "A number that depends on the distance to the key is added to each score, in each head another one.",
    "head": "The output of the last block times all rows gives a score for each token, the logit z; softmax makes "
    "them the probabilities of the next token. A temperature divides the logits first: below 1 the likely tokens "
    "gain, above 1 the others.",
    "head only": "Only the embedding layer of this source is known, so there are no blocks to read: the head is "
    "applied to the input vectors, and its scores are not the model's predictions.",
    "lens": "The hidden state after each block goes through the model's own final norm and head, as if no block "
    "followed. The last row is the model's own output; earlier blocks were not trained to be read in this way.",
    "gradient": "The head is tied: it multiplies by the same table, and every row takes part in the scores. So every "
    "row gets a gradient through the head; looked-up rows also get one through the look-up.",
    "gradient untied": "Only rows that were looked up get a gradient; all other rows of the table stay the same. The "
    "head has rows of its own, and those all get one.",
}
"""Explanation of each step for readers."""

_WHOLE_MODELS = (
    "The blocks are read of embedlayer's own decoders, and of checkpoints of the types "
    + " and ".join(kind for each in FAMILIES if each.decoder is HUGGING_FACE_TENSORS for kind in each.model_types)
    + "."
)

_POSITION_KINDS = {"add": "added", "rotate": "rotation", "bias": "bias", None: "none"}


@dataclass(frozen=True)
class ShownToken:
    """A token as the page shows it.

    Attributes:
        id: Token ID.
        decoded: Readable text of the token; empty if the tokenizer does not know the ID.
        text: The readable text with spaces and invisible characters in visible form, or `row ID`.
        kind: `"special"`, `"byte"` for one byte of a character, or `"text"`.
    """

    id: int
    decoded: str
    text: str
    kind: answers.TokenKind


@dataclass
class Step:
    """One step of the computation, from text to gradient, as the page shows it.

    Args:
        name: Identifier of the step, a key of `_TITLES`, which has its title and formula unless its sentence does.
        note: The sizes and factors of this model, in one line of text.
        values: Tensors to draw, by name: `(T, C)`, or `(H, T, C)` for the first heads.
        facts: All other data of the step, as JSON.
        sentence: Key of the explanation in `_SENTENCES`; `""` for the name of the step.
        idle: Whether the step changes nothing in this model, such as a scale that it does not have.
        vectors: Vectors after the step, `(T, D)`, which are detached; `None` for a step that changes no vectors.
    """

    name: str
    note: str
    values: Mapping[str, Tensor] = field(default_factory=dict)
    facts: JsonObject = field(default_factory=dict)
    _: KW_ONLY
    sentence: str = ""
    idle: bool = False
    vectors: Tensor | None = None

    def __post_init__(self) -> None:
        self.vectors = None if self.vectors is None else self.vectors.detach()

    @property
    def title(self) -> str:
        """Return the title of the step on the page."""
        return self._heading[0]

    @property
    def _heading(self) -> tuple[str, str]:
        """Return title and formula of the step."""
        return _TITLES.get(self.sentence, _TITLES[self.name])

    def to_json(self) -> JsonObject:
        """Return the step as a JSON object, with its title, formula and explanation, and with packed tensors.

        `vectors` are left out, because they are among the `values`.
        """
        return {
            "name": self.name,
            "title": self.title,
            "formula": self._heading[1],
            "sentence": _SENTENCES[self.sentence or self.name],
            "note": self.note,
            "idle": self.idle,
            "values": {name: packed(value) for name, value in self.values.items()},
            "facts": self.facts,
        }


@dataclass(frozen=True)
class Pipeline:
    """A text and all steps from its tokens to the gradient of its loss.

    Attributes:
        text: The text.
        how: How the text was split, as sentences for readers; `""` for a tokenizer.
        tokens: The first T tokens of the text.
        left_out: Number of later tokens, which are not shown.
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        steps: Steps in the order in which the model computes them.
        vectors: Input of the first block, `(T, D)`.
        appended: IDs of tokens that follow those of the text; `tokens` has them too.
    """

    text: str
    how: str
    tokens: tuple[ShownToken, ...]
    left_out: int
    vocab_size: int
    embed_dim: int
    steps: tuple[Step, ...]
    vectors: Float[Tensor, "T D"]
    appended: tuple[int, ...] = ()

    def step(self, name: str) -> Step | None:
        """Return the step with a name; `None` if this model does not have it."""
        return next((step for step in self.steps if step.name == name), None)

    def to_json(self) -> answers.Pipeline:
        """Return the pipeline as a JSON object of its attributes, with packed tensors; see `packed`.

        `vectors` are left out. NaN and infinity outside of tensors become `None`.
        """
        tokens, steps = [vars(token) for token in self.tokens], [step.to_json() for step in self.steps]
        content = {**vars(self), "tokens": tokens, "steps": steps}
        del content["vectors"]
        return cast(answers.Pipeline, finite_json(content))


def packed(values: Tensor) -> answers.PackedTensor:
    """Return a tensor as JSON: its shape, and its float32 numbers, little-endian, in base64.

    Example:
        >>> packed(torch.tensor([[1.0, 2.0]]))
        {'shape': [1, 2], 'float32': 'AACAPwAAAEA='}
    """
    numbers = values.detach().cpu().float().contiguous().numpy().astype("<f4")
    return {"shape": list(values.shape), "float32": base64.b64encode(numbers.tobytes()).decode("ascii")}


def shown_tokens(vocabulary: Vocabulary, ids: Sequence[int]) -> tuple[ShownToken, ...]:
    """Return tokens in the form that the page shows, one for each ID.

    An ID that the tokenizer does not know has the text `row ID`; one without a name has the text `#ID`.
    """
    if not isinstance(vocabulary, Tokenizer):
        names = ["" if vocabulary is None else vocabulary.names[number] for number in ids]
        named = zip(ids, names, strict=True)
        return tuple(ShownToken(number, name, visible_text(name) or f"#{number}", "text") for number, name in named)
    specials = {number for number, token in vocabulary.get_added_tokens_decoder().items() if token.special}

    @cache
    def shown(number: int) -> ShownToken:
        """Return one token in the form that the page shows."""
        if vocabulary.id_to_token(number) is None:
            return ShownToken(number, "", f"row {number}", "special")
        text = token_text(vocabulary, number)
        is_byte = text.startswith("<0x") and text.endswith(">")
        kind: answers.TokenKind = "special" if number in specials else "byte" if is_byte else "text"
        return ShownToken(number, text, visible_text(text), kind)

    return tuple(shown(number) for number in ids)


def answer(source: OpenedModel, params: Params) -> answers.Pipeline:
    """Answer a request of the page: the pipeline of the parameter `text`.

    Args:
        source: The source.
        params: `text`; with `layer` = `"tiny"`, the text is computed in the tiny layer, with the position scheme
            `position` and a head that is tied if `tied` is `"1"`.

    The parameter `appended` has IDs of tokens that follow the text, such as `17,40`. Those that the tokenizer would
    find in a longer text become part of it. Of a decoder, the last step is the logit lens, whose numbers are the answer
    to another request, `logit_lens.answer`.

    Raises:
        CheckpointError: Only the table of a checkpoint could be read.
        SizeError: The tiny layer has no such position scheme.
        TokenizerError: The source has neither a tokenizer nor names, and the text is no list of IDs.
        TextError: The text has no tokens.
    """
    model, vocabulary = requested_model(source, params)
    table, special = parts_of(model)[0], source.adds_special_tokens
    text, appended = params.get("text", ""), token_ids(params, "appended", table.vocab_size)
    text, rest = longer_text(vocabulary, text, appended, table.vocab_size, add_special_tokens=special)
    walked = pipeline(model, vocabulary, text, appended=rest, add_special_tokens=special)
    if isinstance(model, DecoderLM):
        last = len(model.blocks)
        note = f"row 0 is the input of the first block, row {last} the output of the last (nostalgebraist, 2020)"
        walked = replace(walked, steps=(*walked.steps, Step("lens", note)))
    return walked.to_json()


def requested_model(source: OpenedModel, params: Mapping[str, str]) -> tuple[Model, Vocabulary]:
    """Return the model that a request asks for, and what converts texts to its IDs.

    The parameters `layer`, `position` and `tied` are those of `answer`.

    Raises:
        CheckpointError: Only the table of a checkpoint could be read.
        SizeError: The tiny layer has no such position scheme.
    """
    if params.get("layer") == "tiny":
        return tiny_layer(params.get("position", "learned"), tied=params.get("tied", "1") == "1"), TINY_WORDS
    return source.require_input(), vocabulary_of(source)


def choices(source: OpenedModel, params: Params) -> answers.PipelineChoices:
    """Return what the page lets the user choose."""
    vocabulary = vocabulary_of(source)
    refused = f"Only the table of this source can be read. {source.table_only}" if source.table_only else ""
    tiny: answers.TinyChoices = {
        "texts": list(TINY_TEXTS),
        "words": list(TINY_WORDS.names),
        "positions": list(get_args(TinyPosition)),
        "embed_dim": tiny_layer("learned", tied=True).table.embed_dim,
    }
    return {
        "texts": example_texts(source),
        "reads": "tokenizer" if isinstance(vocabulary, Tokenizer) else "ids" if vocabulary is None else "names",
        "refused": refused,
        "tiny": tiny,
    }


def baked(source: OpenedModel) -> list[dict[str, str]]:
    """Return the parameters of the requests whose answers an exported page stores.

    These are the example texts, in the model and in every tiny layer.
    """
    shapes = product(TINY_TEXTS, get_args(TinyPosition), "10")
    tiny = [{"layer": "tiny", "text": text, "position": name, "tied": tied} for text, name, tied in shapes]
    texts = [] if source.table_only else example_texts(source)
    return [*({"text": text} for text in texts), *tiny]


def pipeline(
    model: Model,
    vocabulary: Vocabulary,
    text: str,
    *,
    appended: Sequence[int] = (),
    add_special_tokens: bool = False,
    most_tokens: int = MOST_TOKENS,
) -> Pipeline:
    """Compute every step from `text` to the gradient of its loss.

    Args:
        model: Model, layer or table; steps that it does not have are left out.
        vocabulary: Tokenizer of the model, the names of its rows, or `None` to read IDs such as `#17 #42`.
        text: Any text.
        appended: IDs of tokens that follow those of the text.
        add_special_tokens: Whether the tokenizer adds the tokens that start or end a text. Checkpoints expect them;
            models that were trained by embedlayer do not.
        most_tokens: The text is cut after this many tokens, and at the longest sequence of the positions.

    Raises:
        TokenizerError: There is neither a tokenizer nor names, and the text is no list of IDs.
        TextError: The text has no tokens.
        TokenIdError: The tokenizer gives IDs that the table does not have.

    Example:
        >>> [step.name for step in pipeline(model, tokenizer, "I love dogs").steps]
        ['one_hot', 'rows', 'scale', 'positions', 'dropout', 'rotation', 'head', 'gradient']
    """
    table, position = parts_of(model)
    read = text_ids(vocabulary, text, table.vocab_size, add_special_tokens=add_special_tokens)
    kept = [*read.ids, *appended][: longest(position, most_tokens)]
    tokens = shown_tokens(vocabulary, kept)
    with torch.enable_grad():
        computation = _Computation(model, torch.tensor(kept, device=table.device))
        steps = tuple(computation.steps(tokens, vocabulary))
    left_out = len(read.ids) + len(appended) - len(kept)
    sizes = (table.vocab_size, table.embed_dim)
    return Pipeline(text, read.how, tokens, left_out, *sizes, steps, computation.x.detach(), tuple(appended))


def longest(position: Position, most_tokens: int = MOST_TOKENS) -> int:
    """Return the number of tokens after which a text is cut."""
    return min(most_tokens, position.max_seq_len or most_tokens)


def parts_of(model: Model) -> tuple[LookupTable, Position]:
    """Return the table and the position scheme of a model; a table alone has the scheme without positions."""
    return (model, Position()) if isinstance(model, TokenTable) else (model.table, model.position)


def queries_and_keys(
    model: DecoderLM, x: Float[Tensor, "T D"]
) -> tuple[Float[Tensor, "H T K"], Float[Tensor, "G T K"]]:
    """Compute queries and keys of a decoder's first block, before rotary positions are applied.

    Args:
        model: The decoder, which must have a block.
        x: Input of the first block.
    """
    block = model.blocks[0]
    attention = cast(Attention, block.attention)
    normed = cast(nn.RMSNorm, block.attention_norm)(x)
    queries, keys = (
        projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(-2, -3)
        for projection in (attention.query, attention.key)
    )
    return queries, keys


class _Computation:
    """Compute all steps of one text in one model, one after the other.

    All steps share one autograd graph, from which the last step computes its gradients. The look-up is computed at
    construction; `steps` computes the rest and must be read once, in order.

    Args:
        model: Model, layer or table.
        ids: Token IDs of the text, `(T,)`.
    """

    def __init__(self, model: Model, ids: Int[Tensor, " T"]) -> None:
        self.model = model
        self.table, self.position = parts_of(model)
        self.ids = ids
        self.positions = model.default_positions(ids) if isinstance(model, EmbeddingLayer) else positions_of(ids)
        if isinstance(model, TokenTable):
            self.trace = trace_steps(input_steps(model, self.position), TokenBatch(ids, self.positions))
        else:
            self.trace = model.trace(ids)
        self.look_up = next(self.trace)
        self.rows = self.embedded = self.x = self.look_up.vectors.requires_grad_()

    def steps(self, tokens: Sequence[ShownToken], tokenizer: Vocabulary) -> Iterator[Step]:
        """Yield all steps in order, from the one-hot vectors to the gradient of the loss.

        Args:
            tokens: The tokens of the text, as the page shows them.
            tokenizer: What gives the texts of other tokens: those near in the table, and the most likely next ones.
        """
        yield Step("one_hot", f"for each of {len(self.ids)} tokens, {self.table.vocab_size:,} entries")
        near, facts = self._near_rows(tokenizer)
        yield Step("rows", self.look_up.description, {"rows": self.rows, "near": near}, facts, vectors=self.rows)
        yield from self._input_steps()
        yield self._dropout()
        yield from self._attention_step()
        head = getattr(self.model, "head", None)
        if head is not None:
            yield from self._head_steps(head, tokens, tokenizer)

    @torch.no_grad()
    def _near_rows(self, tokenizer: Vocabulary) -> tuple[Float[Tensor, "N W C"], JsonObject]:
        """Return parts of the table around the looked-up rows, for a picture of the table.

        Of a table of at most `WHOLE_TABLE` rows this is one part, the whole table; else a part is a row with
        `NEAR_ROWS` rows on either side. Where there are more than `NEAR_COLUMNS` dimensions, each column shows the
        number of largest absolute value in its share of them.

        Args:
            tokenizer: What gives the texts of the rows.

        Returns:
            The numbers of the N parts, and for JSON `parts`, the `first` row and the `names` of each, `part_of`, the
            index of each token's part, and `whole`, whether the part is the whole table.
        """
        size = self.table.vocab_size
        wide = size if size <= WHOLE_TABLE else min(size, 2 * NEAR_ROWS + 1)
        starts = (self.ids - NEAR_ROWS).clamp(0, size - wide)
        firsts, part_of = starts.unique(return_inverse=True)
        ids = firsts.unsqueeze(1) + torch.arange(wide, device=firsts.device)
        rows = self.table.look_up(ids)
        columns = -(-rows.shape[-1] // NEAR_COLUMNS)
        runs = F.pad(rows, (0, -rows.shape[-1] % columns)).unflatten(-1, (-1, columns))
        largest = runs.gather(-1, runs.abs().argmax(-1, keepdim=True)).squeeze(-1)
        names = [[token.text for token in shown_tokens(tokenizer, part)] for part in ids.tolist()]
        parts = [{"first": first, "names": of} for first, of in zip(firsts.tolist(), names, strict=True)]
        return largest, {"parts": parts, "part_of": part_of.tolist(), "whole": wide == size}

    def _input_steps(self) -> Iterator[Step]:
        """Yield the steps of the input embedding after the look-up, without dropout.

        A model without a scale or without positions in the input has a step that says so.
        """
        traced = [step for step in self.trace if step.name != "dropout"]
        if traced and traced[0].name == "scale":
            scale = traced.pop(0)
            self.x = self.embedded = scale.vectors
            facts = {"factor": float(cast(float, self.table.factor)), "scaled": True}
            yield Step("scale", scale.description, {"scaled": self.x}, facts, vectors=self.x)
        else:
            facts = {"factor": 1.0, "scaled": False}
            yield Step("scale", "no scale", {"scaled": self.x}, facts, sentence="no scale", idle=True)
        for step in traced:
            before, self.x = self.x, step.vectors
            values = {"result": self.x}
            if step.name == "positions":
                yield from self._position_steps(step, before)
            elif step.name == "token_types":
                values = {"types": torch.zeros_like(before) if step.added is None else step.added, **values}
                yield Step("types", step.description, values, idle=step.added is None, vectors=self.x)
            else:
                name = "project" if step.name == "projection" else step.name
                idle = self.x.shape == before.shape and bool((self.x == before).all())
                yield Step(name, step.description, values, idle=idle, vectors=self.x)
        if not any(step.name == "positions" for step in traced):
            absent = next(
                trace_steps(input_steps(self.table, self.position)[1:], TokenBatch(self.ids, self.positions), self.x)
            )
            yield from self._position_steps(absent, self.x)

    def _position_steps(self, traced: TracedStep, before: Tensor) -> Iterator[Step]:
        """Yield one step with the position vectors and one with the sum of both.

        A scheme that adds nothing to the input yields a single step that says so.

        Args:
            traced: The position step as the model traced it.
            before: Vectors before this step.
        """
        hook = self.position.hook
        facts = {"kind": _POSITION_KINDS[hook], "scheme": type(self.position).__name__}
        if traced.added is None:
            sentence = f"positions {hook or 'none'}"
            yield Step("positions", traced.description, {"result": self.x}, facts, sentence=sentence, idle=True)
            return
        yield Step("positions", traced.description, {"positions": traced.added}, facts, vectors=traced.added)
        values = {"tokens": before, "positions": traced.added, "result": self.x}
        yield Step("sum", f"shape {tuple(self.x.shape)}", values, vectors=self.x)

    def _dropout(self) -> Step:
        """Return the dropout step: the vectors before and after an example mask, which is the same in every call.

        The probability is the model's, or `SHOWN_DROPOUT` if the model has none or 0.
        """
        layer = getattr(self.model, "dropout", None)
        stated = layer.p if isinstance(layer, nn.Dropout) else None
        shown = stated or SHOWN_DROPOUT
        kept = torch.rand(self.x.shape, generator=torch.Generator().manual_seed(0)) >= shown
        values = {"kept": self.x, "dropped": self.x.detach().cpu() * kept / (1 - shown)}
        sentence = "dropout" if stated else "no dropout"
        reason = "this source does not state one" if stated is None else "this model has p = 0"
        note = f"p = {stated:g}" if stated else f"{reason}; shown as it would be with p = {shown:g}"
        return Step("dropout", note, values, {"p": stated, "shown_p": shown}, sentence=sentence, idle=not stated)

    def _attention_step(self) -> Iterator[Step]:
        """Yield one step for a scheme applied inside attention: the rotation, or the bias of the heads.

        Nothing is yielded for other schemes.
        """
        if self.position.hook == "rotate":
            rotation = pair_rotation(self.position, self.positions)
            if rotation is not None and len(rotation.channels):
                yield self._rotation(rotation)
        elif self.position.hook == "bias":
            bias = self.position.bias(self.positions, self.positions)
            assert bias is not None  # the scheme overrides this hook
            facts = {"causal": not getattr(self.position, "bidirectional", False), "heads": bias.shape[1]}
            yield Step("bias", f"{bias.shape[1]} heads", {"bias": bias[0, :MOST_HEADS]}, facts)

    def _rotation(self, rotation: PairRotation) -> Step:
        """Return the step with the rotation angles of each position.

        For a decoder it also has the queries and keys of the first block before and after rotation.
        """
        values = {"angles": rotation.angles}
        note = f"{len(rotation.channels)} pairs of dimensions rotate"
        if isinstance(self.model, DecoderLM) and len(self.model.blocks):
            queries, keys = queries_and_keys(self.model, self.x)
            rotated_queries, rotated_keys = self.position.rotate(queries, keys, self.positions)
            values |= {
                "queries": queries[:MOST_HEADS],
                "queries_turned": rotated_queries[:MOST_HEADS],
                "keys": keys[:MOST_HEADS],
                "keys_turned": rotated_keys[:MOST_HEADS],
            }
            note += f" in each of {queries.shape[-3]} query and {keys.shape[-3]} key heads of the first block"
        facts = {"channels": rotation.channels.tolist(), "head_dim": width_of(self.position)}
        return Step("rotation", note, values, facts)

    def _head_steps(
        self, head: OutputHead | PredictionHead, tokens: Sequence[ShownToken], tokenizer: Vocabulary
    ) -> Iterator[Step]:
        """Yield the step with the most likely next tokens after each token, and the step with the gradient of the loss.

        The loss predicts each token from those before it, so a text of one token has no gradient step.

        Args:
            head: Output head of the model.
            tokens: The tokens of the text, as the page shows them.
            tokenizer: Tokenizer that gives the texts of the most likely tokens.
        """
        hidden = self.x
        if isinstance(self.model, DecoderLM):
            ids = self.ids if len(self.model.injections) else None
            hidden = self.model.hidden(ids, inputs_embeds=self.embedded, positions=self.positions)
        output = head.output if isinstance(head, PredictionHead) else head
        if isinstance(head, PredictionHead):
            hidden = head.transform(hidden)
        table = output.table
        products = F.linear(hidden, output.weight) if table is None else table.raw_logits(hidden)
        logits = finish_logits(products, **output.logit_options()).float()
        chances = logits.detach().softmax(-1)
        best = chances.topk(min(TOP_TOKENS, chances.shape[-1]), dim=-1)
        names = iter(shown_tokens(tokenizer, best.indices.flatten().tolist()))
        top_tokens = [[{**vars(next(names)), "chance": chance} for chance in row] for row in best.values.tolist()]
        following = self.ids[1:]
        rows = "tied: the rows are the table's" if output.tied else "an untied head with its own rows"
        facts = {
            "top_tokens": top_tokens,
            "next": chances[:-1].gather(-1, following.unsqueeze(-1)).squeeze(-1).tolist(),
            "tied": output.tied,
        }
        note = f"{rows}; {self.table.vocab_size:,} scores for each token"
        if isinstance(self.model, DecoderLM):
            last = logits[-1:].detach()
            likely = top_k(last[0], min(CANDIDATES, last.shape[-1]))[1].tolist()
            facts["candidates"] = [vars(token) for token in shown_tokens(tokenizer, likely)]
            facts["room"] = longest(self.position) - len(self.ids)
            yield Step("head", note, {"hidden": hidden, "logits": last}, facts)
        else:
            yield Step("head", f"{note}. {_WHOLE_MODELS}", {"hidden": hidden}, facts, sentence="head only")
        if len(following):
            yield self._gradient(hidden, products, logits, output, tokens)

    def _gradient(
        self,
        hidden: Float[Tensor, "T R"],
        products: Float[Tensor, "T V"],
        logits: Float[Tensor, "T V"],
        head: OutputHead,
        tokens: Sequence[ShownToken],
    ) -> Step:
        """Return the step that shows the norm of the loss's gradient for each row of the table.

        The gradient flows through the look-up and, with a tied head, also through the scores.

        Args:
            hidden: Input of the head.
            products: Raw logits, `hidden` times the rows.
            logits: The final logits, after scale, bias and softcap.
            head: The head, tied or not.
            tokens: The tokens of the text, as the page shows them.
        """
        tied = head.tied
        loss = F.cross_entropy(logits[:-1], self.ids[1:])
        of_rows, of_products = torch.autograd.grad(loss, [self.rows, products])
        if self.table.padding_idx is not None:
            of_rows = of_rows.masked_fill((self.ids == self.table.padding_idx).unsqueeze(-1), 0)
        if head.padding_idx is not None:
            of_products[:, head.padding_idx] = 0  # its row gets no gradient under the head either
        used, index, times = self.ids.unique(return_inverse=True, return_counts=True)
        by_rows = torch.zeros_like(of_rows[: len(used)]).index_add_(0, index, of_rows)
        scores, states = of_products.to(hidden.dtype), hidden.detach()
        by_head = scores[:, used].T @ states if tied else torch.zeros_like(by_rows)
        through_head = torch.cat([_norms(some.T @ states) for some in scores.split(ROWS_AT_ONCE, dim=1)])
        through_rows = torch.zeros(self.table.vocab_size, device=self.ids.device)
        through_rows[used] = _norms(by_rows)
        total = through_head.clone() if tied else torch.zeros_like(through_rows)
        total[used] = _norms(by_head + by_rows)
        touched = int(total.count_nonzero())
        by_id = {token.id: vars(token) for token in tokens}
        columns = (used, total[used], _norms(by_rows), _norms(by_head), times)
        rows = [
            {**by_id[number], "norm": norm, "through_rows": through, "through_head": from_head, "times": count}
            for number, norm, through, from_head, count in zip(*(c.tolist() for c in columns), strict=True)
        ]
        width = -(-len(total) // BINS)
        parts = {"norms": total, "through_rows": through_rows, "through_head": through_head}
        values = {name: _largest_of_bins(norms, width) for name, norms in parts.items()}
        if len(total) <= WHOLE_TABLE:
            whole = torch.zeros(len(total), by_rows.shape[-1], device=self.ids.device).index_copy_(0, used, by_rows)
            values |= {"rows_gradient": whole, "head_gradient": scores.T @ states}
        facts = {
            "loss": loss.item(),
            "touched": touched,
            "used": len(used),
            "touched_by_look_up": int(through_rows.count_nonzero()),
            "touched_by_head": int(through_head.count_nonzero()),
            "tied": tied,
            "rows": sorted(rows, key=lambda row: -row["norm"]),
            "rows_a_bin": width,
        }
        note = (
            f"loss {loss.item():.3f} nats per token; {touched:,} of {len(total):,} rows get a gradient, "
            f"{len(used):,} were looked up"
        )
        return Step("gradient", note, values, facts, sentence="gradient" if tied else "gradient untied")


def _largest_of_bins(norms: Float[Tensor, " V"], width: int) -> Float[Tensor, "1 bins"]:
    """Return the largest norm in each run of `width` rows."""
    return F.pad(norms, (0, -len(norms) % width)).view(-1, width).amax(-1).unsqueeze(0)


def _norms(rows: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """Return the L2 norm of each row, computed in float32."""
    norms: Tensor = rows.float().norm(dim=-1)
    return norms
