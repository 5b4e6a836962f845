"""The fields of the record of K streams of codes: tensor names, sizes and heads, and which streams a head predicts."""

from dataclasses import dataclass
from typing import Literal

from embedlayer.families.field_types import Names

Layout = Literal["joined", "stacked", "transposed"]
"""How the rows of K streams are stored in one tensor: `(sum(V_k), D)`; `(K, V, D)` (Moshi); or `(K, D, V)` (CSM)."""


def numbered(names: Names, number: int) -> Names:
    """Return tensor names with the number of a stream or head in the place of `"{}"`."""
    return tuple(name.format(number) for name in names)


@dataclass(frozen=True)
class CodeHeadSpec:
    """Heads of K streams of codes: one matrix of rows for each stream that they predict, without a bias.

    Attributes:
        weight: Tensor names of the rows: with `"{}"` in each, the number of a head, one tensor for each head; else one
            tensor of all heads, see `layout`.
        first: First stream that is predicted (1 for a depth decoder that reads stream 0, and for Bark).
        only: Whether no other stream than `first` is predicted (CSM's backbone, Kyutai).
        tied: Configuration key that ties the rows to those of the same streams at the input; `None` for none.
        layout: How one tensor of all heads is stored.
    """

    weight: Names
    first: int = 0
    only: bool = False
    layout: Layout = "joined"
    tied: str | None = None


@dataclass(frozen=True)
class CodeSpec:
    """K streams of codes, such as those of a sound codec: their rows, whose sum is an input, and their heads.

    Attributes:
        table: Tensor names of the rows: with `"{}"` in each, the number of a stream, one tensor for each stream; else
            one tensor of all rows, stream after stream.
        size: Configuration keys of the number of codes of a stream, V_k, the preferred one first.
        count: Configuration keys of the number of streams, or of those of one side of a dialogue.
        sides: Sides of a dialogue, each of which has `count` streams (Moshi: 2, its own and the user's).
        more_rows: Rows of each stream beyond its codes, to which the heads have no rows (MusicGen: padding).
        text_size: Configuration key of the size of a further stream before the others, of text; `None` for none.
        shared_padding: Configuration key of the number of a row behind all streams, which is an ID of each stream.
        use: `"alone"`: the sum is the input. `"added"`: it is added to the rows of text tokens. `"placed"`: it takes
            the place of the rows of the text tokens `placeholders`.
        placeholders: Configuration keys of these tokens.
        head: Heads that read the last hidden states of the model; `None` for none.
        depth_head: Heads that read those of a depth decoder, one for each of its streams; `None` for none.
        delays: How many steps later each stream is written. `"steps"`: stream k by k, or both channels of stereo
            sound by k; `"first"`: the first stream of each side by none, and the others by one. Or a configuration key
            of a list. `None` for no delays, or if they are no part of the configuration.
    """

    table: Names
    size: Names
    count: str = "num_codebooks"
    sides: int = 1
    more_rows: int = 0
    text_size: str | None = None
    shared_padding: str | None = None
    use: Literal["alone", "added", "placed"] = "alone"
    placeholders: Names = ()
    head: CodeHeadSpec | None = None
    depth_head: CodeHeadSpec | None = None
    delays: str | None = None

    def streams_of(self, head: CodeHeadSpec, num_streams: int) -> range:
        """Return the streams that a head predicts, of so many, that of text included."""
        if head.only:
            return range(head.first, head.first + 1)
        text = int(self.text_size is not None)
        return range(text + head.first, text + (num_streams - text) // self.sides)
