"""Where the vectors of an additional table enter a decoder: at its input, in the residual stream, or in attention.

Large models read more tables than the token table: hashed n-gram tables (Engram), per-layer tables (Gemma 3n), value
embeddings (nanochat). They differ in the rows that they read, and in the point where these rows enter. Every such table
is an `EmbeddingInjection`. It looks vectors up once for a batch, and overrides one of three neutral hooks; the decoder
calls all three for any injection.

| hook | point | kinds |
|---|---|---|
| `add_to_input` | the input of the first block | `AddedEmbedding` |
| `add_to_stream` | the residual stream before a block, or after the last one | `GatedEmbedding`, `PerLayerEmbedding` |
| `add_to_values` | the values of a block's attention | `ValueEmbedding` |
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.documents import AttentionMask
from embedlayer.core.errors import SizeError
from embedlayer.core.initialization import NormalLinear
from embedlayer.core.torch_state import is_unchanged
from embedlayer.inputs.history import DecodingState
from embedlayer.inputs.ngram import NgramEmbedding
from embedlayer.saving import Pretrained
from embedlayer.tables.conversions import as_lookup_table
from embedlayer.tables.lookup import LookupTable


class InjectionContext(NamedTuple):
    """Hold the tokens of a batch for which an injection looks vectors up.

    Attributes:
        ids: Token IDs, `(B, T)`.
        documents: 0 for padding, else the number of each token's document, `(B, T)`; `None` for one document in each
            row. See `positions_of`.
        state: What the injection keeps in cached decoding, which it changes in place; `None` without a cache.
    """

    ids: Int[Tensor, "*batch T"]
    documents: AttentionMask | None = None
    state: DecodingState | None = None


class EmbeddingInjection(Pretrained, ABC):
    """Abstract: an additional table whose vectors enter a decoder at one of three points.

    A subclass implements `look_up`, and overrides one of `add_to_input`, `add_to_stream` and `add_to_values`. It stores
    each argument of its constructor in an attribute of the same name, from which it is saved and loaded.

    Attributes:
        width: Width of the residual stream that the injection was built for, D; `None` for any.

    Example:
        >>> class FirstBlock(EmbeddingInjection):
        ...     def __init__(self, table):
        ...         super().__init__()
        ...         self.table = table
        ...     def look_up(self, x, context):
        ...         return self.table(context.ids)
        ...     def add_to_stream(self, x, vectors, depth, context):
        ...         return x + vectors if depth == 1 else x
        >>> table = TokenEmbedding(100, 32)
        >>> model = DecoderLM(table, "rotary", injections=[FirstBlock(TokenEmbedding(100, 32))])
        >>> model(torch.tensor([1, 2, 3])).shape
        torch.Size([3, 100])
    """

    width: int | None = None

    @abstractmethod
    def look_up(self, x: Float[Tensor, "B T D"], context: InjectionContext) -> Tensor:
        """Return the vectors that this injection adds to the batch, or computes its addends from.

        A decoder calls it once per forward pass and passes the result to the hooks.

        Args:
            x: Token vectors: output of the input embedding, before any injection and before dropout.
            context: Tokens of the batch.

        Raises:
            TokenIdError: On the CPU, an ID is outside the table.
        """

    def add_to_input(self, x: Float[Tensor, "B T D"], vectors: Tensor) -> Float[Tensor, "B T D"]:
        """Return the token vectors with those of this injection; `x` unchanged if they enter at another point."""
        return x

    def add_to_stream(
        self, x: Float[Tensor, "B T D"], vectors: Tensor, depth: int, context: InjectionContext
    ) -> Float[Tensor, "B T D"]:
        """Return the residual stream with what this injection adds there; `x` unchanged if it adds nothing.

        Args:
            x: Residual stream.
            vectors: Result of `look_up`.
            depth: Number of blocks that have been computed, 0 to `num_layers`.
            context: Tokens of the batch.
        """
        return x

    def add_to_values(
        self, values: Float[Tensor, "B G T K"], x: Float[Tensor, "B T D"], vectors: Tensor, block: int
    ) -> Float[Tensor, "B G T K"]:
        """Return the values of a block's attention with those of this injection; `values` if it adds none.

        Args:
            values: Values of all G key/value heads.
            x: Normalised input of the attention, from which the values were computed.
            vectors: Result of `look_up`.
            block: Number of the block, from 0.
        """
        return values

    def require_sizes(self, *, width: int, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Check the sizes of a decoder against those of this injection.

        Args:
            width: Width of the residual stream, D.
            num_layers: Number of blocks.
            num_kv_heads: Number of key/value heads, G.
            head_dim: Width of a head, K.
        """
        if self.width is not None and self.width != width:
            raise SizeError(f"{type(self).__name__} has width {self.width}, the decoder {width}: build it with that.")


VectorSource = LookupTable | NgramEmbedding
"""What an injection looks vectors up in: a table of vectors by token, or by n-gram."""


def as_source(table: VectorSource | nn.Embedding) -> VectorSource:
    """Return a source of vectors unchanged, and a plain `nn.Embedding` as a `TokenEmbedding` over the same weight."""
    return table if isinstance(table, NgramEmbedding) else as_lookup_table(table)


def vectors_of(table: VectorSource, context: InjectionContext) -> Float[Tensor, "B T E"]:
    """Return the vectors of a table for the tokens of a batch."""
    if isinstance(table, NgramEmbedding):
        vectors: Tensor = table(context.ids, context.documents, context.state)
    else:
        vectors = table(context.ids)
    return vectors


class AddedEmbedding(EmbeddingInjection):
    """Vectors that are added to the token vectors: `x + projection(table(ids))`, before dropout.

    With a hashed bigram table this is the input of the modded-nanogpt records, and of LongCat-Flash-Lite.

    Args:
        table: Table of vectors by token, or hashed table of vectors by n-gram.
        width: Width of the residual stream, D. If the table has another width E, its vectors are projected by a matrix
            without bias, which starts as N(0, 1 / E). `None` for the width of the table.

    Example:
        >>> bigrams = NgramEmbedding.dense(NgramHash.for_rows(500, 100, max_order=2, heads=4), 32)
        >>> model = DecoderLM(TokenEmbedding(100, 32), "rotary", injections=[AddedEmbedding(bigrams)])
        >>> model(torch.tensor([1, 2, 3])).shape
        torch.Size([3, 100])

    Reference: github.com/KellerJordan/modded-nanogpt, pull request 201 (hashed bigrams at the input).
    """

    def __init__(self, table: VectorSource | nn.Embedding, width: int | None = None) -> None:
        super().__init__()
        self.table = as_source(table)
        narrow = self.table.embed_dim
        self.width = narrow if width is None else width
        self.projection = None if narrow == self.width else NormalLinear(narrow, self.width, init_std=narrow**-0.5)

    def look_up(self, x: Float[Tensor, "B T D"], context: InjectionContext) -> Tensor:
        """Return the vectors of the table in the width of the residual stream, `(B, T, D)`.

        Raises:
            TokenIdError: On the CPU, a token ID is outside the table.
        """
        vectors = vectors_of(self.table, context)
        return vectors if self.projection is None else self.projection(vectors)

    def add_to_input(self, x: Float[Tensor, "B T D"], vectors: Tensor) -> Float[Tensor, "B T D"]:
        """Return `x + vectors`."""
        return x + vectors.to(x.dtype)


Injected = tuple[EmbeddingInjection, InjectionContext, Tensor]
"""An injection, the tokens of a batch, and the vectors that it looked up for them."""


def look_up_injections(
    injections: Iterable[EmbeddingInjection],
    x: Float[Tensor, "*batch T D"],
    ids: Int[Tensor, "*batch T"],
    documents: AttentionMask | None = None,
    states: Sequence[DecodingState] | None = None,
) -> tuple[Injected, ...]:
    """Look up the vectors of all injections of a decoder for one batch of token vectors `(..., T, D)`."""
    injected = []
    for number, injection in enumerate(injections):
        context = InjectionContext(ids, documents, None if states is None else states[number])
        injected.append((injection, context, injection.look_up(x, context)))
    return tuple(injected)


def add_to_input(x: Float[Tensor, "*batch T D"], injected: tuple[Injected, ...]) -> Float[Tensor, "*batch T D"]:
    """Return the token vectors with those of all injections, in order."""
    for injection, _, vectors in injected:
        x = injection.add_to_input(x, vectors)
    return x


def add_to_stream(
    x: Float[Tensor, "*batch T D"], injected: tuple[Injected, ...], depth: int
) -> Float[Tensor, "*batch T D"]:
    """Return the residual stream after `depth` blocks with what all injections add there, in order."""
    for injection, context, vectors in injected:
        x = injection.add_to_stream(x, vectors, depth, context)
    return x


def add_to_values(
    values: Float[Tensor, "*batch G T K"], x: Float[Tensor, "*batch T D"], injected: tuple[Injected, ...], block: int
) -> Float[Tensor, "*batch G T K"]:
    """Return the values of the attention of block `block` with those of all injections, in order."""
    for injection, _, vectors in injected:
        values = injection.add_to_values(values, x, vectors, block)
    return values


def injections_at_input(injections: Iterable[EmbeddingInjection]) -> Callable[..., Tensor] | None:
    """Return the step of an input embedding that adds vectors of injections; `None` if none enters at the input."""
    at_input = [each for each in injections if not is_unchanged(each, add_to_input=EmbeddingInjection.add_to_input)]

    def add(x: Tensor, ids: Tensor, attention_mask: AttentionMask | None) -> Tensor:
        documents = None if attention_mask is None else torch.atleast_2d(attention_mask)
        rows = x.reshape(-1, *x.shape[-2:])
        return add_to_input(rows, look_up_injections(at_input, rows, torch.atleast_2d(ids), documents)).view(x.shape)

    add.__name__ = ", ".join(type(each).__name__ for each in at_input)
    return add if at_input else None


def check_blocks(blocks: Iterable[int], num_layers: int | None = None) -> tuple[int, ...]:
    """Return block numbers as a tuple, after a check."""
    numbers = tuple(blocks)
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise SizeError(f"blocks must be distinct block numbers from 0, at least one, not {numbers}.")
    if num_layers is not None and max(numbers) >= num_layers:
        raise SizeError(f"There is no block {max(numbers)}: the decoder has {num_layers} blocks (0..{num_layers - 1}).")
    return numbers
