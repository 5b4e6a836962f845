"""Attention with the bias of a position scheme and a mask of documents, without a T x T tensor for long sequences."""

from contextlib import nullcontext
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from embedlayer.core.block_sizes import ATTENTION_SCORES, FEW_SCORES, block_size
from embedlayer.core.devices import device_kind
from embedlayer.core.documents import packed_lengths
from embedlayer.core.torch_state import (
    fusible,
    has_memory,
    is_capturing,
    is_transformed,
    is_unchanged,
    plain_operators_only,
    values_are_read,
    varlen_attention,
)
from embedlayer.models.cache import Slots
from embedlayer.positions.masks import allowed_keys
from embedlayer.positions.position import Position

QueryBlock = tuple[int, int, int, int]
"""`(start, stop, first, last)`: queries `start .. stop - 1`, and keys `first .. last - 1`, with all they attend to."""


class PackedDocuments:
    """Documents of a mask without padding, for torch's attention over sequences of different lengths.

    The device is waited for once, for the lengths of the documents.
    """

    def __init__(self, documents: Int[Tensor, "B T"] | Bool[Tensor, "B T"]) -> None:
        self.cu_seqlens, self.longest, tokens = packed_lengths(documents)
        is_padding = (documents == 0).flatten()
        self.text = None if tokens == len(is_padding) else is_padding.int().argsort(stable=True)[:tokens]

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        v: Float[Tensor, "B G T K"],
        scale: float | None,
    ) -> Float[Tensor, "B H T K"]:
        """Compute the causal attention of each document by itself; a padded token attends to itself only."""
        varlen_attn = varlen_attention()
        assert varlen_attn is not None
        # torch 2.11 has no such option, and takes heads in groups
        options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
        shape, heads = (q.shape[0], q.shape[2]), q.shape[1]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        values = v
        if self.text is not None:
            q, k, v = (x.index_select(0, self.text) for x in (q, k, v))
        ends, longest = self.cu_seqlens, self.longest
        y: Any = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(-1, 0), **options)
        if self.text is not None:
            y = values.repeat_interleave(heads // values.shape[1], 1).index_copy_(0, self.text, y)
        result: Tensor = y.unflatten(0, shape).transpose(1, 2)
        return result


class AddedScores:
    """What attention adds to its scores: the bias of a position scheme, and -inf for each masked key.

    The definition is `scores` of one block with all T queries and S keys. Where this has too many numbers, `attend`
    computes it for blocks of queries, in every call and again in the backward pass. On the CPU a block leaves out the
    keys before the document of its first query. Under `torch.func` transforms and in exported graphs there are no
    blocks.

    On CUDA a mask of documents without a bias and a cache needs no scores where these would be many and torch has
    FlashAttention for the queries: float16 or bfloat16, in eager mode, not in the capture of a CUDA graph. The first
    `attend` then waits for the device once, for the lengths of the documents.

    `queried` and `seen` are the positions of the queries, `(T,)` or `(B, T)`, and of the keys; the queries are the last
    keys. `documents` has 0 for padding, or else the number of the document of each key. `slots` is not `None` if the
    keys are all slots of a cache of a fixed size; the queries are then at `slots.new`.
    """

    def __init__(
        self,
        position: Position,
        queried: Int[Tensor, "*axes_or_rows T"],
        seen: Int[Tensor, "*axes_or_rows S"],
        documents: Int[Tensor, "*batch S"] | Bool[Tensor, "*batch S"] | None,
        slots: Slots | None,
        num_heads: int,
    ) -> None:
        self.position, self.queried, self.seen, self.documents, self.slots = position, queried, seen, documents, slots
        queries, keys = queried.shape[-1], seen.shape[-1]
        rows = 1 if documents is None else documents.shape[0]
        self.packed: PackedDocuments | None = None
        self.whole: Tensor | None = None
        is_biased = not is_unchanged(position, bias=Position.bias)
        self.may_be_packed = (
            documents is not None
            and documents.dim() == 2
            and not is_biased
            and slots is None
            and queries == keys
            and device_kind(documents) == "cuda"
            and has_memory(documents)
            and fusible(documents)
            and not is_capturing(documents)
            and rows * queries * keys > block_size(FEW_SCORES, "cuda")
        )
        count, most = 1, block_size(ATTENTION_SCORES, queried.device.type)
        if not plain_operators_only():  # it compares sizes, which an exported graph would take for constants
            rows = num_heads * max(rows, queried.shape[:-1].numel()) if is_biased else rows
            while 2 * count <= queries and count * most < rows * queries * keys:
                count *= 2  # so sizes of a traced graph may be symbolic, and it is compiled again for few of them
        bounds = [number * queries // count for number in range(count + 1)]
        self.blocks = [self._block(start, stop) for start, stop in pairwise(bounds)]
        if len(self.blocks) == 1 and not self.may_be_packed:
            self.whole = self.scores(self.blocks[0])

    def _block(self, start: int, stop: int) -> QueryBlock:
        if self.slots is not None:
            return start, stop, 0, self.seen.shape[-1]
        earlier = self.seen.shape[-1] - self.queried.shape[-1]
        first = 0
        if self.documents is not None and start > 0 and values_are_read(self.documents):
            numbers = self.documents[..., : earlier + start + 1].long().cummax(-1).values
            first = int((numbers < numbers[..., -1:]).sum(-1).min())
        return start, stop, first, earlier + stop

    def scores(self, block: QueryBlock) -> Float[Tensor, "*rows Tq Tk"]:
        """Return the sum of the position's bias and `causal_mask`, which is -inf for each masked key."""
        start, stop, first, last = block
        bias = self.position.bias(self.queried[..., start:stop], self.seen[..., first:last])
        places = None if self.slots is None else self.slots.new[start:stop]
        documents = None if self.documents is None else self.documents[..., first:last]
        allowed = allowed_keys(stop - start, last - first, documents, None, self.queried.device, places)
        added = torch.zeros((), device=self.queried.device) if self.slots is None else self.slots.overflow
        if bias is not None:
            added = bias if self.slots is None else bias + added
        return torch.where(allowed, added, float("-inf"))

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S K"],
        scale: float | None,
    ) -> Float[Tensor, "B H T K"]:
        is_plain = self.may_be_packed and all(map(has_memory, (q, k, v))) and fusible(q, k, v)
        if is_plain and _has_flash_attention(q, k, v) and varlen_attention() is not None:
            assert self.documents is not None
            self.packed = PackedDocuments(self.documents) if self.packed is None else self.packed
            if self.packed.longest:  # padding alone has no document
                return self.packed.attend(q, k, v, scale)
        if len(self.blocks) == 1:
            return self._attend_block(self.blocks[0], q, k, v, scale=scale)
        parts = []
        for block in self.blocks:
            start, stop, first, last = block
            part = q[..., start:stop, :], k[..., first:last, :], v[..., first:last, :]
            call = partial(self._attend_block, block, scale=scale)
            if torch.is_grad_enabled():
                call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
            parts.append(call(*part))
        return torch.cat(parts, dim=-2)

    def _attend_block(self, block: QueryBlock, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
        """Return the result of `attend` for the queries of a block."""
        scores = self.scores(block) if self.whole is None else self.whole
        if len(self.blocks) == 1:
            self.whole = scores  # of all layers
        scores = scores.to(q.dtype)
        if self.slots is None or q.shape[-2] != 1:
            return scaled_dot_product(q, k, v, scores, scale=scale)
        q, scores = (  # kernels that take a mask know no groups: the heads of a group are queries of one head
            x.unflatten(-3, (k.shape[-3], -1)).squeeze(-2) if x.dim() > 2 and x.shape[-3] > 1 else x
            for x in (q, scores)
        )
        return scaled_dot_product(q, k, v, scores, scale=scale).flatten(-3, -2).unsqueeze(-2)


def _has_flash_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether torch has FlashAttention for these on their device.

    It has none within `sdpa_kernel(SDPBackend.MATH)`, whose result has second derivatives.
    """
    return q.shape[-1] % 8 == 0 and can_use_flash_attention(
        SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
    )


def scaled_dot_product(
    q: Float[Tensor, "*batch H T K"],
    k: Float[Tensor, "*batch G S K"],
    v: Float[Tensor, "*batch G S K"],
    mask: Float[Tensor, "*rows #T S"] | None = None,
    *,
    is_causal: bool = False,
    scale: float | None,
) -> Float[Tensor, "*batch H T K"]:
    """Call `F.scaled_dot_product_attention`, with heads in groups, and with its plain operators under a transform."""
    # the fused kernels have no forward-mode derivative, no second derivative and no vmap rule
    with sdpa_kernel(SDPBackend.MATH) if is_transformed(q, k, v, mask) else nullcontext():
        # sizes of a traced graph may be symbolic, the two conditions must be plain booleans
        is_grouped = bool(q.shape[-3] != k.shape[-3])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=is_grouped
        )
