"""Per-layer inputs of Gemma 3n and Gemma 4: a second table that gives each token one vector for each block.

`PerLayerInputs` computes the vectors of all blocks once, from token IDs and input embeddings. In each block,
`PerLayerResidual` computes the vector that is added to the residual stream from the hidden state and the vector of
that block.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.core.index_checks import as_ids
from embedlayer.core.initialization import NormalLinear
from embedlayer.core.shapes import IdsLike
from embedlayer.heads.prediction import ACTIVATIONS
from embedlayer.saving import Pretrained
from embedlayer.tables.conversions import as_lookup_table
from embedlayer.tables.lookup import LookupTable


class GemmaRMSNorm(nn.RMSNorm):
    """RMSNorm as Gemma 3n and 4 compute it: `out = x * (mean(x^2) + eps)^-0.5 * weight`, in float32 or wider."""

    eps: float

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalise vectors `(..., D)`; the result has the dtype of `x`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.pow(2).mean(-1, keepdim=True) + self.eps
        return (wide * mean_square.pow(-0.5) * self.weight.to(wide.dtype)).to(x.dtype)


class PerLayerInputs(Pretrained, ComputedBuffers):
    """Compute one vector of width P for each token and block, from the token's ID and its input embedding.

    `out[..., t, :, :] = (norm(W x[t] * D^-0.5) + table(ids[t])) * 2^-0.5`, where W x and the row of the table are
    reshaped to `(layers, P)`, and `norm` is an RMSNorm over P.

    Args:
        table: Table with a row of width `layers * P` for each token, any `LookupTable`. Gemma's is a
            `TokenEmbedding(..., scale=P**0.5, round_scale=True)`. A plain `nn.Embedding` is used without scale.
        width: Width of the input embeddings, D.
        num_layers: Number of blocks. P is the width of the table divided by it.
        eps: Term that the norm adds to the mean square.
        missing_row: Row that replaces the row of an ID that the table lacks. Gemma 3n looks up row 0 for its image and
            audio tokens. `None`: such an ID raises a `TokenIdError` (Gemma 4).
        round_scales: Whether the factors `D^-0.5` and `2^-0.5` are rounded to the dtype of the projection, as Gemma 3n
            does. The rounded numbers are buffers that follow changes of the dtype.
        init_std: Standard deviation of the projection's initialisation.

    Attributes:
        table: The table.
        projection: Linear projection from D to `layers * P`, without bias.
        norm: The RMSNorm over P.

    Example:
        >>> table = TokenEmbedding(100, 3 * 8, scale=8**0.5, round_scale=True)
        >>> inputs = PerLayerInputs(table, 16, 3)
        >>> inputs(torch.tensor([[1, 2]]), torch.randn(1, 2, 16)).shape
        torch.Size([1, 2, 3, 8])

    Reference: transformers/models/gemma4/modeling_gemma4.py (`get_per_layer_inputs`, `project_per_layer_inputs`) and
    models/gemma3n/modeling_gemma3n.py.
    """

    projection_scale: float | Tensor
    """Factor on the projection, `D^-0.5`."""

    sum_scale: float | Tensor
    """Factor on the sum, `2^-0.5`."""

    def __init__(
        self,
        table: LookupTable | nn.Embedding,
        width: int,
        num_layers: int,
        *,
        eps: float = 1e-6,
        missing_row: int | None = None,
        round_scales: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        table = as_lookup_table(table)
        if table.embed_dim % num_layers:
            raise SizeError(f"{num_layers} layers do not divide a table of width {table.embed_dim}.")
        self.width = width
        self.num_layers = num_layers
        self.eps, self.init_std = eps, init_std
        self.missing_row = missing_row
        self.round_scales = round_scales
        self.table = table
        self.projection = NormalLinear(width, table.embed_dim, init_std=init_std)
        self.norm = GemmaRMSNorm(table.embed_dim // num_layers, eps)
        if not round_scales:
            self.projection_scale, self.sum_scale = width**-0.5, 2.0**-0.5
        self.recompute_buffers(self.projection.weight.device)

    @property
    def layer_width(self) -> int:
        """Return the width of the vector of one block, P."""
        return self.table.embed_dim // self.num_layers

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the two factors, rounded to the dtype of the projection; empty without `round_scales`."""
        if not self.round_scales:
            return {}
        dtype = self.projection.weight.dtype
        scales = {"projection_scale": self.width**-0.5, "sum_scale": 2.0**-0.5}
        return {name: torch.tensor(scale, dtype=dtype) for name, scale in scales.items()}

    def look_up(self, ids: IdsLike) -> Float[Tensor, "*batch L P"]:
        """Return the scaled rows of the table, `(..., T)` to `(..., T, layers, P)`.

        Raises:
            TokenIdError: On the CPU, an ID is outside the table, and there is no `missing_row`.
        """
        ids = as_ids(ids, beside=self.table)
        if self.missing_row is not None:
            ids = torch.where((ids >= 0) & (ids < self.table.vocab_size), ids, self.missing_row)
        return self._by_layer(self.table(ids))

    def project(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch L P"]:
        """Return `norm(W x * D^-0.5)`, `(..., T, D)` to `(..., T, layers, P)`.

        For vectors without a token, such as those of an image, Gemma uses this result alone.
        """
        projected: Tensor = self.norm(self._by_layer(self.projection(x) * self.projection_scale))
        return projected

    def forward(self, ids: IdsLike, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch L P"]:
        """Return the per-layer inputs, `(..., T, layers, P)`; `out[..., i, :]` is the input of block i.

        Args:
            ids: Token IDs, `(..., T)`.
            x: Input embeddings of these tokens, `(..., T, D)`, as the first block receives them.

        Raises:
            TokenIdError: As in `look_up`.
        """
        return (self.project(x) + self.look_up(ids)) * self.sum_scale

    def _by_layer(self, rows: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch L P"]:
        return rows.reshape(*rows.shape[:-1], self.num_layers, self.layer_width)


class PerLayerResidual(Pretrained):
    """Compute what a block adds to the residual stream from its per-layer input.

    `out = norm(projection(activation(gate(hidden)) * per_layer_input))`. The caller adds it.

    Gemma 4 adds it to the hidden state at the end of a block, after the MLP: `hidden = hidden + out`, before the factor
    `layer_scalar`. In Gemma 3n, `hidden` is the corrected active prediction of AltUp, and `out` is added to the other
    predictions.

    Args:
        width: Width of the residual stream, D.
        layer_width: Width of the per-layer input, P.
        activation: A key of `ACTIVATIONS`.
        eps: Term that the norm adds to the mean square.
        init_std: Standard deviation of the initialisation of both projections.

    Raises:
        CheckpointError: The activation is unknown.

    Example:
        >>> block = PerLayerResidual(16, 8)
        >>> hidden, per_layer_inputs = torch.randn(1, 2, 16), torch.randn(1, 2, 3, 8)
        >>> (hidden + block(hidden, per_layer_inputs[..., 0, :])).shape
        torch.Size([1, 2, 16])

    Reference: transformers/models/gemma4/modeling_gemma4.py (`Gemma4TextDecoderLayer`).
    """

    def __init__(
        self,
        width: int,
        layer_width: int,
        *,
        activation: str = "gelu_pytorch_tanh",
        eps: float = 1e-6,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise CheckpointError(f"The activation {activation!r} is none of {', '.join(ACTIVATIONS)}.")
        self.width, self.layer_width, self.activation = width, layer_width, activation
        self.eps, self.init_std = eps, init_std
        self.gate = NormalLinear(width, layer_width, init_std=init_std)
        self.projection = NormalLinear(layer_width, width, init_std=init_std)
        self.norm = GemmaRMSNorm(width, eps)

    def forward(
        self, hidden: Float[Tensor, "*batch D"], per_layer_input: Float[Tensor, "*batch P"]
    ) -> Float[Tensor, "*batch D"]:
        """Return the vector to add to the residual stream, `(..., T, D)`.

        Args:
            hidden: Hidden states of the block, `(..., T, D)`.
            per_layer_input: The block's part of the result of `PerLayerInputs`, `(..., T, P)`.
        """
        gated = ACTIVATIONS[self.activation](self.gate(hidden)) * per_layer_input
        added: Tensor = self.norm(self.projection(gated))
        return added

    def extra_repr(self) -> str:
        """Return the activation for `print`, such as `activation=gelu_pytorch_tanh`."""
        return f"activation={self.activation}"
