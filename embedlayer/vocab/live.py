"""The tensors of a live module, and of its optimizer, that have a row for each token; moved together or not at all.

Everything new is built first; then it takes the place of the old in one go. Parameters stay the same objects, so tied
partners and optimizers go on holding them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.checkpoints.layer import EmbeddingLayer
from embedlayer.checkpoints.patch import REPLACED, InputRows
from embedlayer.errors import CheckpointError, SizeError, TokenIdError, VocabularyError
from embedlayer.files import JsonObject
from embedlayer.layers.output import OutputHead
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.table import TokenTable
from embedlayer.vocab.change import Asked, own_or_given
from embedlayer.vocab.receipt import Receipt, moved_back
from embedlayer.vocab.rows import End, RowMove, Slot, moved

NAMED = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "mask_token_id", "sep_token_id")
"""What configurations of live transformers models name tokens by."""

Step = tuple[Callable[[], object], Callable[[], object]]
"""Something to do, and how to undo it."""


class Ends(NamedTuple):
    """What has a row for each token in a live module, by name."""

    tables: dict[str, TokenEmbedding | FactorizedEmbedding]
    heads: dict[str, OutputHead]
    layers: dict[str, EmbeddingLayer]
    others: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Tokens that have a row, V: the same at all ends."""
        return next(iter(self._sizes().values()))

    def _sizes(self) -> dict[str, int]:
        sizes = {name or "the table": table.vocab_size for name, table in self.tables.items()}
        return sizes | {name or "the head": head.out_features for name, head in self.heads.items()}

    def check(self) -> None:
        """Refuse ends that are not those of one vocabulary.

        Raises:
            SizeError: There are none, or they differ in size.
        """
        sizes = self._sizes()
        if not sizes:
            raise SizeError("There is no TokenTable and no OutputHead in this module: nothing here has a vocabulary.")
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            raise SizeError(f"These do not share a vocabulary ({shown}): edit each by itself.")

    def storages(self) -> dict[str, TokenEmbedding]:
        """The dense table that stores each table's rows."""
        return {
            name if table is stored else f"{name}.inner".lstrip("."): stored
            for name, table in self.tables.items()
            for stored in [table.inner if isinstance(table, FactorizedEmbedding) else table]
        }


def ends_of(module: nn.Module) -> Ends:
    """The tables and heads of a module; a tied head brings its table along.

    Raises:
        SizeError: There are none, they differ in size, or a table is of a kind whose rows cannot be moved.
    """
    parts = dict(module.named_modules())
    layers = {name: part for name, part in parts.items() if isinstance(part, EmbeddingLayer)}
    types = {id(layer.types) for layer in layers.values()}
    inner = {id(below) for part in parts.values() if isinstance(part, TokenTable) for below in part.children()}
    tables = {
        name: part
        for name, part in parts.items()
        if isinstance(part, TokenTable) and id(part) not in types and id(part) not in inner
    }
    heads = {name: part for name, part in parts.items() if isinstance(part, OutputHead)}
    for name, head in heads.items():
        table = head.__dict__["table"]
        if table is not None and not isinstance(table, InputRows) and all(table is not t for t in tables.values()):
            tables[f"{name}.table".lstrip(".")] = table
    known: dict[str, TokenEmbedding | FactorizedEmbedding] = {}
    for name, table in tables.items():
        if not isinstance(table, TokenEmbedding | FactorizedEmbedding):
            raise SizeError(
                f"The rows of {name or 'this table'}, a {type(table).__name__}, cannot be moved. "
                f"Edit the table that it was made from (a DeltaEmbedding's after merge()), and make it again."
            )
        known[name] = table
    ends = Ends(known, heads, layers, {})
    ends.check()
    ours = (TokenTable, OutputHead, EmbeddingLayer)
    for name, part in parts.items():
        for key, other in ((name, part), (f"{name}.config".lstrip("."), part.__dict__.get("config"))):
            if not isinstance(other, ours) and getattr(other, "vocab_size", None) == ends.vocab_size:
                ends.others[key] = other  # transformers' modules and configurations state the size again
    for name, head in heads.items():
        if isinstance(head.__dict__["table"], InputRows):
            ends.others[f"{name}.rows"] = head.__dict__["table"]
    return ends


def slots_of(module: nn.Module, ends: Ends, optimizer: Optimizer | None, spare: Mapping[str, int]) -> list[Slot]:
    """Every tensor of a live module and its optimizer that has a row for each token.

    Args:
        module: The module.
        ends: Its ends.
        optimizer: Its optimizer.
        spare: Spare rows that each table's storage is to have.

    Raises:
        SizeError: The optimizer belongs to other parameters, or keeps a state that has no rows.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    slots: list[Slot] = []
    owners: list[tuple[Tensor, int]] = []
    of_heads: set[int] = set()
    for name, table in ends.storages().items():
        owners.append((table.weight, spare.get(name, 0)))
        names.setdefault(id(table.weight), f"{name}.weight".lstrip("."))
    for name, head in ends.heads.items():
        own = [] if head.tied else [("weight", head.weight)]
        for key, parameter in [*own, ("bias", head.bias)]:
            if parameter is not None:
                of_heads.add(id(parameter))
                owners.append((parameter, 0))
                names.setdefault(id(parameter), f"{name}.{key}".lstrip("."))
    unique = {id(parameter): (parameter, spare) for parameter, spare in owners}
    for place, (parameter, rows) in unique.items():
        end: End = "head" if place in of_heads else "table"
        slots.append(Slot(names[place], parameter, _Parameter(parameter), rows, end))
    if optimizer is not None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not held & unique.keys():
            raise SizeError(
                "This optimizer belongs to other parameters: it holds none of the tensors that have a row for each "
                "token. Give the one that trains this module, or none."
            )
        for parameter, rows in unique.values():
            if id(parameter) in held:
                slots += _state_slots(optimizer, parameter, f"optimizer.{names[id(parameter)]}", rows)
    return slots


class _Parameter:
    """Puts other numbers, of another size, into a parameter that stays the same object."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter

    def __call__(self, tensor: Tensor) -> None:
        # A graph that is still alive has noted the old shape for this parameter's gradient; torch forgets that note
        # when the type changes, and only then.
        other = torch.float16 if tensor.dtype != torch.float16 else torch.float32
        self.parameter.data = torch.empty(0, dtype=other, device=tensor.device)
        self.parameter.data = tensor


def _state_slots(optimizer: Optimizer, parameter: Tensor, name: str, spare: int) -> Iterator[Slot]:
    """What an optimizer keeps for each row of a parameter, whatever its kind."""
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() <= 1:
            continue
        of_rows = value.shape == parameter.shape or (
            value.shape[0] == len(parameter) and (len(parameter) not in parameter.shape[1:] or "row" in key)
        )
        if not value.is_floating_point() or not (of_rows or value.shape[-1:] == parameter.shape[-1:]):
            raise SizeError(
                f"The optimizer keeps {key} of {name.removeprefix('optimizer.')} as {tuple(value.shape)} of "
                f"{value.dtype}: how its numbers belong to rows is not known here. Build the optimizer again after the "
                f"edit."
            )
        if of_rows:
            yield Slot(f"{name}.{key}", value, _Entry(state, key), spare, end=None)


class _Entry:
    def __init__(self, state: dict[str, Any], key: str) -> None:
        self.state, self.key = state, key

    def __call__(self, tensor: Tensor) -> None:
        self.state[self.key] = tensor


def settings_of(ends: Ends) -> dict[str, tuple[Any, str]]:
    """Every size and ID in the parts of a live module, as an object and the name of its attribute."""
    found: dict[str, tuple[Any, str]] = {}

    def note(name: str, part: Any, *attributes: str) -> None:
        found.update({f"{name}.{attribute}".lstrip("."): (part, attribute) for attribute in attributes})

    for name, table in ends.tables.items():
        note(name, table, "vocab_size", "num_rows", "padding_idx")
    for name, stored in ends.storages().items():
        note(name, stored, "vocab_size", "num_rows", "num_embeddings", "padding_idx", "pad_to_multiple_of")
        note(f"{name}.bounds", stored.bounds, "size")
        if stored.ledger is not None:
            note(f"{name}.ledger", stored.ledger, "padding_idx")
    for name, head in ends.heads.items():
        note(name, head, "out_features", "padding_idx")
    for name, layer in ends.layers.items():
        note(name, layer, "padding_id")
    for name, patched in {**ends.tables, **ends.heads}.items():
        original = patched.__dict__.get(REPLACED)
        if original is not None:
            sizes = [size for size in ("num_embeddings", "out_features", "padding_idx") if hasattr(original, size)]
            note(f"{name}.original", original, *sizes)
    for name, other in ends.others.items():
        named = [attribute for attribute in NAMED if getattr(other, attribute, None) is not None]
        note(name, other, "vocab_size", *(["num_rows"] if isinstance(other, InputRows) else []), *named)
    return found


def new_settings(ends: Ends, move: RowMove, multiple: int | None) -> JsonObject:
    """What `settings_of` is after a move.

    Raises:
        TokenIdError: The padding row would be gone.
    """
    storages = ends.storages()
    after: JsonObject = {}
    for name, (part, attribute) in settings_of(ends).items():
        value = getattr(part, attribute)
        if attribute in ("vocab_size", "out_features", "size"):
            value = move.size
        elif attribute in ("padding_idx", "padding_id"):
            value = None if value is None else _moved_padding(value, move)
        elif attribute in NAMED:
            value = _moved_ids(value, attribute, move)
        elif not isinstance(part, TokenEmbedding | FactorizedEmbedding):
            value = move.size
        elif attribute in ("num_rows", "num_embeddings", "pad_to_multiple_of"):
            owner = name.rpartition(".")[0]
            stored = storages[owner] if owner in storages else storages[f"{owner}.inner".lstrip(".")]
            multiple_here = stored.pad_to_multiple_of if multiple is None else multiple
            value = (
                multiple_here
                if attribute == "pad_to_multiple_of"
                else math.ceil(move.size / (multiple_here or 1)) * (multiple_here or 1)
            )
        after[name] = value
    return after


def _moved_padding(padding: int, move: RowMove) -> int:
    new = int(move.new_ids[padding])
    if new < 0:
        raise TokenIdError(f"Token {padding} is the padding token, whose row is zero and must stay: keep it.")
    return new


def _moved_ids(value: Any, name: str, move: RowMove) -> Any:
    """The IDs of tokens that a configuration names."""
    if isinstance(value, list | tuple):
        return type(value)(_moved_ids(one, name, move) for one in value)
    if type(value) is not int or not 0 <= value < move.old_size:
        return value
    new = int(move.new_ids[value])
    if new < 0:
        raise VocabularyError(f"Token {value} cannot go: the model's configuration names it as {name}. Keep it.")
    return new


def slots_after(module: nn.Module, ends: Ends, optimizer: Optimizer | None, settings: Mapping[str, Any]) -> list[Slot]:
    """`slots_of`, with the spare rows that the settings to come ask for."""
    spare = {}
    for name in ends.storages():
        prefix = f"{name}.".lstrip(".")
        spare[name] = settings[f"{prefix}num_rows"] - settings[f"{prefix}vocab_size"]
    return slots_of(module, ends, optimizer, spare)


def bring_up_to_date(ends: Ends) -> None:
    """Let rows and moments of row-sparse tables be what dense AdamW has made of them by now."""
    for stored in ends.storages().values():
        if stored.ledger is not None:
            stored.ledger.flush(stored.weight, moments=True)


def carry_out(
    ends: Ends,
    slots: Sequence[Slot],
    tensors: Mapping[str, Tensor],
    move: RowMove,
    settings: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> None:
    """Put the new tensors, sizes, IDs and tokenizer in place: all of them, or none.

    Args:
        ends: What the slots belong to.
        slots: Tensors that are replaced.
        tensors: What takes their place, by name.
        move: How gradients follow.
        settings: New values of `settings_of`.
        tokenizer: The new tokenizer, for layers that carry one.
    """
    learned = [slot for slot in slots if isinstance(slot.tensor, nn.Parameter)]
    gradients = [(slot.tensor, slot.tensor.grad, _moved_gradient(slot, move)) for slot in learned]
    steps: list[Step] = [(partial(_set_grad, p, None), partial(_set_grad, p, old)) for p, old, _ in gradients]
    steps += [(partial(slot.swap, tensors[slot.name]), partial(slot.swap, slot.tensor.data)) for slot in slots]
    places = settings_of(ends)
    steps += [_attribute(*places[name], value) for name, value in settings.items()]
    if tokenizer is not None:
        steps += [_attribute(layer, "_tokenizer", tokenizer) for layer in ends.layers.values()]
    steps += [(partial(_set_grad, p, new), partial(_set_grad, p, None)) for p, _, new in gradients]
    _do_all(steps)
    for stored in ends.storages().values():
        if stored.ledger is not None:
            stored.ledger.detach()  # all is up to date: the optimizer's next step begins a new one


def _do_all(steps: Sequence[Step]) -> None:
    undone: list[Callable[[], object]] = []
    try:
        for do, undo in steps:
            undone.append(undo)
            do()
    except BaseException:
        for undo in reversed(undone):
            undo()
        raise


def _attribute(part: Any, name: str, value: object) -> Step:
    return partial(setattr, part, name, value), partial(setattr, part, name, getattr(part, name))


def _set_grad(parameter: Tensor, grad: Tensor | None) -> None:
    parameter.grad = grad


def _moved_gradient(slot: Slot, move: RowMove) -> Tensor | None:
    """The gradient that a parameter has at this moment, with its rows moved."""
    grad = slot.tensor.grad
    if grad is None or not grad.is_sparse:
        return None if grad is None else move.apply(grad, spare=slot.spare)
    rows = move.new_ids.to(grad.device)[grad._indices()[0]]
    order = torch.argsort(rows, stable=True)
    order = order[rows[order] >= 0]
    shape = (move.size + slot.spare, *grad.shape[1:])
    return torch.sparse_coo_tensor(rows[order].unsqueeze(0), grad._values()[order], shape, check_invariants=False)


def edit_live(
    module: nn.Module, asked: Asked, tokenizer: Tokenizer | None = None, optimizer: Optimizer | None = None
) -> Receipt:
    """Edit a live module in place; nothing is changed if anything fails.

    Raises:
        VocabularyError: The tokenizer is another model's, or the edit cannot be made.
        SizeError: Nothing here has a vocabulary, or the optimizer belongs to other parameters.
        TokenIdError: The padding row would be gone.
    """
    ends = ends_of(module)
    for layer in ends.layers.values():
        tokenizer = own_or_given(layer.tokenizer, tokenizer)
    size = ends.vocab_size
    change = asked.change(tokenizer, size)
    stored = any(layer.tensor_names for layer in ends.layers.values())  # in a checkpoint all rows are looked up
    inner, outer = (asked.pad_to_multiple_of, None) if stored else (None, asked.pad_to_multiple_of)
    move = change.move(size, inner if outer is None else 1)
    settings = new_settings(ends, move, outer)
    old_settings = {name: getattr(*place) for name, place in settings_of(ends).items()}
    bring_up_to_date(ends)
    slots = slots_after(module, ends, optimizer, settings)
    result = moved(slots, move, asked.starts(change, move))
    receipt = change.receipt(move, result, old_settings)
    carry_out(ends, slots, result.tensors, move, settings, change.tokenizer)
    return receipt


def undo_live(receipt: Receipt, module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """What `Receipt.undo` does to a live module.

    Raises:
        CheckpointError: It is not what the edit gave, or has been changed since; nothing was changed.
    """
    ends = ends_of(module)
    if settings_of(ends).keys() != receipt.settings.keys() or ends.vocab_size != receipt.move.size:
        raise CheckpointError(
            f"This {type(module).__name__} is not what the receipt belongs to: its vocabulary has "
            f"{ends.vocab_size:,} rows, the receipt's {receipt.move.size:,}. Nothing was changed."
        )
    bring_up_to_date(ends)
    slots = slots_after(module, ends, optimizer, receipt.settings)
    tensors = moved_back(receipt, slots)
    carry_out(ends, slots, tensors, receipt.move.inverse(), receipt.settings, receipt.old_tokenizer)
