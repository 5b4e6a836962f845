"""The base of dense tables: one parameter `weight` with a row for each token, whose shape gives the table's sizes."""

import math
import operator
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.held_parameters import former_parameter, watch_replacement
from embedlayer.core.initialization import init_normal_, init_normal_rows_, zero_rows_
from embedlayer.core.partitioned import refuse_partitioned
from embedlayer.core.shapes import Vectors
from embedlayer.core.torch_state import is_transformed, recompute_weights
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.tables.lookup import check_sizes
from embedlayer.tables.table import TokenTable

if TYPE_CHECKING:
    from embedlayer.io.files import JsonObject

Table = TypeVar("Table", bound="DenseTable")


class EmbeddingArguments(TypedDict, total=False):
    """Arguments of `torch.nn.Embedding` that `TokenEmbedding` also accepts, under torch's names.

    `padding_idx`, `device` and `dtype` have the same names in both libraries.

    Attributes:
        num_embeddings: Torch's name of `vocab_size`.
        embedding_dim: Torch's name of `embed_dim`.
        max_norm: Must be `None`, because look-ups never write to the weight.
        norm_type: Ignored, as in torch without `max_norm`.
        scale_grad_by_freq: Must be `False`.
        sparse: Must say what the class is: `True` for a `RowSparseEmbedding`, `False` for a `TokenEmbedding`.
        row_sparse: As `sparse`.
    """

    num_embeddings: int
    embedding_dim: int
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    row_sparse: bool


UNSUPPORTED = {
    "max_norm": "is not supported: look-ups do not write. Call weight.data.renorm(2, 0, max_norm) after a step.",
    "scale_grad_by_freq": "is not supported: a row's gradient is the sum over its occurrences.",
}
"""Arguments of `torch.nn.Embedding` that are refused if they are set, with the rest of the error message."""


class DenseTable(TokenTable, nn.Embedding, ComputedBuffers):
    """Abstract: a table whose rows are one parameter `weight`, `(num_rows, D)`, as in `nn.Embedding`.

    `TokenEmbedding` describes the constructor's arguments.
    """

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **arguments: Unpack[EmbeddingArguments],
    ) -> None:
        vocab_size, embed_dim = resolve_sizes(vocab_size, embed_dim, arguments, row_sparse=self.row_sparse)
        multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        padding_idx = check_sizes(
            padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim, pad_to_multiple_of=multiple
        )
        self.vocab_size = vocab_size
        self.num_rows = math.ceil(vocab_size / multiple) * multiple
        self.init_std = resolve_init_std(init_std, embed_dim)
        self.pad_to_multiple_of = pad_to_multiple_of
        nn.Embedding.__init__(
            self, self._stated_rows, embed_dim, padding_idx, sparse=self.row_sparse, device=device, dtype=dtype
        )
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
        }

    def reset_parameters(self) -> None:
        """Draw all rows from N(0, init_std^2) in place, then set the padding row and the spare rows to zero.

        A shard draws the rows of the whole table and keeps its own, so sharding does not change the result.
        """
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

    @property
    def dtype(self) -> torch.dtype:
        """Return the data type of the weight."""
        weight = self._parameters.get("weight")
        parametrization: Any = self._modules.get("parametrizations")
        if weight is None and parametrization is not None and not parametrization.weight.unsafe:  # it keeps the type
            weight = next(iter(parametrization.weight.parameters()), None)
        return (self.weight if weight is None else weight).dtype

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return rows `start` to `stop - 1` of the weight, `(stop - start, D)`, as a view and without `scale`.

        Of a row-sparse table, the pending updates of these rows are applied first; in a compiled function the result is
        a copy.
        """
        return self._current_rows(start, stop)

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor]:
        """Return `(hidden, weight)`, whose product `hidden @ weight.T` is the raw logits of all rows.

        The whole weight is returned, spare rows included, because the gradient of a slice would need a copy.
        """
        return hidden, self._current_rows()

    @abstractmethod
    def _current_rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `start` to `stop - 1` of the weight as they are to be read; the weight itself for all rows."""

    def _read_weight(self) -> Tensor:
        """Return the weight, computed anew if a hook computes it before each call.

        Raises:
            SizeError: DeepSpeed's ZeRO-3 has partitioned the weight, and has not gathered it.
        """
        if self._matrix() is None:
            refuse_partitioned([("the weight of this table", self._parameters.get("weight"))], "is read")
        if "weight" in vars(self):
            recompute_weights(self)
        return self.weight  # once in each call: a parametrization computes it at each read

    def _looked_up(self, ids: Tensor, weight: Tensor, outside: Tensor | None, *, sparse: bool = False) -> Vectors:
        """Return `weight[ids]` without a gradient of the padding row, and zeros for IDs that are `outside`."""
        if not is_transformed(weight):
            vectors = F.embedding(ids, weight, self.padding_idx, sparse=sparse)
        else:  # under vmap torch's F.embedding has no gradient of an empty batch
            vectors = weight[ids]
            if self.padding_idx is not None:  # that row gets no gradient, and its tangent is not let through
                vectors = torch.where((ids == self.padding_idx).unsqueeze(-1), vectors.detach(), vectors)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def _current_check(self) -> IndexCheck:
        """Return `index_check`, the check of IDs, after setting its size to the present number of tokens."""
        check, size = self.index_check, self.vocab_size
        if check.size != size:
            check.size = size
        return check

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, as in torch. An assigned weight must have the padding row."""
        rows = param.shape[0] if name == "weight" and param is not None and param.dim() == 2 else None
        if rows is not None and self.padding_idx is not None and self.padding_idx >= rows:
            raise SizeError(f"A weight of {rows} rows has no padding token {self.padding_idx}: set padding_idx = None.")
        former = former_parameter(self, name)
        super().register_parameter(name, param)
        if name == "weight":
            self._weight_assigned()
        watch_replacement(self, name, former)

    def _weight_assigned(self) -> None:
        """Do what the table needs for a new weight; here nothing."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[Table],
        source: Float[Tensor, "V D"] | npt.NDArray[np.floating[Any]] | Path | str,
        freeze: bool | None = None,
        padding_idx: int | None = None,
        *,
        scale: float | Literal["sqrt_dim"] | None = None,
        **arguments: Unpack[EmbeddingArguments],
    ) -> Table:
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
        refuse_unsupported(arguments, row_sparse=cls.row_sparse)
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
        cls: type[Table], embedding: nn.Embedding, *, scale: float | Literal["sqrt_dim"] | None = None
    ) -> Table:
        """Build a table over the weight of an `nn.Embedding`. The parameter is shared, not copied.

        An optimizer of the parameter continues to train it, and `embedding` stays usable. The padding row with its
        values and the training mode are kept; hooks stay with `embedding`. `reset_parameters` draws from N(0, 1), as in
        torch. A `RowSparseEmbedding` makes the parameter row-sparse: train it only through the table, by `RowAdamW`.

        Args:
            embedding: Module with the weight; also a subclass that inherits the `forward` of `nn.Embedding`.
            scale: As in the constructor.

        Raises:
            SizeError: The module has another `forward`, `max_norm` or `scale_grad_by_freq`; or sparse gradients, which
                only a `RowSparseEmbedding` has.

        Example:
            >>> embedding = nn.Embedding(100, 8, padding_idx=0)
            >>> table = TokenEmbedding.from_embedding(embedding)
            >>> table.weight is embedding.weight, table.padding_idx
            (True, 0)
        """
        if isinstance(embedding, DenseTable):
            remedy = f"{cls.__name__}.from_pretrained(table.weight, freeze=False, padding_idx=..., scale=...)"
            raise SizeError(f"This {type(embedding).__name__} is a table already; {remedy} shares its rows.")
        own = type(embedding).forward is not nn.Embedding.forward or "forward" in vars(embedding)
        if own or "weight" not in dict(embedding.named_parameters(recurse=False)):
            raise SizeError(f"This {type(embedding).__name__} has its own forward. See docs/errors.md, Other forwards.")
        refuse_partitioned([("the weight", embedding.weight)], "becomes that of a table")
        refuse_unsupported(
            {
                "max_norm": embedding.max_norm,
                "scale_grad_by_freq": embedding.scale_grad_by_freq,
                "sparse": cls.row_sparse or has_sparse_gradients(embedding),
            },
            row_sparse=cls.row_sparse,
        )
        weight = embedding.weight
        table = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            embedding.padding_idx,
            scale=scale,
            init_std=1.0,
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


def has_sparse_gradients(embedding: nn.Embedding) -> bool:
    """Return whether an embedding of torch has sparse gradients, or shares the weight of a `RowSparseEmbedding`."""
    return embedding.sparse or hasattr(embedding.weight, "pending_updates")


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


def resolve_sizes(
    vocab_size: int | None, embed_dim: int | None, arguments: EmbeddingArguments, *, row_sparse: bool
) -> tuple[int, int]:
    """Return `(vocab_size, embed_dim)`, each from our argument or from torch's name for it in `arguments`."""
    refuse_unsupported(arguments, row_sparse=row_sparse)
    sizes = (vocab_size, arguments.get("num_embeddings")), (embed_dim, arguments.get("embedding_dim"))
    if any(pair.count(None) != 1 for pair in sizes):
        raise TypeError(f"A table needs vocab_size and embed_dim, each under one name; found {sizes}.")
    rows, width = (next(size for size in pair if size is not None) for pair in sizes)
    return operator.index(rows), operator.index(width)


def refuse_unsupported(arguments: EmbeddingArguments, *, row_sparse: bool) -> None:
    """Check that `arguments` contain no option of `torch.nn.Embedding` that a table, row-sparse or not, lacks."""
    unknown = arguments.keys() - EmbeddingArguments.__annotations__.keys()
    if unknown:
        raise TypeError(f"A table has no argument {', '.join(sorted(unknown))}")
    for name, message in UNSUPPORTED.items():
        value = arguments.get(name)
        if value is not None and (value or name == "max_norm"):
            raise SizeError(f"{name}={value} {message}")
    for name in ("sparse", "row_sparse"):
        value = arguments.get(name)
        if value is not None and bool(value) is not row_sparse:
            kinds = "a table with sparse gradients is a RowSparseEmbedding, with dense ones a TokenEmbedding"
            raise SizeError(f"{name}={value}: {kinds}; both have from_embedding and from_pretrained.")
