"""A text on its way through a model, one step at a time: the numbers that the page and the terminal show.

Each step is written out plainly here; tests hold the last vectors equal to what the model's own way in gives, and the
gradient equal to autograd's.
"""

import base64
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.checkpoints.layer import EmbeddingLayer, TransformedHead
from embedlayer.errors import TextError, TokenizerError
from embedlayer.explorer.source import Layer, Source
from embedlayer.files import JsonObject
from embedlayer.layers.output import OutputHead
from embedlayer.losses.cross_entropy import finish_logits
from embedlayer.models.decoder import Attention, DecoderLM
from embedlayer.plots import visible_text
from embedlayer.positions.position import AdditivePosition, Position, positions_of
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.tables.table import TokenTable
from embedlayer.text.tokenizer import token_text, without_limits

MOST_TOKENS = 64
MOST_HEADS = 8
LIKELIEST = 8
BINS = 1024
ROWS_AT_ONCE = 8192
SHOWN_DROPOUT = 0.1

Model = Layer | TokenTable
"""What can be shown: a whole decoder, the two ends of one, the way in alone, or only a table."""

TEXTS = (
    "I love dogs and dogs love me.",
    "The cat sat on the mat.",
    "To be, or not to be, that is the question.",
    "A naïve café ☕ in Zürich",
    "for i in range(10): print(i)",
)


@dataclass(frozen=True)
class ShownToken:
    """A token of the text.

    Attributes:
        id: Its ID.
        piece: What it stands for.
        text: The same with spaces and unseen characters marked.
        kind: `"special"`, `"byte"` for a part of a character, or `"text"`.
    """

    id: int
    piece: str
    text: str
    kind: str


@dataclass(frozen=True)
class Step:
    """One step of the way.

    Attributes:
        name: What it is called in code.
        title: What it is called on the page.
        formula: What it computes, in the letters of `embedlayer.shapes`.
        sentence: What one sees.
        note: The sizes and factors of this model, in one line.
        values: Numbers to draw, by name: `(T, C)`, or `(H, T, C)` for each of the first heads.
        facts: Everything else.
        made: The vectors that the step makes, `(T, D)`; `None` where it leaves them as they are.
    """

    name: str
    title: str
    formula: str
    sentence: str
    note: str = ""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    facts: JsonObject = field(default_factory=dict)
    made: Tensor | None = None


@dataclass(frozen=True)
class Pipeline:
    """A text and all steps from its tokens to the gradient that its loss sends back.

    Attributes:
        text: The text.
        tokens: Its first tokens, T of them.
        left_out: Tokens after those, which are not shown.
        vocab_size: Rows of the table, V.
        embed_dim: Width of a row, D.
        steps: In the order in which a model takes them.
        vectors: What enters the first block, `(T, D)`.
    """

    text: str
    tokens: tuple[ShownToken, ...]
    left_out: int
    vocab_size: int
    embed_dim: int
    steps: tuple[Step, ...]
    vectors: Float[Tensor, "T D"]

    def step(self, name: str) -> Step | None:
        """The step of that name, if this model has it."""
        return next((step for step in self.steps if step.name == name), None)

    def to_json(self) -> JsonObject:
        """Everything as JSON; tensors are packed."""
        steps = [
            {**vars(step), "values": {name: packed(value) for name, value in step.values.items()}}
            for step in self.steps
        ]
        for step in steps:
            del step["made"]  # it is among the values
        content = {**vars(self), "tokens": [vars(token) for token in self.tokens], "steps": steps}
        del content["vectors"]
        return cast(JsonObject, _finite(content))


_ONE_AT_A_TIME = threading.Lock()
"""A walk puts a hook on the model and seeds the generator: two in one process would meet."""


def packed(values: Tensor) -> JsonObject:
    """A tensor as JSON without a digit lost: its shape, and its float32 numbers, little-endian, in base64.

    Example:
        >>> packed(torch.tensor([[1.0, 2.0]]))
        {'shape': [1, 2], 'float32': 'AACAPwAAAEA='}
    """
    numbers = values.detach().cpu().float().contiguous().numpy().astype("<f4")
    return {"shape": list(values.shape), "float32": base64.b64encode(numbers.tobytes()).decode("ascii")}


def shown_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[ShownToken, ...]:
    """Tokens as people can read them; a row that the tokenizer does not know is `row N`."""
    specials = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    @cache
    def shown(number: int) -> ShownToken:
        if tokenizer.id_to_token(number) is None:
            return ShownToken(number, "", f"row {number}", "special")
        text = token_text(tokenizer, number)
        is_byte = text.startswith("<0x") and text.endswith(">")
        kind = "special" if number in specials else "byte" if is_byte else "text"
        return ShownToken(number, text, visible_text(text), kind)

    return tuple(shown(number) for number in ids)


def answer(source: Source, params: Mapping[str, str]) -> JsonObject:
    """What the page asks for: the text `params["text"]` on its way through a source; without one, texts to begin with.

    Raises:
        TokenizerError: There is no tokenizer.
        TextError: The text has no tokens.
    """
    if "text" not in params:
        return {"texts": example_texts(source.tokenizer)}
    model = source.table if source.model is None else source.model
    is_checkpoint = source.model is not None and source.run is None
    return pipeline(model, source.tokenizer, params["text"], add_special_tokens=is_checkpoint).to_json()


def baked(source: Source) -> list[dict[str, str]]:
    """What an exported page can ask: the texts to begin with, and each of them on its way."""
    return [{}, *({"text": text} for text in example_texts(source.tokenizer))]


def example_texts(tokenizer: Tokenizer | None) -> list[str]:
    """Texts to begin with that have tokens; none without a tokenizer."""
    if tokenizer is None:
        return []
    unlimited = without_limits(tokenizer)
    return [text for text in TEXTS if unlimited.encode(text, add_special_tokens=False).ids]


def pipeline(
    model: Model,
    tokenizer: Tokenizer | None,
    text: str,
    *,
    add_special_tokens: bool = False,
    most_tokens: int = MOST_TOKENS,
) -> Pipeline:
    """Every step from `text` to the gradient of its loss.

    Args:
        model: What the text goes through. Steps that it does not have are left out.
        tokenizer: Text to IDs.
        text: Any text.
        add_special_tokens: Whether the tokenizer adds the tokens that start or end a text, as checkpoints expect it; a
            model that was trained here has not seen them.
        most_tokens: The text is cut after so many tokens, and at the longest sequence of the positions.

    Raises:
        TokenizerError: There is no tokenizer.
        TextError: The text has no tokens.
        TokenIdError: The tokenizer gives IDs that the table does not have.

    Example:
        >>> [step.name for step in pipeline(model, tokenizer, "I love dogs").steps]
        ['one_hot', 'rows', 'scale', 'positions', 'dropout', 'rotation', 'head', 'gradient']
    """
    if tokenizer is None:
        raise TokenizerError("This source has no tokenizer, so no text can be read. Name one with --tokenizer.")
    ids = without_limits(tokenizer).encode(text, add_special_tokens=add_special_tokens).ids
    if not ids:
        raise TextError(f"{text!r} has no tokens: there is nothing to look up.")
    table, position = parts_of(model)
    kept = ids[: min(most_tokens, position.max_seq_len or most_tokens)]
    tokens = shown_tokens(tokenizer, kept)
    device = table.device
    batch = torch.tensor(kept, device=device)
    with _ONE_AT_A_TIME, torch.enable_grad():
        walk = _Walk(model, table, position, batch)
        steps = tuple(walk.steps(tokens, tokenizer))
    left_out = len(ids) - len(kept)
    return Pipeline(text, tokens, left_out, table.vocab_size, table.embed_dim, steps, walk.x.detach())


def parts_of(model: Model) -> tuple[TokenTable, Position]:
    """The table of any model, and its positions; a bare table has none."""
    return (model, Position()) if isinstance(model, TokenTable) else (model.table, model.position)


def queries_and_keys(
    model: DecoderLM, x: Float[Tensor, "T D"]
) -> tuple[Float[Tensor, "H T K"], Float[Tensor, "G T K"]]:
    """Queries and keys of the first block, before any position acts on them."""
    block = model.blocks[0]
    attention = cast(Attention, block.attention)
    inner = cast(nn.RMSNorm, block.attention_norm)(x)
    queries, keys = (
        part(inner).unflatten(-1, (-1, attention.head_dim)).transpose(-2, -3)
        for part in (attention.query, attention.key)
    )
    return queries, keys


class _Walk:
    """One text on its way; every step keeps the graph, so that the last can ask for the gradient of the first."""

    def __init__(self, model: Model, table: TokenTable, position: Position, ids: Int[Tensor, " T"]) -> None:
        self.model = model
        self.table = table
        self.position = position
        self.ids = ids
        self.places = model._positions(ids, None) if isinstance(model, EmbeddingLayer) else positions_of(ids)
        self.rows = table.look_up(ids).detach().requires_grad_()
        self.x = self.rows

    def steps(self, tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> Iterator[Step]:
        yield self._one_hot()
        yield self._look_up()
        yield self._scale()
        recipe = self.model.recipe if isinstance(self.model, EmbeddingLayer) else ("position",)
        for name in recipe:
            yield from {
                "types": self._types,
                "position": self._add,
                "norm": self._norm,
                "project": self._project,
            }[name]()
        if "position" not in recipe:
            yield from self._add()
        yield self._dropout()
        yield from self._inside_attention()
        head = getattr(self.model, "head", None)
        if head is not None:
            yield from self._way_out(head, tokens, tokenizer)

    def _one_hot(self) -> Step:
        return Step(
            "one_hot",
            "One-hot",
            "e[t, v] = 1 if v = id[t], else 0",
            "Each token is one mark among all the places of the vocabulary: a line of zeros with a single 1.",
            f"{len(self.ids)} times {self.table.vocab_size:,} places",
        )

    def _look_up(self) -> Step:
        return Step(
            "rows",
            "Rows",
            "e · W, which is W[id[t]]",
            "A one-hot line times the table picks out one row, so nothing is multiplied: the row is read.",
            f"a table of {self.table.vocab_size:,} × {self.table.embed_dim}",
            {"rows": self.rows},
            made=self.rows.detach(),
        )

    def _scale(self) -> Step:
        factor = self.table.factor
        before = self.x
        self.x = before if factor is None else factor * before
        number = 1.0 if factor is None else float(factor)
        root = abs(number - self.table.embed_dim**0.5) < 0.01 * number
        return Step(
            "scale",
            "Scale",
            "x = s · W[id[t]]",
            "Every number is multiplied by the same factor, so that a token weighs enough beside its position."
            if factor is not None
            else "This model takes its rows as they are; others multiply them, often by √D.",
            "no scale" if factor is None else f"each row times {number:.6g}" + (" = √D" if root else ""),
            {"scaled": self.x},
            {"factor": number, "scaled": factor is not None},
            made=None if factor is None else self.x.detach(),
        )

    def _types(self) -> Iterator[Step]:
        assert isinstance(self.model, EmbeddingLayer)
        before = self.x
        self.x = self.model._add_types(before, self.ids, None)
        yield Step(
            "types",
            "Types",
            "x + types[0]",
            "A vector for the segment that a token stands in is added; here all are in the first.",
            "segment 0" if self.x is not before else "this model adds none where no segments are given",
            {"types": self.x - before, "result": self.x},
            made=self.x.detach(),
        )

    def _add(self) -> Iterator[Step]:
        name = type(self.position).__name__
        if not isinstance(self.position, AdditivePosition):
            elsewhere = "turns queries and keys" if _rotates(self.position) else "is a bias on the scores"
            neutral = type(self.position) is Position
            yield Step(
                "positions",
                "Positions",
                "x stays as it is",
                "This model tells the input nothing about positions."
                if neutral
                else f"Nothing is added here: this scheme {elsewhere}, inside attention, two steps on.",
                "none" if neutral else f"{name}: adds nothing here, it acts inside attention",
                {"result": self.x},
                {"kind": "none" if neutral else "rotation" if _rotates(self.position) else "bias", "scheme": name},
            )
            return
        added = self.position.vectors(self.places).to(self.x.dtype)
        yield Step(
            "positions",
            "Positions",
            "p[t]",
            "Each position in the text has a vector of its own, whatever token stands there.",
            f"{name}: adds a vector for each position",
            {"positions": added},
            {"kind": "added", "scheme": name},
            made=added.detach(),
        )
        before = self.x
        self.x = self.position.add(before, self.places)
        yield Step(
            "sum",
            "Sum",
            "x[t] + p[t]",
            "Token and position become one vector: the same token at two positions now has two.",
            f"shape {tuple(self.x.shape)}",
            {"tokens": before, "positions": added, "result": self.x},
            made=self.x.detach(),
        )

    def _norm(self) -> Iterator[Step]:
        self.x = self._layer("norm")(self.x)
        yield Step(
            "norm",
            "Normalise",
            "LayerNorm(x)",
            "Each vector is shifted to mean 0 and scaled to variance 1, then weighted number by number.",
            f"width {self.x.shape[-1]}",
            {"result": self.x},
            made=self.x.detach(),
        )

    def _project(self) -> Iterator[Step]:
        self.x = self._layer("projection")(self.x)
        yield Step(
            "project",
            "Project",
            "x · P",
            "Narrow rows are widened to the width of the blocks.",
            f"{self.table.embed_dim} to {self.x.shape[-1]}",
            {"result": self.x},
            made=self.x.detach(),
        )

    def _layer(self, name: str) -> Callable[[Tensor], Tensor]:
        return cast(Callable[[Tensor], Tensor], getattr(self.model, name))

    def _dropout(self) -> Step:
        layer = getattr(self.model, "dropout", None)
        stated = layer.p if isinstance(layer, nn.Dropout) else None
        shown = stated or SHOWN_DROPOUT
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            dropped = F.dropout(self.x.detach().cpu(), shown)
        own = {None: "this source does not state one", 0.0: "this model has p = 0"}
        return Step(
            "dropout",
            "Dropout",
            "0 with probability p, else x / (1 − p)",
            "Only in training: some numbers become 0, another choice each time, and the others grow to keep the mean. "
            "In use, nothing is dropped.",
            f"p = {stated:g}" if stated else f"{own[stated]}; shown as it would be with p = {shown:g}",
            {"kept": self.x, "dropped": dropped},
            {"p": stated, "shown_p": shown},
        )

    def _inside_attention(self) -> Iterator[Step]:
        """What a scheme that adds nothing does in the first block."""
        if _rotates(self.position):
            yield self._rotation()
        elif type(self.position).bias is not Position.bias:
            bias = self.position.bias(self.places, self.places)
            assert bias is not None  # its scheme overrides this hook
            yield Step(
                "bias",
                "Bias",
                "q[i] · k[j] / √K + bias[h, i, j]",
                "The further back a key stands, the more is taken from its score; each head has its own slope.",
                f"{bias.shape[1]} heads",
                {"bias": bias[0, :MOST_HEADS]},
                {"causal": not getattr(self.position, "bidirectional", False), "heads": bias.shape[1]},
            )

    def _rotation(self) -> Step:
        position = cast(RotaryEmbedding, self.position)
        cos, sin = position.cos_sin(self.places)
        values = {"angles": torch.atan2(sin, cos)}
        pairs = cos.shape[-1]
        note = f"{pairs} pairs of dimensions turn"
        if isinstance(self.model, DecoderLM) and len(self.model.blocks):
            queries, keys = queries_and_keys(self.model, self.x)
            turned_queries, turned_keys = position.rotate(queries, keys, self.places)
            values |= {
                "queries": queries[:MOST_HEADS],
                "queries_turned": turned_queries[:MOST_HEADS],
                "keys": keys[:MOST_HEADS],
                "keys_turned": turned_keys[:MOST_HEADS],
            }
            note += f" in each of {queries.shape[-3]} query and {keys.shape[-3]} key heads of the first block"
        return Step(
            "rotation",
            "Rotation",
            "(a, b) → (a cos θ − b sin θ, a sin θ + b cos θ), θ = t · base^(−2i/K)",
            "Inside attention, pairs of numbers of every query and key are turned like clock hands: the first pairs "
            "fast, the last slowly.",
            note,
            values,
            {
                "interleaved": position.interleaved,
                "rotary_dim": position.rotary_dim,
                "head_dim": position.head_dim,
                "base": position.base,
            },
        )

    def _way_out(
        self, head: OutputHead | TransformedHead, tokens: Sequence[ShownToken], tokenizer: Tokenizer
    ) -> Iterator[Step]:
        hidden = self._hidden()
        output = head.output if isinstance(head, TransformedHead) else head
        if isinstance(head, TransformedHead):
            hidden = head.transform(hidden)
        rows_of = _rows_of(output)
        products = torch.cat([hidden @ rows_of(start, stop).T for start, stop in _chunks(self.table.vocab_size)], -1)
        logits = finish_logits(products, **output.logit_options()).float()
        chances = logits.detach().softmax(-1)
        whole = isinstance(self.model, DecoderLM)
        best = chances.topk(min(LIKELIEST, chances.shape[-1]), dim=-1)
        names = iter(shown_tokens(tokenizer, best.indices.flatten().tolist()))
        likeliest = [[{**vars(next(names)), "chance": chance} for chance in row] for row in best.values.tolist()]
        following = self.ids[1:]
        yield Step(
            "head",
            "Head",
            "softmax(h · Wᵀ)",
            "Read the other way: what comes out of the blocks is compared with all rows, and the scores become "
            "probabilities of the next token."
            if whole
            else "Read the other way: a vector is compared with all rows. This source holds the two ends only, so the "
            "head reads the input vectors themselves, with no blocks between.",
            ("tied: the rows are the table's" if output.tied else "a head with rows of its own")
            + f"; {self.table.vocab_size:,} scores for each token",
            {"hidden": hidden},
            {
                "likeliest": likeliest,
                "next": chances[:-1].gather(-1, following.unsqueeze(-1)).squeeze(-1).tolist(),
                "tied": output.tied,
                "blocks": len(self.model.blocks) if isinstance(self.model, DecoderLM) else 0,
            },
        )
        if len(following):
            yield self._gradient(hidden, products, logits, output, tokens)

    def _hidden(self) -> Float[Tensor, "T D"]:
        """What the head reads: the model's own blocks, entered with the vectors of these steps."""
        if not isinstance(self.model, DecoderLM):
            return self.x
        model, entered = self.model, self.x.unsqueeze(0)
        first = model.blocks[0] if len(model.blocks) else model.norm
        hook = first.register_forward_pre_hook(lambda _, inputs: (entered, *inputs[1:]))
        try:
            return model.hidden(self.ids.unsqueeze(0), positions=self.places).squeeze(0)
        finally:
            hook.remove()

    def _gradient(
        self,
        hidden: Float[Tensor, "T R"],
        products: Float[Tensor, "T V"],
        logits: Float[Tensor, "T V"],
        output: OutputHead,
        tokens: Sequence[ShownToken],
    ) -> Step:
        """The gradient of each row: through the look-up, and if the head is tied, through the scores."""
        loss = F.cross_entropy(logits[:-1], self.ids[1:])
        of_rows, of_products = torch.autograd.grad(loss, [self.rows, products])
        if self.table.padding_idx is not None:
            of_rows = of_rows.masked_fill((self.ids == self.table.padding_idx).unsqueeze(-1), 0)
        used, places, times = self.ids.unique(return_inverse=True, return_counts=True)
        by_rows = torch.zeros_like(of_rows[: len(used)]).index_add_(0, places, of_rows)
        by_head = torch.zeros_like(by_rows)
        total = torch.zeros(self.table.vocab_size, device=self.ids.device)
        if output.tied:
            scores, states = of_products.to(hidden.dtype), hidden.detach()
            by_head = scores[:, used].T @ states
            for start, stop in _chunks(len(total)):
                total[start:stop] = _norms(scores[:, start:stop].T @ states)
        total[used] = _norms(by_head + by_rows)
        touched = int(total.count_nonzero())
        by_id = {token.id: vars(token) for token in tokens}
        columns = (used, total[used], _norms(by_rows), _norms(by_head), times)
        rows = [
            {**by_id[number], "norm": norm, "through_rows": through_rows, "through_head": through_head, "times": count}
            for number, norm, through_rows, through_head, count in zip(*(c.tolist() for c in columns), strict=True)
        ]
        return Step(
            "gradient",
            "Gradient",
            "∂loss / ∂W",
            "The head is tied, so the loss pushes every row a little through the scores; the rows that were looked up "
            "get their share on top."
            if output.tied
            else "Only rows that were looked up get a gradient; all others of the table stay as they are.",
            f"loss {loss.item():.3f} nats per token; {touched:,} of {len(total):,} rows get a gradient, "
            f"{len(used):,} were looked up",
            {"norms": _widest(total)},
            {
                "loss": loss.item(),
                "touched": touched,
                "used": len(used),
                "tied": output.tied,
                "rows": sorted(rows, key=lambda row: -row["norm"]),
                "rows_a_bin": -(-len(total) // BINS),
            },
        )


def _norms(rows: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    norms: Tensor = rows.float().norm(dim=-1)
    return norms


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: `None` in their place."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _rotates(position: Position) -> bool:
    return type(position).rotate is not Position.rotate


def _rows_of(output: OutputHead) -> Callable[[int, int], Tensor]:
    """Rows of the head as stored, without a gradient of their own."""
    table: TokenTable | None = output.__dict__["table"]
    if table is not None:
        return lambda start, stop: table.rows(start, stop).detach()
    return lambda start, stop: output.weight[start:stop].detach()


def _chunks(rows: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE))


def _widest(norms: Float[Tensor, " V"]) -> Float[Tensor, "1 bins"]:
    """The largest of each of at most `BINS` stretches of rows."""
    width = -(-len(norms) // BINS)
    padded = F.pad(norms, (0, -len(norms) % width))
    return padded.view(-1, width).amax(-1).unsqueeze(0)
