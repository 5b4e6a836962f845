"""A position speaks at one of three places: added to the input, rotating queries and keys, or as a bias on the scores.

Every scheme is a `Position` and overrides exactly one of three neutral hooks; attention calls all three and never asks
which scheme it has. Positions come from the caller, so offsets, cached decoding, left padding and packed sequences are
the same mechanism: other numbers.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.overrides import has_hooks
from embedlayer.pretrained import Pretrained
from embedlayer.shapes import Positions

AttentionMask = Int[Tensor, "*batch T"] | Bool[Tensor, "*batch T"]
"""0 for padding; 1 for text, or 1, 2, 3, ... from left to right for the documents packed into a row."""


class Position(Pretrained):
    """No position at all (NoPE), and the base of every scheme.

    Attributes:
        max_seq_len: Positions that the scheme covers, or `None` for no limit.

    Reference: Kazemnejad et al., The impact of positional encoding on length generalization, 2023 (NoPE).
    """

    max_seq_len: int | None = None

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {}

    def add(self, x: Float[Tensor, "*batch T D"], positions: Positions) -> Float[Tensor, "*batch T D"]:
        """What enters the first block: `x` and, for an additive scheme, a vector for each position."""
        return x

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: Positions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Queries and keys as attention compares them; G key heads may be fewer than H."""
        return q, k

    def bias(
        self, query_positions: Int[Tensor, "*rows Tq"], key_positions: Int[Tensor, "*rows Tk"]
    ) -> Float[Tensor, "rows H Tq Tk"] | None:
        """What is added to the scores, `(1 or B, H, Tq, Tk)`; masking the future is attention's business."""
        return None

    def forward(self, positions: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        """Raise `ShapeError`: only additive schemes have a vector for each position."""
        raise ShapeError(
            f"{type(self).__name__} adds nothing to the input, so there is no vector of a position to look up.\n"
            f"It is applied in attention: q, k = position.rotate(q, k, positions), and position.bias(query_positions, "
            f"key_positions) is added to the scores."
        )

    def require_sizes(
        self, *, embed_dim: int | None = None, num_heads: int | None = None, head_dim: int | None = None
    ) -> None:
        """Refuse a model whose sizes are not those that this scheme was built for.

        Args:
            embed_dim: Width of the vectors that positions are added to, or `None` if unknown.
            num_heads: Query heads of the attention.
            head_dim: Width of one head.

        Raises:
            SizeError: The scheme has a size of that name, and it is another one.
        """
        for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim}.items():
            own = getattr(self, name, None)
            if size is not None and own is not None and own != size:
                raise SizeError(
                    f"This {type(self).__name__} has {name} {own}, the model has {size}: build it with {name} {size}."
                )

    def check(self) -> None:
        """Wait for the device and raise the error of a position outside the scheme since the last check."""


class AdditivePosition(Position, ABC):
    """Abstract: a scheme that adds one vector for each position."""

    @abstractmethod
    def vectors(self, positions: Positions) -> Float[Tensor, "*rows T D"]:
        """The vector of each position.

        Raises:
            PositionError: A position is outside `0 .. max_seq_len - 1`.
        """

    def stored(self, length: int) -> Float[Tensor, "T D"] | None:
        """The vectors of positions 0 to `length - 1` where they lie, to be read only; `None` if they lie nowhere."""
        return None

    def forward(self, positions: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        """Return the vector of each position, of any shape: what `nn.Embedding` returns for the same numbers.

        Raises:
            ShapeError: `positions` holds floats, such as hidden states.
            PositionError: A position is outside `0 .. max_seq_len - 1`.
        """
        if torch.is_floating_point(positions):
            raise ShapeError(
                f"{type(self).__name__} is called with positions, which are integers, not with "
                f"{str(positions.dtype).removeprefix('torch.')} values of shape {tuple(positions.shape)}.\n"
                f"To add positions to hidden states, call add(x, positions): add(hidden, torch.arange(T))."
            )
        vectors = self.vectors(torch.atleast_1d(positions))
        return vectors.reshape(*positions.shape, vectors.shape[-1])

    def add(self, x: Float[Tensor, "*batch T D"], positions: Positions) -> Float[Tensor, "*batch T D"]:
        """Return `x[..., t, :] + self(positions)[..., t, :]`: a replaced or hooked `forward` sees the call.

        Hooks are given a position for each token of each sequence, so that per-sample gradients can be told apart.

        Raises:
            ShapeError: `x` has another width than the vectors.
        """
        if has_hooks(self):
            positions = positions.expand(torch.broadcast_shapes(positions.shape, x.shape[:-1]))
        vectors: Tensor = self(positions)
        if x.shape[-1] != vectors.shape[-1]:
            raise ShapeError(
                f"Hidden states of width {x.shape[-1]} cannot take positions of width {vectors.shape[-1]}: "
                f"build {type(self).__name__} with embed_dim {x.shape[-1]}."
            )
        return x + vectors.to(x.dtype)


def positions_of(
    ids: Int[Tensor, "*batch T"],
    attention_mask: AttentionMask | None = None,
    *,
    offset: int = 0,
    padding_position: int = 0,
) -> Positions:
    """Where each token stands in its own text.

    Args:
        ids: Token IDs; only their shape and device count.
        attention_mask: 0 for padding; 1 for text, or 1, 2, 3, ... from left to right for documents packed into one row,
            each of which counts from 0. `None`: every row is one text without padding.
        offset: Position of the first token, for a sequence that continues a cached one; or where counting begins:
            RoBERTa counts from `padding_idx + 1`, which is `positions_of(ids, ids != padding_idx,
            offset=padding_idx + 1, padding_position=padding_idx)`.
        padding_position: Position of padding.

    Returns:
        `(T,)` without a mask, else the shape of the mask.

    Example:
        >>> positions_of(torch.zeros(2, 4).long(), torch.tensor([[0, 0, 1, 1], [1, 1, 2, 2]]))
        tensor([[0, 0, 0, 1],
                [0, 1, 0, 1]])
    """
    if ids.dim() == 0:
        raise ShapeError("IDs must have shape (..., T), not (): a single one is written torch.tensor([7]).")
    if attention_mask is None:
        return torch.arange(offset, offset + ids.shape[-1], device=ids.device)
    if attention_mask.shape != ids.shape:
        raise ShapeError(f"attention_mask {tuple(attention_mask.shape)} must have the shape of ids {tuple(ids.shape)}.")
    is_text = attention_mask != 0
    place = is_text.cumsum(-1) - 1
    document = attention_mask.long().cummax(-1).values
    is_first = is_text & (document != torch.nn.functional.pad(document, (1, 0))[..., :-1])
    start = torch.where(is_first, place, 0).cummax(-1).values
    return torch.where(is_text, place - start + offset, padding_position)
