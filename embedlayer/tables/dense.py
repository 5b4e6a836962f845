"""The dense table: one learned row per token."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.bounds import Bounds
from embedlayer.derived import Derived
from embedlayer.errors import ShapeError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.normal import draw_, draw_rows_, zero_rows_
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.ledger import RowLedger, all_caught_up, as_stored, caught_up, ledger_of
from embedlayer.tables.row_gradient import run_as_stored
from embedlayer.tables.table import TokenTable, check_sizes
from embedlayer.tables.torch_arguments import EmbeddingArguments, refuse_unsupported, resolve_sizes
from embedlayer.tracing import is_transformed, plain_operators_only

TableLike: TypeAlias = TokenTable | nn.Embedding | Tensor | npt.NDArray[Any]
"""What a function takes that only reads rows: a table, a plain `nn.Embedding`, or the rows `(V, D)` themselves."""


class TokenEmbedding(TokenTable, nn.Embedding, Derived):
    """One learned row per token: `out[..., :] = scale * weight[ids]`.

    It is an `nn.Embedding` (parameter `weight`, `(num_rows, D)`), so whatever looks for one finds it.

    Args:
        vocab_size: Rows of the table that are tokens, V.
        embed_dim: Width of a row, D.
        padding_idx: Row that is zero and stays zero, from the end if negative; `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"`, or `None` for none.
        round_scale: Round the scale to the type of the rows, as Gemma does: sqrt(3072) = 55.4256 is 55.5 in bfloat16.
            The rounded number is the buffer `embed_scale`, made again whenever the type changes.
        init_std: Standard deviation of the normal initialisation: a number, or `"1/sqrt_dim"`.
        pad_to_multiple_of: Store spare zero rows up to this multiple (64 suits GPUs), out of look-up and loss.
        row_sparse: Give gradients of the looked-up rows only, for `RowAdamW`. Between its steps updates of the other
            rows are pending; they are applied when somebody reads or writes the weight (`RowSparseParameter`). torch's
            clipping works. `torch.optim.AdamW` ends in "Adam does not support sparse gradients, please consider
            SparseAdam instead": use `RowAdamW`, which gives AdamW's results; `SparseAdam` does not.
        device: Where to put the rows.
        dtype: In which type.
        **arguments: Sizes under torch's names, `num_embeddings` and `embedding_dim`; see `EmbeddingArguments`.

    Raises:
        SizeError: A size is below 1, the padding row is no token, or an option is not one of those above.

    Example:
        >>> TokenEmbedding(100, 8)(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 8])
        >>> TokenEmbedding(100, 3072, scale="sqrt_dim", round_scale=True).bfloat16().embed_scale
        tensor(55.5000, dtype=torch.bfloat16)

    Reference: torch/nn/modules/sparse.py. We differ: `init_std` is 0.02 and not 1 (with a tied head a start of 1 makes
    the first loss far larger than ln V), a bad ID is an error that names it, and the padding row also stays zero when
    the same rows are a head.
    """

    ledger: RowLedger | None = None
    """Of a row-sparse table: which rows are behind."""

    first_row = 0
    """Of a shard: number of its first row in the whole table."""

    whole_rows: int | None = None
    """Of a shard: rows of the whole table, of which `reset_parameters` draws those that are here."""

    embed_scale: float | Tensor | None
    """What look-ups are multiplied by, under the name by which PEFT finds it."""

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
        self.bounds = Bounds(vocab_size, "token id")
        if not round_scale:
            self.embed_scale = self.scale
        self.derive(self.weight.device)

    # The weight says how many rows there are, however it was assigned: `table.weight = ...`, `weight.data`,
    # transformers' resize_token_embeddings, functional_call. Setting a size changes only what was stated.

    @property
    def num_rows(self) -> int:
        """Rows of `weight`, the spare ones among them."""
        weight = self._matrix()
        return self._stated_rows if weight is None else weight.shape[0]

    @num_rows.setter
    def num_rows(self, size: int) -> None:
        self._stated_rows = size

    @property
    def vocab_size(self) -> int:
        """Rows that are tokens, V: all rows of a weight of another size than the table was built with."""
        rows = self.num_rows
        return self._stated_vocab_size if rows == self._stated_rows else rows

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self._stated_vocab_size = size

    @property
    def num_embeddings(self) -> int:
        """Rows of `weight`, under torch's name."""
        return self.num_rows

    @num_embeddings.setter
    def num_embeddings(self, size: int) -> None:
        """Accept what torch and transformers set, and ignore it: the weight says it."""

    @property
    def embedding_dim(self) -> int:
        """Width of a row, D, under torch's name."""
        weight = self._matrix()
        return self._stated_width if weight is None else weight.shape[1]

    @embedding_dim.setter
    def embedding_dim(self, size: int) -> None:
        self._stated_width = size

    @property
    def embed_dim(self) -> int:  # type: ignore[override]
        """Width of a row, D."""
        return self.embedding_dim

    def _matrix(self) -> Tensor | None:
        """Return the weight, or `None` where there is none or a sharding library stores it flat."""
        weight = self._parameters.get("weight")
        return weight if weight is not None and len(weight.shape) == 2 else None

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
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
        """Draw the rows from N(0, init_std^2); padding and spare rows are zero."""
        self.flush()  # no update may be pending on the rows of before
        if self.whole_rows is None:
            draw_(self.weight, std=self.init_std)
        else:
            draw_rows_(self.weight.detach(), start=self.first_row, num_rows=self.whole_rows, std=self.init_std)
        padding = [] if self.padding_idx is None else [self.padding_idx]
        zero_rows_(self.weight, [*padding, *range(self.vocab_size, self.num_rows)])

    def derived(self) -> dict[str, Tensor]:
        """The rounded scale, where there is one."""
        if not self.round_scale:
            return {}
        scale = 1.0 if self.scale is None else self.scale
        return {"embed_scale": torch.tensor(scale, dtype=self.weight.dtype)}

    def look_up(self, ids: Ids) -> Vectors:
        """Return `weight[ids]`: `(...)` to `(..., D)`."""
        ids, outside = self._bounded()(ids)
        transformed = is_transformed(self.weight)  # by torch.func, whose gradients are not the ledger's
        sparse = self.row_sparse and not transformed and not plain_operators_only()
        padding_idx = None if sparse else self.padding_idx  # the ledger drops that row's gradient itself
        ids = self._caught_up(ids)
        if not transformed:
            vectors = F.embedding(ids, self.weight, padding_idx, sparse=sparse)
        else:  # under vmap torch's F.embedding has no gradient of an empty batch
            vectors = self.weight[ids]
            if padding_idx is not None:  # that row gets no gradient, and its tangent is not let through
                vectors = torch.where((ids == padding_idx).unsqueeze(-1), vectors.detach(), vectors)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def stored(self, ids: Ids) -> tuple[Tensor, Tensor] | None:
        """The IDs and `weight`; `None` on an accelerator, which need not know of bad IDs yet."""
        if ids.device.type != "cpu":
            return None
        ids, _ = self._bounded()(ids)
        weight = self.weight
        if not self.row_sparse:
            return ids, weight
        if ledger := ledger_of(weight):
            ledger.catch_up(weight, ids)
        return ids, as_stored(weight)

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1` as stored: a view, without `scale`."""
        if not self.row_sparse or torch.compiler.is_compiling() or plain_operators_only():
            return self._current_weight()[start:stop]
        self.flush(start, stop)
        rows: Tensor = run_as_stored(Tensor.__getitem__, (), (self.weight, slice(start, stop)), {})
        return rows

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor]:
        """`hidden` and `weight`, whole, so that the gradient of its spare rows needs no copy."""
        return hidden, self._current_weight()

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID that was looked up since the last check."""
        self.bounds.check()

    def _bounded(self) -> Bounds:
        """Return the check of IDs, for the rows that the weight has now."""
        if self.bounds.size != self.vocab_size:
            self.bounds.size = self.vocab_size
        return self.bounds

    def flush(self, start: int = 0, stop: int | None = None) -> None:
        """Bring rows `start` to `stop - 1` of a row-sparse table up to date: what dense AdamW would have made of them.

        Functions of torch that read `weight` do it themselves. Works in chunks, and only where updates are pending.
        """
        if not torch.compiler.is_compiling() and (ledger := ledger_of(self.weight)):
            ledger.flush(self.weight, start, stop)

    def _current_weight(self) -> Tensor:
        """Return `weight` with all updates applied; in a compiled function of a row-sparse table, a copy of it.

        Raises:
            ShapeError: A compiled function would send a gradient to every row.
        """
        if plain_operators_only():
            self._refuse_pending_rows()
            return self.weight
        if self.ledger is None or not torch.compiler.is_compiling():
            self.flush()
            return self.weight
        if torch.is_grad_enabled() and self.weight.requires_grad:
            raise ShapeError(
                "A compiled function reads all rows of a row-sparse table with gradients on: every row would get one. "
                "Read it under torch.no_grad(), give the model a head of its own, or build it with row_sparse=False."
            )
        copy: Tensor = all_caught_up(self.weight.detach(), self._handle)
        return copy

    def _caught_up(self, ids: Tensor) -> Tensor:
        if not self.row_sparse:
            return ids
        if plain_operators_only():
            self._refuse_pending_rows()
        elif torch.compiler.is_compiling():
            current: Tensor = caught_up(ids, self._handle)
            return current
        return ids  # in eager mode RowSparseParameter applies what is pending when it is looked up

    def _refuse_pending_rows(self) -> None:
        """Raise `SizeError` where updates of rows are pending and cannot be applied any more: under a transform."""
        if self.ledger is not None and self.ledger.pending:
            raise SizeError(
                "Rows of this row-sparse table have pending updates, which a torch.func transform cannot apply.\n"
                "Call table.flush() after the last optimizer step and before this."
            )

    def _watch(self, weight: Tensor | None) -> None:
        """Give a weight of a row-sparse table its ledger; an optimizer that holds the one before is told."""
        if not self.row_sparse or not isinstance(weight, nn.Parameter):
            return
        if self.ledger is not None and ledger_of(weight) is self.ledger:
            return
        if self.ledger is not None:
            self.ledger.replaced = True
        self.ledger = ledger_of(weight) or RowLedger(self.padding_idx)
        self._handle = self.ledger.handle
        self.ledger.watch(weight)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in torch; a new weight of a row-sparse table starts with rows that are right.

        Raises:
            SizeError: A new weight has no row for the padding token.
        """
        rows = param.shape[0] if name == "weight" and param is not None and param.dim() == 2 else None
        if rows is not None and self.padding_idx is not None and self.padding_idx >= rows:
            raise SizeError(
                f"A weight of {rows} rows has none for the padding token {self.padding_idx}: set "
                f"table.padding_idx = None first, or keep that row."
            )
        super().register_parameter(name, param)
        if name == "weight":
            self._watch(param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TokenEmbedding":
        super()._apply(fn, recurse)
        self._watch(self.weight)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("ledger", "_handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch(self.weight)

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
        """Return a table of the rows of a tensor or an array, or read one from a folder.

        Args:
            source: A `(V, D)` tensor or NumPy array, which becomes the weight itself (torch's meaning, frozen unless
                `freeze=False`; a read-only array is copied), or a folder that `save_pretrained` wrote (Hugging Face's
                meaning, trainable unless `freeze=True`).
            freeze: Whether the rows are kept as they are.
            padding_idx: With a tensor: row that is zero, from the end if negative; the tensor is copied if its row is
                not.
            scale: With a tensor: as in the constructor.
            **arguments: Further arguments of `torch.nn.Embedding.from_pretrained`; see `EmbeddingArguments`.

        Raises:
            ShapeError: The tensor is not `(V, D)`, or holds no floats.
            SizeError: `source` is an `nn.Embedding`, or an argument is not supported.
            FileError: The folder cannot be read. Damaged: `CheckpointError`.
        """
        refuse_unsupported(arguments)
        if isinstance(source, Path | str):
            table = cls.read_pretrained(source)
            table.weight.requires_grad_(not freeze)
            return table
        weight = _rows_of(source)
        vocab_size, embed_dim = weight.shape
        table = cls(vocab_size, embed_dim, padding_idx=padding_idx, scale=scale, device="meta", dtype=weight.dtype)
        if table.padding_idx is not None and weight[table.padding_idx].any():
            weight = weight.clone()
            weight[table.padding_idx] = 0
        table.weight = nn.Parameter(weight, requires_grad=freeze is False)
        table.bounds.derive(weight.device)
        return table

    @classmethod
    def from_embedding(
        cls: type["TokenEmbedding"],
        embedding: nn.Embedding,
        *,
        scale: float | Literal["sqrt_dim"] | None = None,
    ) -> "TokenEmbedding":
        """Return a table over the weight of a plain `nn.Embedding`: the same `nn.Parameter`, nothing is copied.

        An optimizer that holds the parameter goes on training it, and `embedding` itself stays usable. Its padding row
        and sparse gradients (`row_sparse`) are kept; hooks stay with `embedding`. `reset_parameters` draws from
        N(0, 1), as torch does.

        Args:
            embedding: The module to take the weight of.
            scale: As in the constructor.

        Raises:
            SizeError: It is no plain `nn.Embedding` (a subclass or a replaced `forward` computes something else), it
                has `max_norm` or `scale_grad_by_freq`, or its padding row is not zero.

        Example:
            >>> embedding = nn.Embedding(100, 8, padding_idx=0)
            >>> table = TokenEmbedding.from_embedding(embedding)
            >>> table.weight is embedding.weight, table.padding_idx
            (True, 0)
        """
        if not isinstance(embedding, nn.Embedding):
            raise SizeError(
                f"from_embedding takes a torch.nn.Embedding; found {type(embedding).__name__}. "
                f"For rows in a tensor call TokenEmbedding.from_pretrained."
            )
        own = type(embedding).forward is not nn.Embedding.forward or "forward" in vars(embedding)
        if own or "weight" not in dict(embedding.named_parameters(recurse=False)):
            raise SizeError(
                f"This {type(embedding).__name__} does not look its rows up as torch.nn.Embedding does, so a table of "
                f"them could mean something else. For a model of transformers call embedlayer.patch(model); for the "
                f"rows alone, TokenEmbedding.from_pretrained(embedding.weight)."
            )
        refuse_unsupported({"max_norm": embedding.max_norm, "scale_grad_by_freq": embedding.scale_grad_by_freq})
        weight, padding_idx = embedding.weight, embedding.padding_idx
        if padding_idx is not None and not weight.is_meta and weight[padding_idx].any():
            raise SizeError(
                f"The padding row {padding_idx} of this embedding is not zero; in a TokenEmbedding it is. Set it to "
                f"zero (embedding.weight.data[{padding_idx}] = 0), or set embedding.padding_idx = None."
            )
        table = cls(
            embedding.num_embeddings,
            embedding.embedding_dim,
            padding_idx,
            scale=scale,
            init_std=1.0,
            row_sparse=embedding.sparse,
            device="meta",
            dtype=weight.dtype,
        )
        table.weight = weight
        table.bounds.derive(weight.device)
        return table.train(embedding.training)

    def extra_repr(self) -> str:
        """Sizes and options, for `print`."""
        parts = [f"{self.vocab_size}, {self.embed_dim}"]
        parts += [f"num_rows={self.num_rows}"] if self.num_rows != self.vocab_size else []
        parts += [f"padding_idx={self.padding_idx}"] if self.padding_idx is not None else []
        parts += [f"scale={self.scale:.6g}"] if self.scale is not None else []
        parts += ["row_sparse"] if self.row_sparse else []
        parts += ["rounded"] if self.round_scale else []
        return ", ".join(parts)


def as_table(table: TokenTable | nn.Embedding, *, registered: bool = True) -> TokenTable:
    """Return `table` if it is a `TokenTable`, and a plain `nn.Embedding` as a `TokenEmbedding` over the same weight.

    Args:
        table: What the user passed.
        registered: Whether the caller registers the table as a module of its own. A tied head does not: it would keep
            the old weight where the embedding gets another one, so there an `nn.Embedding` is refused.

    Raises:
        SizeError: It is neither, or an `nn.Embedding` that cannot be converted; see `TokenEmbedding.from_embedding`.
    """
    if isinstance(table, TokenTable):
        return table
    if isinstance(table, nn.Embedding):
        if registered:
            return TokenEmbedding.from_embedding(table)
        raise SizeError(
            "A head cannot be tied to a torch.nn.Embedding, whose weight may be replaced without its knowing. Make the "
            "table first, table = TokenEmbedding.from_embedding(embedding), and use it at both ends: as the input and "
            "in OutputHead(table)."
        )
    if isinstance(table, Tensor | np.ndarray):
        raise SizeError(
            f"A table is needed here; found {type(table).__name__} of shape {tuple(table.shape)}: "
            f"pass TokenEmbedding.from_pretrained(rows, freeze=False)."
        )
    raise SizeError(
        f"A table is needed here; found {type(table).__name__}: pass a TokenEmbedding or another TokenTable, or a "
        f"torch.nn.Embedding."
    )


def as_rows(table: TableLike) -> TokenTable | Tensor:
    """Return what a function reads that takes a table or its rows: a tensor as it is, an array as a tensor in the same
    memory (a read-only one is copied), all else as `as_table` converts it.

    Raises:
        SizeError: See `as_table`.
        ShapeError: An array of something else than numbers.
    """
    if isinstance(table, np.ndarray):
        if table.dtype.kind not in "fiub":
            raise ShapeError(f"Rows must be floats, not {table.dtype}: convert them to float32.")
        return torch.from_numpy(table if table.flags.writeable else table.copy())
    return table if isinstance(table, Tensor) else as_table(table)


def require_rows(rows: Tensor) -> None:
    """Refuse a tensor that is not one row of floats for each token.

    Raises:
        ShapeError: It is not `(V, D)`, or holds no floats.
    """
    if rows.ndim != 2:
        raise ShapeError(f"A table must have shape (V, D), not {tuple(rows.shape)}.")
    if not rows.is_floating_point():
        raise ShapeError(
            f"Rows must be floats, not {str(rows.dtype).removeprefix('torch.')}: convert them to float32. Quantised "
            f"codes mean nothing without their steps: multiply them out first, then "
            f"QuantizedEmbedding.from_table(rows, bits=8) stores them in 8 bits again."
        )


def _rows_of(source: object) -> Tensor:
    """Return the rows of a tensor or an array as a detached `(V, D)` tensor of floats, in the same memory."""
    if isinstance(source, nn.Embedding):
        raise SizeError(
            "from_pretrained takes rows or a folder, not a module: call TokenEmbedding.from_embedding(embedding)."
        )
    if not isinstance(source, Tensor | np.ndarray):
        raise ShapeError(
            f"A table is made of a (V, D) tensor or array, or read from a folder; found {type(source).__name__}: "
            f"pass torch.tensor(rows)."
        )
    rows = as_rows(source)
    assert isinstance(rows, Tensor)
    require_rows(rows)
    return rows.detach()


def resolve_scale(scale: float | str | None, embed_dim: int) -> float | None:
    """`"sqrt_dim"` as the number it means; numbers and `None` as they are."""
    if scale == "sqrt_dim":
        return math.sqrt(embed_dim)
    if isinstance(scale, str):
        raise SizeError(f'scale must be a number, "sqrt_dim" or None, not {scale!r}.')
    return None if scale is None else float(scale)


def resolve_init_std(init_std: float | str, embed_dim: int) -> float:
    """`"1/sqrt_dim"` as the number it means; numbers as they are."""
    if init_std == "1/sqrt_dim":
        return 1 / math.sqrt(embed_dim)
    if isinstance(init_std, str) or init_std < 0:
        raise SizeError(f'init_std must be a number of at least 0, or "1/sqrt_dim", not {init_std!r}.')
    return float(init_std)
