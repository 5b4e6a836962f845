"""Relative positions: one learned number per head for each bucket of distances (T5)."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.derived import Derived
from embedlayer.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.normal import draw_
from embedlayer.positions.position import Position


def distance_buckets(num_buckets: int, max_distance: int) -> Int[Tensor, " distances"]:
    """The bucket of each distance 0 .. max_distance: one for each of the first half, then ever wider ones.

    With `e = n // 2` of n buckets, a distance d from e on is in bucket
    `e + floor(ln(d / e) / ln(max_distance / e) * (n - e))`, at most the last. As published, the logarithm is a
    float32: at some edges that decides the bucket.
    """
    exact = num_buckets // 2
    distances = torch.arange(max_distance + 1)
    shares = torch.log(distances.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (shares * (num_buckets - exact)).long()).clamp_max(num_buckets - 1)
    return torch.where(distances < exact, distances, wide)


class RelativePositionBias(Position, Derived):
    """Learned biases of distances: `bias[h, i, j] = weight[bucket(key position - query position), h]`.

    There is no longest sequence: all distances from `max_distance` on share one bucket.

    Args:
        num_heads: Query heads, H.
        num_buckets: Rows of the table `weight`, `(num_buckets, H)`.
        max_distance: From here on, distances are in the last bucket.
        bidirectional: Half of the buckets are for keys after the query (encoders). Otherwise such keys are in bucket 0
            with the query itself (decoders, where a mask removes them).
        init_std: Standard deviation of the normal initialisation.

    Raises:
        SizeError: A number is too small: there must be an exact and a wide bucket on each side.

    Example:
        >>> RelativePositionBias(8).bias(torch.arange(5), torch.arange(5)).shape
        torch.Size([1, 8, 5, 5])

    Reference: Raffel et al., T5, 2020, section 2.1; transformers/models/t5/modeling_t5.py
    (`_relative_position_bucket`). We differ: buckets are looked up in a table made once on the CPU, so they are the
    same on every device.
    """

    buckets: Int[Tensor, " distances"]

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        side = num_buckets // 2 if bidirectional else num_buckets
        if num_heads < 1 or side < 2 or max_distance <= side // 2 or (bidirectional and num_buckets % 2):
            raise SizeError(
                f"{num_heads} heads, {num_buckets} buckets and a max_distance of {max_distance} are not possible: "
                f"there must be a head, {'4 buckets, an even number' if bidirectional else '2 buckets'}, "
                f"and a max_distance above the {max(side // 2, 1)} distances that have a bucket each."
            )
        self.num_heads = num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()
        self.derive()

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "num_heads": self.num_heads,
            "num_buckets": self.num_buckets,
            "max_distance": self.max_distance,
            "bidirectional": self.bidirectional,
            "init_std": self.init_std,
        }

    def reset_parameters(self) -> None:
        """Draw the biases from N(0, init_std^2)."""
        draw_(self.weight, std=self.init_std)

    def derived(self) -> dict[str, Tensor]:
        """The bucket of each distance to one side."""
        side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        return {"buckets": distance_buckets(side, self.max_distance)}

    def bucket(self, relative_positions: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """The row of `weight` for each `key position - query position`."""
        relative = relative_positions.long()
        distance = relative.abs() if self.bidirectional else (-relative).clamp_min(0)
        rows = F.embedding(distance.clamp_max(self.max_distance), self.buckets.unsqueeze(-1)).squeeze(-1)
        return rows + (relative > 0) * (self.num_buckets // 2) if self.bidirectional else rows

    def bias(
        self, query_positions: Int[Tensor, "*rows Tq"], key_positions: Int[Tensor, "*rows Tk"]
    ) -> Float[Tensor, "rows H Tq Tk"]:
        """`weight[bucket(key position - query position), h]`."""
        query, key = torch.atleast_2d(query_positions), torch.atleast_2d(key_positions)
        rows = self.bucket(key.unsqueeze(-2) - query.unsqueeze(-1))
        return F.embedding(rows, self.weight).movedim(-1, -3)

    def extra_repr(self) -> str:
        """Sizes, for `print`."""
        way = "bidirectional" if self.bidirectional else "causal"
        return f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, {way}"
