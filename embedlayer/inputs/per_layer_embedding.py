"""Per-layer embeddings in a decoder: a vector for each token and block, added to the residual stream after it."""

from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.core.errors import SizeError
from embedlayer.inputs.injection import EmbeddingInjection, InjectionContext
from embedlayer.inputs.per_layer import PerLayerInputs, PerLayerResidual
from embedlayer.io.files import JsonObject
from embedlayer.saving import describe
from embedlayer.tables.lookup import LookupTable


class PerLayerEmbedding(EmbeddingInjection):
    """Per-layer embeddings of Gemma 3n and 4: after block i, `x + residual_i(x, inputs(ids, x_0)[..., i, :])`.

    `inputs` computes one vector of width P for each token and block, from the token's row and the input embedding x_0;
    see `PerLayerInputs`. After each block `PerLayerResidual` computes the vector to add from it.

    Args:
        table: The table with a row of width `num_layers * P` for each token; or a `PerLayerInputs`, which has one.
        width: Width of the decoder, D; that of a `PerLayerInputs` is its own.
        num_layers: Number of blocks of the decoder; that of a `PerLayerInputs` is its own.
        init_std: Standard deviation of the projections in the blocks.

    Attributes:
        inputs: The table with its projection.

    Example:
        >>> injection = PerLayerEmbedding(TokenEmbedding(100, 2 * 8, scale=8**0.5), 32, num_layers=2)
        >>> model = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=2, injections=[injection])
        >>> model(torch.tensor([1, 2, 3])).shape
        torch.Size([3, 100])

    Reference: transformers/models/gemma4/modeling_gemma4.py (`Gemma4TextDecoderLayer`).
    """

    def __init__(
        self,
        table: LookupTable | nn.Embedding | PerLayerInputs,
        width: int | None = None,
        *,
        num_layers: int | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if isinstance(table, PerLayerInputs):
            inputs = table
            if width not in (None, inputs.width) or num_layers not in (None, inputs.num_layers):
                raise SizeError(f"PerLayerInputs have width {inputs.width}, {inputs.num_layers} blocks: pass neither.")
        elif width is None or num_layers is None:
            raise SizeError("PerLayerEmbedding(table, width, num_layers=...) needs both sizes of the decoder.")
        else:
            inputs = PerLayerInputs(table, width, num_layers)
        self.inputs, self.init_std, self.width = inputs, init_std, inputs.width
        self.residuals = nn.ModuleList(
            PerLayerResidual(inputs.width, inputs.layer_width, eps=inputs.norm.eps, init_std=init_std)
            for _ in range(inputs.num_layers)
        )

    @property
    def config(self) -> JsonObject:
        """Return the constructor's arguments as JSON: the table with its projection, and `init_std`."""
        return {"table": describe(self.inputs), "init_std": self.init_std}

    @classmethod
    def from_config(cls: type["PerLayerEmbedding"], config: JsonObject) -> "PerLayerEmbedding":
        """Build the layer from its `config`; earlier versions wrote the table as `inputs`."""
        return super().from_config({"table" if key == "inputs" else key: value for key, value in config.items()})

    def look_up(self, x: Float[Tensor, "B T D"], context: InjectionContext) -> Float[Tensor, "B T L P"]:
        """Return the per-layer inputs of all blocks, `(B, T, L, P)`; errors are those of `PerLayerInputs.forward`."""
        vectors: Tensor = self.inputs(context.ids, x)
        return vectors

    def add_to_stream(
        self, x: Float[Tensor, "B T D"], vectors: Tensor, depth: int, context: InjectionContext
    ) -> Float[Tensor, "B T D"]:
        """Return the residual stream plus the vector of the block just computed; unchanged before the first block."""
        if depth == 0:
            return x
        added: Tensor = self.residuals[depth - 1](x, vectors[..., depth - 1, :])
        return x + added

    def require_sizes(self, *, width: int, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Check the sizes of a decoder against those of the table, as `EmbeddingInjection.require_sizes` describes."""
        super().require_sizes(width=width, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if self.inputs.num_layers != num_layers:
            raise SizeError(f"PerLayerInputs are for {self.inputs.num_layers} blocks, the decoder has {num_layers}.")
