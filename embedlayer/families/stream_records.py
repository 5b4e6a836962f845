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

    weight: Names
    first: int = 0
    only: bool = False
    layout: Layout = "joined"
    tied: str | None = None


@dataclass(frozen=True)
class CodeSpec:
    """K streams of codes, such as those of a sound codec: their rows, whose sum is an input, and their heads."""

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
