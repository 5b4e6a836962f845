"""The dense table: one learned row per token."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.bounds import Bounds
from embedlayer.derived import Derived
from embedlayer.errors import ShapeError, SizeError
from embedlayer.files import JsonObject
from embedlayer.normal import draw_
from embedlayer.shapes import Ids, Vectors
from embedlayer.tables.ledger import RowLedger, caught_up
from embedlayer.tables.table import TokenTable, check_sizes


class TokenEmbedding(TokenTable, nn.Embedding, Derived):
    """One learned row per token: `out[..., :] = scale * weight[ids]`.

    It is an `nn.Embedding` (parameter `weight`, `(num_rows, D)`), so whatever looks for one finds it.

    Args:
        vocab_size: Rows of the table that are tokens, V.
        embed_dim: Width of a row, D.
        padding_idx: Row that is zero and stays zero; `None` for no such row.
        scale: Factor on every looked-up row: a number, `"sqrt_dim"`, or `None` for none.
        round_scale: Round the scale to the type of the rows, as Gemma does: sqrt(3072) = 55.4256 is 55.5 in bfloat16.
            The rounded number is the buffer `embed_scale`, made again whenever the type changes.
        init_std: Standard deviation of the normal initialisation: a number, or `"1/sqrt_dim"`.
        pad_to_multiple_of: Store spare zero rows up to this multiple (64 suits GPUs), out of look-up and loss.
        row_sparse: Give gradients of the looked-up rows only, for `RowAdamW`. Between its steps rows may be
            behind: they are brought up to date before they are looked up or saved; call `flush()` before reading
            `weight` itself.
        device: Where to put the rows.
        dtype: In which type.

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

    embed_scale: float | Tensor | None
    """What look-ups are multiplied by, under the name by which PEFT finds it."""

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        *,
        padding_idx: int | None = None,
        scale: float | Literal["sqrt_dim"] | None = None,
        round_scale: bool = False,
        init_std: float | Literal["1/sqrt_dim"] = 0.02,
        pad_to_multiple_of: int | None = None,
        row_sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim, pad_to_multiple_of=multiple)
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

    # The weight says how many rows there are, whoever assigned it and however: `table.weight = ...`, `weight.data`,
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
        return weight if weight is not None and weight.dim() == 2 else None

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
        draw_(self.weight, std=self.init_std)
        with torch.no_grad():
            self.weight[self.vocab_size :] = 0
        self._fill_padding_idx_with_zero()

    def derived(self) -> dict[str, Tensor]:
        """The rounded scale, where there is one."""
        if not self.round_scale:
            return {}
        scale = 1.0 if self.scale is None else self.scale
        return {"embed_scale": torch.tensor(scale, dtype=self.weight.dtype)}

    def look_up(self, ids: Ids) -> Vectors:
        """`weight[ids]`: `(..., T)` to `(..., T, D)`."""
        ids, outside = self._bounded()(ids)
        padding_idx = None if self.row_sparse else self.padding_idx  # the ledger drops that row's gradient itself
        vectors = F.embedding(self._caught_up(ids), self.weight, padding_idx, sparse=self.row_sparse)
        return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

    def stored(self, ids: Ids) -> tuple[Tensor, Tensor] | None:
        """The IDs and `weight`; `None` on an accelerator, which need not know of bad IDs yet."""
        if ids.device.type != "cpu":
            return None
        ids, _ = self._bounded()(ids)
        return self._caught_up(ids), self.weight

    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Rows `start` to `stop - 1` as stored: a view, without `scale`."""
        self.flush(start, stop)
        return self.weight[start:stop]

    def as_linear(self, hidden: Float[Tensor, "*batch D"]) -> tuple[Tensor, Tensor]:
        """`hidden` and `weight`, whole, so that the gradient of its spare rows needs no copy."""
        self.flush()
        return hidden, self.weight

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

        Needed only before `weight` is read directly. Works in chunks; does nothing where no row is behind.
        """
        if self.ledger is not None and not torch.compiler.is_compiling():
            self.ledger.flush(self.weight, start, stop)

    def _caught_up(self, ids: Tensor) -> Tensor:
        if not self.row_sparse:
            return ids
        if torch.compiler.is_compiling():
            current: Tensor = caught_up(ids, self._handle)
            return current
        if self.ledger is not None:
            self.ledger.catch_up(self.weight, ids)
        return ids

    def _watch(self, weight: Tensor | None) -> None:
        """Give a weight of a row-sparse table its ledger; an optimizer that holds the one before is told."""
        if not self.row_sparse or not isinstance(weight, nn.Parameter):
            return
        if self.ledger is not None and getattr(weight, "row_ledger", None) is self.ledger:
            return
        if self.ledger is not None:
            self.ledger.replaced = True
        self.ledger = getattr(weight, "row_ledger", None) or RowLedger(self.padding_idx)
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
        self.flush()
        super()._apply(fn, recurse)
        self._watch(self.weight)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.ledger is not None and not self.ledger.raw:
            self.flush()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.flush()
        super()._load_from_state_dict(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {name: value for name, value in self.__dict__.items() if name not in ("ledger", "_handle")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch(self.weight)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type["TokenEmbedding"],
        source: Float[Tensor, "V D"] | Path | str,
        freeze: bool | None = None,
        padding_idx: int | None = None,
        *,
        scale: float | Literal["sqrt_dim"] | None = None,
    ) -> "TokenEmbedding":
        """A table from a tensor, or from a folder.

        Args:
            source: A `(V, D)` tensor, which becomes the weight itself (torch's meaning, frozen unless `freeze=False`),
                or a folder that `save_pretrained` wrote (Hugging Face's meaning, trainable unless `freeze=True`).
            freeze: Whether the rows are kept as they are.
            padding_idx: With a tensor: row that is zero; the tensor is copied if its row is not.
            scale: With a tensor: as in the constructor.

        Raises:
            ShapeError: The tensor is not `(V, D)`.
            FileError: The folder cannot be read. Damaged: `CheckpointError`.
        """
        if not isinstance(source, Tensor):
            table = cls.read_pretrained(source)
            table.weight.requires_grad_(not freeze)
            return table
        if source.dim() != 2:
            raise ShapeError(f"A table must have shape (V, D), not {tuple(source.shape)}.")
        vocab_size, embed_dim = source.shape
        table = cls(vocab_size, embed_dim, padding_idx=padding_idx, scale=scale, device="meta", dtype=source.dtype)
        weight = source.detach()
        if padding_idx is not None and weight[padding_idx].any():
            weight = weight.clone()
            weight[padding_idx] = 0
        table.weight = nn.Parameter(weight, requires_grad=freeze is False)
        table.bounds.derive(weight.device)
        return table

    def extra_repr(self) -> str:
        """Sizes and options, for `print`."""
        parts = [f"{self.vocab_size}, {self.embed_dim}"]
        parts += [f"num_rows={self.num_rows}"] if self.num_rows != self.vocab_size else []
        parts += [f"padding_idx={self.padding_idx}"] if self.padding_idx is not None else []
        parts += [f"scale={self.scale:.6g}"] if self.scale is not None else []
        parts += ["row_sparse"] if self.row_sparse else []
        parts += ["rounded"] if self.round_scale else []
        return ", ".join(parts)


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
