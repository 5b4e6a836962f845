"""What decoding remembers: the keys and values of the tokens that were read, so that each is computed once."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embedlayer.errors import ShapeError
from embedlayer.positions.position import AttentionMask, Position, positions_of
from embedlayer.positions.rotary import RotaryEmbedding
from embedlayer.positions.rotary_scaling import DynamicNTKScaling, LongRopeScaling
from embedlayer.shapes import Positions


class BlockCache:
    """The keys and values of one block, `(B, G, S, K)` each."""

    def __init__(self) -> None:
        self.keys: Float[Tensor, "B G S K"] | None = None
        self.values: Float[Tensor, "B G S K"] | None = None

    def extend(
        self, keys: Float[Tensor, "B G T K"], values: Float[Tensor, "B G T K"]
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"]]:
        """Add the new tokens; returns the keys and values of all."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=-2)
        self.values = values if self.values is None else torch.cat([self.values, values], dim=-2)
        return self.keys, self.values


class KeyValueCache:
    """Keys as attention compares them (rotated) and values of the tokens read so far.

    Start with an empty one and hand the same one to every call of a `DecoderLM`: each call reads the tokens that are
    new, sees the remembered ones, and remembers what it read. Keys are kept rotated. Where their angles depend on the
    length too (`DynamicNTKScaling`, `LongRopeScaling`), they are turned on when it grows past the trained one. What later blocks
    remember still comes from attention by the earlier angles, so logits then differ from reading everything anew; with
    a position made by `RotaryEmbedding.at_length` they do not.

    Attributes:
        positions: Where each remembered token stands, `(B, S)`.
        documents: 0 for padding, else the document of each, as in `positions_of`; `None` if all is one text.
        length: Longest position seen plus one, where angles depend on it.
        blocks: The keys and values, block by block.

    Example:
        >>> cache, ids = KeyValueCache(), torch.tensor([1, 2, 3, 4])
        >>> first = model(ids[:3], cache=cache)  # reads three tokens
        >>> last = model(ids[3:], cache=cache)  # reads one and sees four
        >>> len(cache), torch.allclose(last, model(ids)[3:], atol=1e-5)
        (4, True)
    """

    def __init__(self) -> None:
        self.positions: Int[Tensor, "B S"] | None = None
        self.documents: AttentionMask | None = None
        self.length = 0
        self.blocks: list[BlockCache] = []

    def __len__(self) -> int:
        return 0 if self.positions is None else self.positions.shape[-1]

    def block(self, number: int) -> BlockCache:
        """What block `number` remembers."""
        if number == len(self.blocks):
            self.blocks.append(BlockCache())
        return self.blocks[number]

    def places_of(
        self, ids: Int[Tensor, "B T"], positions: Positions | None, attention_mask: AttentionMask | None
    ) -> tuple[Int[Tensor, "B T"], AttentionMask | None]:
        """Position and document of each new token; by default they go on with the last text of their row.

        Raises:
            ShapeError: The batch has another size than the remembered one, or new tokens have a mask but no positions.
        """
        if self.positions is None:
            positions = positions_of(ids, attention_mask) if positions is None else positions
            return positions.expand(ids.shape), attention_mask
        if len(self.positions) != len(ids):
            raise ShapeError(
                f"The cache remembers {len(self.positions)} sequences and was given {len(ids)}: "
                f"start an empty KeyValueCache for each batch."
            )
        if positions is None and attention_mask is not None:
            raise ShapeError(
                "Tokens that continue a cached text follow its last one. Where an attention_mask says otherwise, "
                "give their positions too."
            )
        last = self._last_text()
        if positions is None:
            positions = self.positions.gather(-1, last) + torch.arange(1, ids.shape[-1] + 1, device=ids.device)
        if attention_mask is None and self.documents is not None:
            attention_mask = self.documents.gather(-1, last).expand(ids.shape)
        return positions.expand(ids.shape), attention_mask

    def follow(self, position: Position, positions: Int[Tensor, "B T"]) -> None:
        """Turn the remembered keys as sequences that reach `positions` ask, where angles depend on the length."""
        scaling = position.scaling if isinstance(position, RotaryEmbedding) else None
        if not isinstance(scaling, DynamicNTKScaling | LongRopeScaling) or scaling.length is not None:
            return
        assert isinstance(position, RotaryEmbedding)
        before, self.length = self.length, max(self.length, int(positions.max()) + 1)
        if self.positions is None or self.length == before:
            return
        for block in self.blocks:
            if block.keys is not None:
                block.keys = position.rerotate(block.keys, self.positions, from_length=before, to_length=self.length)

    def remember(
        self, positions: Int[Tensor, "B T"], documents: AttentionMask | None
    ) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None]:
        """Add the places of new tokens; returns those of all."""
        if self.positions is None:
            self.positions, self.documents = positions, documents
            return positions, documents
        if documents is not None:
            before = torch.ones_like(self.positions) if self.documents is None else self.documents
            self.documents = torch.cat([before, documents], dim=-1)
        self.positions = torch.cat([self.positions, positions], dim=-1)
        return self.positions, self.documents

    def _last_text(self) -> Int[Tensor, "B 1"]:
        """Index of the last token of each row that is not padding."""
        assert self.positions is not None
        index = torch.arange(len(self), device=self.positions.device).expand_as(self.positions)
        is_text = index if self.documents is None else torch.where(self.documents != 0, index, 0)
        return is_text.amax(-1, keepdim=True)
