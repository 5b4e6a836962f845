"""Cache of keys and values, so that decoding computes those of each token once."""

from collections import defaultdict

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.core.documents import AttentionMask, check_mask
from embedlayer.core.errors import ShapeError
from embedlayer.core.shapes import Positions
from embedlayer.injections.history import DecodingState
from embedlayer.positions.position import Position, positions_of
from embedlayer.positions.rotary.embedding import RotaryEmbedding
from embedlayer.positions.rotary.scaling import DynamicNTKScaling, LongRopeScaling


class BlockCache:
    """Hold the keys and the values of one block, each `(B, G, S, K)`; both are `None` before the first token."""

    def __init__(self) -> None:
        self.keys: Float[Tensor, "B G S K"] | None = None
        self.values: Float[Tensor, "B G S K"] | None = None

    def extend(
        self, keys: Float[Tensor, "B G T K"], values: Float[Tensor, "B G T K"]
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"]]:
        """Append keys and values of the new tokens in place, and return (keys, values) of all tokens so far."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=-2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=-2)
        return self.keys, self.values


class KeyValueCache:
    """Hold the rotated keys and the values of all tokens that a `DecoderLM` has read.

    Start with an empty cache and pass it to every call of the model. Each call reads the new tokens only, attends to
    the cached ones, and appends the new ones.

    Some frequencies depend on the length of the sequence (`DynamicNTKScaling`, `LongRopeScaling`). When the length
    grows past the trained length, the cached keys are rotated to the new angles. Values and keys of later blocks still
    come from attention with the earlier angles, so logits then differ from those of reading the whole text. A position
    from `RotaryEmbedding.at_length` has fixed frequencies and avoids this.

    Attributes:
        positions: Position of each cached token, `(B, S)`, or `(A, B, S)` if some were passed on A axes; `None` for an
            empty cache.
        documents: For each cached token 0 for padding, else the number of its document, `(B, S)`, as in the mask of
            `positions_of`; `None` if each row is one document without padding.
        length: Largest position so far plus one, where frequencies depend on the length; else 0.
        blocks: Number of the block -> its keys and values.
        injections: Number of the injection -> what it keeps of earlier tokens, such as the last IDs of an n-gram table.

    Example:
        >>> cache, ids = KeyValueCache(), torch.tensor([1, 2, 3, 4])
        >>> first = model(ids[:3], cache=cache)  # reads three tokens
        >>> last = model(ids[3:], cache=cache)  # reads one and attends to four
        >>> len(cache), torch.allclose(last, model(ids)[3:], atol=1e-5)
        (4, True)
    """

    def __init__(self) -> None:
        self.positions: Int[Tensor, "*axes B S"] | None = None
        self.documents: AttentionMask | None = None
        self.length = 0
        self.blocks: defaultdict[int, BlockCache] = defaultdict(BlockCache)
        self.injections: defaultdict[int, DecodingState] = defaultdict(dict)

    def __len__(self) -> int:
        return 0 if self.positions is None else self.positions.shape[-1]

    def next_positions(
        self, ids: Int[Tensor, "B T"], positions: Positions | None, attention_mask: AttentionMask | None
    ) -> tuple[Int[Tensor, "*axes B T"], AttentionMask | None]:
        """Return (positions, documents) of new tokens; the cache does not change.

        By default a text continues at the last position plus one; on several axes, at the largest of these. With an
        empty cache the default positions are those of `positions_of`, and the documents are `attention_mask`.

        Args:
            ids: IDs of the new tokens; only their shape and device are used.
            positions: Position of each new token, `(T,)`, `(B, T)` or `(A, B, T)`; `None` to continue from the last
                cached token of each row.
            attention_mask: 0 for padding, else the number of the document; `None` to continue the last document of each
                row.

        Raises:
            ShapeError: The batch size differs from the cached one; the cache has tokens, and the new ones have a mask
                without positions, or a document before the last cached one.
        """
        if self.positions is None:
            positions = positions_of(ids, attention_mask) if positions is None else positions
            return positions.expand(*positions.shape[:-2], *ids.shape), attention_mask
        if self.positions.shape[-2] != len(ids):
            raise ShapeError(
                f"The cache has {self.positions.shape[-2]} sequences and the new tokens have {len(ids)}: "
                f"start an empty KeyValueCache for each batch."
            )
        if positions is None and attention_mask is not None:
            raise ShapeError(
                "New tokens continue the last document of a cached text. To start another one with an attention_mask, "
                "pass their positions too."
            )
        index = torch.arange(len(self), device=ids.device).expand(len(ids), -1)
        text = index if self.documents is None else torch.where(self.documents != 0, index, 0)
        last = text.amax(-1, keepdim=True)  # of each row, the last token that is not padding
        if positions is None:
            reached = self.positions if self.positions.dim() == 2 else self.positions.amax(0)
            positions = reached.gather(-1, last) + torch.arange(1, ids.shape[-1] + 1, device=ids.device)
        if attention_mask is not None:
            before = torch.ones_like(last) if self.documents is None else self.documents.gather(-1, last)
            whole = torch.cat([before, attention_mask], dim=-1)
            check_mask(whole, whole.shape, "The last cached document with the attention_mask")
        elif self.documents is not None:
            attention_mask = self.documents.gather(-1, last).expand(ids.shape)
        return positions.expand(*positions.shape[:-2], *ids.shape), attention_mask

    def rerotate(self, position: Position, positions: Int[Tensor, "*axes B T"]) -> None:
        """Rotate the cached keys in place to the angles of the longer sequence that the new tokens make.

        This changes nothing for schemes whose angles do not depend on the length of the sequence.

        Args:
            position: Position scheme of the model.
            positions: Positions of the new tokens.
        """
        scaling = position.scaling if isinstance(position, RotaryEmbedding) else None
        if not isinstance(scaling, DynamicNTKScaling | LongRopeScaling) or scaling.length is not None:
            return
        assert isinstance(position, RotaryEmbedding)
        before, self.length = self.length, max(self.length, int(positions.max()) + 1)
        if self.positions is None or self.length == before:
            return
        for block in self.blocks.values():
            if block.keys is not None:
                block.keys = position.rerotate(block.keys, self.positions, from_length=before, to_length=self.length)

    def append(
        self, positions: Int[Tensor, "*axes B T"], documents: AttentionMask | None
    ) -> tuple[Int[Tensor, "... S"], Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None]:
        """Append positions and documents of new tokens in place, and return (positions, documents) of all tokens.

        Args:
            positions: Position of each new token.
            documents: 0 for padding, else the number of the token's document; `None` if all belong to one document.
        """
        if self.positions is None:
            self.positions, self.documents = positions, documents
            return positions, documents
        if documents is not None:
            ones = torch.ones_like(self.positions[(0,) * (self.positions.dim() - 2)])
            before = ones if self.documents is None else self.documents
            self.documents = torch.cat([before, documents], dim=-1)
        axes = torch.broadcast_shapes(self.positions.shape[:-2], positions.shape[:-2])
        both = (each.expand(*axes, *each.shape[-2:]) for each in (self.positions, positions))
        self.positions = torch.cat(list(both), dim=-1)
        return self.positions, self.documents
