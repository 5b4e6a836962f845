"""The library's two ends inside a live transformers model, and out again.

Weights stay the same parameter objects, under the same names, so whatever holds them (an optimizer, a state, a tied
partner) goes on as before. transformers is not imported: a model is known by its `get_input_embeddings`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.errors import CheckpointError
from embedlayer.layers.output import OutputHead
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.table import TokenTable

Model = TypeVar("Model", bound=nn.Module)

REPLACED = "_replaced_by_embedlayer"
"""Where a module of ours keeps the one whose place it took."""


def patch(model: Model) -> Model:
    """Give a transformers model the library's table and head, in place; its outputs stay what they were.

    The input embeddings become a `TokenEmbedding` (Gemma's rounded scale and BART's unrounded one included), an output
    head that is a linear layer becomes an `OutputHead`. Parameters stay the same objects under the same names; tied
    stays tied, and a tied head reads the table through the model: where PEFT has put LoRA on the table, the head sees
    it too. A padding row keeps its numbers and, as before, gets no gradient from look-ups; its logit is not masked.

    What comes with it: a bad ID is an error that names its place, and `model.get_output_embeddings().loss(hidden,
    targets)` is the loss of the head. `edit_vocabulary` changes a patched model's vocabulary.

    Args:
        model: A model of transformers, before PEFT.

    Returns:
        The same model. One that is patched already stays as it is.

    Raises:
        CheckpointError: Its input embeddings are of a kind that `TokenEmbedding` is not: nothing was changed.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = patch(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_positions=16, n_embd=8, n_layer=1, n_head=2)))
        >>> type(model.transformer.wte).__name__, type(model.lm_head).__name__
        ('TokenEmbedding', 'OutputHead')
    """
    if not callable(getattr(model, "get_input_embeddings", None)):
        raise CheckpointError(f"A {type(model).__name__} has no get_input_embeddings: give a model of transformers.")
    old = model.get_input_embeddings()  # type: ignore[operator]
    if isinstance(old, TokenEmbedding):
        return model
    table = _table_like(old)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if type(head) is nn.Linear:
        _swap(model, head, _head_like(head, model if head.weight is old.weight else None, table))
    _swap(model, old, table)
    return model


def unpatch(model: Model) -> Model:
    """Put back the modules that `patch` took out, with the weights as they are now; also under PEFT's wrappers.

    Returns:
        The same model. One that is not patched stays as it is.
    """
    for ours in [module for module in model.modules() if REPLACED in module.__dict__]:
        original: nn.Module = ours.__dict__[REPLACED]
        for name, parameter in ours._parameters.items():
            original._parameters[name] = parameter
        for name, buffer in original._buffers.items():
            original._buffers[name] = None if buffer is None else buffer.to(next(ours.parameters()).device)
        original.train(ours.training)
        _swap(model, ours, original, keep=False)
    return model


def _table_like(old: nn.Module) -> TokenEmbedding:
    """A `TokenEmbedding` over the rows of transformers' input embeddings."""
    scale, rounded = _scale_of(old)
    if not isinstance(old, nn.Embedding):
        hint = " Patch before adding PEFT." if hasattr(old, "base_layer") or hasattr(old, "original_module") else ""
        raise CheckpointError(f"The input embeddings are a {type(old).__name__}, not an nn.Embedding.{hint}")
    if old.max_norm is not None or old.scale_grad_by_freq or old.sparse or hasattr(old, "_hf_hook"):
        raise CheckpointError(
            "TokenEmbedding has no max_norm, scale_grad_by_freq or sparse gradients, and cannot take the place of a "
            "module that accelerate has put hooks on. Patch before dispatching the model."
        )
    table = TokenEmbedding(
        old.num_embeddings,
        old.embedding_dim,
        padding_idx=old.padding_idx,
        scale=scale,
        round_scale=rounded,
        device="meta",
        dtype=old.weight.dtype,
    )
    table.weight = old.weight
    table.derive(old.weight.device)
    table.bounds.derive(old.weight.device)
    return _in_place_of(old, table)


def _scale_of(old: nn.Module) -> tuple[float | None, bool]:
    """The factor of scaled word embeddings, and whether it is rounded to the type of the rows."""
    scale = getattr(old, "embed_scale", None)
    if type(old) is nn.Embedding or not isinstance(old, nn.Embedding):
        return None, False
    if isinstance(scale, Tensor) and scale.numel() == 1:  # Gemma: `scalar_embed_scale` is what was rounded
        return float(getattr(old, "scalar_embed_scale", scale)), True
    if isinstance(scale, int | float):
        return float(scale), False
    raise CheckpointError(f"What a {type(old).__name__} does beyond look-up and scale is not known here.")


def _head_like(old: nn.Linear, owner: nn.Module | None, table: TokenEmbedding) -> OutputHead:
    """An `OutputHead` over the rows of a linear layer; with an owner, over the input embeddings that it has by then."""
    biased = old.bias is not None
    with torch.device("meta"):
        if owner is None:
            head = OutputHead(vocab_size=old.out_features, embed_dim=old.in_features, bias=biased)
        else:
            rows = InputRows(owner, table)
            head = OutputHead(rows, bias=biased)
            rows.__dict__["head"] = head
    parameters: dict[str, Any] = {"weight": old.weight, "bias": old.bias}
    head._parameters.clear()
    head._parameters.update(parameters)  # a tied weight too: transformers ties and saves it by this name
    return _in_place_of(old, head)


New = TypeVar("New", bound=nn.Module)


def _in_place_of(old: nn.Module, new: New) -> New:
    """The mode and the hooks of a module for the one that takes its place."""
    new.train(old.training)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks"):
        new.__dict__[hooks] = old.__dict__[hooks]  # the same dictionary: handles that remove a hook go on working
    return new


def _swap(model: nn.Module, old: nn.Module, new: nn.Module, *, keep: bool = True) -> None:
    """Put `new` wherever `old` stands in the model."""
    if keep:
        new.__dict__[REPLACED] = old
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


class Adapter(NamedTuple):
    """One LoRA on a table: rows of `A^T B^T * scaling`."""

    a: Float[Tensor, "R V"]
    b: Float[Tensor, "D R"]
    scaling: float


class InputRows(TokenTable):
    """The rows that a model's input embeddings have at the moment, with the LoRA that PEFT has put on them.

    It owns nothing: a tied head reads the model's table through it.

    Args:
        owner: The model.
        table: Its table, for the sizes.
    """

    def __init__(self, owner: nn.Module, table: TokenEmbedding) -> None:
        super().__init__()
        self.__dict__["owner"] = owner  # past Module.__setattr__: referred to, not registered; so is the head
        self.vocab_size, self.num_rows, self.embed_dim = table.vocab_size, table.num_rows, table.embed_dim
        self.padding_idx = None
        self.scale = None

    @property
    def weight(self) -> nn.Parameter:
        """The rows without LoRA."""
        weight: nn.Parameter = self.__dict__["head"]._parameters["weight"]
        return weight

    def look_up(self, ids: Ids) -> Vectors:
        """The model's own look-up."""
        vectors: Tensor = self.__dict__["owner"].get_input_embeddings()(ids)
        return vectors

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1`, LoRA included."""
        rows: Tensor = self.weight[start:stop]
        for adapter in self.adapters():
            delta = adapter.a[:, start:stop].T @ adapter.b.T * adapter.scaling
            rows = rows + delta.to(rows.dtype)
        return rows

    def products(
        self, hidden: Float[Tensor, "*batch D"], start: int = 0, stop: int | None = None
    ) -> Float[Tensor, "*batch N"]:
        """`hidden @ rows(start, stop).T`: LoRA adds two narrow products."""
        products = F.linear(hidden, self.weight[start:stop])
        for adapter in self.adapters():
            narrow = hidden.to(adapter.b.dtype) @ adapter.b * adapter.scaling
            products = products + (narrow @ adapter.a[:, start:stop]).to(products.dtype)
        return products

    def adapters(self) -> Iterator[Adapter]:
        """The active LoRA on the table; none where it is merged or disabled, or where PEFT has wrapped the head itself.

        Raises:
            CheckpointError: A variant (DoRA) whose rows are no sum.
        """
        owner = self.__dict__["owner"]
        table: Any = owner.get_input_embeddings()
        wraps_head = owner.get_output_embeddings() is not self.__dict__["head"]
        if wraps_head or not hasattr(table, "lora_embedding_A") or table.disable_adapters or table.merged:
            return
        for name in table.active_adapters:
            if name not in table.lora_embedding_A:
                continue
            if name in getattr(table, "lora_variant", ()):
                raise CheckpointError(f"The adapter {name} is a variant of LoRA that a tied head cannot follow.")
            yield Adapter(table.lora_embedding_A[name], table.lora_embedding_B[name], table.scaling[name])

    def check(self) -> None:
        """The model's table does that."""
