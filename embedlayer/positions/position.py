"""The interface of position schemes, and the positions of tokens.

A scheme is applied at one of three points: added to the input, rotating queries and keys, or as an attention bias.
Every scheme is a `Position` and overrides one of three neutral hooks; attention calls all three for any scheme. The
caller passes the positions, so offsets, cached decoding, left padding and packed documents need no code in a scheme.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.documents import AttentionMask, check_mask, index_in_document
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import check_integer_positions, length_of
from embedlayer.core.shapes import Positions
from embedlayer.core.torch_state import has_hooks, is_unchanged
from embedlayer.kernels.gpu.launch import launch
from embedlayer.kernels.input import StoredRows, input_launches
from embedlayer.kernels.operation import Operation
from embedlayer.saving import Pretrained

PreparedPositions = Positions | tuple[Any, ...]
"""Positions, or the tuple of tensors that `prepare` of the same scheme computed from them."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(score, batch, head, query index, key index) -> score`, as `torch.nn.attention.flex_attention` calls it."""


class Position(Pretrained):
    """Base class of every position scheme; itself the scheme without positions (NoPE).

    A new scheme is a subclass that overrides one of `add`, `rotate` and `bias`. A scheme that adds one vector for each
    position overrides `vectors` of `AdditivePosition` instead. The constructor stores each argument in an attribute of
    the same name; `config`, saving and loading read them there.

    Attributes:
        max_seq_len: Number of positions that the scheme covers, or `None` for no limit.
        num_axes: Number of axes, A, on which a token has a position; in general 1.

    Example:
        >>> class RecencyBias(Position):
        ...     def __init__(self, num_heads: int, slope: float = 0.1) -> None:
        ...         super().__init__()
        ...         self.num_heads, self.slope = num_heads, slope
        ...
        ...     def bias(self, query_positions, key_positions):
        ...         query, key = torch.atleast_2d(query_positions), torch.atleast_2d(key_positions)
        ...         distance = (query[:, None, :, None] - key[:, None, None, :]).abs()
        ...         return (-self.slope * distance).expand(-1, self.num_heads, -1, -1)
        >>> position = RecencyBias(num_heads=2)
        >>> position.hook, position.config
        ('bias', {'num_heads': 2, 'slope': 0.1})
        >>> DecoderLM(TokenEmbedding(100, 16), position, num_heads=2)(torch.tensor([[5, 2, 7]])).shape
        torch.Size([1, 3, 100])

    Reference: Kazemnejad et al., The impact of positional encoding on length generalization, 2023 (NoPE).
    """

    max_seq_len: int | None = None
    num_axes: int = 1

    def extra_repr(self) -> str:
        """Return the constructor's arguments that are set, which `print` shows."""
        names = [name for name in inspect.signature(type(self)).parameters if name != "device"]
        values = {name: getattr(self, name) for name in names if getattr(self, name, None) not in (None, False)}
        texts = {name: f"{each:g}" if isinstance(each, float) else str(each) for name, each in values.items()}
        return ", ".join(f"{name}={text}" for name, text in texts.items())

    @property
    def hook(self) -> Literal["add", "rotate", "bias"] | None:
        """Return which method this scheme overrides: `"add"`, `"rotate"` or `"bias"`; `None` without positions."""
        if not is_unchanged(self, add=Position.add):
            return "add"
        if not is_unchanged(self, rotate=Position.rotate):
            return "rotate"
        return None if is_unchanged(self, bias=Position.bias) else "bias"

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter or buffer; the CPU for a scheme that has none."""
        tensor = next(chain(self.parameters(), self.buffers()), None)
        return torch.device("cpu") if tensor is None else tensor.device

    def check_positions(self, positions: object, shape: Sequence[int] | None = None) -> None:
        """Check the dtype and the shape of positions. A model calls it where a caller's positions enter.

        Positions are whole numbers in every scheme. Which ones it covers, each scheme checks itself: additive schemes
        those from 0 (or `-offset`) to `max_seq_len - 1`. Rotations and biases depend on distances, and take negative
        ones too, except with a `query_scaling`.

        Args:
            positions: What a caller passed.
            shape: Shape of the tokens, `(..., T)`; `None` if it is not known.

        Raises:
            ShapeError: Positions are no int32 or int64 tensor; or their shape is not `(T,)`, that of the tokens with
                sizes of 1 in place of others, or with several axes `(A, B, T)`.

        Example:
            >>> Position().check_positions(torch.arange(5), (2, 5))
        """
        check_integer_positions(positions)
        assert isinstance(positions, Tensor)
        sizes = tuple(positions.shape)
        on_axes = self.num_axes > 1 and len(sizes) == 3
        rows = sizes[1:] if on_axes else sizes
        tokens = (1, *shape) if on_axes and shape is not None and len(shape) == 1 else shape
        if tokens is None:
            fits = 1 <= len(rows) <= 2
        else:  # they broadcast to the tokens; graphs of torch 2.9 take `strict=False` for `True`
            fits = 1 <= len(rows) <= len(tokens) and rows[-1] == tokens[-1]
            for a, b in zip(rows[:-1], tokens[-len(rows) : -1], strict=True) if fits else ():
                fits = fits and a in (b, 1)
        if not fits or (on_axes and sizes[0] != self.num_axes):
            target = type(self).__name__ if shape is None else f"tokens of shape {tuple(shape)}"
            several = f" or ({self.num_axes}, B, T)" if self.num_axes > 1 else ""
            raise ShapeError(f"positions of shape {sizes} do not fit {target}: pass (T,), (1, T) or (B, T){several}.")

    def add(self, x: Float[Tensor, "*batch T D"], positions: Positions) -> Float[Tensor, "*batch T D"]:
        """Return `x` plus a vector for each position; schemes that are not additive return `x` unchanged."""
        return x

    def prepare(self, positions: Positions) -> PreparedPositions:
        """Return what `rotate` accepts in place of `positions`; schemes that do not rotate return `positions`.

        A model calls it once per forward pass and passes the result to `rotate` of every block. Rotary positions then
        compute their angles once. The numbers are those of `rotate` with the positions themselves.
        """
        return positions

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: PreparedPositions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Return rotated queries and keys; schemes that do not rotate return `q` and `k` unchanged.

        In grouped-query attention there are fewer key heads (G) than query heads (H).

        Args:
            q: Queries.
            k: Keys.
            positions: Position of each token, or the result of `prepare` for these positions.
        """
        return q, k

    def bias(
        self, query_positions: Int[Tensor, "*rows Tq"], key_positions: Int[Tensor, "*rows Tk"]
    ) -> Float[Tensor, "rows H Tq Tk"] | None:
        """Return the numbers to add to attention scores, `(1 or B, H, Tq, Tk)`; `None` for a scheme without a bias.

        The causal mask is not part of them. The number of a query and a key depends on their two positions alone, since
        long sequences are computed in blocks of queries.
        """
        return None

    def shift_keys(self, cached_keys: Float[Tensor, "*batch G T K"], steps: Positions) -> Float[Tensor, "*batch G T K"]:
        """Return cached keys as `rotate` returns them for positions that are larger by `steps`.

        Schemes that are applied in attention alone and do not rotate return the keys unchanged.

        Args:
            cached_keys: Keys that `rotate` returned.
            steps: What is added to the position of each key; shapes are those of positions.

        Raises:
            SizeError: The scheme is part of the vectors that keys were computed from, or rotates by the length.
        """
        if self.hook in ("add", "rotate"):
            raise SizeError(f"Keys of {type(self).__name__} cannot be moved: read the text with an empty cache.")
        return cached_keys

    def forward(self, positions: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        """Raise `ShapeError`: only additive schemes have a vector for each position."""
        raise ShapeError(f"{type(self).__name__} adds nothing to the input: call its rotate or bias in attention.")

    def require_sizes(
        self, *, embed_dim: int | None = None, num_heads: int | None = None, head_dim: int | None = None
    ) -> None:
        """Check the sizes of a model against those of this scheme.

        A size that is `None`, or that the scheme does not have, is not checked.

        Args:
            embed_dim: Width of the vectors that positions are added to, or `None` if unknown.
            num_heads: Query heads of the attention, or `None`.
            head_dim: Width of one head, or `None`.
        """
        for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim}.items():
            own = getattr(self, name, None)
            if size is not None and own is not None and own != size:
                raise SizeError(f"{type(self).__name__} has {name} {own}, the model has {size}: build it with {size}.")


class AdditivePosition(Position, ABC):
    """Abstract: a scheme that adds one vector for each position to the input. A subclass defines `vectors`."""

    @abstractmethod
    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """Return the vector of each position.

        Raises:
            PositionError: On the CPU, a position is outside the range that the scheme covers, in general
                `0 .. max_seq_len - 1`. On an accelerator its vector is zero, and the next `index_check.check()` raises
                the error.
        """

    def stored(self, length: int) -> Float[Tensor, "T D"] | None:
        """Return the vectors of positions `0 .. length - 1` without copying them, or `None` if they are not stored.

        The result is a view of a parameter or buffer, so callers must not change it.
        """
        return None

    def stored_look_up(self, positions: Positions) -> StoredRows | None:
        """Return the look-up that gives `vectors(positions)`, for a kernel on CUDA that checks the positions itself.

        Returns:
            Positions, rows and check. `None` where the vectors are more than rows of one tensor, or no kernel applies.
        """
        return None

    def forward(self, positions: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        """Return the vector of each position, for positions of any shape, as `nn.Embedding` does.

        Raises:
            PositionError: On the CPU, a position is outside the range that the scheme covers; see `vectors`.
        """
        check_integer_positions(positions)
        vectors = self.vectors(torch.atleast_1d(positions))
        return vectors.reshape(*positions.shape, vectors.shape[-1])

    def add(self, x: Float[Tensor, "*batch T D"], positions: Positions) -> Float[Tensor, "*batch T D"]:
        """Return `x` plus the vector of each token's position, `x[..., t, :] + self(positions)[..., t, :]`.

        The module itself is called, so hooks and a replaced `forward` take effect. If there are hooks, `positions` are
        expanded to one for each token of each sequence, so that hooks can compute per-sample gradients.

        Raises:
            ShapeError: `x` and the position vectors differ in width, or positions do not fit `x` or are no integers.
            PositionError: On the CPU, a position is outside the range that the scheme covers; see `vectors`.
        """
        self.check_positions(positions, x.shape[:-1])
        if has_hooks(self):
            positions = positions.expand(torch.broadcast_shapes(positions.shape, x.shape[:-1]))
        vectors: Tensor = self(positions)
        if x.shape[-1] != vectors.shape[-1]:
            widths = f"width {x.shape[-1]} cannot take positions of width {vectors.shape[-1]}"
            raise ShapeError(f"Hidden states of {widths}: build {type(self).__name__} with embed_dim {x.shape[-1]}.")
        return x + vectors.to(x.dtype)


def positions_of(
    ids: Int[Tensor, "*batch T"],
    attention_mask: AttentionMask | None = None,
    *,
    offset: int = 0,
    padding_position: int = 0,
) -> Positions:
    """Return the position of each token in its own document.

    Args:
        ids: Token IDs; only their shape and device are used.
        attention_mask: 0 for padding; 1 for text, or 1, 2, 3, ... from left to right for documents packed into one row,
            each of which starts at `offset`; see `embedlayer.core.check_mask`. `None`: every row is one document
            without padding.
        offset: Position of the first token: the length of the cached text in cached decoding, or `padding_idx + 1` in
            RoBERTa: `positions_of(ids, ids != padding_idx, offset=padding_idx + 1, padding_position=padding_idx)`.
        padding_position: Position of padding tokens.

    Returns:
        `(T,)` without a mask, else the shape of the mask.

    Raises:
        ShapeError: `ids` is a scalar, or the mask is not valid; see `embedlayer.core.check_mask`.

    Example:
        >>> positions_of(torch.zeros(2, 4).long(), torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 0, 1]])
    """
    if attention_mask is None:
        return torch.arange(offset, offset + ids.shape[-1], device=ids.device)
    check_mask(attention_mask, ids.shape)
    positions: Tensor = POSITIONS_OF_MASK(attention_mask, offset, padding_position)
    return positions


def positions_in_documents(mask: Tensor, offset: int, padding_position: int) -> Tensor:
    """Return the positions of tokens from a mask; see `positions_of`."""
    return torch.where(mask != 0, index_in_document(mask) + offset, padding_position)


POSITIONS_OF_MASK = Operation(
    "positions of tokens in the documents of a mask",
    positions_in_documents,
    gpu=input_launches,
    launches=["positions_of_mask"],
)


@POSITIONS_OF_MASK.operator()
def positions_of_mask(mask: Tensor, offset: int, padding_position: int) -> Tensor:
    """Compute the positions of tokens in one launch, `(..., T)`, int64."""
    mask = mask.contiguous()
    positions, sizes = torch.empty_like(mask, dtype=torch.int64), {"length": length_of(mask), "offset": offset}
    tensors = {"mask": mask, "positions": positions}
    launch(input_launches(), "positions_of_mask", **tensors, **sizes, padding_position=padding_position)
    return positions


def score_mod_of(
    position: Position,
    bias: Callable[[Tensor, Tensor, Tensor], Tensor],
    query_positions: Int[Tensor, "*rows Tq"] | None,
    key_positions: Int[Tensor, "*rows Tk"] | None,
) -> ScoreMod:
    """Return the function for `flex_attention` that adds `bias(head, query position, key position)` to each score."""
    for positions in (query_positions, key_positions):
        if positions is not None:
            position.check_positions(positions)
    query, key = (None if at is None else torch.atleast_2d(at.long()) for at in (query_positions, key_positions))

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # of one row a tensor as well: graphs of torch 2.9 mix no integer with tensors of indices
        i = q if query is None else query[batch if len(query) > 1 else 0 * batch, q]
        j = k if key is None else key[batch if len(key) > 1 else 0 * batch, k]
        return score + bias(head, i, j)

    return add_bias
