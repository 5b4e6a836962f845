"""An LM head with a transform before the output product, as BERT, ALBERT and OPT have it."""

from collections.abc import Callable
from typing import TypeVar, Unpack, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.class_identifiers import class_of
from embedlayer.core.errors import CheckpointError
from embedlayer.core.option_docs import show_options
from embedlayer.core.torch_state import calls_forward
from embedlayer.heads.output import ROWS, OutputHead, called_logits
from embedlayer.io.files import JsonObject
from embedlayer.losses.definition import transformed_states
from embedlayer.losses.head_outputs import HeadOutputs
from embedlayer.losses.options import Impl, LogitOptions, check_options
from embedlayer.losses.rows import own_tokens, padded_tokens
from embedlayer.losses.uncomputed_logits import TokenChoice, UncomputedLogits
from embedlayer.saving import Described, build, check_saved, describe, is_description
from embedlayer.tables.table import TokenTable

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activations of heads, by their names in the configurations of transformers."""

Part = TypeVar("Part", bound=nn.Module)


class PredictionHead(HeadOutputs, nn.Module):
    """LM head with a transform: `logits = output(norm(activation(dense(hidden))))`.

    Args:
        output: The product with the rows of the vocabulary, tied or untied.
        dense: Projection from the width of the model, D, to the width of the rows, R.
        activation: A key of `ACTIVATIONS`, or `None` for no activation.
        norm: LayerNorm or RMSNorm of width R, or `None` for none.

    Raises:
        CheckpointError: The activation is unknown.

    Example:
        >>> table = TokenEmbedding(100, 8)
        >>> head = PredictionHead(OutputHead(table), dense=torch.nn.Linear(16, 8), activation="gelu")
        >>> head(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 100])

    Reference: transformers/models/bert/modeling_bert.py, `BertLMPredictionHead`.
    """

    def __init__(
        self, output: OutputHead, *, dense: nn.Linear, activation: str | None = None, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        if activation is not None and activation not in ACTIVATIONS:
            raise CheckpointError(f"The activation {activation!r} is none of {', '.join(ACTIVATIONS)}.")
        self.output = output
        self.dense = dense
        self.activation = activation
        self.norm = norm

    @property
    def tied(self) -> bool:
        """Return whether the head uses the rows of the token table."""
        return self.output.tied

    @property
    def weight(self) -> Tensor:
        """Return the rows that the transformed hidden states are multiplied with, `(V, R)`."""
        weight: Tensor = self.output.weight
        return weight

    def transform(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch R"]:
        """Compute `norm(activation(dense(hidden)))`, `(..., D)` to `(..., R)`."""
        projected = self.dense(hidden)
        activated = projected if self.activation is None else ACTIVATIONS[self.activation](projected)
        result: Tensor = activated if self.norm is None else self.norm(activated)
        return result

    def forward(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """Return the logits of every token, `(..., D)` to `(..., V)`."""
        states = self.transformed(hidden) if self.output.batch_invariant else self.transform(hidden)
        logits: Tensor = self.output(states)
        return logits

    def transformed(self, hidden: Float[Tensor, "*batch D"], *, batch_invariant: bool = True) -> Tensor:
        """Return `transform(hidden)` by `transformed_states`, of tokens that are padded if they are to be invariant."""
        if not batch_invariant:
            return transformed_states(self.transform, hidden)
        return own_tokens(transformed_states(self.transform, padded_tokens(hidden)), hidden)

    @show_options(LogitOptions)
    def uncomputed_logits(
        self, hidden: Float[Tensor, "*batch D"], *, impl: Impl = "auto", **options: Unpack[LogitOptions]
    ) -> UncomputedLogits:
        """Describe the logits of `hidden` without computing them; only the transform is computed.

        Arguments, errors, and what is computed with hooks or another `forward`, are those of
        `OutputHead.uncomputed_logits`.

        Args:
            hidden: Output of the last block, after its final norm, `(..., D)`.
            impl: Implementation of the cross entropy; see `ScoreOptions`.
            **options: Options that replace those of the head; see `LogitOptions`.
        """
        check_options(options, LogitOptions, f"{type(self).__name__}.uncomputed_logits", impl=impl)
        return self.selected_logits(hidden, None, impl, {**self.output.model_logit_options(), **options})

    def selected_logits(
        self, hidden: Tensor, choice: TokenChoice | None, impl: Impl, options: LogitOptions
    ) -> UncomputedLogits:
        """Describe the logits of some tokens, or of all; see `OutputHead.selected_logits`."""
        if not calls_forward(self, _FORWARD):
            return called_logits(self, self.output, hidden, choice, options)
        states = self.transformed(hidden, batch_invariant=options.get("batch_invariant", self.output.batch_invariant))
        if choice is None:
            return self.output.uncomputed_logits(states, impl=impl, **options)
        return self.output.selected_logits(states, choice, impl, options)

    def extra_repr(self) -> str:
        """Return the activation for `print`, such as `activation=gelu`, or "" if there is none."""
        return "" if self.activation is None else f"activation={self.activation}"


_FORWARD = PredictionHead.forward
"""The method whose product losses compute, saved at import to detect later changes."""


def part_config(part: nn.Module | None) -> JsonObject | None:
    """Return the constructor's arguments of a projection or a norm of torch as JSON; `None` for `None`."""
    if part is None:
        return None
    if isinstance(part, Described) or not isinstance(part, nn.Linear | nn.RMSNorm | nn.LayerNorm):
        return describe(cast(Described, part))
    if isinstance(part, nn.Linear):
        return {"in_features": part.in_features, "out_features": part.out_features, "bias": part.bias is not None}
    config: JsonObject = {"normalized_shape": part.normalized_shape[0], "eps": part.eps}
    if isinstance(part, nn.RMSNorm):
        return {**config, "elementwise_affine": part.weight is not None}
    config |= {} if part.bias is not None else {"bias": False}
    return config | ({} if part.weight is not None else {"elementwise_affine": False})


def build_part(kind: type[Part], config: JsonObject | None) -> Part | None:
    """Build a projection or a norm from a result of `part_config`, with fresh weights; `None` for `None`."""
    # `part_config` writes no kind for torch's classes: only an `nn.RMSNorm` has `elementwise_affine` without `bias`.
    if config is None:
        return None
    if is_description(config):
        part: Part = build(config)
        return part
    if kind is nn.LayerNorm and "elementwise_affine" in config and "bias" not in config:
        kind = nn.RMSNorm  # type: ignore[assignment]
    check_saved(kind, config)
    return kind(**config)


def describe_head(head: OutputHead | PredictionHead) -> JsonObject:
    """Return `{"tied": head.tied, **describe(head)}`, the description from which `build_head` constructs a head."""
    if isinstance(head, PredictionHead):
        own = {"dense": part_config(head.dense), "activation": head.activation, "norm": part_config(head.norm)}
        return {**describe_head(head.output), **own}
    return {"tied": head.tied, **(describe(head) if isinstance(head, OutputHead) else head.config)}  # PEFT's wrapper


def build_head(config: JsonObject, table: TokenTable) -> OutputHead | PredictionHead:
    """Build a head from a description, with fresh weights."""
    options = {name: build(value) if name == ROWS else value for name, value in config.items()}
    tied, dense = options.pop("tied"), build_part(nn.Linear, options.pop("dense", None))
    activation, norm = options.pop("activation", None), build_part(nn.LayerNorm, options.pop("norm", None))
    kind = options.pop("kind", "output_head")
    check_saved(PredictionHead, {"activation": activation})
    cls = class_of(kind)
    if not issubclass(cls, OutputHead):
        raise CheckpointError(f"The kind {kind!r} is not an output head.")
    check_saved(cls, options)
    output = cls(table, **options) if tied else cls(**options)
    return output if dense is None else PredictionHead(output, dense=dense, activation=activation, norm=norm)
