"""The tensors of a live module, and of its optimizer, that have a row for each token; moved together or not at all.

Everything new is built first; then it takes the place of the old in one go. Parameters stay the same objects, so tied
partners and optimizers go on holding them. Of a table that is divided among processes each moves its own rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import Optimizer

from embedlayer.checkpoints.embedding_layer import EmbeddingLayer
from embedlayer.checkpoints.patch import REPLACED
from embedlayer.data.tokenizer import fingerprint
from embedlayer.errors import CheckpointError, SizeError, TokenIdError
from embedlayer.io.files import JsonObject
from embedlayer.layers.output import OutputHead
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.sparse_gradient import row_gradient
from embedlayer.tables.table import TokenTable
from embedlayer.vocab.change import Asked, Change, own_or_given
from embedlayer.vocab.owners import ALONE, Owners
from embedlayer.vocab.receipt import Receipt, moved_back
from embedlayer.vocab.roles import NewTokenIds, role_ids
from embedlayer.vocab.rows import End, RowMove, Slot, moved, row_fingerprint

NAMED = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "mask_token_id", "sep_token_id")
"""What configurations of live transformers models name tokens by."""

Step = tuple[Callable[[], object], Callable[[], object]]
"""Something to do, and how to undo it."""


class Part(NamedTuple):
    """The rows of a table that are in this process.

    Attributes:
        local: They, as a table: the table itself, unless it is divided.
        whole: The table.
        owners: Who has the others.
        of_head: Whether they are the rows of an untied head, divided.
    """

    local: TokenEmbedding | FactorizedEmbedding
    whole: TokenTable
    owners: Owners
    of_head: bool = False

    @property
    def stored(self) -> TokenEmbedding:
        """The dense table that stores them."""
        return self.local.inner if isinstance(self.local, FactorizedEmbedding) else self.local

    @property
    def divided(self) -> bool:
        """Whether other processes have others."""
        return self.local is not self.whole

    @property
    def padding_idx(self) -> int | None:
        """The token whose row is zero; that of a head's padding token is like any other."""
        return None if self.of_head else self.whole.padding_idx


class Ends(NamedTuple):
    """What has a row for each token in a live module, by name; of each table also the rows that are here."""

    tables: dict[str, TokenTable]
    parts: dict[str, Part]
    heads: dict[str, OutputHead]
    layers: dict[str, EmbeddingLayer]
    others: dict[str, Any]

    @property
    def owners(self) -> Owners:
        """The processes that must edit together."""
        return next((part.owners for part in self.parts.values() if part.divided), ALONE)

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
            raise SizeError(
                "There is no TokenTable and no OutputHead in this module: nothing here has a vocabulary. A "
                "torch.nn.Embedding is edited as TokenEmbedding.from_embedding(embedding), put in its place; a model "
                "of transformers after patch(model)."
            )
        if len(set(sizes.values())) > 1:
            shown = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            raise SizeError(f"These do not share a vocabulary ({shown}): edit each by itself.")

    def storages(self) -> dict[str, Part]:
        """Each part by the name of the dense table that stores its rows."""
        return {
            name if part.local is part.stored else f"{name}.inner".lstrip("."): part
            for name, part in self.parts.items()
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
        if table is not None and all(table is not t for t in tables.values()):
            tables[f"{name}.table".lstrip(".")] = table
    of_heads = {id(below) for head in heads.values() for below in head.children()}
    rows_here = dict(_part(name, table, id(table) in of_heads) for name, table in tables.items())
    ends = Ends(tables, rows_here, heads, layers, {})
    ends.check()
    ours = (TokenTable, OutputHead, EmbeddingLayer)
    for name, part in parts.items():
        for key, other in ((name, part), (f"{name}.config".lstrip("."), part.__dict__.get("config"))):
            if not isinstance(other, ours) and getattr(other, "vocab_size", None) == ends.vocab_size:
                ends.others[key] = other  # transformers' modules and configurations state the size again
    return ends


def _part(name: str, table: TokenTable, of_head: bool) -> tuple[str, Part]:
    """The rows of a table that are here, and their name."""
    if isinstance(table, TokenEmbedding | FactorizedEmbedding):
        return name, Part(table, table, ALONE)
    from embedlayer.distributed.sharded import ShardedTable  # who has one has imported it already

    if isinstance(table, ShardedTable) and isinstance(table.local, TokenEmbedding | FactorizedEmbedding):
        from embedlayer.vocab.divided import ManyOwners

        return f"{name}.local".lstrip("."), Part(table.local, table, ManyOwners(table.mesh), of_head)
    raise SizeError(
        f"The rows of {name or 'this table'}, a {type(table).__name__}, cannot be moved. "
        f"Edit the table that it was made from (a DeltaEmbedding's after merge()), and make it again."
    )


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
    found: list[tuple[Tensor, int, Owners]] = []
    of_heads: set[int] = set()
    for name, part in ends.storages().items():
        weight = part.stored.weight
        found.append((weight, spare.get(name, 0), part.owners))
        names.setdefault(id(weight), f"{name}.weight".lstrip("."))
        if part.of_head:
            of_heads.add(id(weight))
    for name, head in ends.heads.items():
        own = [] if head.tied else [("weight", head.weight)]
        for key, parameter in [*own, ("bias", head.bias)]:
            if parameter is not None:
                of_heads.add(id(parameter))
                found.append((parameter, 0, ALONE))
                names.setdefault(id(parameter), f"{name}.{key}".lstrip("."))
    unique = {id(parameter): (parameter, rows, owners) for parameter, rows, owners in found}
    for place, (parameter, rows, owners) in unique.items():
        end: End = "head" if place in of_heads else "table"
        slots.append(Slot(names[place], parameter, _Parameter(parameter), rows, end, owners))
    if optimizer is not None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not held & unique.keys():
            raise SizeError(
                "This optimizer belongs to other parameters: it holds none of the tensors that have a row for each "
                "token. Give the one that trains this module, or none."
            )
        for slot in list(slots):
            if id(slot.tensor) in held:
                slots += _state_slots(optimizer, slot)
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


def _state_slots(optimizer: Optimizer, of: Slot) -> Iterator[Slot]:
    """What an optimizer keeps for each row of a parameter, whatever its kind."""
    parameter = of.tensor
    state = optimizer.state.get(parameter, {})
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() <= 1:
            continue
        of_rows = value.shape == parameter.shape or (
            value.shape[0] == len(parameter) and (len(parameter) not in parameter.shape[1:] or "row" in key)
        )
        if not value.is_floating_point() or not (of_rows or value.shape[-1:] == parameter.shape[-1:]):
            raise SizeError(
                f"The optimizer keeps {key} of {of.name} as {tuple(value.shape)} of {value.dtype}: how its numbers "
                f"belong to rows is not known here. Build the optimizer again after the edit."
            )
        if of_rows:
            yield Slot(f"optimizer.{of.name}.{key}", value, _Entry(state, key), of.spare, owners=of.owners)


class _Entry:
    def __init__(self, state: dict[str, Any], key: str) -> None:
        self.state, self.key = state, key

    def __call__(self, tensor: Tensor) -> None:
        self.state[self.key] = tensor


class Setting(NamedTuple):
    """A size or an ID in a part of a live module: an object, the name of its attribute, and the rows that it is about.

    `of` is `None` where it is about those of all processes.
    """

    place: Any
    attribute: str
    of: Part | None = None

    @property
    def value(self) -> Any:
        """As it is."""
        return getattr(self.place, self.attribute)


def settings_of(ends: Ends) -> dict[str, Setting]:
    """Every size and ID in the parts of a live module."""
    found: dict[str, Setting] = {}

    def note(name: str, place: Any, *attributes: str, of: Part | None = None) -> None:
        found.update({f"{name}.{attribute}".lstrip("."): Setting(place, attribute, of) for attribute in attributes})

    for name, table in ends.tables.items():
        note(name, table, "vocab_size", "num_rows", "padding_idx")
    for name, part in ends.parts.items():
        if part.divided:
            outer = name.removesuffix("local").removesuffix(".")
            note(f"{outer}.index_check", part.whole.index_check, "size")
            note(name, part.local, "vocab_size", "num_rows", "padding_idx", of=part)
    for name, part in ends.storages().items():
        stored = part.stored
        sizes = ("vocab_size", "num_rows", "num_embeddings", "padding_idx", "pad_to_multiple_of")
        note(name, stored, *sizes, of=part)
        note(f"{name}.index_check", stored.index_check, "size", of=part)
        if stored.whole_rows is not None:
            note(name, stored, "first_row", "whole_rows", of=part)
        if stored.pending_updates is not None:
            note(f"{name}.pending_updates", stored.pending_updates, "padding_idx", of=part)
    for name, head in ends.heads.items():
        note(name, head, "out_features", "padding_idx")
    for name, layer in ends.layers.items():
        note(name, layer, "padding_id")
    for name, patched in {**ends.tables, **ends.heads}.items():
        original = patched.__dict__.get(REPLACED)
        if original is not None:
            named = [size for size in ("num_embeddings", "out_features", "padding_idx") if hasattr(original, size)]
            note(f"{name}.original", original, *named)
    for name, other in ends.others.items():
        named = [attribute for attribute in NAMED if getattr(other, attribute, None) is not None]
        note(name, other, "vocab_size", *named)
    return found


def new_settings(ends: Ends, change: Change, move: RowMove, multiple: int | None) -> JsonObject:
    """What `settings_of` is after a move.

    Raises:
        TokenIdError: The padding row would be gone.
        SizeError: A process would be left without a row.
    """
    storages = ends.storages()
    ids = NewTokenIds(move.new_ids.tolist(), {}, role_ids(change.tokenizer, change.roles))
    after: JsonObject = {}
    for name, (place, attribute, of) in settings_of(ends).items():
        value = getattr(place, attribute)
        start, stop = (0, move.size) if of is None else of.owners.span(move.size)
        if attribute in ("start", "first_row", "stop"):
            value = stop if attribute == "stop" else start
        elif attribute == "whole_rows":
            value = move.size
        elif attribute in ("vocab_size", "out_features", "size"):
            value = stop - start
        elif attribute in ("padding_idx", "padding_id"):
            padding = value if of is None else of.padding_idx
            new = None if padding is None else _moved_padding(padding, move)
            value = None if new is None or not start <= new < stop else new - start
        elif attribute in NAMED:
            if attribute == "eos_token_id" and change.roles is not None:
                change.roles.warn()
            beside = {name: getattr(place, name, None) for name in NAMED}
            value = ids.of(attribute, value, beside, "the model's configuration")
        elif not isinstance(place, TokenEmbedding | FactorizedEmbedding):
            value = stop - start
        elif attribute in ("num_rows", "num_embeddings", "pad_to_multiple_of"):
            owner = name.rpartition(".")[0]
            stored = storages[owner if owner in storages else f"{owner}.inner".lstrip(".")].stored
            multiple_here = stored.pad_to_multiple_of if multiple is None else multiple
            value = (
                multiple_here
                if attribute == "pad_to_multiple_of"
                else math.ceil((stop - start) / (multiple_here or 1)) * (multiple_here or 1)
            )
        after[name] = value
    return after


def _moved_padding(padding: int, move: RowMove) -> int:
    new = int(move.new_ids[padding])
    if new < 0:
        raise TokenIdError(f"Token {padding} is the padding token, whose row is zero and must stay: keep it.")
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
    for part in ends.parts.values():
        if part.stored.pending_updates is not None:
            part.stored.pending_updates.apply_all(part.stored.weight, moments=True)


def carry_out(
    ends: Ends,
    slots: Sequence[Slot],
    tensors: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | None],
    settings: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> None:
    """Put the new tensors, sizes, IDs and tokenizer in place: all of them, or none.

    Args:
        ends: What the slots belong to.
        slots: Tensors that are replaced.
        tensors: What takes their place, by name.
        gradients: And of the gradients that parameters have at this moment.
        settings: New values of `settings_of`.
        tokenizer: The new tokenizer, for layers that carry one.
    """
    learned = [(slot.tensor, slot.tensor.grad, gradients[slot.name]) for slot in slots if slot.name in gradients]
    steps: list[Step] = [(partial(_set_grad, p, None), partial(_set_grad, p, old)) for p, old, _ in learned]
    steps += [(partial(slot.swap, tensors[slot.name]), partial(slot.swap, slot.tensor.data)) for slot in slots]
    places = settings_of(ends)
    steps += [_attribute(*places[name][:2], value) for name, value in settings.items()]
    if tokenizer is not None:
        steps += [_attribute(layer, "_tokenizer", tokenizer) for layer in ends.layers.values()]
    steps += [(partial(_set_grad, p, new), partial(_set_grad, p, None)) for p, _, new in learned]
    _do_all(steps)
    for part in ends.parts.values():
        if part.stored.pending_updates is not None:
            part.stored.pending_updates.detach()  # all is up to date: the optimizer's next step begins a new one


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


def moved_gradients(slots: Sequence[Slot], move: RowMove) -> dict[str, Tensor | None]:
    """The gradients that parameters have at this moment, with their rows moved."""
    return {slot.name: _moved_gradient(slot, move) for slot in slots if isinstance(slot.tensor, nn.Parameter)}


def _moved_gradient(slot: Slot, move: RowMove) -> Tensor | None:
    grad, owners = slot.tensor.grad, slot.owners
    if grad is None or not grad.is_sparse:
        return None if grad is None else move.apply(grad, spare=slot.spare, owners=owners)
    places = grad._indices()[0] + owners.span(move.old_size)[0]
    rows = move.new_ids.to(grad.device)[places]
    stay = (rows >= 0).nonzero().squeeze(1)
    rows, values = owners.delivered(rows[stay], grad._values().index_select(0, stay), move.size)
    order = torch.argsort(rows, stable=True)
    start, stop = owners.span(move.size)
    shape = (stop - start + slot.spare, *grad.shape[1:])
    moved = torch.sparse_coo_tensor(rows[order].unsqueeze(0), values[order], shape, check_invariants=False)
    return row_gradient(slot.tensor, moved)


def edit_live(
    module: nn.Module, asked: Asked, tokenizer: Tokenizer | None = None, optimizer: Optimizer | None = None
) -> Receipt:
    """Edit a live module in place; nothing is changed if anything fails.

    Raises:
        VocabularyError: The tokenizer is another model's, or the edit cannot be made.
        SizeError: Nothing here has a vocabulary, the optimizer belongs to other parameters, or a process that has rows
            of a divided table would be left without one.
        TokenIdError: The padding row would be gone.
        PeerError: Another process that has rows refused, or makes another edit.
    """
    ends = ends_of(module)
    with ends.owners.agreed() as facts:
        for layer in ends.layers.values():
            tokenizer = own_or_given(layer.tokenizer, tokenizer)
        size = ends.vocab_size
        change = asked.change(tokenizer, size)
        in_checkpoint = any(layer.tensor_names for layer in ends.layers.values())  # there all rows are looked up
        inner, outer = (asked.pad_to_multiple_of, None) if in_checkpoint else (None, asked.pad_to_multiple_of)
        if outer is not None and ends.owners is not ALONE:
            raise SizeError("Rows that are divided among processes have no spare ones: leave out pad_to_multiple_of.")
        move = change.move(size, inner if outer is None else 1)
        settings = new_settings(ends, change, move, outer)
        old_settings = {name: setting.value for name, setting in settings_of(ends).items()}
        bring_up_to_date(ends)
        slots = slots_after(module, ends, optimizer, settings)
        start = asked.starts(change, move)
        if ends.owners is not ALONE:
            facts |= _facts(slots, move, change.tokenizer, change.old_tokenizer)
    result = moved(slots, move, start, ends.owners)
    receipt = change.receipt(move, result, old_settings)
    gradients = moved_gradients(slots, move)
    with ends.owners.agreed():
        pass  # all have come so far
    carry_out(ends, slots, result.tensors, gradients, settings, change.tokenizer)
    return receipt


def _facts(slots: Sequence[Slot], move: RowMove, *tokenizers: Tokenizer | None) -> JsonObject:
    """What must be the same on all processes, lest one waits for what another never sends."""
    return {
        "the tensors that are there": [(slot.name, str(slot.tensor.dtype), slot.tensor.shape[1:]) for slot in slots],
        "the gradients that are there": [
            (slot.name, slot.tensor.grad.is_sparse)
            for slot in slots
            if isinstance(slot.tensor, nn.Parameter) and slot.tensor.grad is not None
        ],
        "what is asked for": row_fingerprint(move.sources),
        "the tokenizer": [None if tokenizer is None else fingerprint(tokenizer) for tokenizer in tokenizers],
    }


def undo_live(receipt: Receipt, module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """What `Receipt.undo` does to a live module.

    Raises:
        CheckpointError: It is not what the edit gave, or has been changed since; nothing was changed.
        PeerError: It is so on another process that has rows.
    """
    ends = ends_of(module)
    with ends.owners.agreed():
        if settings_of(ends).keys() != receipt.settings.keys() or ends.vocab_size != receipt.move.size:
            raise CheckpointError(
                f"This {type(module).__name__} is not what the receipt belongs to: its vocabulary has "
                f"{ends.vocab_size:,} rows, the receipt's {receipt.move.size:,}. Nothing was changed."
            )
        bring_up_to_date(ends)
        slots = slots_after(module, ends, optimizer, receipt.settings)
    tensors = moved_back(receipt, slots, ends.owners)
    gradients = moved_gradients(slots, receipt.move.inverse())
    with ends.owners.agreed():
        pass
    carry_out(ends, slots, tensors, gradients, receipt.settings, receipt.old_tokenizer)
