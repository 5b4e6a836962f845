"""The base of every table: rows that are looked up by token ID.

A `LookupTable` is read in one direction, `table(ids) -> vectors`. It is the input side alone, as of a hashed n-gram
table or a per-layer table. `embedlayer.tables.table.TokenTable` adds the other direction, against all rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import chain
from typing import Any, Self, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.devices import device_kind
from embedlayer.core.errors import SizeError, TokenIdError
from embedlayer.core.index_checks import as_ids, raise_if_outside, rows_without_record
from embedlayer.core.shapes import Ids, IdsLike, Vectors
from embedlayer.core.torch_state import Proxy, fusible, leaf_of_trace, may_use, recompute_weights
from embedlayer.kernels.index_check import IndexCheck
from embedlayer.kernels.input import StoredRows, gather_rows, scale_applies
from embedlayer.saving import Pretrained

LookUp: TypeAlias = Callable[[Any, Tensor], Tensor]  # a method `look_up` of a table


class LookupTable(Pretrained, ABC):
    """Abstract: a table that maps token IDs to vectors, however it stores them.

    A subclass implements `look_up` and `rows`. To be saved it stores each argument of its constructor in an attribute
    of the same name, or overrides `config`. Its `look_up` gets only IDs from 0 to `vocab_size - 1`: wherever it is
    called from, this class checks the IDs before. It also keeps the gradient from the row of `padding_idx`.

    Attributes:
        vocab_size: Number of tokens that can be looked up, V. IDs run from 0 to V - 1.
        num_rows: Number of rows stored. In a `TokenTable` it is V plus spare rows, which are never looked up.
        embed_dim: Width of a vector, D.
        padding_idx: Token whose row is zero in a new table and gets no gradient, or `None` for no such token. Other
            values that a row holds, from a model or written by the user, are kept, looked up and multiplied.
        scale: Factor that `forward` applies and `look_up` and `rows` do not, or `None` for 1.
        row_sparse: Whether a backward pass gives gradients to the looked-up rows only.
        is_collective: Whether every rank must call `look_up`, equally often.

    Example:
        >>> class Hashed(LookupTable):
        ...     def __init__(self, vocab_size, num_rows, embed_dim):
        ...         super().__init__()
        ...         self.vocab_size, self.num_rows, self.embed_dim = vocab_size, num_rows, embed_dim
        ...         self.padding_idx = self.scale = None
        ...         self.weight = torch.nn.Parameter(torch.randn(num_rows, embed_dim))
        ...     def look_up(self, ids):
        ...         return torch.nn.functional.embedding(ids * 7919 % self.num_rows, self.weight)
        ...     def rows(self, start, stop):
        ...         return self.look_up(torch.arange(start, stop))
        >>> TransformerEmbedding(1000, 8, 16, table=Hashed(1000, 64, 8))([[1, 2, 3]]).shape
        torch.Size([1, 3, 8])
    """

    vocab_size: int
    num_rows: int
    embed_dim: int
    padding_idx: int | None
    scale: float | None
    row_sparse: bool = False
    is_collective: bool = False

    def children(self) -> Iterator[nn.Module]:
        """Return the child modules but for the check of IDs: to tools that count leaves a table is one, as in torch."""
        return (each for each in super().children() if not isinstance(each, IndexCheck))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the table as torch does, which asks `children` for the modules inside."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for each in self._modules.values():
            if isinstance(each, IndexCheck):
                each._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the mode as torch does, which asks `children` for the modules inside."""
        super().train(mode)
        for each in self._modules.values():
            if isinstance(each, IndexCheck):
                each.train(mode)
        return self

    def __init_subclass__(cls, *, checks_ids: bool = False, **arguments: Any) -> None:
        """Check IDs before the `look_up` that a subclass defines, except with `checks_ids=True`.

        Args:
            checks_ids: Whether that `look_up` checks its IDs and keeps the gradient from the padding row itself.
            **arguments: Class arguments of other bases.
        """
        super().__init_subclass__(**arguments)
        look_up: LookUp | None = vars(cls).get("look_up")
        if look_up is None or checks_ids:
            return

        @wraps(look_up)
        def checked_look_up(self: LookupTable, ids: Ids) -> Vectors:
            ids = as_ids(ids, beside=self)
            if self._forward_pre_hooks:
                recompute_weights(self)
            rows, outside = rows_without_record(ids, self.vocab_size, "token id"), None
            if rows is None:
                check = self._modules.get("index_check")
                if not isinstance(check, IndexCheck):
                    check = self.index_check = IndexCheck(self.vocab_size, "token id")
                check.size = self.vocab_size
                rows, outside = check.clamp_and_record(ids)
            vectors = look_up(self, rows)
            if self.padding_idx is not None:
                vectors = torch.where((rows == self.padding_idx).unsqueeze(-1), vectors.detach(), vectors)
            return vectors if outside is None else vectors.masked_fill(outside.unsqueeze(-1), 0)

        cls.look_up = checked_look_up  # type: ignore[method-assign]

    @abstractmethod
    def look_up(self, ids: Ids) -> Vectors:
        """Return the vectors of `ids` without `scale`, `(...)` to `(..., D)`, as a new tensor.

        Raises:
            ShapeError: `ids` are not integers.
            TokenIdError: On the CPU, an ID is outside the table. On an accelerator a bad ID gives zeros and gets no
                gradient, and the next `check()` of the table's `IndexCheck` raises the error.
        """

    def summed(
        self,
        ids: Int[Tensor, "*ids K"],
        bounds: Int[Tensor, " bounds"] | None = None,
        weights: Float[Tensor, "*ids K"] | None = None,
    ) -> Float[Tensor, "*bags D"]:
        """Return sums of vectors without `scale`, added one after another; gradients reach the rows and `weights`.

        Without `bounds` each sum has the K vectors of `ids[..., :]`, `(..., K)` to `(..., D)`:
        `(w[0] * look_up(ids[..., 0]) + w[1] * look_up(ids[..., 1])) + ...`, as K modules that are added. With `bounds`
        sum n has those of the bag `ids[bounds[n] : bounds[n + 1]]`, `(M,)` to `(N, D)`; the sum of an empty bag is 0.
        Never are all vectors of a call in memory at once, except for the gradient of `weights`.

        Args:
            ids: Token IDs, `(..., K)`, or with `bounds` those of all bags, `(M,)`.
            bounds: Start of each bag and end of the last, in ascending order from 0 to M, `(N + 1,)`; or `None`. The
                values are checked on the CPU.
            weights: Factor on each vector, of the shape of `ids`, converted to the dtype of the vectors; `None` for 1.

        Raises:
            ShapeError: IDs are not integers; `weights` have another shape than `ids`; or `bounds` are no such bounds.
            TokenIdError: As in `look_up`.
        """
        from embedlayer.tables.sums import check_bags, is_summed_faster, sum_vectors, summed_rows

        ids = as_ids(ids, beside=self)
        check_bags(ids, bounds, weights)
        if fusible(ids, weights):
            stored = self.stored(ids) if may_use(self, "stored", "look_up") else None
            if stored is not None and is_summed_faster(stored, weights):
                return summed_rows(stored, bounds, weights)
        block = max(1, len(ids)) if self.is_collective and bounds is not None else None
        try:
            return sum_vectors(self.look_up, ids, bounds, weights, block=block)
        except TokenIdError:
            raise_if_outside(ids, self.vocab_size, "token id")  # by its place among all
            raise

    def stored(self, ids: Ids) -> StoredRows | None:
        """Return IDs and the weight, from which a fused kernel can gather the vectors, without `scale`.

        `forward` calls this method only on CUDA, for a table with a scale.

        Returns:
            IDs, weight, and the check of the IDs, which a kernel makes as it reads the rows. `None` where a look-up is
            more than reading rows of one tensor.
        """
        return None

    def forward(self, input: IdsLike) -> Vectors:
        """Return `scale * look_up(input)`, `(...)` to `(..., D)`, for IDs of any shape, as `nn.Embedding` does.

        Args:
            input: Token IDs, a tensor of int64 or int32. A number, lists, a NumPy array of integers or an `Encoding` of
                a tokenizer is converted by `embedlayer.core.index_checks.as_ids`.

        Raises:
            TokenIdError: On the CPU, an ID is outside the table. See `look_up` for accelerators.
        """
        if isinstance(input, Proxy):
            call: Vectors = leaf_of_trace(self, input)
            return call
        ids, factor = input if isinstance(input, Tensor) else as_ids(input, beside=self), self.factor
        if factor is not None and device_kind(ids) == "cuda" and fusible(ids) and may_use(self, "stored", "look_up"):
            stored = self.stored(ids)
            if stored is not None and scale_applies(factor, stored.weight):
                return gather_rows(stored, scale=factor)
        vectors = self.look_up(ids)
        return vectors if factor is None else factor * vectors

    @property
    def factor(self) -> float | Tensor | None:
        """Return the factor that `forward` applies: `embed_scale` if the table has it, else `scale`; `None` means 1."""
        factor: float | Tensor | None = getattr(self, "embed_scale", self.scale)
        return factor

    @abstractmethod
    def rows(self, start: int, stop: int) -> Float[Tensor, "N D"]:
        """Return the vectors of tokens `start` to `stop - 1`, `(stop - start, D)`, without `scale`."""

    @property
    def device(self) -> torch.device:
        """Return the device of the table, which is that of its first parameter or buffer."""
        return next(chain(self.parameters(), self.buffers())).device


def check_positive(name: str, size: int) -> int:
    """Return `size` unchanged, after a check that it is at least 1."""
    if size < 1:
        raise SizeError(f"{name} must be at least 1, not {size}.")
    return size


def check_sizes(*, padding_idx: int | None, vocab_size: int, **sizes: int) -> int | None:
    """Check that sizes are at least 1 and that `padding_idx` is a token, and return `padding_idx` counted from 0."""
    for name, size in {"vocab_size": vocab_size, **sizes}.items():
        check_positive(name, size)
    if padding_idx is None:
        return None
    if not -vocab_size <= padding_idx < vocab_size:
        raise SizeError(f"padding_idx {padding_idx} is not one of the {vocab_size} tokens (0..{vocab_size - 1}).")
    return padding_idx % vocab_size
