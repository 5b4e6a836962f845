"""The distribution of the next byte of a text, from logits of tokens: how tokenizers that differ are compared."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError, TokenizerError
from embedlayer.core.formatting import short_repr
from embedlayer.tokenization.bytes import TokenBytes
from embedlayer.tokenization.ids import end_of_text_id, table_size

SPECIAL = 256
"""The event that the next token is no text."""


@dataclass(frozen=True, eq=False)
class NextBytes:
    """The event of each token of a vocabulary: the byte with which it begins, or that it is no text.

    After the tokens of a text, the probability that the next byte is b is the sum of the probabilities of all tokens
    that begin with b. Events 0 to 255 are these bytes. Event 256 has all other tokens: special ones, and rows without a
    token. With `end_of_text`, event 257 is the end of the text alone.

    The statistic is exact for the given tokens of a text. It is that of the text where its tokens are the only ones
    that the model gives mass to. Two tokenizers are compared at positions where both have a token that ends there.
    Before the first token of a text, a SentencePiece token that begins with `▁` counts as a space, which the text does
    not have: leave that position out.

    Args:
        events: Event of each token, `(V,)` int64, 0 to `num_events - 1`.
        num_events: Number of events: 257 or 258.

    Example:
        >>> tokenizer = train_tokenizer((), kind="byte")
        >>> events = NextBytes.of(tokenizer)
        >>> events.events[:3].tolist(), events.num_events
        ([0, 1, 2], 257)
    """

    __repr__ = short_repr

    events: Int[Tensor, " V"]
    num_events: int

    def __post_init__(self) -> None:
        events = self.events
        if events.dim() != 1 or events.dtype != torch.int64 or not len(events):
            raise ShapeError(f"events must be int64, one for each token, not {events.dtype} {tuple(events.shape)}.")
        if not 0 <= int(events.min()) <= int(events.max()) < self.num_events:
            raise SizeError(f"Events must be in 0..{self.num_events - 1}, as NextBytes.of(tokenizer) returns them.")

    @classmethod
    def of(cls, tokenizer: object, vocab_size: int | None = None, *, end_of_text: bool = False) -> "NextBytes":
        """Return the events of a tokenizer's tokens.

        Args:
            tokenizer: A `tokenizers.Tokenizer`, or a fast tokenizer of transformers: byte-level BPE, or SentencePiece
                with byte fallback.
            vocab_size: Number of rows of the head, V; `None` for the number of IDs.
            end_of_text: Whether the end of a text, as `end_of_text_id` finds it, is an event of its own.

        Raises:
            TokenizerError: The tokens of the tokenizer do not give the bytes of a text; or it has no end of a text.
        """
        tokens = TokenBytes(tokenizer)
        size = table_size(tokens.tokenizer)
        if len(tokens.single_bytes) < 256:
            raise TokenizerError(
                "The tokens of this tokenizer change bytes of a text. Use DraftMap.divergence or TokenAlignment.sum."
            )
        if vocab_size is not None and vocab_size < size:
            raise SizeError(f"The tokenizer has {size} IDs, and vocab_size is {vocab_size}.")
        events = torch.full((vocab_size or size,), SPECIAL, device="cpu")
        for token in tokens.entries.keys() - tokens.special:
            if reading := tokens.readings(token)[0]:
                events[token] = reading[0]
        if end_of_text:
            end = end_of_text_id(tokens.tokenizer)
            if end is None:
                raise TokenizerError("The tokenizer has no token that ends a text: leave out end_of_text.")
            events[end] = SPECIAL + 1
        return cls(events, SPECIAL + 1 + end_of_text)

    def selected(self, ids: Int[Tensor, " N"]) -> "NextBytes":
        """Return the events of some tokens, as of a head over these."""
        return NextBytes(self.events[ids.to(self.events.device)], self.num_events)


def check_next_bytes(next_bytes: NextBytes | None, vocab_size: int) -> None:
    """Check that there is an event for each token of a vocabulary, or that there are no events."""
    if next_bytes is not None and len(next_bytes.events) != vocab_size:
        raise ShapeError(
            f"next_bytes has {len(next_bytes.events)} tokens and the head {vocab_size}: use vocab_size={vocab_size}."
        )
