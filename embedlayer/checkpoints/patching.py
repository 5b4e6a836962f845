"""Replace token embeddings, LM heads and bags of a model of another library by those of this library, and undo it.

Weights stay the same parameter objects under the same names, so an optimizer, a state or a tied module that refers to
them stays valid. transformers is not imported: a model is recognised by its `get_input_embeddings`.
"""

import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn

from embedlayer.checkpoints.model_loss import accept_token_weights, refuse_token_weights
from embedlayer.checkpoints.reading.configuration import logit_factors, text_config, with_defaults, with_whole_model
from embedlayer.core.errors import CheckpointError, warn_if_untested
from embedlayer.core.formatting import a_or_an
from embedlayer.core.own_attributes import (
    INITIALISED,
    REPLACED,
    TRAINED_BEFORE,
    copy_own_attributes,
    modules_with,
    own_attribute,
    remove_own_attribute,
    set_own_attribute,
)
from embedlayer.core.partitioned import refuse_partitioned
from embedlayer.families import SCALE_ATTRIBUTES, family_of
from embedlayer.families.records import CountedRows
from embedlayer.heads.logit_source import LogitsReport, ModelLogitOptions
from embedlayer.heads.output import OutputHead
from embedlayer.integrations.fsdp import has_fsdp_modules
from embedlayer.integrations.peft import PeftReference
from embedlayer.row_sparse.hooks import release
from embedlayer.tables.bag import Bag
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tables.table import TokenTable

Model = TypeVar("Model", bound=nn.Module)

RESIZE, TIE = "resize_token_embeddings", "tie_weights"
"""The methods that `patch` replaces in a model of transformers."""


def patch(
    model: Model,
    *,
    row_sparse: bool = False,
    head_dtype: torch.dtype | str | None = None,
    batch_invariant: bool = False,
) -> Model:
    """Replace token embeddings, LM heads and bags of a model in place, without changing its outputs.

    Every token look-up becomes a `TokenEmbedding`: the model's input embeddings, those of its encoder and decoder, and
    all others that share their weight. Each keeps its scale; Gemma's is rounded, BART's is not. Every LM head that is
    an `nn.Linear` becomes an `OutputHead`. Parameters stay the same objects under the same names, and tied weights stay
    tied. A tied head reads the table through the model, so it also sees LoRA that PEFT adds to the table later. A
    padding row keeps its values. It gets no gradient from look-ups, and the head trains it, as before.

    The logits of a patched head are computed when something reads them. The loss of `model(input_ids, labels=labels)`
    needs none of them: it is `linear_cross_entropy` of the hidden states (see `DeferredLogits`). Logits must be read
    before the weights change. The first function that reads them is logged at level INFO.

    `model(input_ids, labels=labels, token_weights=weights)` multiplies the loss of each label by a weight, floats in
    the shape of the labels, which are shifted as the labels are; see `LossOptions`. A model that computes its loss by
    code of its own refuses them by name.

    `token_log_probs(outputs.logits, tokens)`, `token_statistics` and `divergence` take these logits without computing
    them. With `head = model.get_output_embeddings()`, `head.loss(hidden, targets)`, `token_log_probs`,
    `token_statistics` and `uncomputed_logits` compute the same distribution, from the output of the last block after
    its final norm (or after the transform of a masked language model). They apply the scale and the soft cap that the
    model applies outside the head (Gemma 2, Cohere, Granite, T5), while `head(hidden)` is the product alone. For a
    model type whose scale and cap are not known here they raise `CheckpointError`.

    With `head_dtype=torch.float32` the products with the rows of a head, its logits, and what follows from them are in
    float32, also in a model in bfloat16 and under autocast, with tied weights and with adapters, and without a float32
    copy of the rows. So `outputs.logits`, the loss of the model and everything above are those of a head in float32.

    A model of sentence-transformers with a StaticEmbedding, or any other model without `get_input_embeddings`, is
    patched where it has an `nn.EmbeddingBag`: each becomes a `Bag`, whose tensors keep their names in the state dict.

    A bad ID then raises an error that names its row and column. `edit_vocabulary` and `model.resize_token_embeddings`
    change the vocabulary of a patched model.

    Args:
        model: A model of transformers, before PEFT wraps it, or one with an `nn.EmbeddingBag`. Modules that are already
            patched stay as they are.
        row_sparse: Store gradients of the looked-up rows only, for `RowAdamW`; requires untied heads. The gradients of
            an `nn.EmbeddingBag(sparse=True)` are row-sparse in any case.
        head_dtype: `torch.float32` for LM heads in float32, or `None`; see `LogitOptions`.
        batch_invariant: Whether results of the LM heads do not depend on the other tokens of a call; see
            `LogitOptions`.

    Returns:
        The same model.

    Raises:
        SizeError: DeepSpeed's ZeRO-3 has partitioned a parameter; `head_dtype` is neither `torch.float32` nor `None`;
            or `Bag.from_embedding_bag` refuses a module.
        CheckpointError: `get_input_embeddings` is missing or returns no `nn.Embedding` but, for example, the module in
            which PEFT wraps it; an embedding does more than look-up and scale, or has a replaced `forward`;
            `row_sparse` is requested for a model with a tied head, or for one that is patched; options of heads are
            passed for a model without one that can be replaced; or `fully_shard` was called before. The model is then
            unchanged.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = patch(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_positions=16, n_embd=8, n_layer=1, n_head=2)))
        >>> type(model.transformer.wte).__name__, type(model.lm_head).__name__
        ('TokenEmbedding', 'OutputHead')
    """
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        warn_if_untested("transformers", sys.modules["transformers"].__version__)
    refuse_partitioned(model.named_parameters(), "is patched", gathered=False)
    old_bags = [] if hasattr(model, "get_input_embeddings") else _bags(model)
    old_tables, old_heads = ([] if old_bags else _look_ups(model)), _heads(model)
    if (old_tables or old_heads or old_bags) and has_fsdp_modules(model):
        raise CheckpointError("Sharded weights are gathered for the modules that had them: patch the model before.")
    asks_of_heads = head_dtype is not None or batch_invariant
    if (row_sparse and not old_tables and not old_bags) or (asks_of_heads and not old_heads):
        raise CheckpointError(
            f"The {type(model).__name__} is patched already, or has no LM head that is an nn.Linear: unpatch it first, "
            f"or leave out row_sparse, head_dtype and batch_invariant."
        )
    if row_sparse and (name := name_of_tied_module(model, [table.weight for table in old_tables])):
        raise CheckpointError(f"{name} shares the table's weight, and its gradient is dense: leave out row_sparse.")
    tables = [(old, _table_like(old, row_sparse=row_sparse)) for old in old_tables]
    bags = [(old, Bag.from_embedding_bag(old, row_sparse=row_sparse or old.sparse)) for old in old_bags]
    report = LogitsReport(type(model).__name__)
    products: dict[str, Any] = {"head_dtype": head_dtype, "batch_invariant": batch_invariant}
    heads = [(old, _head_like(old, report, _model_options(model, old), products)) for old in old_heads]
    for old, new in (*tables, *heads, *bags):
        _swap(model, old, new)
        set_own_attribute(new, REPLACED, old)
    places = [
        (PeftReference(parent, name), child) for parent in model.modules() for name, child in parent._modules.items()
    ]
    for place, child in places:
        if isinstance(child, OutputHead) and own_attribute(child, REPLACED) is not None:
            # it reads the tables that share its weight
            child.follow_references([table for table, module in places if isinstance(module, DenseTable)], place)
    if heads and head_dtype is not None:
        model_without_head = getattr(model, "base_model", model)
        report.bypass_check = model_without_head.register_forward_pre_hook(report.warn_of_bypass)
    if heads:
        accept_token_weights(model)
    if (tables or heads) and hasattr(model, RESIZE):
        set_own_attribute(model, RESIZE, partial(_resized, model))
        set_own_attribute(model, TIE, partial(_tied, model))
    return model


def unpatch(model: Model) -> Model:
    """Put back the modules that `patch` replaced, with the current weights; PEFT's wrappers may be present.

    Returns:
        The same model. A model without patched modules stays as it is.

    Raises:
        CheckpointError: Rows of a table are trained separately and not merged, or `replace_table` has put in a table
            that transformers has no module for. The model is then unchanged.
    """
    replaced = modules_with(model, REPLACED)
    if replaced or own_attribute(model, RESIZE) is not None:
        _refuse_other_tables(model)
    for ours in replaced:
        original: Any = own_attribute(ours, REPLACED)
        table = ours.table if isinstance(ours, Bag) else ours
        if isinstance(table, DenseTable):
            release(cast(nn.Parameter, table.weight))
            original.num_embeddings, original.padding_idx = table.num_embeddings, table.padding_idx
        elif isinstance(ours, OutputHead):
            original.out_features = ours.out_features
            if ours.logits_report is not None and ours.logits_report.bypass_check is not None:
                ours.logits_report.bypass_check.remove()
                ours.logits_report.bypass_check = None
        original._parameters.update(table._parameters)
        for name, buffer in original._buffers.items():  # the modules that are replaced have no buffer but a scale
            known = torch.full_like(buffer, cast(float, ours.scale), device="cpu") if buffer.is_meta else buffer
            original._buffers[name] = known.to(next(ours.parameters()).device)
        _swap(model, ours, original)
    for part in model.modules():
        remove_own_attribute(part, RESIZE)
        remove_own_attribute(part, TIE)
        refuse_token_weights(part)
    return model


def _refuse_other_tables(model: nn.Module) -> None:
    """Raise a `CheckpointError` if a patched model has a table that no module of transformers can take the place of."""
    for name, module in model.named_modules():
        if isinstance(module, TokenTable) and not isinstance(module, DenseTable):
            remedy = "unpatch the model before replace_table"
            if isinstance(module, DeltaEmbedding):  # its trained rows are not in the table yet
                is_prepared = modules_with(model, TRAINED_BEFORE)
                call = "embedlayer.vocab.merge_rows(model)" if is_prepared else f"model.{name} = model.{name}.merge()"
                remedy = f"call {call} before unpatch"
            raise CheckpointError(f"{name} is {a_or_an(module)}, which transformers cannot store: {remedy}.")


def _bags(model: nn.Module) -> list[nn.EmbeddingBag]:
    """Return each `nn.EmbeddingBag` inside a model, which `patch` replaces."""
    if isinstance(model, nn.EmbeddingBag):
        raise CheckpointError("This is an nn.EmbeddingBag: call embedlayer.tables.Bag.from_embedding_bag(module).")
    return [each for each in model.modules() if isinstance(each, nn.EmbeddingBag)]


def _look_ups(model: nn.Module) -> list[nn.Embedding]:
    """Return the token embeddings that `patch` must replace.

    These are the model's input embeddings, its output module if that is an embedding (FSMT), its per-layer table (Gemma
    3n and 4), and all other embeddings that share a weight with one of them. Modules that are patched already are left
    out.
    """
    inputs = _call_getters(model, "get_input_embeddings")
    if not hasattr(model, "get_input_embeddings") or not inputs:
        raise CheckpointError(f"A {type(model).__name__} has no get_input_embeddings and no nn.EmbeddingBag to patch.")
    root = inputs[0]
    if not isinstance(root, nn.Embedding):
        library = type(root).__module__.partition(".")[0]
        raise CheckpointError(f"The input embeddings are {a_or_an(root)} of {library}: patch before it wraps them.")
    others = ("get_output_embeddings", "get_per_layer_input_embeddings")  # FSMT: a table as output; Gemma 3n and 4
    candidates = (*inputs, *(module for getter in others for module in _call_getters(model, getter)))
    tables = [root, *(each for each in candidates if isinstance(each, nn.Embedding) and _is_known(each))]
    weights = {id(each.weight) for each in tables}
    sharing = [each for each in model.modules() if isinstance(each, nn.Embedding) and id(each.weight) in weights]
    return [each for each in dict.fromkeys((*tables, *sharing)) if not isinstance(each, DenseTable)]


def _call_getters(model: nn.Module, getter: str, *, inside: bool = True) -> list[nn.Module]:
    """Call a getter, such as `get_input_embeddings`, on a model and all its submodules; return the modules found."""
    modules = []
    for part in model.modules() if inside else (model,):
        with suppress(NotImplementedError, AttributeError):  # modules without embeddings raise one of these
            modules.append(getattr(part, getter)())
    return [each for each in modules if isinstance(each, nn.Module)]


def _heads(model: nn.Module) -> list[nn.Linear]:
    """Return the `nn.Linear` modules of a model that are LM heads or share the weight of a token embedding.

    Modules of a subclass, such as PEFT's modules and heads that are patched already, are left out.
    """
    inputs, outputs = (_call_getters(model, getter) for getter in ("get_input_embeddings", "get_output_embeddings"))
    heads = {id(each) for each in outputs}
    tables = [each for each in (*inputs, *outputs) if isinstance(each, nn.Embedding)]
    weights = {id(table.weight) for table in tables}
    linear = [each for each in model.modules() if type(each) is nn.Linear]
    return [each for each in linear if id(each) in heads or id(each.weight) in weights]


def name_of_tied_module(model: nn.Module, weights: Iterable[Tensor]) -> str:
    """Return the name of a module of a model that has the weight of a table and is no embedding; empty if none has."""
    ids = {id(weight) for weight in weights}
    others = ((name, module) for name, module in model.named_modules() if not isinstance(module, nn.Embedding))
    return next((name for name, module in others if any(id(p) in ids for p in module._parameters.values())), "")


def _table_like(old: nn.Embedding, *, row_sparse: bool) -> DenseTable:
    """Return a dense table that shares the parameter, the scale and the padding ID of `old`."""
    if not _is_known(old):
        raise CheckpointError(f"What {a_or_an(old)} does beyond look-up and scale is unknown: it is not patched.")
    if old.max_norm is not None or old.scale_grad_by_freq or old.sparse or own_attribute(old, "forward") is not None:
        raise CheckpointError("max_norm, scale_grad_by_freq, sparse and a replaced forward cannot be patched.")
    scale, rounded = _scale_of(old)
    kind = RowSparseEmbedding if row_sparse else TokenEmbedding
    table = kind(
        old.num_embeddings,
        old.embedding_dim,
        padding_idx=old.padding_idx,
        scale=scale,
        round_scale=rounded,
        device="meta",
        dtype=old.weight.dtype,
    )
    table.weight = old.weight
    device = torch.device("cpu") if old.weight.is_meta else old.weight.device  # meta weights are loaded later
    table.recompute_buffers(device)
    table.index_check.move_record(device)
    return table


def _is_known(old: object) -> bool:
    """Return whether an embedding computes `scale * weight[ids]` and nothing else.

    A subclass of `nn.Embedding` qualifies if it stores only a weight and a scale, and a small instance of it computes
    this formula.
    """
    if isinstance(old, DenseTable) or type(old) is nn.Embedding:
        return True
    if not isinstance(old, nn.Embedding) or old._modules or set(old._parameters) != {"weight"}:
        return False
    name = SCALE_ATTRIBUTES[-1]
    scale = getattr(old, name, None)
    is_number = isinstance(scale, Tensor) and scale.numel() == 1
    if not set(old._buffers) <= {name} or not (isinstance(scale, int | float) or is_number):
        return False
    with torch.device("cpu"):  # even if the caller builds models on the meta device
        rows = torch.arange(32.0).view(8, 4) / 7 - 2
        small: Any = type(old).__new__(type(old))
        nn.Embedding.__init__(small, 8, 4, _weight=rows)
        copy_own_attributes(old, small, vars(old).keys() - vars(small).keys())
        factor, rounded = _scale_of(old)
        setattr(small, name, torch.tensor(factor) if rounded else factor)
        return bool(torch.equal(small(torch.arange(8)), rows * getattr(small, name)))


def _scale_of(old: nn.Module) -> tuple[float | None, bool]:
    """Return `(factor, is_rounded)` for an embedding of transformers that scales its rows.

    The factor is `None` for no scale. `is_rounded` says whether it is rounded to the dtype of the rows (Gemma).
    """
    if type(old) is nn.Embedding:
        return None, False
    scales = [getattr(old, name) for name in SCALE_ATTRIBUTES if getattr(old, name, None) is not None]
    return (float(scales[0]) if scales else None), bool(scales) and isinstance(scales[-1], Tensor)


def _head_like(
    old: nn.Linear, report: LogitsReport, options: ModelLogitOptions, products: dict[str, Any]
) -> OutputHead:
    """Return an `OutputHead` with deferred logits, whose weight and bias are the parameters of a linear layer.

    `products` are its options `head_dtype` and `batch_invariant`.
    """
    with torch.device("meta"):
        head = OutputHead(old.in_features, old.out_features, bias=old.bias is not None, **products)
    head._parameters.clear()
    head._parameters.update(old._parameters)  # transformers ties and saves a tied weight under this name
    head.logits_report, head.model_options = report, options
    return head


def _model_options(model: nn.Module, old: nn.Linear) -> ModelLogitOptions:
    """Return what a model does to its logits outside a head, as the record of its family says.

    If that is not known, `unknown` of the result says why.
    """
    owners = [part for part in model.modules() if old in _call_getters(part, "get_output_embeddings", inside=False)]
    owner = (owners or [model])[0]
    config_object: Any = getattr(owner, "config", None)
    if not hasattr(config_object, "to_dict"):
        return ModelLogitOptions(unknown=f"A {type(model).__name__} has no configuration of transformers")
    whole = config_object.to_dict()
    config = text_config(whole)
    model_type = config.get("model_type")
    family = family_of(model_type)
    spec = None if family is None else with_whole_model(family, whole.get("model_type")).head
    if family is None or spec is None:
        return ModelLogitOptions(unknown=f"What model type {model_type!r} does to its logits is not known")
    config = with_defaults(family, config)
    for key in family.sub_configs:  # the decoder's is the last one
        config = {**config, **(config.get(key) or {})}
    count = config.get(spec.rows.key) if isinstance(spec.rows, CountedRows) else None
    rows = count or old.out_features
    if spec.columns or rows < old.out_features:
        reason = f"The logits of model type {model_type!r} are not those of its head's rows"
        return ModelLogitOptions(unknown=reason, is_partial=bool(spec.columns))
    tensors = (name for name, _ in (*owner.named_parameters(), *owner.named_buffers()))
    is_bias = (name for name in tensors if f".{name}".endswith(tuple(f".{end}" for end in spec.bias)))
    bias_name = next(is_bias, None) if old.bias is None else None
    bias = None if bias_name is None else PeftReference(owner, bias_name)
    try:
        factors = logit_factors(spec, config, old.in_features)
        return ModelLogitOptions(**factors, bias=bias, scales_hidden=spec.scales_hidden)
    except CheckpointError as error:
        return ModelLogitOptions(unknown=f"The configuration does not say what the model does to its logits ({error})")


def _resized(model: Any, *arguments: Any, **options: Any) -> nn.Module:
    """Resize the vocabulary of a patched model with transformers' method, then patch the modules it created.

    `patch` installs this function as the model's `resize_token_embeddings`. Pending lazy updates are applied first.
    Heads keep `head_dtype` and `batch_invariant`.
    """
    if not _have_weights(model):
        raise CheckpointError(
            f"transformers cannot resize {a_or_an(model.get_input_embeddings())}: embedlayer.vocab.merge_rows(model), "
            f"or resize the model before its table is compressed."
        )
    heads = {name: module for name, module in model.named_modules() if isinstance(module, OutputHead)}
    for module in model.modules():
        if isinstance(module, RowSparseEmbedding) and module.pending_updates is not None:
            module.pending_updates.apply_all(module.weight, moments=True)
            module.pending_updates.detach()
    type(model).resize_token_embeddings(model, *arguments, **options)
    patch(model)
    for name, former in heads.items():
        head = model.get_submodule(name)
        head.head_dtype, head.batch_invariant = former.head_dtype, former.batch_invariant
        head.logits_report = former.logits_report
    table: nn.Module = model.get_input_embeddings()
    return table


def _tied(model: Any, *arguments: Any, **options: Any) -> None:
    """Tie the weights of a patched model with transformers' own method, where its table has a weight.

    `patch` installs this function as the model's `tie_weights`. The head of another table, such as a quantised one or
    one with rows that are trained separately, reads that table at each call.
    """
    if _have_weights(model):
        type(model).tie_weights(model, *arguments, **options)


def _have_weights(model: nn.Module) -> bool:
    """Return whether all tables of a model are `nn.Embedding`s, whose weights transformers reads and writes."""
    return all(isinstance(table, nn.Embedding) for table in model.modules() if isinstance(table, TokenTable))


CONTENTS = {"_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"}
"""Attributes of `nn.Module()` with a module's own content; the others are its mode and its hooks."""


def _swap(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the module `old` by `new` in every module of `model` that has it as a child."""
    new.train(old.training)
    shared = vars(nn.Module()).keys() - CONTENTS
    copy_own_attributes(old, new, {*shared, INITIALISED})  # the same dictionaries, so that handles still remove hooks
    for hooks in [own_attribute(old, name) for name in shared]:
        for hook in hooks.values() if isinstance(hooks, dict) else ():
            if getattr(hook, "with_module", False):  # torch calls the hook with this module
                hook.module = ref(new)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
