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
    """Heads of K streams of codes: one matrix of rows for each stream that they predict, without a bias."""

    weight: Names  # with "{}", one tensor for each head; else one of all, see `layout`
    first: int = 0  # first stream that is predicted (1 in some depth decoders, and in Bark)
    only: bool = False  # no other stream than `first` (CSM's backbone, Kyutai)
    layout: Layout = "joined"
    tied: str | None = None  # key that ties the rows to those of the input


@dataclass(frozen=True)
class CodeSpec:
    """K streams of codes, such as those of a sound codec: their rows, whose sum is an input, and their heads."""

    table: Names  # with "{}", one tensor for each stream; else one of all, stream after stream
    size: Names  # keys of the number of codes of a stream, V_k
    count: str = "num_codebooks"  # key of the number of streams, or of those of a side
    sides: int = 1  # of a dialogue (Moshi: 2)
    more_rows: int = 0  # rows of a stream beyond its codes (MusicGen: padding)
    text_size: str | None = None  # key of the size of a stream of text before the others
    shared_padding: str | None = None  # key of a row behind all streams, which is an ID of each
    # the sum alone is the input, added to that of text, or in the place of `placeholders`
    use: Literal["alone", "added", "placed"] = "alone"
    placeholders: Names = ()  # keys of these tokens
    head: CodeHeadSpec | None = None
    depth_head: CodeHeadSpec | None = None  # heads of a depth decoder, one for each stream
    # "steps": stream k by k; "first": all but the first of each side by one; or the key of a list
    delays: str | None = None

    def streams_of(self, head: CodeHeadSpec, num_streams: int) -> range:
        """Return the streams that a head predicts, of so many, that of text included."""
        if head.only:
            return range(head.first, head.first + 1)
        text = int(self.text_size is not None)
        return range(text + head.first, text + (num_streams - text) // self.sides)
