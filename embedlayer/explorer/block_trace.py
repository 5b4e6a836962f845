"""The first block of a decoder, opened: the vectors between its modules, their formulas, and its attention weights.

The model's own modules compute all of it, and forward hooks record what they return. `embedlayer embed` prints the
formulas of norm and head too.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.torch_state import is_unchanged
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.inputs.injection import EmbeddingInjection
from embedlayer.losses.options import LogitSettings
from embedlayer.models.attention import AddedScores
from embedlayer.models.decoder import AddToValues, Attention, Block, DecoderLM
from embedlayer.positions.position import Position, PreparedPositions


class BlockTrace(NamedTuple):
    """Hold what the first block of a decoder computes for T tokens."""

    vectors: dict[str, Float[Tensor, "T _"]]
    scores: Float[Tensor, "H T T"]  # of each query (row) with each key (column), bias included; later keys mean nothing
    weights: Float[Tensor, "H T T"]
    values: Float[Tensor, "G T K"]
    heads: Float[Tensor, "H T K"]
    states: list[Float[Tensor, "T D"]]
    value_tables: str
    stream_tables: str


@torch.no_grad()
def trace_first_block(
    model: DecoderLM, ids: Int[Tensor, " T"] | None, inputs_embeds: Float[Tensor, "T D"], positions: Int[Tensor, " T"]
) -> BlockTrace:
    """Run a decoder of at least one block, and return what its first block computes."""
    model = _with_own_first_block(model)
    block = cast(Block, model.blocks[0])
    attention, mlp = block.attention, block.mlp
    recorded: dict[str, Tensor] = {}
    arguments: list[Any] = []  # of the attention

    def record(name: str, *, of_input: bool = False) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, result: Any) -> None:
            recorded[name] = (inputs[0] if of_input else result).squeeze(0)

        return hook

    block.attention_norm.register_forward_hook(record("attention_norm"))
    attention.query.register_forward_hook(record("query"))
    attention.key.register_forward_hook(record("key"))
    attention.out.register_forward_hook(record("heads", of_input=True))
    attention.register_forward_hook(lambda module, inputs, result: arguments.extend(inputs))
    attention.register_forward_hook(record("attention"))
    block.mlp_norm.register_forward_hook(record("attention_sum", of_input=True))
    block.mlp_norm.register_forward_hook(record("mlp_norm"))
    mlp.gate.register_forward_hook(record("gate"))
    mlp.up.register_forward_hook(record("up"))
    mlp.down.register_forward_hook(record("product", of_input=True))
    mlp.register_forward_hook(record("mlp"))
    block.register_forward_hook(record("mlp_sum"))
    states = list(model.hidden_states(ids, inputs_embeds=inputs_embeds, positions=positions))
    queries, keys, heads = (
        recorded.pop(name).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1) for name in ("query", "key", "heads")
    )
    vectors = {"input": states[0], **recorded}
    scores = _scores(attention, queries, keys, *arguments[1:4])
    own, weights, values = _weights_and_values(attention, *arguments)
    value_tables = stream_tables = ""
    if not values.equal(own):
        value_tables = _overriding(model, add_to_values=EmbeddingInjection.add_to_values)
    if not states[1].equal(vectors["mlp_sum"]):
        stream_tables = _overriding(model, add_to_stream=EmbeddingInjection.add_to_stream)
    if stream_tables:
        vectors["stream"] = states[1]
    return BlockTrace(vectors, scores, weights, values, heads, states, value_tables, stream_tables)


def _overriding(model: DecoderLM, **hook: Callable[..., Any]) -> str:
    """Return the classes of the injections of a model that override a hook."""
    return ", ".join(type(each).__name__ for each in model.injections if not is_unchanged(each, **hook))


def _with_own_first_block(model: DecoderLM) -> DecoderLM:
    """Return a copy of a decoder with a first block of its own, for hooks; all tensors and other modules are shared."""
    first, *later = model.blocks
    others = [child for child in model.children() if child is not model.blocks]
    shared = [*others, *later, *first.parameters(), *first.buffers()]
    return deepcopy(model, {id(each): each for each in shared})


def _scores(
    attention: Attention,
    queries: Float[Tensor, "H T K"],
    keys: Float[Tensor, "G T K"],
    position: Position,
    prepared: PreparedPositions,
    added: AddedScores | None,
) -> Float[Tensor, "H T T"]:
    """Return the scores of rotated queries and keys, with the bias of the position scheme."""
    rotated, rotated_keys = position.rotate(queries.unsqueeze(0), keys.unsqueeze(0), prepared)
    factor = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    per_group = queries.shape[0] // keys.shape[0]
    scores: Tensor = factor * rotated[0] @ rotated_keys[0].repeat_interleave(per_group, 0).transpose(-1, -2)
    length = queries.shape[-2]
    return scores if added is None else scores + added.scores((0, length, 0, length)).squeeze(0)


def _weights_and_values(
    attention: Attention,
    x: Float[Tensor, "1 T D"],
    position: Position,
    prepared: PreparedPositions,
    scores: AddedScores | None,
    past: None,
    add_to_values: AddToValues | None,
) -> tuple[Float[Tensor, "G T K"], Float[Tensor, "H T T"], Float[Tensor, "G T K"]]:
    """Return the values without other tables, the weights, and the values of an attention."""
    # The weights are what the attention returns for one-hot values, K keys at a time; a hook reads the input of `out`.
    sums: list[Tensor] = []
    values: list[Tensor] = []
    attention.out.register_forward_hook(lambda module, inputs, result: sums.append(inputs[0]))
    for keys in torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).split(attention.head_dim):

        def one_hot_values(own: Tensor, x: Tensor, keys: Tensor = keys) -> Tensor:
            values.extend((own, own if add_to_values is None else add_to_values(own, x)))
            return F.pad(keys.T, (0, own.shape[-1] - len(keys))).expand_as(own)

        attention.forward(x, position, prepared, scores, past, one_hot_values)
    weights = torch.cat([each[0].unflatten(-1, (-1, attention.head_dim)) for each in sums], dim=-1).transpose(0, 1)
    return values[0][0], weights[..., : x.shape[-2]], values[1][0]


def block_formulas(model: DecoderLM, trace: BlockTrace) -> dict[str, tuple[str, str]]:
    """Return symbol and formula of each vector of a trace, as this model computes it in evaluation mode."""
    hook, block = model.position.hook, cast(Block, model.blocks[0])
    queries, keys = ("rotated q", "rotated k") if hook == "rotate" else ("q", "k")
    factor = model.sizes["query_scale"]
    scores = f"{'' if factor == 1 else f'{factor:.9g} · '}{queries} · {keys} / √K{' + bias' if hook == 'bias' else ''}"
    values = f"(v + {trace.value_tables})" if trace.value_tables else "v"
    return {
        "input": ("x", "input of the block"),
        "attention_norm": ("n", norm_formula(block.attention_norm)),
        "attention": ("a", f"concat(p · {values}) · W_outᵀ, p = softmax({scores})"),
        "attention_sum": ("x′", "x + a"),
        "mlp_norm": ("n′", norm_formula(block.mlp_norm, "x′")),
        "gate": ("g", "n′ · W_gateᵀ, the gate of SwiGLU"),
        "up": ("u", "n′ · W_upᵀ, what the gate multiplies"),
        "product": ("s", "silu(g) · u, silu(g) = g / (1 + e^(−g))"),
        "mlp": ("m", "s · W_downᵀ, the result of SwiGLU"),
        "mlp_sum": ("y", "x′ + m"),
        "stream": ("y′", f"y + {trace.stream_tables}"),
    }


def head_formula(head: OutputHead | PredictionHead, norm: nn.RMSNorm | None) -> str:
    """Return the formula from the output `x` of the last block to the probabilities `p` of the next token."""
    steps, states = [], "x"
    if norm is not None:
        steps, states = ["h = RMSNorm(x)"], "h"
    if isinstance(head, PredictionHead):
        transform = f"dense({states})" if head.activation is None else f"{head.activation}(dense({states}))"
        steps.append(f"t = {transform}" if head.norm is None else f"t = {type(head.norm).__name__}({transform})")
        head, states = head.output, "t"
    settings = LogitSettings(**head.logit_options())
    z = f"{states} · Wᵀ"
    if settings.logit_scale != 1:
        z = f"{settings.logit_scale:.9g} · {z}"
    if settings.bias is not None:
        z = f"{z} + b"
    if settings.softcap is not None:
        z = f"({z})" if settings.bias is not None else z
        z = f"{settings.softcap:.9g} · tanh({z} / {settings.softcap:.9g})"
    steps.append(f"z = {z}")
    if settings.masked() is not None:
        steps.append(f"z[{settings.masked()}] = −∞")
    return ", ".join([*steps, "p = softmax(z)" if norm is None else "p = softmax(z / temperature)"])


def norm_formula(norm: nn.RMSNorm, x: str = "x") -> str:
    """Return the formula of a norm with its number ε; `x` is the symbol of its input."""
    return f"RMSNorm({x}) = w · {x} / √(mean({x}²) + {norm.eps:g})"
