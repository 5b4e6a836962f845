"""Parts of input embeddings besides table, positions and LayerNorm: type tables, trigrams, a decoder's own parts."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.documents import AttentionMask
from embedlayer.core.errors import SizeError
from embedlayer.core.shapes import Ids
from embedlayer.families.field_types import Step
from embedlayer.heads.prediction import build_part, part_config
from embedlayer.io.files import JsonObject
from embedlayer.saving import Pretrained, build, describe
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.table import TokenTable


class TypeTables(Pretrained):
    """Several tables of token types, whose rows are summed: `out = tables[0](ids) + sum_i tables[i](0)`."""

    def __init__(self, tables: Sequence[TokenEmbedding]) -> None:
        super().__init__()
        if len({table.embed_dim for table in tables}) != 1:
            raise SizeError(f"Type tables need one width, not {[table.embed_dim for table in tables]}.")
        self.tables: Any = nn.ModuleList(tables)

    def forward(self, ids: Ids) -> Float[Tensor, "*batch T D"]:
        """Return the sum of one row of each table for each token: that of `ids` of the first, row 0 of the others."""
        first, *others = self.tables
        rows: Tensor = first(ids)
        for table in others:
            rows = rows + table(torch.zeros_like(ids))
        return rows


class ElementwiseAffine(Pretrained):
    """Multiply and add without normalising: `out = x * weight + bias`, MobileBERT's `NoNorm`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Return `x * weight + bias`."""
        return x * self.weight + self.bias


class OffsetRMSNorm(Pretrained):
    """RMSNorm whose weight counts from one: `out = x / sqrt(mean(x^2) + eps) * (1 + weight)`, in float32 or wider."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Return the normalised vectors in the dtype of `x`."""
        wide = x.double() if x.dtype == torch.float64 else x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalised * (1 + self.weight.to(wide.dtype))).to(x.dtype)


class ShiftScale(Pretrained):
    """Add one vector and multiply with another: `out = (x + shift) * scale` (Zaya), or `x + shift` (HRM-Text)."""

    scale: nn.Parameter | None

    def __init__(self, width: int, *, scales: bool = True) -> None:
        super().__init__()
        self.width, self.scales = width, scales
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_parameter("scale", nn.Parameter(torch.ones(width)) if scales else None)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        shifted = x + self.shift
        return shifted if self.scale is None else shifted * self.scale


class TrigramProjection(nn.Linear, Pretrained):
    """Projection of each vector together with its neighbours: `out[t] = weight @ [x[t + 1], x[t], x[t - 1]] + bias`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias=bias)

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {"in_features": self.in_features, "out_features": self.out_features, "bias": self.bias is not None}

    def forward(self, x: Float[Tensor, "*batch T D"]) -> Float[Tensor, "*batch T E"]:
        following = F.pad(x[..., 1:, :], (0, 0, 0, 1))
        before = F.pad(x[..., :-1, :], (0, 0, 1, 0))
        return F.linear(torch.cat([following, x, before], dim=-1), self.weight, self.bias)


class FeatureProjection(nn.Linear, Pretrained):
    """Projection of each vector with constant features appended: `out = weight @ [x, rows[0], ...] + bias`."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, features: Sequence[Sequence[int]] = ()
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias=bias)
        self.features: Any = nn.ModuleList(nn.Embedding(rows, width) for rows, width in features)

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "features": [list(each.weight.shape) for each in self.features],
        }

    def forward(self, x: Float[Tensor, "*batch T D"]) -> Float[Tensor, "*batch T E"]:
        rows = [each.weight[0].expand(*x.shape[:-1], -1) for each in self.features]
        return F.linear(torch.cat([x, *rows], dim=-1), self.weight, self.bias)


class TokenDropout(Pretrained):
    """Set the vectors of the mask token to zero, and rescale the others by the share of mask tokens (ESM)."""

    def __init__(self, mask_token_id: int, expected: float = 0.15 * 0.8) -> None:
        super().__init__()
        self.mask_token_id = mask_token_id
        self.expected = expected

    def forward(
        self, x: Float[Tensor, "*batch T D"], ids: Ids, attention_mask: AttentionMask | None
    ) -> Float[Tensor, "*batch T D"]:
        """Return the rescaled vectors; `attention_mask` is 0 for padding, and `None` keeps all tokens."""
        is_mask = ids == self.mask_token_id
        length = torch.full(ids.shape[:-1], ids.shape[-1], device=ids.device)
        length = length if attention_mask is None else (attention_mask != 0).sum(-1)
        share = is_mask.sum(-1).to(x.dtype) / length
        x = x.masked_fill(is_mask.unsqueeze(-1), 0.0)
        return (x * (1 - self.expected) / (1 - share)[..., None, None]).to(x.dtype)


class PredictionStreams(Pretrained):
    """Append the first vectors of the streams that predict later tokens (ProphetNet)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count, self.width = count, width
        self.weight = nn.Parameter(torch.zeros(count, width))

    def forward(
        self, x: Float[Tensor, "*batch T D"], following: Float[Tensor, "*rows T D"]
    ) -> Float[Tensor, "*batch streams D"]:
        """Return the vectors of all streams, `(..., T, D)` to `(..., (1 + n) * T, D)`."""
        streams = [(row + following).expand_as(x) for row in self.weight.roll(1, 0)]
        return torch.cat([x, *streams], dim=-2)


class DecoderInput(Pretrained):
    """Parts of the decoder's input embedding that are not those of the encoder; the others are shared."""

    def __init__(
        self,
        recipe: Sequence[Step] | None = None,
        *,
        table: TokenTable | None = None,
        norm: nn.Module | None = None,
        is_scaled: bool = True,
    ) -> None:
        super().__init__()
        self.is_scaled = is_scaled
        self.recipe = None if recipe is None else tuple(recipe)
        self.table = table
        self.norm = norm

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON."""
        return {
            "recipe": None if self.recipe is None else list(self.recipe),
            "table": None if self.table is None else describe(self.table),
            "norm": part_config(self.norm),
            "is_scaled": self.is_scaled,
        }

    @classmethod
    def from_config(cls: type["DecoderInput"], config: JsonObject) -> "DecoderInput":
        """Build the parts that `config` describes, with initial weights."""
        table = None if config["table"] is None else build(config["table"])
        norm = build_part(nn.LayerNorm, config["norm"])
        return cls.construct(recipe=config["recipe"], table=table, norm=norm, is_scaled=config["is_scaled"])
