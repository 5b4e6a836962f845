"""The steps of one text in a model, from its tokens to the gradient of the loss, with what the page draws of each.

The model traces its input embedding itself. Tests compare the last vectors with the model's own, and the gradient of
each row with autograd's.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.explorer.block_trace import BlockTrace, block_formulas, head_formula, norm_formula, trace_first_block
from embedlayer.explorer.rotation import PairRotation, pair_rotation, width_of
from embedlayer.explorer.text_answers import PackedTensor, ShownToken
from embedlayer.explorer.text_ids import Vocabulary, shown_tokens
from embedlayer.families import FAMILIES, HUGGING_FACE_TENSORS
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.inputs.embedding import TransformerEmbedding
from embedlayer.inputs.steps import TokenBatch, TracedStep, input_steps, trace_steps
from embedlayer.io.files import JsonObject
from embedlayer.losses.definition import finish
from embedlayer.losses.largest import top_k
from embedlayer.losses.options import LogitSettings
from embedlayer.losses.rows import in_head_dtype, linear
from embedlayer.models.decoder import Attention, Block, DecoderLM
from embedlayer.positions.position import Position, positions_of
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
SMALL_MATRIX = 64
NEAR_ROWS = 3
NEAR_COLUMNS = 64

Model = DecoderLM | EmbeddingLayer | TransformerEmbedding | TokenTable
"""What can be shown: a decoder, the embedding layer of a checkpoint, an input embedding, or only a table."""

_WHOLE_MODELS = (
    "The blocks are read of embedlayer's own decoders, and of checkpoints of the types "
    + " and ".join(kind for each in FAMILIES if each.decoder is HUGGING_FACE_TENSORS for kind in each.model_types)
    + "."
)

_POSITION_KINDS = {"add": "added", "rotate": "rotation", "bias": "bias", None: "none"}


@dataclass
class PipelineStep:
    """One step of the computation, from text to gradient, as the page shows it."""

    name: str
    note: str
    values: Mapping[str, Tensor] = field(default_factory=dict)
    facts: JsonObject = field(default_factory=dict)
    _: KW_ONLY
    sentence: str = ""
    own_formula: str = ""
    idle: bool = False
    vectors: Tensor | None = None

    def __post_init__(self) -> None:
        self.vectors = None if self.vectors is None else self.vectors.detach()

    @property
    def title(self) -> str:
        return self._heading[0]

    @property
    def formula(self) -> str:
        return self.own_formula or self._heading[1]

    @property
    def _heading(self) -> tuple[str, str]:
        """Return title and formula of the step."""
        return TITLES.get(self.sentence, TITLES[self.name])

    def to_json(self) -> JsonObject:
        """Return the step as a JSON object, with its title, formula and explanation, and with packed tensors."""
        return {
            "name": self.name,
            "title": self.title,
            "formula": self.formula,
            "sentence": SENTENCES[self.sentence or self.name],
            "note": self.note,
            "idle": self.idle,
            "values": {name: packed(value) for name, value in self.values.items()},
            "facts": self.facts,
        }


def packed(values: Tensor) -> PackedTensor:
    """Return a tensor as JSON: its shape, and its float32 numbers, little-endian, in base64."""
    numbers = values.detach().cpu().float().contiguous().numpy().astype("<f4")
    return {"shape": list(values.shape), "float32": base64.b64encode(numbers.tobytes()).decode("ascii")}


def longest(position: Position, most_tokens: int = MOST_TOKENS) -> int:
    """Return the number of tokens after which a text is cut."""
    return min(most_tokens, position.max_seq_len or most_tokens)


def parts_of(model: Model) -> tuple[LookupTable, Position]:
    """Return the table and the position scheme of a model; a table alone has the scheme without positions."""
    return (model, Position()) if isinstance(model, TokenTable) else (model.table, model.position)


def queries_and_keys(
    model: DecoderLM, x: Float[Tensor, "T D"]
) -> tuple[Float[Tensor, "H T K"], Float[Tensor, "G T K"]]:
    """Compute queries and keys of a decoder's first block, before rotary positions are applied."""
    block = model.blocks[0]
    attention = cast(Attention, block.attention)
    normed = cast(nn.RMSNorm, block.attention_norm)(x)
    queries, keys = (
        projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(-2, -3)
        for projection in (attention.query, attention.key)
    )
    return queries, keys


class TracedText(NamedTuple):
    """The input embedding of one text in a model, computed in one autograd graph with all that follows."""

    model: Model
    ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    steps: list[TracedStep]

    @property
    def scaled(self) -> Float[Tensor, "T D"]:
        """Return the rows times the scale, if the table has one."""
        return next(step.vectors for step in self.steps[1::-1] if step.name in ("scale", "look_up"))

    @property
    def vectors(self) -> Float[Tensor, "T D"]:
        """Return the result of the input embedding."""
        return self.steps[-1].vectors

    @property
    def looked_up_ids(self) -> Int[Tensor, " T"] | None:
        """Return the IDs that injections of a decoder look up beside `scaled`; `None` if it has none."""
        return self.ids if isinstance(self.model, DecoderLM) and len(self.model.injections) else None


def trace_text(model: Model, ids: Int[Tensor, " T"]) -> TracedText:
    """Compute the input embedding of a text as steps, without dropout; the looked-up vectors require a gradient."""
    positions = model.default_positions(ids) if isinstance(model, EmbeddingLayer) else positions_of(ids)
    if isinstance(model, TokenTable):
        trace = trace_steps(input_steps(model, Position()), TokenBatch(ids, positions))
    else:
        trace = model.trace(ids)
    look_up = next(trace)
    look_up.vectors.requires_grad_()
    return TracedText(model, ids, positions, [look_up, *(step for step in trace if step.name != "dropout")])


def pipeline_steps(
    traced: TracedText, tokens: Sequence[ShownToken], vocabulary: Vocabulary, no_decoder: str = ""
) -> Iterator[PipelineStep]:
    """Yield all steps of a text in order, from its tokens to the gradient of the loss."""
    table, position = parts_of(traced.model)
    yield _tokenize(tokens, vocabulary)
    yield PipelineStep("one_hot", f"for each of {len(traced.ids)} tokens, {table.vocab_size:,} entries")
    _, rows, note, _ = traced.steps[0]
    near, facts = _near_rows(table, traced.ids, vocabulary)
    yield PipelineStep("look_up", note, {"rows": rows, "near": near}, facts, vectors=rows)
    yield from _input_steps(traced, table, position)
    yield _dropout(getattr(traced.model, "dropout", None), traced.vectors)
    trace = _first_block(traced)
    if position.hook == "rotate":
        rotation = pair_rotation(position, traced.positions)
        if rotation is not None and len(rotation.channels):
            yield _rotation(rotation, position, traced, trace)
    elif position.hook == "bias":
        bias = position.bias(traced.positions, traced.positions)
        assert bias is not None  # the scheme overrides this hook
        facts = {"causal": not getattr(position, "bidirectional", False), "heads": bias.shape[1]}
        yield PipelineStep("bias", f"{bias.shape[1]} heads", {"bias": bias[0, :MOST_HEADS]}, facts)
    if trace is not None:
        yield _block(trace, cast(DecoderLM, traced.model))
    head = getattr(traced.model, "head", None)
    if head is not None:
        yield from _head_steps(head, traced, tokens, vocabulary, no_decoder)


def _tokenize(tokens: Sequence[ShownToken], vocabulary: Vocabulary) -> PipelineStep:
    """Return the first step, without numbers: what the tokenizer did is another answer, `explorer.tokenization`."""
    if isinstance(vocabulary, Tokenizer):
        size, kind = vocabulary.get_vocab_size(), type(vocabulary.model).__name__
        return PipelineStep("tokenize", f"{kind} with {size:,} tokens; {len(tokens)} of them here")
    sentence = "tokenize ids" if vocabulary is None else "tokenize names"
    return PipelineStep("tokenize", f"{len(tokens)} tokens", sentence=sentence)


@torch.no_grad()
def _near_rows(
    table: LookupTable, token_ids: Int[Tensor, " T"], vocabulary: Vocabulary
) -> tuple[Float[Tensor, "N W C"], JsonObject]:
    """Return parts of the table around the looked-up rows, for a picture of the table."""
    size = table.vocab_size
    wide = size if size <= WHOLE_TABLE else min(size, 2 * NEAR_ROWS + 1)
    firsts, part_of = (token_ids - NEAR_ROWS).clamp(0, size - wide).unique(return_inverse=True)
    ids = firsts.unsqueeze(1) + torch.arange(wide, device=firsts.device)
    rows = table.look_up(ids)
    columns = -(-rows.shape[-1] // NEAR_COLUMNS)
    largest = rows.gather(-1, _largest_of_each(rows, columns))
    names = [[token["text"] for token in shown_tokens(vocabulary, part)] for part in ids.tolist()]
    parts = [{"first": first, "names": of} for first, of in zip(firsts.tolist(), names, strict=True)]
    return largest, {"parts": parts, "part_of": part_of.tolist(), "whole": wide == size}


def _largest_of_each(rows: Float[Tensor, "*batch D"], count: int) -> Int[Tensor, "*batch runs"]:
    """Return the index of the largest absolute value in each run of `count` numbers of a row."""
    runs = F.pad(rows.abs(), (0, -rows.shape[-1] % count), value=-1.0).unflatten(-1, (-1, count))
    index: Tensor = runs.argmax(-1) + count * torch.arange(runs.shape[-2], device=rows.device)
    return index


def _input_steps(traced: TracedText, table: LookupTable, position: Position) -> Iterator[PipelineStep]:
    """Yield the steps of the input embedding after the look-up, without dropout."""
    x, steps = traced.scaled, traced.steps[1:]
    if x is traced.steps[0].vectors:
        facts = {"factor": 1.0, "scaled": False}
        yield PipelineStep("scale", "no scale", {"scaled": x}, facts, sentence="no scale", idle=True)
    else:
        scale, *steps = steps
        facts = {"factor": float(cast(float, table.factor)), "scaled": True}
        yield PipelineStep("scale", scale.description, {"scaled": x}, facts, vectors=x)
    if not any(step.name == "position" for step in steps):  # a step that adds nothing
        batch = TokenBatch(traced.ids, traced.positions)
        steps = [*steps, *trace_steps(input_steps(table, position)[1:], batch, traced.vectors)]
    for step in steps:
        before, x = x, step.vectors
        if step.name == "position":
            yield from _position_steps(step, before, position)
            continue
        values, idle = {"result": x}, x.shape == before.shape and bool((x == before).all())
        if step.name == "types":
            idle = step.added is None
            values = {"types": torch.zeros_like(before) if step.added is None else step.added, **values}
        yield PipelineStep(step.name, step.description, values, idle=idle, vectors=x)


def _position_steps(traced: TracedStep, before: Tensor, position: Position) -> Iterator[PipelineStep]:
    """Yield one step with the position vectors and one with the sum of both."""
    x, note = traced.vectors, traced.description
    facts = {"kind": _POSITION_KINDS[position.hook], "scheme": type(position).__name__}
    if traced.added is None:
        sentence = f"position {position.hook or 'none'}"
        yield PipelineStep("position", note, {"result": x}, facts, sentence=sentence, idle=True)
        return
    yield PipelineStep("position", note, {"positions": traced.added}, facts, vectors=traced.added)
    values = {"tokens": before, "positions": traced.added, "result": x}
    yield PipelineStep("sum", f"shape {tuple(x.shape)}", values, vectors=x)


def _dropout(layer: nn.Module | None, x: Float[Tensor, "T D"]) -> PipelineStep:
    """Return the dropout step: the vectors before and after an example mask, which is the same in every call."""
    p = layer.p if isinstance(layer, nn.Dropout) else None
    shown = p or SHOWN_DROPOUT
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) >= shown
    values = {"kept": x, "dropped": x.detach().cpu() * mask / (1 - shown)}
    reason = "this source does not state one" if p is None else "this model has p = 0"
    note = f"p = {p:g}" if p else f"{reason}; shown as it would be with p = {shown:g}"
    sentence = "dropout" if p else "no dropout"
    return PipelineStep("dropout", note, values, {"p": p, "shown_p": shown}, sentence=sentence, idle=not p)


def _rotation(rotation: PairRotation, position: Position, traced: TracedText, trace: BlockTrace | None) -> PipelineStep:
    values = {"angles": rotation.angles}
    note = f"{len(rotation.channels)} pairs of dimensions rotate"
    if trace is not None:
        queries, keys = queries_and_keys(cast(DecoderLM, traced.model), trace.vectors["input"])
        rotated_queries, rotated_keys = position.rotate(queries, keys, traced.positions)
        values |= {
            "queries": queries[:MOST_HEADS],
            "queries_turned": rotated_queries[:MOST_HEADS],
            "keys": keys[:MOST_HEADS],
            "keys_turned": rotated_keys[:MOST_HEADS],
        }
        note += f" in each of {queries.shape[-3]} query and {keys.shape[-3]} key heads of the first block"
    facts = {"channels": rotation.channels.tolist(), "head_dim": width_of(position)}
    return PipelineStep("rotation", note, values, facts)


def _first_block(traced: TracedText) -> BlockTrace | None:
    """Return what the first block of a decoder computes; `None` for a model without blocks."""
    model = traced.model
    if not isinstance(model, DecoderLM) or not len(model.blocks):
        return None
    return trace_first_block(model, traced.looked_up_ids, traced.scaled.detach(), traced.positions)


def _block(trace: BlockTrace, model: DecoderLM) -> PipelineStep:
    """Return the step with the vectors inside the first block, its attention weights, and the length of all states."""
    block, formulas = cast(Block, model.blocks[0]), block_formulas(model, trace)
    vectors, product = trace.vectors, trace.vectors["product"]
    units_a_column = -(-product.shape[-1] // BINS)
    strongest = _largest_of_each(product, units_a_column)
    inside = {name: vectors[name].gather(-1, strongest) for name in ("gate", "up", "product")}
    per_group = len(trace.weights) // len(trace.values)
    norms, parts = (block.attention_norm, block.mlp_norm), (block.attention, block.mlp)
    values = {
        **vectors,
        **inside,
        "lengths": torch.stack([_norms(rows) for rows in vectors.values()], dim=-1),
        "state_lengths": torch.stack([_norms(rows) for rows in trace.states], dim=-1),
        "norm_weights": torch.stack([norm.weight for norm in norms]),
        "scores": trace.scores[:MOST_HEADS],
        "weights": trace.weights[:MOST_HEADS],
        "values": trace.values.repeat_interleave(per_group, 0)[:MOST_HEADS],
        "heads": trace.heads[:MOST_HEADS],
    }
    weights = {name: cast(nn.Linear, part).weight for each in parts for name, part in each.named_children()}
    if all(weight.numel() <= SMALL_MATRIX for weight in weights.values()):
        values |= {f"{name}_matrix": weight for name, weight in weights.items()}
    facts: JsonObject = {
        "vectors": [
            {"name": name, "symbol": formulas[name][0], "formula": formulas[name][1], "size": rows.shape[-1]}
            for name, rows in vectors.items()
        ],
        "eps": norms[0].eps,
        "heads": len(trace.weights),
        "kv_heads": len(trace.values),
        "units_a_column": units_a_column,
        "blocks": len(model.blocks),
    }
    sizes = model.sizes
    note = (
        f"block 1 of {len(model.blocks)}; {sizes['num_heads']} query and {sizes['num_kv_heads']} key/value heads of "
        f"width {sizes['head_dim']}; {sizes['mlp_dim']:,} units in SwiGLU{_rounding(vectors['input'])}"
    )
    return PipelineStep("block", note, values, facts, vectors=trace.states[1])


def _rounding(result: Tensor) -> str:
    """Return how far a number of a result may be rounded, as the end of a note; `""` in float32 and beyond."""
    dtype, share = str(result.dtype).removeprefix("torch."), 2 / torch.finfo(result.dtype).eps
    return "" if share > 1e6 else f"; computed in {dtype}, which rounds by up to 1 part in {share:,.0f}"


def _head_steps(
    head: OutputHead | PredictionHead,
    traced: TracedText,
    tokens: Sequence[ShownToken],
    vocabulary: Vocabulary,
    no_decoder: str,
) -> Iterator[PipelineStep]:
    """Yield the step with the most likely next tokens after each token, and the step with the gradient of the loss."""
    model, ids, hidden = traced.model, traced.ids, traced.vectors
    values, norm = {}, None
    if isinstance(model, DecoderLM):
        norm = model.norm
        for x in model.hidden_states(traced.looked_up_ids, inputs_embeds=traced.scaled, positions=traced.positions):
            values["before_norm"] = x
        hidden = norm(values["before_norm"])
    values["hidden"] = hidden
    output = head.output if isinstance(head, PredictionHead) else head
    states = head.transform(hidden) if isinstance(head, PredictionHead) else hidden
    product = partial(linear, weight=output.weight) if output.table is None else output.table.raw_logits
    raw_logits = in_head_dtype(product, states, output.head_dtype)
    logits = finish(raw_logits, LogitSettings(**output.logit_options())).float()
    facts = _likely_tokens(logits.detach(), ids[1:], vocabulary) | {"tied": output.tied}
    table, position = parts_of(model)
    rows = "tied: the rows are the table's" if output.tied else "an untied head with its own rows"
    note = f"{rows}; {table.vocab_size:,} scores for each token{_rounding(hidden)}"
    formula = head_formula(head, norm)
    if norm is None:
        sentence = "head only"
        note = f"{note}. {f'The blocks are not read: {no_decoder}' if no_decoder else _WHOLE_MODELS}"
    else:
        sentence, last = "head", logits[-1:].detach()
        likely = top_k(last[0], min(CANDIDATES, last.shape[-1]))[1].tolist()
        facts["candidates"] = list(shown_tokens(vocabulary, likely))
        facts["tokens_left"] = longest(position) - len(ids)
        facts["norm_eps"] = norm.eps
        values |= {"norm_weight": norm.weight.unsqueeze(0), "logits": last}
        if table.vocab_size <= WHOLE_TABLE and states is hidden:
            values["head_rows"] = output.weight if output.table is None else output.table.rows(0, table.vocab_size)
        note = f"{norm_formula(norm)}; {note}"
    yield PipelineStep("head", note, values, facts, sentence=sentence, own_formula=formula)
    if len(ids) > 1:
        loss = F.cross_entropy(logits[:-1], ids[1:])
        yield _gradient(loss, traced, states, raw_logits, output, tokens)


def _likely_tokens(logits: Float[Tensor, "T V"], following: Int[Tensor, " N"], vocabulary: Vocabulary) -> JsonObject:
    """Return the most likely tokens after each token, and the probability of each following token, for JSON."""
    chances = logits.softmax(-1)
    best = chances.topk(min(TOP_TOKENS, chances.shape[-1]), dim=-1)
    names = iter(shown_tokens(vocabulary, best.indices.flatten().tolist()))
    rows = zip(best.values.tolist(), logits.gather(-1, best.indices).tolist(), strict=True)
    return {
        "top_tokens": [
            [{**next(names), "chance": chance, "logit": logit} for chance, logit in zip(*row, strict=True)]
            for row in rows
        ],
        "next": chances[:-1].gather(-1, following.unsqueeze(-1)).squeeze(-1).tolist(),
    }


def _gradient(
    loss: Float[Tensor, ""],
    traced: TracedText,
    hidden: Float[Tensor, "T R"],
    raw_logits: Float[Tensor, "T V"],
    head: OutputHead,
    tokens: Sequence[ShownToken],
) -> PipelineStep:
    """Return the step with the norms of the loss's gradient: of each looked-up row, and of the whole table by rows."""
    ids, table, tied = traced.ids, parts_of(traced.model)[0], head.tied
    of_rows, scores = torch.autograd.grad(loss, [traced.steps[0].vectors, raw_logits])
    if table.padding_idx is not None:
        of_rows = of_rows.masked_fill((ids == table.padding_idx).unsqueeze(-1), 0)
    if head.padding_idx is not None:
        scores[:, head.padding_idx] = 0  # its row gets no gradient under the head either
    used, index, times = ids.unique(return_inverse=True, return_counts=True)
    by_rows = torch.zeros_like(of_rows[: len(used)]).index_add_(0, index, of_rows)
    hidden = hidden.detach().to(scores.dtype)
    by_head = scores[:, used].T @ hidden if tied else torch.zeros_like(by_rows)
    through_head = torch.cat([_norms(some.T @ hidden) for some in scores.split(ROWS_AT_ONCE, dim=1)])
    through_rows = torch.zeros(table.vocab_size, device=ids.device)
    through_rows[used] = _norms(by_rows)
    total = through_head.clone() if tied else torch.zeros_like(through_rows)
    total[used] = _norms(by_head + by_rows)
    touched = int(total.count_nonzero())
    by_id = {token["id"]: token for token in tokens}
    columns = (used, total[used], _norms(by_rows), _norms(by_head), times)
    rows = [
        {**by_id[number], "norm": norm, "through_rows": through, "through_head": from_head, "times": count}
        for number, norm, through, from_head, count in zip(*(c.tolist() for c in columns), strict=True)
    ]
    width = -(-len(total) // BINS)
    parts = {"norms": total, "through_rows": through_rows, "through_head": through_head}
    values = {  # the largest norm of each bin of rows
        name: F.pad(norms, (0, -len(norms) % width)).view(1, -1, width).amax(-1) for name, norms in parts.items()
    }
    if len(total) <= WHOLE_TABLE:
        whole = torch.zeros(len(total), by_rows.shape[-1], device=ids.device).index_copy_(0, used, by_rows)
        values |= {"rows_gradient": whole, "head_gradient": scores.T @ hidden}
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
    return PipelineStep("gradient", note, values, facts, sentence="gradient" if tied else "gradient untied")


def _norms(rows: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """Return the L2 norm of each row, computed in float32."""
    norms: Tensor = rows.float().norm(dim=-1)
    return norms


TITLES = {
    "tokenize": ("Tokenize", "text → pre-tokens → tokens → id[t]"),
    "one_hot": ("One-hot", "e[t, v] = 1 if v = id[t], else 0"),
    "look_up": ("Rows", "e · W, which is W[id[t]]"),
    "scale": ("Scale", "x = s · W[id[t]]"),
    "types": ("Types", "x + types[0]"),
    "position": ("Positions", "p[t]"),
    "sum": ("Sum", "x[t] + p[t]"),
    "injections": ("Other tables", "x[t] + vectors of other tables"),
    "mask": ("Mask", "0 for padding"),
    "length_mask": ("Mask", "0 for padding"),
    "token_dropout": ("Token dropout", "0 for the mask token, the others rescaled"),
    "streams": ("Streams", "x and the vectors that predict later tokens"),
    "codes": ("Codes", "x and the sum of the rows of codes"),
    "norm": ("Normalise", "LayerNorm(x)"),
    "project": ("Project", "x · P"),
    "dropout": ("Dropout", "0 with probability p, else x / (1 − p)"),
    "rotation": ("Rotation", "(a, b) → (a cos θ − b sin θ, a sin θ + b cos θ), θ = t · base^(−2i/K)"),
    "bias": ("Bias", "q[i] · k[j] / √K + bias[h, i, j]"),
    "block": ("Block", "y = x′ + SwiGLU(RMSNorm(x′)), x′ = x + attention(RMSNorm(x))"),
    "head": ("Next token", "p = softmax(head(norm(x)) / temperature)"),
    "head only": ("Head", "p = softmax(head(x))"),
    "lens": ("Logit lens", "softmax(head(norm(x[l, t])))"),
    "gradient": ("Gradient", "∂loss / ∂W"),
}
"""Title and formula of each step; a sentence may have its own. `head_formula` writes out those of a model's head."""

SENTENCES = {
    "tokenize": "The tokenizer normalises the text and splits it into pre-tokens; its model splits each of them into "
    "tokens of the vocabulary. The ID of a token is the number of its row.",
    "tokenize names": "Each word is looked up among the names of the rows. The ID of a token is the number of its row.",
    "tokenize ids": "The text lists IDs: each is the number of a row.",
    "one_hot": "Each token is a vector with a 1 at its ID and zeros at all other entries of the vocabulary.",
    "look_up": "All products but those of one row are 0, so the sum is that row. Therefore nothing is multiplied in "
    "practice: the row is read from the table.",
    "scale": "Every number of the row is multiplied by the same factor.",
    "no scale": "This model uses its rows without a factor; others multiply them, often by √D.",
    "types": "A vector for the token's segment is added; here all tokens are in the first segment.",
    "position": "Each position in the text has its own vector, the same for every token.",
    "position none": "This model adds no information about positions to the input.",
    "position rotate": "Nothing is added here: this scheme rotates queries and keys inside attention, in the step "
    "Rotation.",
    "position bias": "Nothing is added here: this scheme is a bias on the scores inside attention, in the step Bias.",
    "sum": "Token and position become one vector: the same token at two positions now has two vectors.",
    "injections": "The vectors of further tables are added, such as those of the n-gram that ends at the token.",
    "mask": "The vectors of padding become zero; this text has no padding.",
    "length_mask": "The vectors of padding become zero; this text has no padding.",
    "token_dropout": "The vector of the mask token becomes zero, and the others are multiplied to make up for it.",
    "streams": "Vectors that predict later tokens are appended.",
    "codes": "The sum of the rows of K streams of codes is added, or takes the place of some tokens; this text has no "
    "codes.",
    "norm": "Each vector is shifted to mean 0 and scaled to variance 1; each dimension has its own weight and bias.",
    "project": "Narrow rows are projected to the width of the blocks.",
    "dropout": "In training only: random numbers become 0, others in each step, and the rest grow to keep the mean. "
    "In use, nothing is dropped.",
    "no dropout": "This model drops nothing. Others set random numbers to 0 in training, as in this example.",
    "rotation": "Inside attention, each pair of numbers of a query or key is rotated by an angle that grows with the "
    "position: the first pairs fast, the last slowly.",
    "bias": "A number that depends on the distance to the key is added to each score, in each head another one.",
    "block": "A block adds two vectors to that of each token: what attention reads from the tokens, weighted by the "
    "softmax of the scores, and what SwiGLU computes from the token's own numbers. RMSNorm comes before each. The next "
    "block reads the sum, the residual stream.",
    "head": "The final norm makes the output x of the last block the hidden state h. The head multiplies h by all rows "
    "of W: a score for each token, the logit z. Softmax makes the logits the probabilities of the next token.",
    "head only": "Only the embedding layer of this source is known, so there are no blocks to read. The blocks and the "
    "final norm are left out, and the head is applied to the input vectors x. Its scores are not the model's "
    "predictions.",
    "lens": "The hidden state after each block goes through the model's own final norm and head, as if no block "
    "followed. The last row is the model's own output; earlier blocks were not trained to be read in this way.",
    "gradient": "The head is tied: it multiplies by the same table, and every row takes part in the scores. So every "
    "row gets a gradient through the head; looked-up rows also get one through the look-up.",
    "gradient untied": "Only rows that were looked up get a gradient; all other rows of the table stay the same. The "
    "head has rows of its own, and those all get one.",
}
"""Explanation of each step for readers."""
