"""Relative positions: one learned bias per head for each bucket of distances (T5)."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.errors import SizeError
from embedlayer.core.index_checks import check_integer_positions
from embedlayer.core.initialization import init_normal_
from embedlayer.core.torch_state import recompute_weights
from embedlayer.positions.position import Position, ScoreMod, score_mod_of


class RelativePositionBias(Position, ComputedBuffers):
    """Learned biases by distance: `bias[h, i, j] = weight[bucket(key position - query position), h]`.

    There is no longest sequence: all distances from `max_distance` on are in the last bucket of their direction.

    Args:
        num_heads: Query heads, H.
        num_buckets: Rows of the table `weight`, `(num_buckets, H)`.
        max_distance: Distance from which on all distances are in the last bucket.
        bidirectional: Half of the buckets are for keys after the query (encoders). Otherwise such keys are in bucket 0,
            as the query itself (decoders, which mask them).
        init_std: Standard deviation of the normal initialisation.

    Example:
        >>> RelativePositionBias(8).bias(torch.arange(5), torch.arange(5)).shape
        torch.Size([1, 8, 5, 5])

    Reference: Raffel et al., T5, 2020, section 2.1; transformers/models/t5/modeling_t5.py
    (`_relative_position_bucket`). We differ: buckets are looked up in a table that is computed once on the CPU,
    so they are the same on every device.
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
        if side < 2 or max_distance <= side // 2:
            raise SizeError(f"{side} buckets a direction need 2 or more, and max_distance {max_distance} above half.")
        self.num_heads = num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()
        self.recompute_buffers()

    def reset_parameters(self) -> None:
        """Draw all biases again, in place, from N(0, init_std²)."""
        init_normal_(self.weight, std=self.init_std)

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffer `buckets`: the bucket of each distance `0 .. max_distance` from the query back to a key.

        With n buckets and `e = n // 2`, a distance d below e is in bucket d. A distance from e on is in bucket
        `min(n - 1, e + floor(ln(d / e) / ln(max_distance / e) * (n - e)))`. The logarithm is computed in float32 as in
        T5, which decides the bucket at some edges. If the bias is bidirectional, n is half of `num_buckets`, and the
        method `bucket` adds this half for keys after the query.
        """
        side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        exact, distances = side // 2, torch.arange(self.max_distance + 1)
        shares = torch.log(distances.clamp_min(1).float() / exact) / math.log(self.max_distance / exact)
        wide = (exact + (shares * (side - exact)).long()).clamp_max(side - 1)
        return {"buckets": torch.where(distances < exact, distances, wide)}

    def bucket(self, relative_positions: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the bucket of each relative position, which is the row of `weight` with its biases.

        Args:
            relative_positions: `key position - query position`, of any shape; negative for keys before the query.
        """
        check_integer_positions(relative_positions)
        return self._bucket(relative_positions.long())

    def _bucket(self, relative: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the bucket of each relative position, by operators that `flex_attention` compiles."""
        distance = relative.abs() if self.bidirectional else (-relative).clamp_min(0)
        rows = self.buckets[distance.clamp_max(self.max_distance)]
        return rows + (relative > 0) * (self.num_buckets // 2) if self.bidirectional else rows

    def bias(
        self, query_positions: Int[Tensor, "*rows Tq"], key_positions: Int[Tensor, "*rows Tk"]
    ) -> Float[Tensor, "rows H Tq Tk"]:
        """Return the bias of each head h for each query and key, `(1 or B, H, Tq, Tk)`.

        It is `weight[bucket(key position - query position), h]`.
        """
        self.check_positions(query_positions)
        self.check_positions(key_positions)
        query, key = torch.atleast_2d(query_positions.long()), torch.atleast_2d(key_positions.long())
        rows = self.bucket(key.unsqueeze(-2) - query.unsqueeze(-1))
        if "weight" in vars(self):
            recompute_weights(self)
        return F.embedding(rows, self.weight).movedim(-1, -3)

    def score_mod(
        self,
        query_positions: Int[Tensor, "*rows Tq"] | None = None,
        key_positions: Int[Tensor, "*rows Tk"] | None = None,
    ) -> ScoreMod:
        """Return the same bias as a function for `torch.nn.attention.flex_attention`, which builds no bias matrix.

        Args:
            query_positions: Position of each query, `(Tq,)`, `(1, Tq)` or `(B, Tq)`; its index if `None`.
            key_positions: Position of each key, likewise; its index if `None`.
        """
        if "weight" in vars(self):
            recompute_weights(self)
        weight = self.weight
        return score_mod_of(
            self, lambda head, query, key: weight[self._bucket(key - query), head], query_positions, key_positions
        )
