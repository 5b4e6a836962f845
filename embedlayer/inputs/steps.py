"""The input embedding as named steps: `run_steps` computes it, `trace_steps` yields the vectors after each step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.documents import AttentionMask
from embedlayer.core.shapes import Ids, Positions
from embedlayer.core.torch_state import is_unchanged
from embedlayer.families.field_types import Step
from embedlayer.inputs.fused import dropout_step, may_skip_call
from embedlayer.positions.position import AdditivePosition, Position
from embedlayer.tables.lookup import LookupTable


class EmbeddingStep(NamedTuple):
    """Describe one step of an input embedding by its name, which says what it computes, and by its module.

    | name | computes |
    |---|---|
    | `look_up` | `module(ids)`, scale included; the first step, skipped where vectors are passed instead of IDs |
    | `types` | `x + module(token_type_ids)`; `x` if there are no `token_type_ids` |
    | `position` | `module.add(x, positions)` |
    | `norm`, `project`, `dropout` | `module(x)` |
    | `mask`, `length_mask` | `x` with zeros for padding; `x` if there is no `attention_mask` |
    | `injections`, `token_dropout` | `module(x, ids, attention_mask)` |
    | `streams` | `module(x, following)` |
    | `codes` | `module(x, ids, codes)`; `x` if there are no `codes` |
    """

    name: Step
    module: Callable[..., Any]


class TokenBatch(NamedTuple):
    """Hold the inputs of all steps of an input embedding.

    Attributes:
        ids: Token IDs, `(..., T)`; zeros of that shape if vectors are passed instead.
        positions: Position of each token, `(T,)` or `(..., T)`.
        token_type_ids: Segment of each token (BERT), `(..., T)`; `None` to add no segment vectors.
        attention_mask: 0 for padding, `(..., T)`; `None` without padding. Only the steps `injections`, `mask`,
            `length_mask` and `token_dropout` read it.
        following: Vectors of the position after that of each token, `(T, D)` or `(..., T, D)`, which only the step
            `streams` reads; `None` without such a step.
        codes: Codes of K streams, `(..., T, K)`, which only the step `codes` reads; `None` to read none.
    """

    ids: Int[Tensor, "*batch T"]
    positions: Positions
    token_type_ids: Ids | None = None
    attention_mask: AttentionMask | None = None
    following: Float[Tensor, "*rows T D"] | None = None
    codes: Int[Tensor, "*batch T K"] | None = None


class TracedStep(NamedTuple):
    """Hold the result of one step of an input embedding.

    Attributes:
        name: Name of the step.
        vectors: Vectors after the step, `(..., T, D)`.
        description: What the step did, with its sizes and factors, in one line.
        added: Vectors that the step added, `(..., T, D)` or `(T, D)`; `None` for a step that added nothing.
    """

    name: Step
    vectors: Float[Tensor, "*batch T D"]
    description: str
    added: Float[Tensor, "*rows T D"] | None = None


def input_steps(
    table: nn.Module,
    position: Position,
    dropout: nn.Module | None = None,
    *,
    injections: Callable[..., Any] | None = None,
) -> tuple[EmbeddingStep, ...]:
    """Return the steps of `dropout(position.add(table(ids), positions))` in order.

    Args:
        table: Table, or a module that wraps one.
        position: Position scheme.
        dropout: Module of the last step; `None` for no such step.
        injections: Function of the step before dropout that adds the vectors of additional tables; `None` for no such
            step.
    """
    steps = [EmbeddingStep("look_up", table), EmbeddingStep("position", position)]
    steps += [] if injections is None else [EmbeddingStep("injections", injections)]
    return tuple(steps if dropout is None else [*steps, EmbeddingStep("dropout", dropout)])


def run_steps(
    steps: Sequence[EmbeddingStep], batch: TokenBatch, inputs_embeds: Float[Tensor, "*batch T D"] | None = None
) -> Float[Tensor, "*batch T E"]:
    """Run the steps of an input embedding one after another, and return the vectors after the last.

    Args:
        steps: Steps in order; the first one is the look-up.
        batch: Inputs of the steps.
        inputs_embeds: Vectors to use instead of the look-up, already scaled; `None` to look up `batch.ids`.
    """
    x = inputs_embeds
    for step in steps:
        x = _run(step, x, batch)
    assert x is not None
    return x


def trace_steps(
    steps: Sequence[EmbeddingStep], batch: TokenBatch, inputs_embeds: Float[Tensor, "*batch T D"] | None = None
) -> Iterator[TracedStep]:
    """Run the steps as `run_steps` does, and yield a `TracedStep` with the vectors after each.

    For the look-up of a table with a scale two steps are yielded, rows and scale; only one if a hook or an override may
    change `table(ids)`.
    Each step reads the tensor that was yielded before it. So `vectors.requires_grad_()` on a yielded tensor gives the
    gradient of a later loss at that step.

    Args:
        steps: Steps in order; the first one is the look-up.
        batch: Inputs of the steps.
        inputs_embeds: Vectors to use instead of the look-up, already scaled, for which no step is yielded; or `None`.

    Example:
        >>> table, position = TokenEmbedding(100, 8, scale=2.0), SinusoidalPositionalEmbedding(16, 8)
        >>> batch = TokenBatch(torch.tensor([5, 2, 7]), torch.arange(3))
        >>> [step.name for step in trace_steps(input_steps(table, position), batch)]
        ['look_up', 'scale', 'position']
    """
    x = inputs_embeds
    for step in steps:
        name, table = step
        if x is None and isinstance(table, LookupTable) and may_skip_call(table):
            x = table.look_up(batch.ids)
            yield TracedStep("look_up", x, f"a table of {table.vocab_size:,} × {table.embed_dim}")
            if table.factor is not None:
                factor, x = float(table.factor), table.factor * x
                root = " = √D" if abs(factor - table.embed_dim**0.5) < 0.01 * abs(factor) else ""
                yield TracedStep("scale", x, f"each row times {factor:.6g}{root}")
        elif x is None:
            x = _run(step, None, batch)
            yield TracedStep("look_up", x, f"{type(table).__name__}: rows, with any scale applied")
        elif name != "look_up":
            before, x = x, _run(step, x, batch)
            yield TracedStep(name, x, *_effect(step, before, x, batch))


def _run(step: EmbeddingStep, x: Tensor | None, batch: TokenBatch) -> Tensor:
    """Return the vectors after one step."""
    name, module = step
    if x is None:
        x = module(batch.ids)
    elif name == "types":
        x = x if batch.token_type_ids is None else x + module(batch.token_type_ids)
    elif name == "position":
        assert isinstance(module, Position)
        x = module.add(x, batch.positions)
    elif name in ("mask", "length_mask"):
        mask = batch.attention_mask
        x = x if mask is None else x * (mask != 0).unsqueeze(-1).to(x.dtype)
    elif name in ("token_dropout", "injections"):
        x = module(x, batch.ids, batch.attention_mask)
    elif name == "streams":
        x = module(x, batch.following)
    elif name == "codes":
        x = x if batch.codes is None else module(x, batch.ids, batch.codes)
    elif name == "dropout":
        x = dropout_step(module, x)
    elif name != "look_up":
        x = module(x)
    assert x is not None
    return x


def _effect(step: EmbeddingStep, x: Tensor, result: Tensor, batch: TokenBatch) -> tuple[str, Tensor | None]:
    """Return a description of what a step after the look-up did to `x`, and the vectors that it added."""
    (name, module), added = step, None
    if name == "position":
        assert isinstance(module, Position)
        effects = {"add": "adds a vector for each position", "rotate": "it rotates queries and keys"}
        effects |= {"bias": "it is a bias on attention scores"}
        effect = effects.get(module.hook or "", "the model has none")
        note = f"{type(module).__name__}: {'' if module.hook == 'add' else 'adds nothing to the input; '}{effect}"
        if module.hook == "add":
            is_plain = isinstance(module, AdditivePosition) and is_unchanged(module, add=AdditivePosition.add)
            added = module(batch.positions).to(x.dtype) if is_plain else result - x
    elif name == "types":
        note = "no segments are passed, so none are added"
        if batch.token_type_ids is not None:
            added = module(batch.token_type_ids)
            note = "segment 0" if not batch.token_type_ids.any() else "the segments that are passed"
    elif name == "project":
        note = f"{x.shape[-1]} to {result.shape[-1]}"
    elif name in ("mask", "length_mask"):
        note = "no attention mask is passed" if batch.attention_mask is None else "vectors of padding become zero"
    elif name == "token_dropout":
        note = "vectors of the mask token become zero, the others are rescaled"
    elif name == "injections":
        note, added = f"adds the vectors of {getattr(module, '__name__', 'additional tables')}", result - x
    elif name == "streams":
        note = f"{result.shape[-2] // x.shape[-2] - 1} streams that predict later tokens are appended"
    elif name == "codes":
        note = "no codes are passed, so none are added" if batch.codes is None else "sums of the rows of codes"
    else:
        note = f"width {result.shape[-1]}" if name == "norm" else f"p = {getattr(module, 'p', 0):g}, in training only"
    return note, added
