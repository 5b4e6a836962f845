"""Cache of keys and values, so that decoding computes those of each token once."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from embedlayer.core.documents import AttentionMask, check_mask
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.shapes import Positions
from embedlayer.inputs.history import DecodingState
from embedlayer.positions.position import Position, positions_of
from embedlayer.positions.rotary.embedding import RotaryEmbedding


class Slots:
    """Places of the tokens in a cache of a fixed size, one after another.

    Their numbers are tensors on the device, so all shapes are the same in each step, the host waits for nothing, and a
    CUDA graph of a step can be replayed for the next ones.

    Attributes:
        size: Number of slots: the largest number of tokens.
        called: Number of tokens that were passed to calls; replays of a graph are not counted.
        used: Number of tokens that are stored, `(1,)`.
        new: Slot of each new token, `(T,)`; the last slot for tokens that have none.
        overflow: 0, or NaN if a new token has no slot, `(1,)`.
    """

    used: Int[Tensor, "1"]
    new: Int[Tensor, " T"]
    overflow: Float[Tensor, "1"]

    def __init__(self, size: int) -> None:
        self.size = size
        self.called = 0

    def take(self, tokens: int, device: torch.device) -> None:
        """Choose the slots of new tokens."""
        if self.called == 0:
            self.used = torch.zeros(1, dtype=torch.int64, device=device)
            self._scores = torch.full((), torch.nan, device=device), torch.zeros((), device=device)
        self.called += tokens
        self.new = (self.used + torch.arange(tokens, device=device)).clamp(max=self.size - 1)
        self.used += tokens
        self.overflow = torch.where(self.used > self.size, *self._scores)

    def allocate(self, first: Tensor, dim: int = -1) -> Tensor:
        """Return memory of all slots along a dimension, with those of the first tokens in front, and zeros behind."""
        sizes = list(first.shape)
        sizes[dim] = self.size
        slots = first.new_zeros(sizes)
        slots.narrow(dim, 0, first.shape[dim]).copy_(first)
        return slots

    def store(self, slots: Tensor, new: Tensor, dim: int = -1) -> Tensor:
        """Write what belongs to the new tokens to their slots, and return all slots."""
        return slots.index_copy_(dim, self.new, new)


class BlockCache:
    """Hold the keys and the values of one block, each `(B, G, S, K)`; both are `None` before the first token."""

    def __init__(self, slots: Slots | None = None) -> None:
        self.slots = slots
        self.keys: Float[Tensor, "B G S K"] | None = None
        self.values: Float[Tensor, "B G S K"] | None = None

    def extend(
        self, keys: Float[Tensor, "B G T K"], values: Float[Tensor, "B G T K"]
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"]]:
        """Append keys and values of the new tokens in place, and return (keys, values) of those that they attend to.

        Those are all tokens so far. In a cache of a fixed size they are all slots, except for its first tokens, which
        attend only to each other.
        """
        if self.keys is None or self.values is None:
            self.keys, self.values = keys, values
            if self.slots is not None:
                self.keys, self.values = (self.slots.allocate(first, dim=-2) for first in (keys, values))
            return keys, values
        if self.slots is None:
            self.keys, self.values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
            return self.keys, self.values
        return self.slots.store(self.keys, keys, dim=-2), self.slots.store(self.values, values, dim=-2)


class KeyValueCache:
    """Hold the rotated keys and the values of all tokens that a `DecoderLM` has read.

    Start with an empty cache and pass it to every call of the model. Each call reads the new tokens only, attends to
    the cached ones, and appends the new ones.

    Some frequencies depend on the length of the sequence (`DynamicNTKScaling`, `LongRopeScaling`). A call whose length
    has others than the cached keys makes the model read all tokens again, so logits are those of reading the whole
    text: once with `LongRopeScaling`, where it exceeds the trained length, and in each call beyond it with
    `DynamicNTKScaling`. A position from `RotaryEmbedding.at_length` has fixed frequencies and avoids this.

    With `max_seq_len` the memory of all tokens is allocated at the first call, and keys and values are written in
    place. After the first call all shapes are the same in each call with as many new tokens, and nothing waits for the
    device: so `torch.cuda.graph` can capture such a call without positions and mask, and replay it for the next
    tokens. Tokens that a replay adds behind the last slot get NaN. Nothing is differentiated by what is cached.

    Args:
        max_seq_len: Largest number of tokens of each row, padding included; `None` for a cache that grows.

    Attributes:
        positions: Position of each cached token, `(B, S)`, or `(A, B, S)` if some were passed on A axes; `None` for an
            empty cache. With `max_seq_len` S is this number; entries after the last token are undefined.
        documents: For each cached token 0 for padding, else the number of its document, `(B, S)`, as in the mask of
            `positions_of`; `None` if each row is one document without padding. It is 0 after the last token.
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

    def __init__(self, max_seq_len: int | None = None) -> None:
        self._slots = None if max_seq_len is None else Slots(max_seq_len)
        self.positions: Int[Tensor, "*axes B S"] | None = None
        self.documents: AttentionMask | None = None
        self.length = 0
        self._read: list[tuple[Tensor, Tensor | None]] = []  # IDs, and vectors, of calls; see `read_again`
        self.blocks: defaultdict[int, BlockCache] = defaultdict(partial(BlockCache, self._slots))
        self.injections: defaultdict[int, DecodingState] = defaultdict(dict)

    def __len__(self) -> int:
        """Return the number of cached tokens of each row. With `max_seq_len` the call waits for the device."""
        if self.positions is None:
            return 0
        return self.positions.shape[-1] if self._slots is None else int(self._slots.used)

    @property
    def attended_slots(self) -> Slots | None:
        """Return the places of the tokens in a cache with `max_seq_len`, if its keys are attended to by slots.

        The first tokens attend to each other alone, so for them the result is `None`.
        """
        return self._slots if self._slots is not None and self._slots.called > len(self._slots.new) else None

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
            SizeError: The tokens exceed `max_seq_len`, or with it gradients are recorded.
        """
        slots, tokens = self._slots, ids.shape[-1]
        if slots is not None and slots.called + tokens > slots.size:
            raise SizeError(f"A KeyValueCache({slots.size}) has no room for {slots.called} and {tokens} more tokens.")
        if slots is not None and torch.is_grad_enabled():
            raise SizeError("A KeyValueCache with max_seq_len is written in place: call it under torch.no_grad().")
        if self.positions is None:
            positions = positions_of(ids, attention_mask) if positions is None else positions
            return positions.expand(*positions.shape[:-2], *ids.shape), attention_mask
        if positions is None and attention_mask is not None:
            raise ShapeError("New tokens continue the last document; with an attention_mask, pass their positions too.")
        last = self._last_text_places(self.positions)
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

    def _last_text_places(self, positions: Int[Tensor, "*axes B S"]) -> Int[Tensor, "B 1"]:
        """Return the place of the last cached token of each row that is not padding."""
        batch, cached = positions.shape[-2:]
        if self.documents is not None:
            places = torch.arange(cached, device=positions.device)
            return torch.where(self.documents != 0, places, 0).amax(-1, keepdim=True)
        if self._slots is not None:
            return (self._slots.used - 1).expand(batch, 1)
        return torch.full((batch, 1), cached - 1, device=positions.device)

    def read_again(
        self,
        position: Position,
        table: nn.Module,
        ids: Int[Tensor, "B T"],
        vectors: Float[Tensor, "B T D"] | None,
        positions: Int[Tensor, "*axes B T"],
        documents: AttentionMask | None,
    ) -> dict[str, Tensor | None] | None:
        """Empty the cache and return all tokens as arguments of the model, if new ones change the frequencies of keys.

        The result is `None` where the cached keys stay valid, as they do for schemes that do not depend on the length.

        Args:
            position: Position scheme of the model.
            table: Table of the model.
            ids: IDs of the new tokens.
            vectors: Their vectors, if these were passed to the model.
            positions: Positions of the new tokens.
            documents: As in `append`.

        Raises:
            SizeError: The frequencies depend on the length, and the cache has a fixed size.
        """
        if not isinstance(position, RotaryEmbedding) or not position.depends_on_length:
            return None
        if self._slots is not None:
            raise SizeError(f"Frequencies depend on the length: use model.position.at_length({self._slots.size}).")
        before, self.length = self.length, max(self.length, int(positions.max()) + 1)
        old, new = (position.phase_increments_at(length) for length in (before, self.length))
        self._read.append((ids, vectors))
        if self.positions is None or torch.equal(old, new):
            return None
        seen, all_documents = self.append(positions, documents)
        all_ids, all_vectors = torch.cat([ids for ids, _ in self._read], dim=-1), None
        if any(vectors is not None for _, vectors in self._read):
            all_vectors = torch.cat([table(ids) if each is None else each for ids, each in self._read], dim=-2)
        self.positions = self.documents = None
        for part in (self.blocks, self.injections, self._read):
            part.clear()
        return {"ids": all_ids, "inputs_embeds": all_vectors, "positions": seen, "attention_mask": all_documents}

    def shift(self, position: Position, drop: int, *, keep: int = 0) -> None:
        """Drop the `drop` tokens behind the first `keep` ones, and move later tokens to the positions that become free.

        In each row and on each axis, the first later token that is not padding moves to the position of the first
        dropped one of its document, and the rest of this document moves by as much. Keys are rotated by the difference,
        and equal the same keys rotated at the new positions. With `keep`, the first tokens stay as attention sinks.

        Keys and values of all blocks but the first were computed from hidden states that attended to the dropped
        tokens: they still depend on these, and so do what injections keep, such as the last IDs of an n-gram table.
        Logits therefore differ from those of reading the remaining text alone. With `max_seq_len` the call waits for
        the device.

        Args:
            position: Position scheme of the model.
            drop: Number of tokens of each row to drop, at least 1; padding counts.
            keep: Number of first tokens of each row that stay.

        Raises:
            SizeError: No token would remain, or keys cannot be moved: see `Position.shift_keys`. The cache is then as
                it was.

        Reference: Xiao et al., Efficient streaming language models with attention sinks, 2024.

        Example:
            >>> cache = KeyValueCache()
            >>> _ = model(torch.arange(6), cache=cache)
            >>> cache.shift(model.position, 2, keep=1)
            >>> len(cache), cache.positions
            (4, tensor([[0, 1, 2, 3]]))
        """
        if drop < 1 or keep < 0 or keep + drop >= len(self):
            raise SizeError(f"Of {len(self)} cached tokens, {drop} cannot be dropped behind the first {keep}.")
        assert self.positions is not None
        before = self.positions
        documents = torch.ones_like(before[(0,) * (before.dim() - 2)]) if self.documents is None else self.documents
        later = documents[:, keep + drop :]
        cut = later.gather(-1, (later != 0).int().argmax(-1, keepdim=True))  # document of the first token that moves
        is_moved = (documents == cut) & (cut != 0)
        dropped, later = is_moved[:, keep : keep + drop], is_moved[:, keep + drop :]
        starts = (part.int().argmax(-1, keepdim=True) for part in (dropped, later))
        first, next = (
            before.gather(-1, (at + offset).expand(*before.shape[:-1], 1))
            for at, offset in zip(starts, (keep, keep + drop), strict=True)
        )
        steps = torch.where(is_moved & dropped.any(-1, keepdim=True), first - next, 0)
        steps[..., : keep + drop] = 0
        blocks = [block for block in self.blocks.values() if block.keys is not None]
        moved = [position.shift_keys(cast(Tensor, block.keys), steps) for block in blocks]
        for block, keys in zip(blocks, moved, strict=True):
            block.keys = self._without(cast(Tensor, block.keys), keys, drop, keep, -2)
            block.values = self._without(cast(Tensor, block.values), cast(Tensor, block.values), drop, keep, -2)
        self.positions = self._without(before, before + steps, drop, keep)
        if self.documents is not None:
            self.documents = self._without(self.documents, self.documents, drop, keep)
        if self._slots is not None:
            self._slots.called = int(self._slots.used.sub_(drop))

    def _without(self, x: Tensor, new: Tensor, drop: int, keep: int, dim: int = -1) -> Tensor:
        sizes = [keep, drop, new.shape[dim] - keep - drop]
        first, dropped, later = new.split(sizes, dim)
        if self._slots is None:
            return torch.cat([first, later], dim)
        return x.copy_(torch.cat([first, later, torch.zeros_like(dropped)], dim))

    def keep_in_place(self, earlier: Mapping[int, DecodingState]) -> None:
        """With `max_seq_len`, write what injections keep now to where it was before the call.

        So a graph of the call reads what its last replay wrote.

        Args:
            earlier: The value of `injections` before the call.
        """
        for number, state in earlier.items() if self._slots is not None else ():
            for name, x in state.items():
                self.injections[number][name] = x.copy_(self.injections[number][name])

    def append(
        self, positions: Int[Tensor, "*axes B T"], documents: AttentionMask | None
    ) -> tuple[Int[Tensor, "... S"], Int[Tensor, "B S"] | Bool[Tensor, "B S"] | None]:
        """Append positions and documents of new tokens in place, and return (positions, documents) of all tokens.

        With `attended_slots` these are of all slots.

        Args:
            positions: Position of each new token.
            documents: 0 for padding, else the number of the token's document; `None` if all belong to one document.
        """
        slots = self._slots
        if slots is not None:
            slots.take(positions.shape[-1], positions.device)
        if self.positions is None:
            self.positions, self.documents = positions, documents
            if slots is not None:
                self.positions = slots.allocate(positions)
                self.documents = None if documents is None else slots.allocate(documents.long())
            return positions, documents
        if documents is not None and self.documents is None:
            self.documents = torch.ones_like(self.positions[(0,) * (self.positions.dim() - 2)])
            if slots is not None:
                self.documents *= torch.arange(slots.size, device=positions.device) < slots.new[0]
        axes = torch.broadcast_shapes(self.positions.shape[:-2], positions.shape[:-2])
        before, positions = (each.expand(*axes, *each.shape[-2:]) for each in (self.positions, positions))
        if slots is None:
            self.positions = torch.cat([before, positions], dim=-1)
            if documents is not None and self.documents is not None:
                self.documents = torch.cat([self.documents, documents], dim=-1)
        else:
            self.positions = before if before.shape == self.positions.shape else before.clone()
            slots.store(self.positions, positions)
            if documents is not None and self.documents is not None:
                slots.store(self.documents, documents.long())
        return self.positions, self.documents
