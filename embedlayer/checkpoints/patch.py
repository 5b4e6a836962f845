"""The library's two ends inside a live transformers model, and out again.

Weights stay the same parameter objects, under the same names, so whatever holds them (an optimizer, a state, a tied
partner) goes on as before. transformers is not imported: a model is known by its `get_input_embeddings`.
"""

from functools import partial
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from embedlayer.errors import CheckpointError
from embedlayer.layers.in_place import Place
from embedlayer.layers.output import OutputHead
from embedlayer.tables.dense import TokenEmbedding

Model = TypeVar("Model", bound=nn.Module)

REPLACED = "_replaced_by_embedlayer"
"""Where a module of ours keeps the one whose place it took."""


def patch(model: Model, *, row_sparse: bool = False) -> Model:
    """Replace the token embeddings and LM heads of a transformers model, in place; its outputs stay what they were.

    Every look-up becomes a `TokenEmbedding`: the model's input embeddings, those of its encoder and its decoder, and
    all others that share their weight; the scale of each stays what it was (Gemma's is rounded, BART's is not). Every
    LM head that is an `nn.Linear` becomes an `OutputHead`. Parameters stay the same objects under the same names, tied
    stays tied, and a tied head reads the table through the model: where PEFT has put LoRA on the table, the head sees
    it too. A padding row keeps its numbers and, as before, gets no gradient from look-ups; its logit is not masked.

    In exchange a bad ID is an error that names its place, and `model.get_output_embeddings().loss(hidden, targets)` is
    the loss without logits. `edit_vocabulary` changes a patched model's vocabulary, and so does
    `model.resize_token_embeddings`.

    Args:
        model: A model of transformers, before PEFT. One that is patched already stays as it is.
        row_sparse: Give gradients of the looked-up rows only, for `RowAdamW`; needs untied heads.

    Raises:
        CheckpointError: An embedding is of a kind that `TokenEmbedding` is not, or `row_sparse` is requested of a model
            whose head is tied: nothing was changed.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = patch(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_positions=16, n_embd=8, n_layer=1, n_head=2)))
        >>> type(model.transformer.wte).__name__, type(model.lm_head).__name__
        ('TokenEmbedding', 'OutputHead')
    """
    old_tables, old_heads = _look_ups(model), _heads(model)
    if row_sparse:
        _refuse_tied(old_tables, model)
    tables = [(old, _table_like(old, row_sparse=row_sparse)) for old in old_tables]
    heads = [(old, _head_like(old)) for old in old_heads]
    for old, new in (*tables, *heads):
        _swap(model, old, new)
    _link_heads(model)
    if (tables or heads) and hasattr(model, "resize_token_embeddings"):
        model.__dict__["resize_token_embeddings"] = partial(_resized, model)
    return model


def unpatch(model: Model) -> Model:
    """Put back the modules that `patch` replaced, with the weights as they are now; also under PEFT's wrappers.

    Returns:
        The same model. One that is not patched stays as it is.
    """
    for ours in [module for module in model.modules() if REPLACED in module.__dict__]:
        original: Any = ours.__dict__[REPLACED]
        if isinstance(ours, TokenEmbedding):
            if ours.pending_updates is not None:
                ours.pending_updates.release(cast(nn.Parameter, ours.weight))
            original.num_embeddings, original.padding_idx = ours.num_embeddings, ours.padding_idx
        elif isinstance(ours, OutputHead):
            original.out_features = ours.out_features
        for name, parameter in ours._parameters.items():
            original._parameters[name] = parameter
        for name, buffer in original._buffers.items():  # of the kinds that are replaced, a scale alone
            known = torch.full_like(buffer, cast(float, ours.scale), device="cpu") if buffer.is_meta else buffer
            original._buffers[name] = known.to(next(ours.parameters()).device)
        _swap(model, ours, _in_place_of(ours, original), keep=False)
    for part in model.modules():
        part.__dict__.pop("resize_token_embeddings", None)
    return model


def _look_ups(model: nn.Module) -> list[nn.Embedding]:
    """Return the token embeddings of a model that are not ours yet: of all its parts, and all that share a weight.

    Raises:
        CheckpointError: The model has none, or they are no `nn.Embedding`.
    """
    root = _part_of(model, "get_input_embeddings")
    if not isinstance(root, nn.Module):
        raise CheckpointError(
            f"A {type(model).__name__} has no get_input_embeddings that returns a module: pass a model of transformers."
        )
    if not isinstance(root, nn.Embedding):
        wrapped = hasattr(root, "base_layer") or hasattr(root, "original_module") or hasattr(root, "token_adapter")
        hint = " Patch before adding PEFT." if wrapped else ""
        raise CheckpointError(f"The input embeddings are a {type(root).__name__}, not an nn.Embedding.{hint}")
    tables = [root, *(each for each in _tables(model) if _is_known(each))]
    weights = {id(each.weight) for each in tables}
    sharing = [each for each in model.modules() if isinstance(each, nn.Embedding) and id(each.weight) in weights]
    unique = {id(each): each for each in (*tables, *sharing)}
    return [each for each in unique.values() if not isinstance(each, TokenEmbedding)]


def _tables(model: nn.Module) -> list[nn.Embedding]:
    """Return what a model and its parts, such as a decoder, look tokens up in; FSMT's decoder calls it output."""
    getters = ("get_input_embeddings", "get_output_embeddings")
    found = [_part_of(part, getter) for part in model.modules() for getter in getters]
    return [each for each in found if isinstance(each, nn.Embedding)]


def _heads(model: nn.Module) -> list[nn.Linear]:
    """Return the LM heads of a model that are plain linear layers, and all such layers that share a table's weight."""
    of_parts = {id(_part_of(part, "get_output_embeddings")) for part in model.modules()}
    weights = {id(table.weight) for table in _tables(model)}
    linear = [each for each in model.modules() if type(each) is nn.Linear]
    return [each for each in linear if id(each) in of_parts or id(each.weight) in weights]


def _part_of(module: nn.Module, getter: str) -> Any:
    """Return what a model of transformers answers to `get_input_embeddings()` or `get_output_embeddings()`, or None."""
    method = getattr(module, getter, None)
    if not callable(method):
        return None
    try:
        return method()
    except (NotImplementedError, AttributeError):  # parts that have none, and say so in either way
        return None


def _refuse_tied(tables: list[nn.Embedding], model: nn.Module) -> None:
    """Refuse row-sparse look-ups of a weight that anything else reads, or of a model that is patched already.

    Raises:
        CheckpointError: Naming what reads it.
    """
    if not tables:
        raise CheckpointError("The model is patched already: unpatch it first, then patch it with row_sparse=True.")
    weights = {id(table.weight) for table in tables}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) and any(id(p) in weights for p in module._parameters.values()):
            raise CheckpointError(
                f"{name} shares the table's weight, and its logits send a gradient to every row, so row_sparse=True is "
                f"impossible here. Leave it out, or give the model an untied head (tie_word_embeddings=False)."
            )


def _table_like(old: nn.Embedding, *, row_sparse: bool) -> TokenEmbedding:
    """Return a `TokenEmbedding` over the rows of one of transformers' embeddings."""
    if not _is_known(old):
        raise CheckpointError(f"What a {type(old).__name__} does beyond look-up and scale is not known here.")
    if old.max_norm is not None or old.scale_grad_by_freq or old.sparse or "forward" in old.__dict__:
        raise CheckpointError(
            "TokenEmbedding has no max_norm, scale_grad_by_freq or sparse gradients, and cannot take the place of a "
            "module whose forward has been replaced, as accelerate does. Patch before dispatching the model; for "
            "sparse gradients, patch(model, row_sparse=True)."
        )
    scale, rounded = _scale_of(old)
    table = TokenEmbedding(
        old.num_embeddings,
        old.embedding_dim,
        padding_idx=old.padding_idx,
        scale=scale,
        round_scale=rounded,
        row_sparse=row_sparse,
        device="meta",
        dtype=old.weight.dtype,
    )
    table.weight = old.weight
    device = torch.device("cpu") if old.weight.is_meta else old.weight.device  # weights that are loaded later
    table.recompute_buffers(device)
    table.index_check.move_record(device)
    return _in_place_of(old, table)


def _is_known(old: object) -> bool:
    """Return whether this is a look-up with at most a scale: a class of transformers that has nothing else.

    A subclass has nothing else if it stores nothing else, and a small one of its class gives `scale * weight[ids]`.
    """
    if isinstance(old, TokenEmbedding) or type(old) is nn.Embedding:
        return True
    if not isinstance(old, nn.Embedding) or old._modules or set(old._parameters) != {"weight"}:
        return False
    scale = getattr(old, "embed_scale", None)
    if not set(old._buffers) <= {"embed_scale"} or not (isinstance(scale, int | float) or _is_number(scale)):
        return False
    with torch.device("cpu"):  # also where a model is built on the meta device
        rows = torch.arange(32.0).view(8, 4) / 7 - 2
        small: Any = type(old).__new__(type(old))
        nn.Embedding.__init__(small, 8, 4, _weight=rows)
        small.__dict__.update({name: value for name, value in old.__dict__.items() if name not in small.__dict__})
        factor, rounded = _scale_of(old)
        small.embed_scale = torch.tensor(factor) if rounded else factor
        return bool(torch.equal(small(torch.arange(8)), rows * small.embed_scale))


def _is_number(scale: object) -> bool:
    return isinstance(scale, Tensor) and scale.numel() == 1


def _scale_of(old: nn.Module) -> tuple[float | None, bool]:
    """Return the factor of scaled word embeddings, and whether it is rounded to the type of the rows."""
    scale = None if type(old) is nn.Embedding else getattr(old, "embed_scale", None)
    if isinstance(scale, Tensor):  # Gemma: `scalar_embed_scale` is what was rounded
        return float(getattr(old, "scalar_embed_scale", scale)), True
    return None if scale is None else float(scale), False


def _head_like(old: nn.Linear) -> OutputHead:
    """Return an `OutputHead` over the rows of a linear layer."""
    with torch.device("meta"):
        head = OutputHead(vocab_size=old.out_features, embed_dim=old.in_features, bias=old.bias is not None)
    head._parameters.clear()
    head._parameters.update(old._parameters)  # a tied weight too: transformers ties and saves it by this name
    return _in_place_of(old, head)


def _link_heads(model: nn.Module) -> None:
    """Let each head read the tables that have its weight through their places in the model."""
    places = [(Place(parent, name), child) for parent in model.modules() for name, child in parent._modules.items()]
    tables = [place for place, child in places if isinstance(child, TokenEmbedding)]
    for place, child in places:
        if isinstance(child, OutputHead) and REPLACED in child.__dict__:
            child.follow_places(tables, place)


def _resized(model: Any, *arguments: Any, **options: Any) -> nn.Module:
    """`model.resize_token_embeddings` of a patched model, in which transformers puts a new `nn.Linear` for a head."""
    for module in model.modules():
        if isinstance(module, TokenEmbedding) and module.pending_updates is not None:
            module.pending_updates.apply_all(module.weight, moments=True)
            module.pending_updates.detach()
    type(model).resize_token_embeddings(model, *arguments, **options)
    patch(model)
    table: nn.Module = model.get_input_embeddings()
    return table


CONTENTS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
"""What a module has of its own; all else that `nn.Module()` sets is its mode and what others have registered on it."""

INITIALISED = "_is_hf_initialized"
"""transformers' mark on a module whose weights are not to be drawn again, such as a head that was resized."""

New = TypeVar("New", bound=nn.Module)


def _in_place_of(old: nn.Module, new: New) -> New:
    """Hand over the mode and the hooks of every kind to the module that takes the place."""
    new.train(old.training)
    if INITIALISED in old.__dict__:
        new.__dict__[INITIALISED] = old.__dict__[INITIALISED]
    for name in nn.Module().__dict__:
        if name not in CONTENTS:
            new.__dict__[name] = old.__dict__[name]  # the same dictionaries: handles that remove a hook go on working
            for hook in old.__dict__[name].values() if isinstance(old.__dict__[name], dict) else ():
                if getattr(hook, "with_module", False):  # torch calls it with the module that it was registered on
                    hook.module = ref(new)
    return new


def _swap(model: nn.Module, old: nn.Module, new: nn.Module, *, keep: bool = True) -> None:
    """Put `new` wherever `old` is in the model."""
    if keep:
        new.__dict__[REPLACED] = old
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
