"""The dense table: one learned row per token, optionally with row-sparse gradients."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, Unpack

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.held_parameters import former_parameter, watch_replacement
from embedlayer.core.index_checks import INTEGERS, raise_if_outside
from embedlayer.core.initialization import init_normal_, init_normal_rows_, zero_rows_
from embedlayer.core.partitioned import refuse_partitioned
from embedlayer.core.shapes import Ids, Vectors
from embedlayer.core.torch_state import (
    PLAIN_TYPES,
    fusible,
    is_transformed,
    plain_operators_only,
    recompute_weights,
    without_dispatch,
)
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import StoredRows, gather_rows, rows_on_cuda
from embedlayer.tables.lookup import check_sizes
from embedlayer.tables.table import TokenTable
from embedlayer.tables.torch_arguments import EmbeddingArguments, refuse_unsupported, resolve_sizes

if TYPE_CHECKING:  # a table that is not row-sparse imports nothing of `row_sparse`
    from embedlayer.io.files import JsonObject
    from embedlayer.row_sparse.hooks import RowSparseParameter
    from embedlayer.row_sparse.pending_updates import PendingUpdates


class TokenEmbedding(TokenTable, nn.Embedding, ComputedBuffers, checks_ids=True):
    """One learned row per token: `out[..., :] = scale * weight[ids]`.

    It is an `nn.Embedding` with the parameter `weight`, `(num_rows, D)`, so PEFT, FSDP and transformers recognise it.

    Args:
        vocab_size: Number of tokens, V.
        embed_dim: Width of a row, D.
        padding_idx: Row that is initialised to zero and gets no gradient, at look-up and under a tied head; a negative
            number counts from the end. Other values that are written to it are kept. `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"` for sqrt(D), or `None` for 1.
        round_scale: Whether to round the scale to the dtype of the rows, as Gemma does: sqrt(3072) = 55.4256 is 55.5 in
            bfloat16. The rounded number is the buffer `embed_scale`, which follows changes of the dtype.
        init_std: Standard deviation of the normal initialisation: a number, or `"1/sqrt_dim"` for 1 / sqrt(D).
        pad_to_multiple_of: Store spare zero rows, so that `num_rows` is a multiple of this number (64 suits GPUs).
            Spare rows are not looked up and take no part in the loss. `None` for no spare rows.
        row_sparse: Whether a backward pass gives gradients to the looked-up rows only, as a sparse tensor. Train such a
            table with `RowAdamW`, which has the results of dense AdamW. Between its steps, updates of the other rows
            are pending; they are applied when an operator reads or writes the weight (`RowSparseParameter`).
            Torch's gradient clipping works. With gradients on, graphs of `torch.compile` end at the look-up, and with
            `fullgraph=True` torch raises `torch._dynamo.exc.Unsupported`. `torch.optim.AdamW` raises "Adam does not
            support sparse gradients, please consider SparseAdam instead", but `SparseAdam` has other results than
            AdamW.
        device: Device of the rows; `None` for torch's default.
        dtype: Data type of the rows; `None` for torch's default.
        **arguments: Sizes under torch's names, `num_embeddings` and `embedding_dim`; see `EmbeddingArguments`.

    Raises:
        TypeError: A size is missing, passed under both names or not an integer, or an argument is unknown.

    Example:
        >>> TokenEmbedding(100, 8)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
        >>> TokenEmbedding(100, 3072, scale="sqrt_dim", round_scale=True).bfloat16().embed_scale
        tensor(55.5000, dtype=torch.bfloat16)

    Reference: torch/nn/modules/sparse.py. We differ: torch initialises with a standard deviation of 1 and this table
    with 0.02, because under a tied head 1 makes the first loss far larger than ln V; the error of a bad ID names the ID
    and its position; and the padding row gets no gradient also under a tied head.
    """

    pending_updates: "PendingUpdates | None" = None
    """Optimizer steps that rows of a row-sparse table have not taken yet; `None` for other tables."""

    first_row = 0
    """Number of the first row in the whole table, for a shard."""

    whole_rows: int | None = None
    """Number of rows of the whole table, for a shard. `reset_parameters` draws them all and keeps its own."""

    embed_scale: float | Tensor | None
    """Factor on looked-up rows, under the name that PEFT reads."""

    def __init__(
        self,
        vocab_size: int | None = None,
        embed_dim: int | None = None,
        padding_idx: int | None = None,
        *,
        scale: float | Literal["sqrt_dim"] | None = None,
        round_scale: bool = False,
        init_std: float | Literal["1/sqrt_dim"] = 0.02,
        pad_to_multiple_of: int | None = None,
        row_sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **arguments: Unpack[EmbeddingArguments],
    ) -> None:
        vocab_size, embed_dim = resolve_sizes(vocab_size, embed_dim, arguments)
        multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        padding_idx = check_sizes(
            padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim, pad_to_multiple_of=multiple
        )
        self.vocab_size = vocab_size
        self.num_rows = math.ceil(vocab_size / multiple) * multiple
        self.init_std = resolve_init_std(init_std, embed_dim)
        self.pad_to_multiple_of = pad_to_multiple_of
        nn.Embedding.__init__(
            self, self._stated_rows, embed_dim, padding_idx, sparse=row_sparse, device=device, dtype=dtype
        )
        self.row_sparse = row_sparse
        self._watch(self.weight)
        self.scale = resolve_scale(scale, embed_dim)
        self.round_scale = round_scale
        self.index_check = IndexCheck(vocab_size, "token id")
        if not round_scale:
            self.embed_scale = self.scale
        self.recompute_buffers(self.weight.device)

    # Sizes are read from the weight, however it was assigned: `table.weight = ...`, `weight.data`, transformers'
    # resize_token_embeddings, functional_call. Setting a size changes only the stated size.

    @property
    def num_rows(self) -> int:
        """Return the number of rows of `weight`, spare rows included."""
        weight = self._matrix()
        return self._stated_rows if weight is None else weight.shape[0]

    @num_rows.setter
    def num_rows(self, size: int) -> None:
        self._stated_rows = size

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, V, which is the number of rows that can be looked up.

        This is the size passed to the constructor, unless the weight was replaced by one with another number of rows.
        Then every row of the new weight is a token.
        """
        rows = self.num_rows
        return self._stated_vocab_size if rows == self._stated_rows else rows

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self._stated_vocab_size = size

    @property
    def num_embeddings(self) -> int:
        """Return `num_rows`, under torch's name."""
        return self.num_rows

    @num_embeddings.setter
    def num_embeddings(self, size: int) -> None:
        """Ignore the size that torch or transformers assigns: the number of rows is that of `weight`."""

    @property
    def embedding_dim(self) -> int:
        """Return the width of a row, D, under torch's name."""
        weight = self._matrix()
        return self._stated_width if weight is None else weight.shape[1]

    @embedding_dim.setter
    def embedding_dim(self, size: int) -> None:
        self._stated_width = size

    @property
    def embed_dim(self) -> int:  # type: ignore[override]
        """Return the width of a row, D."""
        return self.embedding_dim

    def _matrix(self) -> Tensor | None:
        """Return `weight` if it is two-dimensional, else `None`."""
        weight = self._parameters.get("weight")
        return weight if weight is not None and len(weight.shape) == 2 else None

    @property
    def config(self) -> "JsonObject":
        """Return the constructor's arguments for the present sizes, as JSON."""
        multiple = self.pad_to_multiple_of
        spare_rows_follow = multiple is not None and -self.vocab_size % multiple == self.num_rows - self.vocab_size
        return {
            "vocab_size": self.vocab_size,
            "embed_dim": self.embed_dim,
            "padding_idx": self.padding_idx,
            "scale": self.scale,
            "round_scale": self.round_scale,
            "init_std": self.init_std,
            "pad_to_multiple_of": multiple if spare_rows_follow else None,
            "row_sparse": self.row_sparse,
        }

    def reset_parameters(self) -> None:
        """Draw all rows from N(0, init_std^2) in place, then set the padding row and the spare rows to zero.

        Pending updates of a row-sparse table are applied first, so that no later read changes the new rows. A shard
        draws the rows of the whole table and keeps its own, so sharding does not change the result.
        """
        self.apply_pending_updates()  # later they would change the new rows
        if self.whole_rows is None:
            init_normal_(self.weight, std=self.init_std)
        else:
            init_normal_rows_(self.weight.detach(), start=self.first_row, num_rows=self.whole_rows, std=self.init_std)
        padding = [] if self.padding_idx is None else [self.padding_idx]
        zero_rows_(self.weight, [*padding, *range(self.vocab_size, self.num_rows)])

    def buffer_values(self) -> dict[str, Tensor]:
        """Return `{"embed_scale": scalar}`, rounded to the dtype of the weight; empty without `round_scale`."""
        if not self.round_scale:
            return {}
        scale = 1.0 if self.scale is None else self.scale
        return {"embed_scale": torch.tensor(scale, dtype=self.dtype)}

    def look_up(self, ids: Ids) -> Vectors:
        """Return `weight[ids]` without `scale`, `(...)` to `(..., D)`. See `LookupTable.look_up` for the errors."""
        kind, rows = device_kind(ids), self._parameters.get("weight")
        if (
            kind == "cpu"
            and rows is not None
            and type(ids) is Tensor
            and ids.dtype in INTEGERS
            and type(rows) in PLAIN_TYPES
            and rows.dim() == 2
            and not self.row_sparse
            and not (rows.shape[0] == self._stated_rows != self._stated_vocab_size)
            and fusible(rows)
        ):
            try:  # on a CPU torch checks the IDs as it reads the rows
                return F.embedding(ids, rows, self.padding_idx)
            except IndexError:
                raise_if_outside(ids, rows.shape[0], "token id")
                raise
        if kind == "cuda" and (stored := self.stored(ids)) is not None:
            return gather_rows(stored)
        ids, outside = self._current_check()(ids)
        if "weight" in vars(self):
            recompute_weights(self)
        weight = self.weight  # once: a parametrization computes it at each read
        transformed, compiling = is_transformed(weight), torch.compiler.is_compiling()
        padding_idx, sparse = self.padding_idx, self.row_sparse and not transformed and not plain_operators_only()
        if sparse and self._is_watched(weight):  # PendingUpdates drops the gradient of padding
            from embedlayer.row_sparse.hooks import look_up_rows, look_up_rows_between_graphs, with_updates_applied

            if not compiling:
                vectors = look_up_rows(ids, weight)
            elif torch.is_grad_enabled() and weight.requires_grad:
                vectors = look_up_rows_between_graphs(ids, weight)
            else:  # in eager mode the parameter applies updates
                vectors = F.embedding(with_updates_applied(ids, self._handle, True), weight)
        elif not transformed:  # the gradient of a computed weight (functional_call) is dense in graphs
            if sparse and not compiling:
                self._refuse_divided_rows(weight)
            vectors = F.embedding(ids, weight, padding_idx, sparse=sparse and not compiling)
        else:  # under vmap torch's F.embedding has no gradient of an empty batch
            vectors = weight[ids]
            if padding_idx is not None:  # that row gets no gradient, and its tangent is not let through
                vectors = torch.where((ids == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def stored(self, ids: Ids) -> StoredRows | None:
        """Return IDs and the weight, from which a fused kernel can gather the vectors, without `scale`.

        Pending updates of a row-sparse table are not applied: read its rows in a block of `applied_rows`.

        Returns:
            IDs and weight. On CUDA the IDs are unchecked, and a kernel checks them as it reads the rows; `None` where
            there is no such kernel.

        Raises:
            TokenIdError: As in `look_up`.
        """
        if "weight" in vars(self):
            recompute_weights(self)
        if device_kind(ids) != "cpu":
            return None if self.row_sparse else rows_on_cuda(ids, self.weight, self._current_check(), self.padding_idx)
        ids, _ = self._current_check()(ids)
        weight = self.weight
        if self.row_sparse:
            self._refuse_divided_rows(weight)
        return StoredRows(ids, weight, self.padding_idx, self.row_sparse)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start` to `stop - 1` of the weight, `(stop - start, D)`, as a view and without `scale`.

        Pending updates of these rows (row-sparse tables) are applied first. In a compiled function of a row-sparse
        table the result is a copy.
        """
        is_parameter = self._parameters.get("weight") is not None
        if not self.row_sparse or not is_parameter or torch.compiler.is_compiling() or plain_operators_only():
            return self._current_weight()[start:stop]
        self.apply_pending_updates(start, stop)
        with without_dispatch() if self._is_watched(self.weight) else nullcontext():
            return self.weight[start:stop]

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the weight."""
        weight = self._parameters.get("weight")
        parametrization: Any = self._modules.get("parametrizations")
        if weight is None and parametrization is not None and not parametrization.weight.unsafe:  # it keeps the type
            weight = next(iter(parametrization.weight.parameters()), None)
        return (self.weight if weight is None else weight).dtype

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor]:
        """Return `(hidden, weight)`, whose product `hidden @ weight.T` is the raw logits of all rows.

        The whole weight is returned, spare rows included, because the gradient of a slice would need a copy.
        """
        return hidden, self._current_weight()

    def _current_check(self) -> IndexCheck:
        """Return `index_check`, the check of IDs, after setting its size to the present number of tokens."""
        self._refuse_partitioned()
        if self.index_check.size != self.vocab_size:
            self.index_check.size = self.vocab_size
        return self.index_check

    def apply_pending_updates(self, start: int = 0, stop: int | None = None) -> None:
        """Apply the AdamW steps that `RowAdamW` has delayed for rows `start` to `stop - 1`, in place.

        Afterwards these rows are those of dense AdamW.

        Torch functions that read `weight` do this themselves. Without effect on tables that are not row-sparse, and
        inside a compiled function.

        Args:
            start: First row.
            stop: Last row + 1; `None` for all rows.

        Raises:
            StaleRowsError: The weight was written in place while updates were pending.
        """
        if not torch.compiler.is_compiling() and (pending := getattr(self.weight, "pending_updates", None)):
            pending.apply_all(self.weight, start, stop)

    def _refuse_partitioned(self) -> None:
        """Raise a `SizeError` if DeepSpeed's ZeRO-3 has partitioned the weight, and has not gathered it."""
        if self._matrix() is None:
            refuse_partitioned([("the weight of this table", self._parameters.get("weight"))], "is read")

    def _current_weight(self) -> Tensor:
        """Return the whole `weight` after applying all pending updates."""
        self._refuse_partitioned()
        if "weight" in vars(self):
            recompute_weights(self)
        weight = self.weight
        if plain_operators_only():
            return weight  # operators on it apply the updates, below all transforms
        if self.pending_updates is None or not torch.compiler.is_compiling():
            if not torch.compiler.is_compiling() and (pending := getattr(weight, "pending_updates", None)):
                pending.apply_all(weight, 0, None)
            return weight
        if torch.is_grad_enabled() and weight.requires_grad:
            raise ShapeError("A graph with gradients reads all rows. See docs/errors.md, Row-sparse tables.")
        from embedlayer.row_sparse.hooks import with_updates_applied

        copy: Tensor = with_updates_applied(weight.detach(), self._handle, False)
        return copy

    def _refuse_divided_rows(self, weight: Tensor) -> None:
        """Raise `ShapeError` if FSDP or tensor parallelism divides the rows of this row-sparse table, in training."""
        if self._is_watched(weight) or not (weight.requires_grad and torch.is_grad_enabled()):
            return
        gathered = getattr(weight, "pending_updates", None) is None and getattr(self, "_is_fsdp_managed_module", False)
        if gathered or hasattr(weight, "to_local"):
            raise ShapeError(f"{self.num_rows} row-sparse rows are divided. See docs/errors.md, Row-sparse tables.")

    def _is_watched(self, weight: Tensor) -> TypeGuard["RowSparseParameter"]:
        """Return whether a weight of a row-sparse table is the parameter on which torch functions see all updates."""
        if not self.row_sparse:
            return False
        from embedlayer.row_sparse.hooks import RowSparseParameter

        return isinstance(weight, RowSparseParameter)

    def _watch(self, weight: Tensor | None) -> None:
        """Attach `PendingUpdates` to a new weight of a row-sparse table. Without effect for other tables."""
        if not self.row_sparse or not isinstance(weight, nn.Parameter):
            return
        from embedlayer.row_sparse.hooks import watch
        from embedlayer.row_sparse.pending_updates import PendingUpdates

        attached: PendingUpdates | None = getattr(weight, "pending_updates", None)
        if self.pending_updates is not None and attached is self.pending_updates:
            return
        if self.pending_updates is not None:
            self.pending_updates.replaced = True
        self.pending_updates = attached or PendingUpdates(self.padding_idx)
        self._handle = self.pending_updates.handle
        watch(weight, self.pending_updates)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, as in torch. A weight assigned to a row-sparse table starts without pending updates."""
        rows = param.shape[0] if name == "weight" and param is not None and param.dim() == 2 else None
        if rows is not None and self.padding_idx is not None and self.padding_idx >= rows:
            raise SizeError(f"A weight of {rows} rows has no padding token {self.padding_idx}: set padding_idx = None.")
        former = former_parameter(self, name)
        super().register_parameter(name, param)
        if name == "weight":
            self._watch(param)
        watch_replacement(self, name, former)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TokenEmbedding":
        """Move or cast the table, as in torch; if a row-sparse table gets a new parameter, attach `PendingUpdates`."""
        with self._swappable_weight():
            super()._apply(fn, recurse)
        self._watch(self._parameters.get("weight"))
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._swappable_weight():
            super()._load_from_state_dict(*args)

    @contextmanager
    def _swappable_weight(self) -> Iterator[None]:
        """Context manager: let torch swap the weight with an ordinary parameter, and watch it again."""
        weight: Any = self._parameters.get("weight")
        swaps = (
            torch.__future__.get_swap_module_params_on_conversion()
            and getattr(weight, "pending_updates", None) is not None
        )
        if swaps:
            from embedlayer.row_sparse.hooks import RowSparseParameter, release, watch

            swaps = type(weight) is RowSparseParameter
            if swaps:
                release(weight)
        try:
            yield
        finally:
            if swaps and self.pending_updates is not None:
                watch(weight, self.pending_updates)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("pending_updates", "_handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch(self._parameters.get("weight"))

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type["TokenEmbedding"],
        source: Float[Tensor, "V D"] | npt.NDArray[np.floating[Any]] | Path | str,
        freeze: bool | None = None,
        padding_idx: int | None = None,
        *,
        scale: float | Literal["sqrt_dim"] | None = None,
        **arguments: Unpack[EmbeddingArguments],
    ) -> "TokenEmbedding":
        """Build a table from the rows of a tensor or an array, or read one from a folder.

        Args:
            source: A `(V, D)` tensor or NumPy array, which becomes the weight without a copy, as in torch (an array
                whose memory torch cannot use is copied, such as a read-only one); or a folder that `save_pretrained`
                wrote, as in Hugging Face.
            freeze: Whether the rows are not trained. `None` freezes rows from a tensor and trains rows from a folder.
            padding_idx: For a tensor: row that gets no gradient and keeps its values, as in torch; a negative number
                counts from the end.
            scale: For a tensor: as in the constructor.
            **arguments: Further arguments of `torch.nn.Embedding.from_pretrained`; see `EmbeddingArguments`.

        Raises:
            FileError: The folder cannot be read.
            CheckpointError: A file in the folder is damaged, or the folder holds another kind of layer.
            TypeError: An argument is unknown.

        Example:
            >>> TokenEmbedding.from_pretrained(torch.eye(3), freeze=False)([2])
            tensor([[0., 0., 1.]], grad_fn=<EmbeddingBackward0>)
        """
        refuse_unsupported(arguments)
        if isinstance(source, Path | str):
            table = super().from_pretrained(source)
            table.weight.requires_grad_(not freeze)
            return table
        if not isinstance(source, Tensor | np.ndarray):
            raise ShapeError(f"A table is built from rows (V, D) or a folder; found {type(source).__name__}.")
        weight = tensor_of(source).detach()
        if weight.ndim != 2:
            raise ShapeError(f"A table must have shape (V, D), not {tuple(weight.shape)}.")
        if not weight.is_floating_point():
            name = str(weight.dtype).removeprefix("torch.")
            raise ShapeError(f"Rows must be floats, not {name}. See docs/errors.md, Rows that are not floats.")
        vocab_size, embed_dim = weight.shape
        table = cls(vocab_size, embed_dim, padding_idx=padding_idx, scale=scale, device="meta", dtype=weight.dtype)
        table.weight = nn.Parameter(weight, requires_grad=freeze is False)
        table.index_check.move_record(weight.device)
        return table

    @classmethod
    def from_embedding(
        cls: type["TokenEmbedding"], embedding: nn.Embedding, *, scale: float | Literal["sqrt_dim"] | None = None
    ) -> "TokenEmbedding":
        """Build a table over the weight of an `nn.Embedding`. The parameter is shared, not copied.

        An optimizer of the parameter continues to train it, and `embedding` stays usable. The padding row with its
        values, sparse gradients (`row_sparse`) and training mode are kept; hooks stay with `embedding`.
        `reset_parameters` draws from N(0, 1), as in torch.

        Args:
            embedding: Module with the weight; also a subclass that inherits the `forward` of `nn.Embedding`.
            scale: As in the constructor.

        Raises:
            SizeError: The module has another `forward`, `max_norm` or `scale_grad_by_freq`.

        Example:
            >>> embedding = nn.Embedding(100, 8, padding_idx=0)
            >>> table = TokenEmbedding.from_embedding(embedding)
            >>> table.weight is embedding.weight, table.padding_idx
            (True, 0)
        """
        own = type(embedding).forward is not nn.Embedding.forward or "forward" in vars(embedding)
        if own or "weight" not in dict(embedding.named_parameters(recurse=False)):
            raise SizeError(f"This {type(embedding).__name__} has its own forward. See docs/errors.md, Other forwards.")
        refuse_partitioned([("the weight", embedding.weight)], "becomes that of a table")
        refuse_unsupported({"max_norm": embedding.max_norm, "scale_grad_by_freq": embedding.scale_grad_by_freq})
        weight = embedding.weight
        table = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            scale=scale,
            init_std=1.0,
            row_sparse=embedding.sparse,
            device="meta",
            dtype=weight.dtype,
        )
        table.weight = weight
        table.index_check.move_record(weight.device)
        return table.train(embedding.training)

    def extra_repr(self) -> str:
        """Return the sizes and the options that are set, for `print`: `"100, 8, padding_idx=0"`."""
        spare = f", num_rows={self.num_rows}" if self.num_rows != self.vocab_size else ""
        return f"{self.vocab_size}, {self.embed_dim}{spare}{describe_options(self)}"


def describe_options(table: Any) -> str:
    """Return the options that are set in a dense or quantised table, for `print`, such as `", scale=8, rounded"`."""
    parts = [f"padding_idx={table.padding_idx}"] if table.padding_idx is not None else []
    parts += [f"scale={table.scale:.6g}"] if table.scale is not None else []
    parts += ["row_sparse"] if table.row_sparse else []
    parts += ["rounded"] if table.round_scale else []
    return "".join(f", {part}" for part in parts)


def tensor_of(rows: Tensor | npt.NDArray[Any]) -> Tensor:
    """Return a tensor unchanged, and an array as a tensor over the same memory, or a copy where torch needs one."""
    if isinstance(rows, Tensor):
        return rows
    if rows.dtype.kind not in "fiub":
        raise ShapeError(f"Rows must be floats, not {rows.dtype}: convert them to float32.")
    native = np.dtype(f"{rows.dtype.kind}{min(rows.itemsize, 8)}")
    steps_fit = all(stride >= 0 and stride % rows.itemsize == 0 for stride in rows.strides)
    fits = rows.flags.behaved and steps_fit and rows.dtype == native
    return torch.from_numpy(rows if fits else rows.astype(native, order="C"))


def resolve_scale(scale: float | str | None, embed_dim: int) -> float | None:
    """Return a table's `scale` as a number: sqrt(D) for `"sqrt_dim"`, and `None` for `None`."""
    if scale == "sqrt_dim":
        return math.sqrt(embed_dim)
    return None if scale is None else float(scale)


def resolve_init_std(init_std: float | str, embed_dim: int) -> float:
    """Return the standard deviation `init_std` of a table as a number: 1/sqrt(D) for `"1/sqrt_dim"`."""
    return 1 / math.sqrt(embed_dim) if init_std == "1/sqrt_dim" else float(init_std)
