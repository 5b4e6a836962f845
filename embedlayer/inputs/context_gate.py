"""Context-aware gating (Engram): the hidden state decides how much of a looked-up vector enters the residual stream."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from embedlayer.core.documents import AttentionMask
from embedlayer.core.errors import ShapeError, SizeError
from embedlayer.core.initialization import NormalLinear
from embedlayer.inputs.history import DecodingState, documents_of, prepend_history
from embedlayer.saving import Pretrained

SMALLEST_SCORE = 1e-6  # smallest magnitude of a gate's score before the square root, whose gradient at 0 is infinite


class ShortConvolution(Pretrained):
    """Short causal depthwise convolution of normalised vectors.

    Channel by channel, `out[t] = silu(sum_j weight[:, j] * RMSNorm(x[t - (kernel_size - 1 - j) * dilation]))`.
    Positions of other documents, of padding and before the start count as zero. The weight starts at zero, as in
    Engram, so a new layer returns zeros.

    Args:
        width: Width of the vectors, D.
        kernel_size: Number of positions that a result depends on.
        dilation: Distance between these positions; Engram uses the length of the longest n-gram.
        norm_eps: Number added to the mean square in the norm; `None` for the smallest relative step of the dtype.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Reference: see `ContextGate`.
    """

    def __init__(
        self,
        width: int,
        kernel_size: int = 4,
        dilation: int = 3,
        *,
        norm_eps: float | None = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kernel_size < 2 or dilation < 1:
            raise SizeError(f"kernel_size must be at least 2 and dilation 1, not {kernel_size} and {dilation}.")
        self.width, self.norm_eps = width, norm_eps
        self.kernel_size, self.dilation = kernel_size, dilation
        self.norm = nn.RMSNorm(width, eps=norm_eps, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.zeros(width, kernel_size, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Set the weight to zero."""
        nn.init.zeros_(self.weight)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        documents: Int64[Tensor, "B T"] | None = None,
        state: DecodingState | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Return the convolution of `x`, which is zero at padding.

        Args:
            x: One vector for each token.
            documents: 0 for padding, else the number of the token's document; `None`: see `NgramHash.forward`.
            state: Dictionary for cached decoding, in which the layer keeps the last `(kernel_size - 1) * dilation`
                normalised vectors of each text.
        """
        start, length = (self.kernel_size - 1) * self.dilation, x.shape[1]
        inputs, documents = prepend_history("conv_inputs", self.norm(x), documents, state, length=start, fill=0)
        total = torch.zeros_like(x)
        for tap in range(self.kernel_size):
            window = slice(tap * self.dilation, tap * self.dilation + length)
            earlier = inputs[:, window]
            if documents is not None:
                here = documents[:, start:]
                same = torch.eq(documents[:, window], here) & (here != 0)
                earlier = earlier.masked_fill(~same[..., None], 0.0)
            total = total + earlier * self.weight[:, tap]
        return F.silu(total)

    def extra_repr(self) -> str:
        """Return sizes for `print`: `"24, kernel_size=4, dilation=3"`."""
        return f"{self.weight.shape[0]}, kernel_size={self.kernel_size}, dilation={self.dilation}"


class ContextGate(Pretrained):
    """Addend to the residual stream from looked-up vectors, gated by the hidden state.

    The formula is::

        score  = <RMSNorm(key_proj(vectors)), RMSNorm(x)> / sqrt(D)
        gate   = sigmoid(sign(score) * sqrt(max(|score|, 1e-6)))
        gated  = gate * value_proj(vectors)
        addend = gated + conv(gated)          (or gated alone, without a convolution)

    At padding the addend is zero.

    Args:
        embed_dim: Width of the residual stream, D.
        vector_dim: Width of the looked-up vectors, E.
        conv: Convolution of the gated values, or `None`.
        bias: Whether the two projections have a bias, as in Engram's demo.
        norm_eps: Number added to the mean square in both norms; `None` for the smallest relative step of the dtype.
        init_std: Standard deviation of the projections at the start.
        device: Device of the parameters.
        dtype: Data type of the parameters.

    Example:
        >>> gate = ContextGate(16, 64, conv=ShortConvolution(16, dilation=3))
        >>> gate(torch.randn(2, 5, 16), torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 16])

    Reference: Cheng et al., Conditional memory via scalable lookup, arXiv 2601.07372 (2026), "context-aware gating";
    github.com/deepseek-ai/Engram, engram_demo_v1.py (`Engram` with one stream); transformers/models/qwen4_exp
    (`Qwen4ExpTextPLELayer`, one stream; its norms store weight - 1).
    """

    def __init__(
        self,
        embed_dim: int,
        vector_dim: int,
        *,
        conv: ShortConvolution | None = None,
        bias: bool = False,
        norm_eps: float | None = 1e-6,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim, self.vector_dim = embed_dim, vector_dim
        self.bias, self.norm_eps, self.init_std = bias, norm_eps, init_std
        self.key_proj, self.value_proj = (
            NormalLinear(vector_dim, embed_dim, bias=bias, init_std=init_std, device=device, dtype=dtype)
            for _ in range(2)
        )
        self.key_norm, self.query_norm = (
            nn.RMSNorm(embed_dim, eps=norm_eps, device=device, dtype=dtype) for _ in range(2)
        )
        self.conv = conv

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        vectors: Float[Tensor, "*batch T E"],
        documents: AttentionMask | None = None,
        state: DecodingState | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """Return the addend to `x`, `(T, D)` or `(B, T, D)`.

        Args:
            x: Hidden states of the residual stream.
            vectors: Looked-up vectors of the same tokens.
            documents: 0 for padding, else the number of the token's document; see `NgramHash.forward`.
            state: Dictionary for cached decoding; see `ShortConvolution.forward`. It may be that of the `NgramHash`.
        """
        if x.dim() not in (2, 3):
            raise ShapeError(f"A ContextGate needs hidden states (T, D) or (B, T, D), not {tuple(x.shape)}.")
        documents = documents_of(documents, x.shape[:-1])
        is_batch = x.dim() == 3
        x, vectors = (x, vectors) if is_batch else (x[None], vectors[None])
        keys, queries = self.key_norm(self.key_proj(vectors)), self.query_norm(x)
        score = (keys * queries).sum(-1, keepdim=True) / math.sqrt(self.embed_dim)
        gate = torch.sigmoid(score.abs().clamp_min(SMALLEST_SCORE).sqrt() * score.sign())
        gated: Tensor = gate * self.value_proj(vectors)
        if documents is not None:
            gated = gated.masked_fill((documents == 0)[..., None], 0.0)
        gated = gated if self.conv is None else gated + self.conv(gated, documents, state)
        return gated if is_batch else gated[0]
