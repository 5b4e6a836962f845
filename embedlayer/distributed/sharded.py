"""A table whose rows are divided among processes: rank r holds rows `r * ceil(V / N)` up to the next rank's first."""

import math
from collections.abc import Iterator
from copy import deepcopy
from functools import singledispatch
from typing import Any, TypeVar, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from embedlayer.computed_buffers import recompute_all_buffers
from embedlayer.distributed.agreement import require_agreement
from embedlayer.distributed.divided_rows import DividedRows
from embedlayer.distributed.exchange import announce, exchange, gather_rows
from embedlayer.errors import ShapeError, SizeError
from embedlayer.index_checks import IndexCheck
from embedlayer.io.files import JsonObject
from embedlayer.losses.chunked import chunked_cross_entropy
from embedlayer.losses.linear_cross_entropy import (
    LogitOptions,
    LossOptions,
    check_fit,
    filled_in,
    finish_logits,
    refuse_clash,
)
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.dense import TokenEmbedding, as_table
from embedlayer.tables.factorized import FactorizedEmbedding
from embedlayer.tables.quantized import QuantizedEmbedding
from embedlayer.tables.table import TokenTable, check_width

Table = TypeVar("Table", bound=TokenTable)

ROW_TENSORS: dict[type[TokenTable], tuple[str, ...]] = {
    TokenEmbedding: ("weight",),
    FactorizedEmbedding: ("inner.weight",),
    QuantizedEmbedding: ("packed", "row_scale"),
}
"""The kinds that can be divided, and their tensors that have a row for each token."""


class ShardedTable(TokenTable):
    """The rows of one table, divided among the ranks of a mesh; each rank brings IDs and hidden states of its own.

    A look-up sends each ID of this rank's batch, once, to the rank that owns its row, and gets the row back. A loss
    compares the hidden states of all ranks, a chunk at a time, with the rows of this one; three numbers of each token
    are summed over the ranks. Logits are gathered by `logits` alone.

    Gradients of the rows are means over the ranks, as `DistributedDataParallel` and FSDP make them: a batch divided
    evenly among N ranks, with a mean loss on each, trains as it would in one process.

    Args:
        local: This rank's rows, as a table of their own.
        mesh: The ranks, one-dimensional.
        vocab_size: Tokens in all.
        padding_idx: Which of them has the row that is zero.

    Raises:
        SizeError: The mesh is not one-dimensional, or a rank has no row.
        ShapeError: When it is used: its rows were replaced, by `fully_shard` or `load_state_dict(assign=True)`.

    Every rank takes part in each look-up, loss and backward pass. `shard_table` makes one of a whole table;
    `keep_rows_apart` tells `DistributedDataParallel` of it.
    """

    def __init__(self, local: TokenTable, mesh: DeviceMesh, *, vocab_size: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.vocab_size = self.num_rows = vocab_size
        self.start, self.stop = rows_of(mesh, vocab_size)
        self.embed_dim = local.embed_dim
        self.padding_idx = padding_idx
        self.scale = local.scale
        self.row_sparse = local.row_sparse
        self.local = local
        self.index_check = IndexCheck(vocab_size, "token id")
        self.index_check.move_record(local.device)
        self._mark_rows()
        self._register_state_dict_hook(_rows_as_dtensors)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_rows_from_dtensors)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTable":
        """A copy among the same ranks, whose gradients become means too."""
        local = deepcopy(self.local, memo)
        copy = ShardedTable(local, self.mesh, vocab_size=self.vocab_size, padding_idx=self.padding_idx)
        return copy.train(self.training)

    @property
    def config(self) -> JsonObject:
        """The arguments of the table that this one is when it is put together."""
        return {**self.local.config, "vocab_size": self.vocab_size, "padding_idx": self.padding_idx}

    @property
    def factor(self) -> float | Tensor | None:
        """As in the table that was divided."""
        return self.local.factor

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.local.get_parameter(next(iter(ROW_TENSORS[type(self.local)])))

    def _mark_rows(self) -> None:
        """Let gradients of the rows be means, and the rows be known as divided."""
        ranks = self.mesh.size()
        for _, parameter in self.sharded_parameters():
            wanted = parameter.requires_grad
            parameter.requires_grad_(True).register_hook(lambda grad: grad / ranks)
            parameter.requires_grad_(wanted)
            parameter.divided_among = self._group  # type: ignore[attr-defined]

    def _check_rows(self) -> None:
        """Refuse rows that somebody has put in the place of those that were marked."""
        for name, parameter in self.sharded_parameters():
            if not hasattr(parameter, "divided_among"):
                raise ShapeError(
                    f"The {name} of this divided table was replaced behind its back: its gradients would be sums, and "
                    f"after fully_shard its rows those of other ranks. Give fully_shard "
                    f"ignored_params={{p for p in model.parameters() if hasattr(p, 'divided_among')}}, load without "
                    f"assign=True, or divide the table again."
                )

    def sharded_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of which each rank has its own rows, by their names in the whole table."""
        for name, parameter in self.local.named_parameters():
            if name in ROW_TENSORS[type(self.local)]:
                yield name, parameter

    def whole(self, part: Tensor) -> DTensor:
        """This rank's rows of a tensor that has one for each token, as a part of the tensor of all; no copy is made."""
        shape, stride = torch.Size((self.vocab_size, *part.shape[1:])), part.stride()
        return DTensor.from_local(part, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def look_up(self, ids: Ids) -> Vectors:
        """`rows[ids]`, from the ranks that have them: the batch's IDs and stored rows cross the network, each once."""
        self._check_rows()
        ids, outside = self.index_check(ids)
        wanted, places = torch.unique(ids, return_inverse=True)
        owners = wanted // math.ceil(self.vocab_size / self.mesh.size())
        sends = torch.bincount(owners, minlength=self.mesh.size()).tolist()
        receives = announce(sends, self._group, ids.device)
        asked = exchange(wanted, sends, receives, self._group) - self.start
        nobody = asked.new_zeros(0 if len(asked) else 1)  # who is not asked takes part on the way back all the same
        factors = self.local if isinstance(self.local, FactorizedEmbedding) else None
        stored = self.local if factors is None else factors.inner
        found = stored.look_up(torch.cat([asked, nobody]))[: len(asked)]
        rows = exchange(found, receives, sends, self._group)
        vectors = F.embedding(places, rows if factors is None else factors.projection(rows))
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1`, on every rank, without gradients; all ranks must ask."""
        low, high = max(start, self.start), min(stop, self.stop)
        with torch.no_grad():
            return gather_rows(self.local.rows(low - self.start, max(low, high) - self.start), self._group)[0]

    def logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> Float[Tensor, "*batch V"]:
        """A score for each token, gathered: of this rank's hidden states with the rows of all."""
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        everybody, counts = gather_rows(hidden.reshape(-1, self.embed_dim), self._group)
        scores, size = self._local_logits(everybody, options), self.mesh.size()
        widest = math.ceil(self.vocab_size / size)
        own = [counts[self.mesh.get_local_rank()]] * size
        parts = exchange(F.pad(scores, (0, widest - scores.shape[1])), counts, own, self._group)
        joined = parts.unflatten(0, (size, -1)).transpose(0, 1).flatten(1)
        logits: Tensor = joined[:, : self.vocab_size].reshape(*hidden.shape[:-1], self.vocab_size)
        return logits

    def sharded_logits(self, hidden: Float[Tensor, "*batch D"], **options: Unpack[LogitOptions]) -> DTensor:
        """The logits of all ranks' hidden states, `(tokens of all, V)`, divided by token as `loss_parallel` wants.

        Under it, `F.cross_entropy(logits, targets)` with the targets of all ranks, in order, is the mean over all
        tokens, the same on each rank, for any V. Its gradients are those of `loss`, whose mean over the ranks it is:
        what each rank computes from them becomes right as a mean too.
        """
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        everybody, size = gather_rows(hidden.reshape(-1, self.embed_dim), self._group)[0], self.mesh.size()
        scores = self._local_logits(everybody, options)
        if scores.requires_grad:  # DTensor has the ranks' gradients summed; here they become means
            scores.register_hook(lambda grad: grad * size)
        shape, stride = torch.Size((len(scores), self.vocab_size)), (self.vocab_size, 1)
        return DTensor.from_local(scores, self.mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)

    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """`linear_cross_entropy` of this rank's hidden states and targets over the rows of all, in nats.

        Args:
            hidden: What the last block gives.
            targets: Token IDs, or `ignore_index`.
            **options: See `LossOptions`; it goes by chunks, whatever `impl` says. The gradients are made on the way
                forward, and where ranks multiply their losses by different numbers, again on the way back. Quantised
                rows are decoded for it, all that are here at once.
        """
        check_width(hidden, self.embed_dim)
        options.setdefault("padding_idx", self.padding_idx)
        refuse_clash(options)
        self._check_rows()
        linear = self.local.as_linear(hidden)
        states, rows = (hidden, self.local.rows(0, self.local.vocab_size)) if linear is None else linear
        check_fit(states, rows, targets)
        bias = options.get("bias")
        terms = filled_in(states, rows, {**options, "vocab_size": self.vocab_size})
        return chunked_cross_entropy(
            states,
            rows,
            None if bias is None else bias[self.start : self.stop],
            targets,
            terms._replace(padding_idx=self._here(terms.padding_idx)),
            DividedRows(self.start, self.stop, self._group, rows.device),
        )

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID that was looked up since the last check."""
        self.index_check.check()

    def extra_repr(self) -> str:
        """Which rows are here, for `print`."""
        return f"rows {self.start} to {self.stop - 1} of {self.vocab_size}"

    @property
    def _group(self) -> Any:
        return self.mesh.get_group()

    def _here(self, token: int | None) -> int | None:
        """Where a token's row stands on this rank, if it does."""
        return None if token is None or not self.start <= token < self.stop else token - self.start

    def _local_logits(self, hidden: Tensor, options: LogitOptions) -> Tensor:
        self._check_rows()
        bias, padding_idx = options.get("bias"), options.get("padding_idx")
        return finish_logits(
            self.local.raw_logits(hidden),
            logit_scale=options.get("logit_scale", 1.0),
            bias=None if bias is None else bias[self.start : self.stop],
            softcap=options.get("softcap"),
            padding_idx=self._here(padding_idx),
            mask_padding=options.get("mask_padding", False),
        )


def shard_table(table: TokenTable | nn.Embedding, mesh: DeviceMesh) -> ShardedTable:
    """Divide the rows of `table`, the same on every rank, among the ranks of `mesh`.

    A table on the meta device has no rows yet: each rank draws those that are its own, which are those of one process
    with the same seed, and no rank ever has them all.

    Raises:
        PeerError: A rank has another kind of table, of another size or type.
        SizeError: The mesh is not one-dimensional, or there are too few rows for its ranks.
        TypeError: It is a kind of table that cannot be divided, or a quantised one on the meta device.
    """
    table = as_table(table)
    _require_one_dimension(mesh)
    types = {f"type of {name}": str(value.dtype) for name, value in table.state_dict().items()}
    facts = {"kind of table": type(table).__name__, **table.config, **types}
    require_agreement(facts, mesh.get_group(), mesh.device_type)
    start, stop = rows_of(mesh, table.vocab_size)
    local = part_of(table, start, stop)
    for whole, part in zip(table.parameters(), local.parameters(), strict=True):
        part.requires_grad_(whole.requires_grad)
    return ShardedTable(local, mesh, vocab_size=table.vocab_size, padding_idx=table.padding_idx)


def keep_rows_apart(model: nn.Module) -> nn.Module:
    """Let `DistributedDataParallel(keep_rows_apart(model))` leave divided rows alone: it would give all rank 0's.

    Args:
        model: What is given to it, on each rank; what it was told to ignore before no longer counts.

    Returns:
        The same model. `fully_shard(model, ignored_params=...)` takes the parameters that have a `divided_among`.
    """
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, ShardedTable)]
    apart = [f"{name}.local.{row}".lstrip(".") for name, table in tables for row in ROW_TENSORS[type(table.local)]]
    apart += [f"{name}.{key}".lstrip(".") for name, table in tables for key, _ in table.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)
    return model


def rows_of(mesh: DeviceMesh, vocab_size: int) -> tuple[int, int]:
    """First row of this rank and first row after it, with the errors of `spans_of`."""
    return spans_of(mesh, vocab_size)[mesh.get_local_rank()]


def spans_of(mesh: DeviceMesh, vocab_size: int) -> list[tuple[int, int]]:
    """Of each rank its first row and the first row after it.

    Raises:
        SizeError: The mesh is not one-dimensional, or a rank would have no row.
    """
    _require_one_dimension(mesh)
    size = mesh.size()
    each = math.ceil(vocab_size / size)
    if (size - 1) * each >= vocab_size:
        raise SizeError(f"{vocab_size} rows, {each} to a rank, leave nothing for the last of {size} ranks: use fewer.")
    return [(rank * each, min((rank + 1) * each, vocab_size)) for rank in range(size)]


def _require_one_dimension(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise SizeError(f"A table is divided along one dimension, and the mesh has {mesh.ndim}: give mesh['name'].")


@singledispatch
def part_of(table: TokenTable, start: int, stop: int) -> TokenTable:
    """Rows `start` to `stop - 1` of a table, as a table of the same kind."""
    raise TypeError(
        f"A {type(table).__name__} cannot be divided: give one of {', '.join(kind.__name__ for kind in ROW_TENSORS)}."
    )


@part_of.register
def _(table: TokenEmbedding, start: int, stop: int) -> TokenEmbedding:
    part = _empty_part(table, start, stop, table.weight)
    _take_rows(part, table, start, stop)
    return part


@part_of.register
def _(table: FactorizedEmbedding, start: int, stop: int) -> FactorizedEmbedding:
    part = _empty_part(table, start, stop, table.projection.weight)
    _take_rows(part.inner, table.inner, start, stop)
    if table.projection.weight.is_meta:
        part.projection.reset_parameters()
    else:
        part.projection.weight.detach().copy_(table.projection.weight)
    return part


@part_of.register
def _(table: QuantizedEmbedding, start: int, stop: int) -> QuantizedEmbedding:
    if table.packed.is_meta:
        raise TypeError("A quantised table cannot be drawn: give one that QuantizedEmbedding.from_table made.")
    part = _empty_part(table, start, stop, table.packed)
    part.packed.copy_(table.packed[start:stop])
    if part.row_scale is not None and table.row_scale is not None:
        part.row_scale.copy_(table.row_scale[start:stop])
    return part


def _empty_part(table: Table, start: int, stop: int, like: Tensor) -> Table:
    """A table of the same kind for some rows, in the type of `like` and where that is, or on the CPU."""
    with torch.device("meta"):
        part = type(table).from_config(_sizes_of_part(table, start, stop))
    if like.is_floating_point():
        part.to(like.dtype)
    device = torch.device("cpu") if like.is_meta else like.device
    part.to_empty(device=device)
    recompute_all_buffers(part, device)
    return part


@torch.no_grad()
def _take_rows(part: TokenEmbedding, table: TokenEmbedding, start: int, stop: int) -> None:
    """The rows of a table, or, where it has none yet, those that it would draw."""
    part.first_row, part.whole_rows = start, table.num_rows
    if table.weight.is_meta:
        part.reset_parameters()
    else:
        part.weight.copy_(table.rows(start, stop))


def _sizes_of_part(table: TokenTable, start: int, stop: int) -> JsonObject:
    padding_idx = table.padding_idx
    here = padding_idx is not None and start <= padding_idx < stop
    sizes = {
        **table.config,
        "vocab_size": stop - start,
        "padding_idx": padding_idx - start if padding_idx is not None and here else None,
    }
    sizes.pop("pad_to_multiple_of", None)
    return sizes


def _rows_as_dtensors(table: ShardedTable, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """What `state_dict()` gives: whole tensors by the names of the undivided table, of which each rank has a part."""
    inner = f"{prefix}local."
    for key in [key for key in state if key.startswith(inner)]:
        name, value = key.removeprefix(inner), state.pop(key)
        state[prefix + name] = table.whole(value) if name in ROW_TENSORS[type(table.local)] else value


def _rows_from_dtensors(table: ShardedTable, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """What `load_state_dict()` takes: what `state_dict()` gives, or the whole tensors of an undivided table."""
    for name in table.local.state_dict():
        value = state.pop(prefix + name, None)
        if isinstance(value, DTensor):
            value = value.redistribute(table.mesh, [Shard(0)]).to_local()
        elif value is not None and name in ROW_TENSORS[type(table.local)]:
            value = value[table.start : table.stop]
        if value is not None:
            state[f"{prefix}local.{name}"] = value
