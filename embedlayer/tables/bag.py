"""Bags of token IDs: the sum or the mean of the vectors of each bag, for a table of any kind."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from embedlayer.core.documents import check_mask
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import INTEGERS, as_ids, rows_without_record
from embedlayer.core.shapes import IdsLike
from embedlayer.core.torch_state import (
    Proxy,
    calls_forward,
    is_observed,
    leaf_of_trace,
    plain_operators_only,
    refuse_per_sample_gradients,
    values_are_read,
)
from embedlayer.saving import Pretrained
from embedlayer.tables.conversions import as_lookup_table
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.sums import check_bags, sum_vectors

Mode = Literal["sum", "mean"]


class Bag(Pretrained):
    """Sum or mean of the vectors of each bag of tokens: `out[n] = sum over i in bag n of weights[i] * table(ids[i])`.

    It takes the place of an `nn.EmbeddingBag`: its `forward` has the same arguments, and its state dict is that of the
    table, such as `{"weight": ...}`. Tokens with the table's `padding_idx` take no part, neither in the sum nor in the
    number of tokens of a mean. An empty bag gives zeros. The vectors of all tokens are never in memory at once, except
    with hooks on the table, which is then called with all of them.

    Args:
        table: Table of any kind, a `LookupTable` or a plain `nn.Embedding`. With row-sparse gradients it is trained by
            `RowAdamW`.
        mode: `"mean"` or `"sum"`, as in torch.
        include_last_offset: Whether `offsets` has the end of the last bag too.

    Attributes:
        table: The table. Its `scale` multiplies the result.

    Example:
        >>> bag = Bag(TokenEmbedding.from_pretrained(torch.eye(4)), mode="sum")
        >>> bag(torch.tensor([1, 1, 3]), torch.tensor([0, 2]))
        tensor([[0., 2., 0., 0.],
                [0., 0., 0., 1.]])
        >>> bag([[1, 2, 0], [3, 0, 0]], lengths=[2, 1])
        tensor([[0., 1., 1., 0.],
                [0., 0., 0., 1.]])

    Reference: torch/nn/modules/sparse.py, `EmbeddingBag`. We differ: no mode `"max"` and no `max_norm`; and bags are
    also rows of a padded batch with a mask.
    """

    def __init__(
        self, table: LookupTable | nn.Embedding, *, mode: Mode = "mean", include_last_offset: bool = False
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise SizeError(f'mode={mode!r} is not supported: a Bag is a "sum" or a "mean".')
        self.table = as_lookup_table(table)
        self.mode: Mode = mode
        self.include_last_offset = include_last_offset

    @classmethod
    def from_embedding_bag(cls, bag: nn.EmbeddingBag, *, row_sparse: bool | None = None) -> "Bag":
        """Build a bag over the weight of an `nn.EmbeddingBag`. The parameter is shared, not copied.

        An optimizer of the parameter continues to train it, and the module stays usable. For all bags of a model call
        `embedlayer.patch(model)`.

        Args:
            bag: Module with the weight.
            row_sparse: Whether gradients are row-sparse, for `RowAdamW`; `None` for what `bag.sparse` says.

        Raises:
            SizeError: The module has another `forward`, `max_norm`, `scale_grad_by_freq` or the mode `"max"`.

        Example:
            >>> torch_bag = nn.EmbeddingBag(100, 8, mode="sum")
            >>> Bag.from_embedding_bag(torch_bag).table.weight is torch_bag.weight
            True
        """
        own = type(bag).forward is not nn.EmbeddingBag.forward or "forward" in vars(bag)
        if own or "weight" not in dict(bag.named_parameters(recurse=False)):
            raise SizeError(f"This {type(bag).__name__} has its own forward. See docs/errors.md, Other forwards.")
        rows = nn.Embedding(
            bag.num_embeddings,
            bag.embedding_dim,
            bag.padding_idx,
            max_norm=bag.max_norm,
            scale_grad_by_freq=bag.scale_grad_by_freq,
            sparse=bag.sparse if row_sparse is None else row_sparse,
            device="meta",
        )
        rows.weight = bag.weight
        mode: Any = bag.mode
        ours = cls(rows, mode=mode, include_last_offset=bag.include_last_offset)
        return ours.train(bag.training)

    @property
    def embed_dim(self) -> int:
        """Return the width of a vector, D."""
        return self.table.embed_dim

    @property
    def embedding_dim(self) -> int:
        """Return `embed_dim`, under torch's name."""
        return self.table.embed_dim

    @property
    def num_embeddings(self) -> int:
        """Return the number of rows of the table, under torch's name."""
        return self.table.num_rows

    @property
    def padding_idx(self) -> int | None:
        """Return the padding token of the table, which takes no part in a bag."""
        return self.table.padding_idx

    @property
    def weight(self) -> Tensor:
        """Return the weight of a dense table, as code for `nn.EmbeddingBag` reads it.

        Raises:
            AttributeError: The table has none.
        """
        weight = getattr(self.table, "weight", None)
        if not isinstance(weight, Tensor):
            raise AttributeError(f"The {type(self.table).__name__} of this bag has no weight.")
        return weight

    def forward(
        self,
        input: IdsLike,
        offsets: Int[Tensor, " bags"] | None = None,
        per_sample_weights: Float[Tensor, "*ids"] | None = None,
        *,
        mask: Int[Tensor, "*ids"] | Bool[Tensor, "*ids"] | None = None,
        lengths: Int[Tensor, "*bags"] | Sequence[int] | None = None,
    ) -> Float[Tensor, "*bags D"]:
        """Return the sum or mean of each bag, `(N, D)`, or of a padded batch `(..., T)` as `(..., D)`.

        On an accelerator no call waits for the device. There the values of `offsets` and `lengths` are not checked.

        Args:
            input: Token IDs: those of all bags one after the other, `(M,)`, or a batch of bags `(..., T)`.
            offsets: For `(M,)`: start of each bag, ascending from 0, `(N,)`; with `include_last_offset`, M follows.
            per_sample_weights: Factor on the vector of each ID, in the shape of `input`; only for sums.
            mask: For a batch: 0 for tokens that take no part, whose IDs are not read, in the shape of `input`.
            lengths: For a batch: number of tokens of each bag, the first ones, `(...)`, instead of a mask.

        Raises:
            ShapeError: IDs or offsets are not integers, offsets do not ascend from 0, a length is below 0 or above T,
                shapes do not fit, or one of offsets, mask and lengths is missing or too many.
            SizeError: There are weights, and the mode is `"mean"`.
            TokenIdError: On the CPU, an ID is outside the table. See `LookupTable.look_up` for accelerators.
        """
        if isinstance(input, Proxy):
            call: Tensor = leaf_of_trace(self, input, offsets, per_sample_weights, mask=mask, lengths=lengths)
            return call
        table = self.table
        ids = as_ids(input, beside=table)
        check_bags(ids, None, per_sample_weights)
        if per_sample_weights is not None and self.mode != "sum":
            raise SizeError(f'per_sample_weights need mode="sum": in mode {self.mode!r} they have no meaning in torch.')
        if ids.dim() > 1:
            taken = self._taken(ids, offsets, mask, lengths)
            bounds = torch.arange(prod(ids.shape[:-1]) + 1, device=ids.device) * ids.shape[-1]
        else:
            if offsets is None or ids.dim() == 0 or mask is not None or lengths is not None:
                raise ShapeError(f"Ids {tuple(ids.shape)} need offsets, and nothing else; a batch of bags is (..., T).")
            bounds, taken = offsets if self.include_last_offset else _with_end(offsets, len(ids)), None
        if table.padding_idx is not None:
            is_text = ids != table.padding_idx
            taken = is_text if taken is None else taken & is_text
        if taken is not None:
            ids = ids.masked_fill(~taken, 0)
        if taken is not None or ids.dim() > 1:  # an error names the place in what was passed
            rows_without_record(ids, table.vocab_size, "token id")
        weights, is_called = per_sample_weights, not calls_forward(table, LookupTable.forward)
        if "opacus" in sys.modules:  # its hooks are on the parts of a table that have parameters
            is_called = is_called or any(map(is_observed, table.modules()))
        if ids.dim() > 1 and (is_called or plain_operators_only()):
            sums, counts = self._batch_sums(ids, weights, taken, table if is_called else table.look_up)
        else:
            lists = [None if each is None else each.flatten() for each in (weights, taken)]
            sums, counts = self._sums(ids.flatten(), bounds, *lists, is_called=is_called)
            sums, counts = (each.unflatten(0, ids.shape[:-1]) if ids.dim() > 2 else each for each in (sums, counts))
        if self.mode == "mean":
            sums = sums / counts.clamp(min=1).unsqueeze(-1).to(sums.dtype)
        factor = None if is_called else table.factor
        return sums if factor is None else factor * sums

    def _taken(self, ids: Tensor, offsets: Tensor | None, mask: Tensor | None, lengths: Any) -> Tensor | None:
        """Return which IDs of a batch take part; `None` for all."""
        if offsets is not None or (mask is not None and lengths is not None):
            raise ShapeError(f"Ids {tuple(ids.shape)} are a batch of bags: pass a mask or lengths, not both.")
        if lengths is not None:
            lengths = as_ids(lengths, beside=ids)
            if lengths.shape != ids.shape[:-1] or lengths.dtype not in INTEGERS:
                found = f"{tuple(lengths.shape)} of {lengths.dtype}"
                raise ShapeError(f"Lengths are integers {tuple(ids.shape[:-1])}; found {found}.")
            if values_are_read(lengths) and not bool(((lengths >= 0) & (lengths <= ids.shape[-1])).all()):
                raise ShapeError(f"A length is from 0 to {ids.shape[-1]}; found {lengths.min()} to {lengths.max()}.")
            taken: Tensor = torch.arange(ids.shape[-1], device=ids.device) < lengths.unsqueeze(-1)
            return taken
        if mask is not None:
            check_mask(mask, ids.shape, "mask")
            return mask != 0
        return None

    def _batch_sums(
        self, ids: Tensor, weights: Tensor | None, taken: Tensor | None, look_up: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return what `_sums` does for a batch, by operators that every transform and export knows."""
        vectors = look_up(ids)
        vectors = vectors if weights is None else weights.unsqueeze(-1).to(vectors.dtype) * vectors
        taken = torch.ones_like(ids, dtype=torch.bool) if taken is None else taken
        return torch.where(taken.unsqueeze(-1), vectors, 0).sum(-2), taken.sum(-1)

    def _sums(
        self, ids: Tensor, bounds: Tensor, weights: Tensor | None, taken: Tensor | None, *, is_called: bool
    ) -> tuple[Float[Tensor, "N D"], Int[Tensor, " N"]]:
        """Return the sum of each bag, and its number of tokens that are `taken`."""
        table = self.table
        summed = table.summed
        if is_called:
            if "opacus" in sys.modules:  # to it each ID is a sample
                refuse_per_sample_gradients(table)
            check_bags(ids, bounds, weights)
            summed = partial(sum_vectors, table, block=max(1, len(ids)))
        if taken is None:
            return summed(ids, bounds, weights), bounds.diff()
        check_bags(ids, bounds, None)
        bounds = F.pad(taken.cumsum(0), (1, 0)).index_select(0, bounds)
        counts = bounds.diff()
        is_read = values_are_read(ids)
        if is_read:
            order = taken.nonzero().squeeze(1)
        else:
            order, bounds = torch.argsort((~taken).byte(), stable=True), _with_end(bounds, len(ids))
        sums = summed(ids[order], bounds, None if weights is None else weights[order])
        return (sums if is_read else sums[:-1]), counts

    def state_dict(  # type: ignore[override]
        self, *args: Any, prefix: str = "", **options: Any
    ) -> dict[str, Any]:
        """Return the state dict of the table, with the names that an `nn.EmbeddingBag` in place of the bag has."""
        state: dict[str, Any] = super().state_dict(*args, prefix=prefix, **options)
        inner = f"{prefix}table."
        for name in [name for name in state if name.startswith(inner)]:
            state[prefix + name.removeprefix(inner)] = state.pop(name)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Give tensors the names that they have in the module, before torch loads them."""
        inner = f"{prefix}table."
        for name in [name for name in state_dict if name.startswith(prefix) and not name.startswith(inner)]:
            state_dict[inner + name.removeprefix(prefix)] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the mode, for `print`."""
        return f"mode={self.mode!r}{', include_last_offset=True' if self.include_last_offset else ''}"


def _with_end(bounds: Tensor, end: int) -> Tensor:
    """Return the bounds with one more, which is no constant in a compiled graph, as the value of `F.pad` is."""
    return torch.cat([bounds, bounds.new_full((1,), end)])
