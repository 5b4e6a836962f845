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

from embedlayer.errors import ShapeError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.positions.position import Position, PreparedPositions
from embedlayer.pretrained import Described
from embedlayer.shapes import Positions


class QueryScaling(Described, ABC):
    """Abstract base class of the factors on queries by position."""

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON, by name."""
        return dict(vars(self))

    @abstractmethod
    def factors(self, positions: Positions) -> Float[Tensor, "*rows T"]:
        """Return the factor of a query at each position, in float32."""


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
        _require(self.length, self.offset, type(self).__name__)

    def factors(self, positions: Positions) -> Float[Tensor, "*rows T"]:
        """Return `1 + scale * ln(1 + floor((position + offset) / length))`, in float32."""
        steps = torch.div(positions + self.offset, self.length, rounding_mode="floor")
        return 1 + self.scale * torch.log1p(steps.float())


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
        _require(self.length, self.offset, type(self).__name__)

    def factors(self, positions: Positions) -> Float[Tensor, "*rows T"]:
        """Return `(1 + (position + offset) / length)^exponent`, in float32."""
        return torch.exp(self.exponent * torch.log1p((positions + self.offset).float() / self.length))


class QueryFactors(NamedTuple):
    """What `QueryScaledPosition.prepare` returns: the factor of each query, `(*rows, 1, T, 1)`, in float32."""

    factor: Float[Tensor, "*rows 1 T 1"]


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

    def prepare(self, positions: Positions) -> PreparedPositions:
        """Return the factors of the queries as `QueryFactors`, which `rotate` accepts in place of positions."""
        return QueryFactors(query_factors(self.query_scaling, positions))

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: PreparedPositions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Return queries times the factor of their position, and `k` unchanged.

        Raises:
            ShapeError: `positions` were prepared by another scheme.
        """
        factors = self.prepare(positions) if isinstance(positions, Tensor) else positions
        if not isinstance(factors, QueryFactors):
            raise ShapeError(f"A {type(factors).__name__} holds no query factors: call prepare of this scheme.")
        return scale_queries(q, factors.factor), k

    def extra_repr(self) -> str:
        """Return the scaling, which `print` shows."""
        return str(self.query_scaling)


def query_factors(scaling: QueryScaling, positions: Positions) -> Float[Tensor, "*rows 1 T 1"]:
    """Return the factors of a scaling in a shape that broadcasts with queries `(*batch, H, T, K)`."""
    return scaling.factors(positions).unsqueeze(-2).unsqueeze(-1)


def scale_queries(
    q: Float[Tensor, "*batch H T K"], factor: Float[Tensor, "*rows 1 T 1"]
) -> Float[Tensor, "*batch H T K"]:
    """Return `q * factor`, computed in the wider of both dtypes, in the dtype of `q`."""
    return (q * factor).to(q.dtype)


def _require(length: int, offset: int, name: str) -> None:
    """Check the length and the offset of a scaling.

    Args:
        length: Positions in one step.
        offset: Number added to each position.
        name: Name of the class, for the error.

    Raises:
        SizeError: `length` is below 1, or `offset` is negative.
    """
    if length < 1 or offset < 0:
        raise SizeError(f"{name}: length must be at least 1 and offset at least 0, not {length} and {offset}.")
