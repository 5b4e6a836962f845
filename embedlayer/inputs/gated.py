"""Vectors of a table that enter the residual stream before a block, gated by it: the layers of Engram and Qwen4-Exp."""

from jaxtyping import Float
from torch import Tensor, nn

from embedlayer.inputs.context_gate import ContextGate, ShortConvolution
from embedlayer.inputs.injection import (
    EmbeddingInjection,
    InjectionContext,
    VectorSource,
    as_source,
    check_blocks,
    vectors_of,
)
from embedlayer.inputs.ngram import NgramEmbedding


class GatedEmbedding(EmbeddingInjection):
    """Vectors added to the residual stream before a block: `x + gate(x, table(ids))`; see `ContextGate`.

    With an `NgramEmbedding` this is a layer of Engram, or a per-layer embedding (PLE) of Qwen4-Exp, in a decoder with
    one residual stream. These models have a table in several blocks, each with a hash of its own.

    Args:
        table: Hashed table of vectors by n-gram, or table of vectors by token.
        width: Width of the residual stream, D.
        block: Block before which the vectors are added, from 0.
        kernel_size: Length of the causal convolution over the gated vectors, in tokens; 0 for none.
        dilation: Distance between two tokens that the convolution reads; `None` for the longest n-gram of the table,
            and 1 for other tables.
        norm_eps: Term that the norms add to the mean square.
        init_std: Standard deviation of the gate's projections; `None` for 1 / sqrt(E), where E is the width of the
            table's vectors.

    Example:
        >>> ngrams = NgramEmbedding.dense(NgramHash.for_rows(2000, 100, heads=4), 32)
        >>> memory = GatedEmbedding(ngrams, 32, block=1)
        >>> model = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=2, injections=[memory])
        >>> model(torch.tensor([1, 2, 3])).shape
        torch.Size([3, 100])

    Reference: Cheng et al., Conditional memory via scalable lookup, arXiv 2601.07372 (2026).
    """

    def __init__(
        self,
        table: VectorSource | nn.Embedding,
        width: int,
        *,
        block: int,
        kernel_size: int = 4,
        dilation: int | None = None,
        norm_eps: float = 1e-6,
        init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.table = as_source(table)
        self.width = width
        (self.block,) = check_blocks([block])
        if dilation is None:
            dilation = self.table.hash.max_order if isinstance(self.table, NgramEmbedding) else 1
        self.kernel_size, self.dilation = kernel_size, dilation
        self.norm_eps, self.init_std = norm_eps, init_std
        narrow = self.table.embed_dim
        self.gate = ContextGate(
            width,
            narrow,
            conv=ShortConvolution(width, kernel_size=kernel_size, dilation=dilation) if kernel_size else None,
            norm_eps=norm_eps,
            init_std=narrow**-0.5 if init_std is None else init_std,
        )

    def look_up(self, x: Float[Tensor, "B T D"], context: InjectionContext) -> Float[Tensor, "B T E"]:
        """Return the vectors of the table, `(B, T, E)`.

        Raises:
            TokenIdError: On the CPU, a token ID is outside the table.
        """
        return vectors_of(self.table, context)

    def add_to_stream(
        self, x: Float[Tensor, "B T D"], vectors: Tensor, depth: int, context: InjectionContext
    ) -> Float[Tensor, "B T D"]:
        """Return the residual stream plus the gated vectors before block `block`; unchanged elsewhere."""
        if depth != self.block:
            return x
        added: Tensor = self.gate(x, vectors.to(x.dtype), context.documents, context.state)
        return x + added

    def require_sizes(self, *, width: int, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Check the sizes of a decoder against those of this layer, as `EmbeddingInjection.require_sizes` describes."""
        super().require_sizes(width=width, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_blocks([self.block], num_layers)
