"""Scale of queries by their position: attention gets sharper as the text gets longer.

Without it, the weight of each key shrinks as the number of keys grows. A `QueryScaling` is a frozen dataclass that
computes one factor for each position. `RotaryEmbedding` takes it as `query_scaling` and multiplies the rotated queries.
`QueryScaledPosition` is the scheme of blocks that have the factor without a rotation. Keys never get it, so keys in a
cache stay valid.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.index_checks import require_counted
from embedlayer.core.shapes import Positions, wide_dtype
from embedlayer.positions.position import Position, PreparedPositions
from embedlayer.saving import Described


class QueryScaling(Described, ABC):
    """Abstract base class of the factors on queries by position."""

    @abstractmethod
    def factors(self, positions: Positions, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*rows T"]:
        """Return the factor of a query at each position from 0 on, computed in a dtype."""


@dataclass(frozen=True)
class LogQueryScaling(QueryScaling):
    """Logarithmic growth in steps: `1 + scale * ln(1 + floor((position + offset) / length))`.

    Positions before `length - offset` have the factor 1.

    Args:
        scale: Growth for each unit of the logarithm (`attn_scale` of Llama 4, `llama_4_scaling_beta` of Ministral 3).
        length: Positions in one step (`floor_scale`, or `original_max_position_embeddings`).
        offset: 1 to count the query itself, as Llama 4 does; 0 as Ministral 3 and Mistral 4 do.

    Raises:
        SizeError: `length` is below 1, or `offset` is negative.

    Reference: Nakanishi, Scalable-softmax is superior for attention, 2025; transformers/models/llama4 and
    transformers/models/ministral3 (`attn_temperature_tuning`, `get_llama_4_attn_scale`).
    """

    scale: float
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        _require_counts(self.length, self.offset, type(self).__name__)

    def factors(self, positions: Positions, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*rows T"]:
        """Return `1 + scale * ln(1 + floor((position + offset) / length))`."""
        steps = torch.div(positions.long() + self.offset, self.length, rounding_mode="floor")
        return 1 + self.scale * torch.log1p(steps.to(dtype))


@dataclass(frozen=True)
class PowerQueryScaling(QueryScaling):
    """Growth by a power: `(1 + (position + offset) / length)^exponent`.

    Args:
        exponent: The power.
        length: Positions after which the base is 2.
        offset: 1 to count the query itself, else 0.

    Raises:
        SizeError: `length` is below 1, or `offset` is negative.

    Reference: transformers/models/beam/modeling_beam.py (`compute_attention_scaling`: exponent 0.1, length 2048).
    """

    exponent: float
    length: int
    offset: int = 1

    def __post_init__(self) -> None:
        _require_counts(self.length, self.offset, type(self).__name__)

    def factors(self, positions: Positions, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*rows T"]:
        """Return `(1 + (position + offset) / length)^exponent`."""
        return torch.exp(self.exponent * torch.log1p((positions.long() + self.offset).to(dtype) / self.length))


def _require_counts(length: int, offset: int, name: str) -> None:
    if length < 1 or offset < 0:
        raise SizeError(f"{name}: length {length} must be at least 1, offset {offset} at least 0.")


class QueryFactors(NamedTuple):
    """Factors of all queries of a forward pass: `QueryScaledPosition.prepare` returns them, and `rotate` accepts them.

    Attributes:
        factor: Factor of each query, in float32.
        positions: The positions, from which `rotate` computes the factors of float64 queries again in float64.
        scheme: The scaling; `rotate` of a scheme with another one raises a `ShapeError`.
    """

    factor: Float[Tensor, "*rows 1 T 1"]
    positions: Positions
    scheme: str


class QueryScaledPosition(Position):
    """Scheme of blocks without a rotation whose queries are scaled by position: `rotate(q, k)` is `(q * factor, k)`.

    Llama 4 has it in the blocks without rotary positions.

    Args:
        query_scaling: The factor of each position.

    Example:
        >>> position = QueryScaledPosition(LogQueryScaling(scale=0.1, length=8192, offset=1))
        >>> q, k = position.rotate(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), torch.tensor([8191]))
        >>> round(float(q[0, 0, 0, 0]), 4), float(k[0, 0, 0, 0])
        (1.0693, 1.0)
    """

    def __init__(self, query_scaling: QueryScaling) -> None:
        super().__init__()
        self.query_scaling = query_scaling
        self._factors_of = str(query_scaling)  # Dynamo of torch 2.14 cannot trace the `repr` of a dataclass

    def prepare(self, positions: Positions) -> PreparedPositions:
        """Return the factors of the queries as `QueryFactors`, which `rotate` accepts in place of positions.

        Raises:
            PositionError: On the CPU, a position is below 0.
        """
        self.check_positions(positions)
        return QueryFactors(query_factors(self.query_scaling, positions), positions, self._factors_of)

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: PreparedPositions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Return queries times the factor of their position, and `k` unchanged.

        Raises:
            ShapeError: Positions do not fit the queries, are no integers, or were prepared by another scheme.
            PositionError: On the CPU, a position is below 0.
        """
        counted = positions_before(positions, QueryFactors, self._factors_of)
        self.check_positions(counted, (*q.shape[:-3], q.shape[-2]))
        if isinstance(positions, QueryFactors) and q.dtype != torch.float64:
            return scale_queries(q, positions.factor), k
        return scale_queries(q, query_factors(self.query_scaling, counted, wide_dtype(q.dtype))), k

    def shift_keys(self, cached_keys: Float[Tensor, "*batch G T K"], steps: Positions) -> Float[Tensor, "*batch G T K"]:
        """Return cached keys unchanged: they do not depend on their positions."""
        return cached_keys


def positions_before(prepared: PreparedPositions, kind: type[object], scheme: str) -> Positions:
    """Return the positions from which a scheme prepared angles or factors; those of another scheme are an error.

    `kind` is `QueryFactors` or `RotaryAngles`: the last two fields of both are `positions` and `scheme`.
    """
    if not isinstance(prepared, tuple):
        return prepared
    other = prepared[-1] if isinstance(prepared, kind) else f"another scheme, as {type(prepared).__name__}"
    if other != scheme:
        raise ShapeError(f"Positions were prepared by {other}, and this is {scheme}: call prepare of the same scheme.")
    positions: Positions = prepared[-2]
    return positions


def query_factors(
    scaling: QueryScaling, positions: Positions, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows 1 T 1"]:
    """Return the factors of a scaling in a shape that broadcasts with queries `(*batch, H, T, K)`."""
    require_counted(positions)
    return scaling.factors(positions, dtype).unsqueeze(-2).unsqueeze(-1)


def scale_queries(
    q: Float[Tensor, "*batch H T K"], factor: Float[Tensor, "*rows 1 T 1"]
) -> Float[Tensor, "*batch H T K"]:
    """Return `q * factor`, computed in the wider of both dtypes, in the dtype of `q`."""
    return (q * factor).to(q.dtype)
