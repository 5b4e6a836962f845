"""Rows of K streams of codes: the tensors that have them, and how an edit of one stream moves them.

The vocabulary of a stream is the codes of this stream. In a `StreamTable`, streams may have different sizes. A model of
transformers states one size for all its streams, so that after an edit of one the others have as many rows, of which
the last belong to no code.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.families.field_types import End
from embedlayer.families.stream_records import Layout
from embedlayer.tables.streams import require_stream
from embedlayer.vocab.edit import ModelResult, ResolveEdit
from embedlayer.vocab.map import RowTensor
from embedlayer.vocab.targets.apply_rows import apply_row_map
from embedlayer.vocab.targets.module_settings import Assignment
from embedlayer.vocab.targets.optimizer_rows import NewState, state_with_rows
from embedlayer.vocab.targets.unmoved_state import require_moved

STREAM = "stream"
"""Key of the number of the edited stream in the `settings` of a receipt."""


class StreamRows(NamedTuple):
    """Describe a tensor that has the rows of one or several streams.

    Attributes:
        name: Name of the tensor.
        tensor: The tensor, as `layout` says; a joined one may have further rows behind those of all streams. A bias has
            numbers in place of rows.
        streams: The streams whose rows it has, in order.
        sizes: Number of codes of each of them.
        end: Which initialisation computes new rows.
        more: Rows of each stream that follow its codes.
        layout: How the rows are stored in the tensor; see `Layout`.
    """

    name: str
    tensor: Tensor
    streams: tuple[int, ...]
    sizes: tuple[int, ...]
    end: End
    more: int = 0
    layout: Layout = "joined"

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Return the rows of each stream in a tensor of this layout, and then the rows behind all streams."""
        if self.layout != "joined":
            return [each.mT if self.layout == "transposed" else each for each in tensor.unbind()]
        lengths = [size + self.more for size in self.sizes]
        return list(tensor.split([*lengths, len(tensor) - sum(lengths)]))

    def first_row(self, stream: int) -> int:
        """Return the row of code 0 of a stream in the tensor."""
        at = self.streams.index(stream)
        return sum(self.sizes[:at]) + at * self.more

    def codes(self, tensor: Tensor, stream: int) -> Tensor | None:
        """Return the rows of the codes of a stream in a tensor of this layout; `None` if it has no such stream."""
        if stream not in self.streams:
            return None
        at = self.streams.index(stream)
        return self.parts(tensor)[at][: self.sizes[at]]

    def replaced(
        self, tensor: Tensor, stream: int, rows: Tensor, size: int, resized: Collection[int], *, is_state: bool
    ) -> Tensor:
        """Return a tensor of this layout in which a stream has other codes, and some streams `size` of them.

        Args:
            tensor: The tensor before.
            stream: The stream.
            rows: Rows of its codes. They are ignored if the tensor has no such stream.
            size: Number of codes; further rows are the mean of those before, in an optimizer's state zero.
            resized: The streams that get this size.
            is_state: Whether the tensor is an optimizer's state.
        """
        parts = self.parts(tensor)
        for at, (each, old) in enumerate(zip(self.streams, self.sizes, strict=True)):
            codes, rest = parts[at][:old], parts[at][old:]
            codes = rows if each == stream else codes
            if each in resized:
                codes = _resized(codes, size, is_state=is_state)
            parts[at] = torch.cat([codes, rest])
        if self.layout != "joined":
            return torch.stack([each.mT if self.layout == "transposed" else each for each in parts]).contiguous()
        return torch.cat(parts)


def _resized(rows: Tensor, size: int, *, is_state: bool) -> Tensor:
    """Return the first `size` rows, or all of them and further ones: their mean, in an optimizer's state zero."""
    if size <= len(rows):
        return rows[:size]
    mean = rows.double().mean(0, keepdim=True).to(rows.dtype)
    further = torch.zeros_like(mean) if is_state else mean
    return torch.cat([rows, further.expand(size - len(rows), *further.shape[1:])])


class Streams(NamedTuple):
    """Describe the streams of a module or a checkpoint.

    Attributes:
        rows: The tensors with rows of streams.
        sizes: Number of codes of each stream.
        alike: Streams that have one size, as a configuration or a tensor says; empty if each has a size of its own.
        resize: Function that returns the assignments which give modules and configurations other sizes, from these
            sizes, the edited stream, and the new ID of each of its codes.
    """

    rows: list[StreamRows]
    sizes: tuple[int, ...]
    alike: frozenset[int]
    resize: Callable[[tuple[int, ...], int, Tensor], list[Assignment]] = lambda *_: []


class StateRows(NamedTuple):
    """Refer to a state of an optimizer that has the shape of a tensor with rows of streams.

    Attributes:
        name: Name of the state: `optimizer.TENSOR.KEY`.
        part: The tensor.
        key: Key of the state.
        state: All states of the tensor, by key.
        new: Function from new rows to their state; `None` if it is zero.
    """

    name: str
    part: StreamRows
    key: str
    state: dict[str, Any]
    new: Callable[[Tensor], Tensor] | None


class StreamEdit(NamedTuple):
    """Result of an edit of a stream: the new tensors by name, the new sizes, states, and what a receipt stores."""

    tensors: dict[str, Tensor]
    sizes: tuple[int, ...]
    states: list[StateRows]
    result: ModelResult


def edit_streams(
    streams: Streams, stream: int, resolve: ResolveEdit, optimizer: Optimizer | None = None, used: int | None = None
) -> StreamEdit:
    """Compute the edit of one stream, or the undo of one; nothing is changed.

    Args:
        streams: The streams.
        stream: Number of the stream.
        resolve: Function that returns the edit of the stream, or the undo of one.
        optimizer: Optimizer whose state is edited too, or `None`.
        used: For an undo: number of codes after the edit, without rows that belong to no code; else `None`.

    Raises:
        SizeError: There is no such stream, or the optimizer trains none of the tensors.
        CheckpointError: For an undo: the streams are not as the edit of the receipt left them.
        All other errors are those of `apply_row_map`.
    """
    _check_stream(streams, stream, used)
    count = used or streams.sizes[stream]
    edit = resolve([], count, all_rows_have_ids=True)
    resized = streams.alike if stream in streams.alike else frozenset({stream})
    is_common = len(resized) > 1 and used is None
    size = max(edit.row_map.size, streams.sizes[stream]) if is_common else edit.row_map.size
    states = list(_states(streams.rows, optimizer))
    tensors = {part.name: (part, part.tensor.detach()) for part in streams.rows}
    tensors |= {each.name: (each.part, each.state[each.key]) for each in states}
    codes = {
        name: own[:count] for name, (part, each) in tensors.items() if (own := part.codes(each, stream)) is not None
    }
    moved = {part.name: RowTensor(codes[part.name], part.end) for part in streams.rows if part.name in codes}
    moved = dict(sorted(moved.items(), key=lambda named: named[1].local.dim() == 1))  # biases follow their rows
    moved |= {
        each.name: RowTensor(codes[each.name], parameter=each.part.name, state_of=each.new)
        for each in states
        if each.name in codes
    }
    rows = apply_row_map(moved, edit)
    new = {
        name: part.replaced(each, stream, rows.get(name, each), size, resized, is_state=name != part.name)
        for name, (part, each) in tensors.items()
        if resized & {*part.streams}
    }
    sizes = tuple(size if k in resized else each for k, each in enumerate(streams.sizes))
    return StreamEdit(new, sizes, states, ModelResult.of(edit, moved, {STREAM: stream}))


def _check_stream(streams: Streams, stream: int, used: int | None) -> None:
    """Check that there is a stream, and that it has the codes of a receipt; see `edit_streams`."""
    require_stream(stream, len(streams.sizes))
    size = streams.sizes[stream]
    if used is not None and not used <= size:
        raise CheckpointError(
            f"This model is not what the receipt belongs to: stream {stream} has {size:,} codes, the receipt's "
            f"{used:,}."
        )


def _states(rows: Sequence[StreamRows], optimizer: Optimizer | None) -> Iterator[StateRows]:
    """Yield each state of an optimizer that has the shape of a tensor with rows of streams.

    Raises:
        SizeError: The optimizer trains none of the tensors, or has a state of another shape.
        StaleRowsError: The optimizer's state is that before an edit.
    """
    if optimizer is None:
        return
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(part.tensor) in trained for part in rows):
        raise SizeError("This optimizer belongs to other parameters: it trains none of the rows of these streams.")
    for part in [each for each in rows if id(each.tensor) in trained]:
        require_moved(optimizer, part.tensor)
        state = optimizer.state.get(part.tensor, {})
        new = NewState(optimizer, part.name, part.tensor)
        for key, value in state_with_rows(state, part.name, RowTensor(part.tensor)):
            if value.shape != part.tensor.shape:
                raise SizeError(
                    f"The optimizer stores {key} of {part.name} as {tuple(value.shape)}, and the edit of one stream "
                    f"moves states of the shape of the parameter: build the optimizer again after the edit."
                )
            yield StateRows(f"optimizer.{part.name}.{key}", part, key, state, new.of(key))
