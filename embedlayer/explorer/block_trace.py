"""The first block of a decoder, opened: the vectors between its modules, its attention weights, and what follows.

Nothing is computed a second time: the model's own modules run, and forward hooks record what they return.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.models.attention import AddedScores
from embedlayer.models.decoder import AddToValues, Attention, Block, DecoderLM
from embedlayer.positions.position import Position, PreparedPositions


class BlockTrace(NamedTuple):
    """Hold what the first block of a decoder computes for T tokens.

    Attributes:
        vectors: Vectors of each token in the order of the computation, `(T, D)`, or `(T, F)` inside of SwiGLU: `input`,
            `attention_norm`, `attention`, `attention_sum`, `mlp_norm`, `gate`, `up`, `product`, `mlp`, `mlp_sum`; then
            `stream`, if injections add vectors after the block.
        weights: Attention weights of each head, `softmax(scores)`: the rows are queries, the columns keys.
        values: Values that the weights multiply, with those of value embeddings.
        heads: Sum of the weighted values in each head.
        states: Input of the first block, then the output of each block.
    """

    vectors: dict[str, Float[Tensor, "T _"]]
    weights: Float[Tensor, "H T T"]
    values: Float[Tensor, "G T K"]
    heads: Float[Tensor, "H T K"]
    states: list[Float[Tensor, "T D"]]


@torch.no_grad()
def trace_first_block(
    model: DecoderLM, ids: Int[Tensor, " T"] | None, inputs_embeds: Float[Tensor, "T D"], positions: Int[Tensor, " T"]
) -> BlockTrace:
    """Run a decoder of at least one block, and return what its first block computes.

    Args:
        model: Decoder in evaluation mode.
        ids: Token IDs, for a model with injections; else `None`.
        inputs_embeds: Vectors of the tokens in place of the look-up, as in `DecoderLM.hidden`.
        positions: Position of each token.
    """
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
    heads = recorded.pop("heads").unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
    vectors = {"input": states[0], **recorded}
    if not states[1].equal(vectors["mlp_sum"]):
        vectors["stream"] = states[1]
    return BlockTrace(vectors, *_weights_and_values(attention, *arguments), heads, states)


def _with_own_first_block(model: DecoderLM) -> DecoderLM:
    """Return a copy of a decoder with a first block of its own, for hooks; all tensors and other modules are shared."""
    first, *later = model.blocks
    others = [child for child in model.children() if child is not model.blocks]
    shared = [*others, *later, *first.parameters(), *first.buffers()]
    return deepcopy(model, {id(each): each for each in shared})


def _weights_and_values(
    attention: Attention,
    x: Float[Tensor, "1 T D"],
    position: Position,
    prepared: PreparedPositions,
    scores: AddedScores | None,
    past: None,
    add_to_values: AddToValues | None,
) -> tuple[Float[Tensor, "H T T"], Float[Tensor, "G T K"]]:
    """Return the weights and the values of an attention for the arguments of its `forward`; its `out` is removed.

    The weights are what it returns for values that are one-hot vectors, K keys at a time.
    """
    attention.out = nn.Identity()  # type: ignore[assignment]
    weights: list[Tensor] = []
    values: list[Tensor] = []
    for keys in torch.eye(x.shape[-2], dtype=x.dtype, device=x.device).split(attention.head_dim):

        def one_hot_values(own: Tensor, x: Tensor, keys: Tensor = keys) -> Tensor:
            values.append(own if add_to_values is None else add_to_values(own, x))
            return F.pad(keys.T, (0, own.shape[-1] - len(keys))).expand_as(own)

        heads = attention.forward(x, position, prepared, scores, past, one_hot_values)[0]
        weights.append(heads.unflatten(-1, (-1, attention.head_dim))[..., : len(keys)])
    return torch.cat(weights, dim=-1).transpose(0, 1), values[0][0]
