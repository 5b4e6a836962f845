"""Value embeddings: rows of a table that are added, gated, to the values of attention."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.errors import SizeError
from embedlayer.inputs.injection import (
    EmbeddingInjection,
    InjectionContext,
    VectorSource,
    as_source,
    check_blocks,
    vectors_of,
)
from embedlayer.tables.lookup import check_positive


class ValueEmbedding(EmbeddingInjection):
    """Value embedding: `v[g] + gate_scale * sigmoid(gate(x[..., :gate_channels]))[g] * table(ids)[g]` for each head g.

    x is the normalised input of the attention, `(B, T, D)`, from which the values v are computed. `gate` is a matrix
    without bias, one for each block. It maps the first channels of x to a number for each of the G heads, and starts at
    zero, so every gate starts at `gate_scale / 2`.

    Args:
        table: Table of width `G * K`: as wide as the values of all G key/value heads of width K.
        num_kv_heads: Number of key/value heads, G.
        blocks: Blocks whose attention reads the table, from 0. They share its rows, and each has a gate of its own.
            `alternate_blocks` returns those of nanochat, which has a table for each.
        gate_channels: Channels of the input that the gate reads, at most D.
        gate_scale: Largest value of a gate.

    Example:
        >>> values = ValueEmbedding(TokenEmbedding(100, 16), num_kv_heads=2, blocks=[1], gate_channels=8)
        >>> model = DecoderLM(
        ...     TokenEmbedding(100, 32), "rotary", num_layers=2, num_kv_heads=2, injections=[values]
        ... )
        >>> model(torch.tensor([1, 2, 3])).shape
        torch.Size([3, 100])

    Reference: github.com/karpathy/nanochat, nanochat/gpt.py (`value_embeds`, `ve_gate`). Zhou et al., Value residual
    learning, 2024, has the values of the first block in place of a table.
    """

    def __init__(
        self,
        table: VectorSource | nn.Embedding,
        num_kv_heads: int,
        *,
        blocks: Sequence[int],
        gate_channels: int = 32,
        gate_scale: float = 2.0,
    ) -> None:
        super().__init__()
        self.table = as_source(table)
        if self.table.embed_dim % num_kv_heads:
            raise SizeError(f"A table of width {self.table.embed_dim} cannot be divided into {num_kv_heads} heads.")
        self.num_kv_heads = num_kv_heads
        self.blocks = check_blocks(blocks)
        self.gate_channels = check_positive("gate_channels", gate_channels)
        self.gate_scale = gate_scale
        self.gates = nn.ModuleDict(
            {str(block): ZeroLinear(gate_channels, num_kv_heads, bias=False) for block in self.blocks}
        )

    def look_up(self, x: Float[Tensor, "B T D"], context: InjectionContext) -> Float[Tensor, "B G T K"]:
        """Return the rows of the tokens by head, `(B, G, T, K)`.

        Raises:
            TokenIdError: On the CPU, a token ID is outside the table.
        """
        heads: Tensor = vectors_of(self.table, context).unflatten(-1, (self.num_kv_heads, -1))
        return heads.transpose(-2, -3)

    def add_to_values(
        self, values: Float[Tensor, "B G T K"], x: Float[Tensor, "B T D"], vectors: Tensor, block: int
    ) -> Float[Tensor, "B G T K"]:
        """Return the values plus the gated rows; `values` unchanged in a block that does not read the table."""
        if block not in self.blocks:
            return values
        gate: Tensor = self.gates[str(block)](x[..., : self.gate_channels])
        gates = self.gate_scale * torch.sigmoid(gate)
        return values + gates.transpose(-1, -2).unsqueeze(-1) * vectors.to(values.dtype)

    def require_sizes(self, *, width: int, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Check the sizes of a decoder against those of this table, as `EmbeddingInjection.require_sizes` describes."""
        check_blocks(self.blocks, num_layers)
        if (num_kv_heads, num_kv_heads * head_dim) != (self.num_kv_heads, self.table.embed_dim):
            own = f"{self.num_kv_heads} of width {self.table.embed_dim // self.num_kv_heads}"
            raise SizeError(f"The values have {num_kv_heads} heads of width {head_dim}, and the value embedding {own}.")
        if self.gate_channels > width:
            raise SizeError(f"gate_channels {self.gate_channels} exceeds the width {width} of the decoder.")


class ZeroLinear(nn.Linear):
    """An `nn.Linear` whose weight and bias start at zero."""

    def reset_parameters(self) -> None:
        """Set the weight and the bias, if any, to zero."""
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def alternate_blocks(num_layers: int) -> tuple[int, ...]:
    """Return every other block, so that the last one is included: the blocks with value embeddings in nanochat.

    Example:
        >>> alternate_blocks(4), alternate_blocks(5)
        ((1, 3), (0, 2, 4))
    """
    return tuple(range((num_layers - 1) % 2, num_layers, 2))
