"""The small decoder that the layer is trained inside: pre-norm blocks for any table, any position and any head."""

import math
from collections.abc import Callable
from typing import Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from embedlayer.errors import CheckpointError, SizeError
from embedlayer.files import JsonObject
from embedlayer.layers.input import embed
from embedlayer.layers.output import OutputHead
from embedlayer.losses.linear_cross_entropy import LossOptions
from embedlayer.models.cache import BlockCache, KeyValueCache
from embedlayer.normal import draw_
from embedlayer.positions.position import AttentionMask, Position, positions_of
from embedlayer.pretrained import Pretrained, build, check_saved, describe
from embedlayer.shapes import Ids, Positions
from embedlayer.tables.table import TokenTable


class DecoderLM(Pretrained):
    """A decoder-only language model: `head(norm(blocks(dropout(position.add(table(ids))))))`.

    Blocks are of LLaMA's kind: RMSNorm before attention and before a SwiGLU, no biases, key/value heads that may be
    fewer than query heads.

    Args:
        table: What each token is.
        position: Where each token is.
        head: The way out; tied to `table` if `None`.
        num_layers: Blocks.
        num_heads: Query heads, H.
        num_kv_heads: Key/value heads, G, a divisor of H; H if `None`.
        head_dim: Width of a head, K; the width divided by H if `None`.
        mlp_dim: Width inside the SwiGLU; 8/3 of the width, rounded up to 32, if `None`.
        dropout: Share of the numbers set to 0 in training, after the embedding and after each sublayer.
        norm_eps: Added to the mean square in RMSNorm.

    Raises:
        SizeError: The width does not divide into the heads, or the head is of another size than the table.

    Example:
        >>> model = DecoderLM(TokenEmbedding(100, 32, scale="sqrt_dim"), RotaryEmbedding(8), num_layers=2, num_heads=4)
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 100])

    Reference: Touvron et al., LLaMA, 2023, section 2.2.
    """

    def __init__(
        self,
        table: TokenTable,
        position: Position,
        head: OutputHead | None = None,
        *,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int | None = None,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        width = table.embed_dim
        head = OutputHead(table) if head is None else head
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        mlp_dim = math.ceil(8 * width / 3 / 32) * 32 if mlp_dim is None else mlp_dim
        if num_heads < 1 or (head_dim is None and width % num_heads):
            raise SizeError(f"embed_dim {width} is not divisible by {num_heads} heads.")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise SizeError(f"{num_heads} query heads cannot share {num_kv_heads} key/value heads evenly.")
        head_dim = width // num_heads if head_dim is None else head_dim
        if head_dim < 1:
            raise SizeError(f"head_dim must be at least 1, not {head_dim}.")
        if (head.in_features, head.out_features) != (width, table.vocab_size):
            raise SizeError(
                f"The head maps width {head.in_features} to {head.out_features} tokens, "
                f"the table has {table.vocab_size} tokens of width {width}."
            )
        self.table = table
        self.position = position
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                width, num_heads, num_kv_heads, head_dim, mlp_dim, dropout=dropout, norm_eps=norm_eps, depth=num_layers
            )
            for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.head = head
        self.sizes = {
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "mlp_dim": mlp_dim,
            "dropout": dropout,
            "norm_eps": norm_eps,
        }

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "table": describe(self.table),
            "position": describe(self.position),
            "head": {"tied": self.head.tied, **self.head.config},
            **self.sizes,
        }

    @classmethod
    def from_config(
        cls: type["DecoderLM"],
        config: JsonObject,
        *,
        make_table: Callable[[JsonObject], TokenTable] = build,
        make_head: Callable[..., OutputHead] = OutputHead,
    ) -> "DecoderLM":
        """Build the model that `config` describes; a tied head is given the table that was just built.

        Args:
            config: What `config` gives.
            make_table: Makes a table of its description.
            make_head: Makes a head of the table that it is tied to, or `None`, and its options.
        """
        options = dict(config)
        table, position = make_table(options.pop("table")), build(options.pop("position"))
        head = dict(options.pop("head"))
        if not isinstance(table, TokenTable) or not isinstance(position, Position):
            raise CheckpointError(f"A decoder needs a table and a position, not {type(table)} and {type(position)}.")
        tied_to = table if head.pop("tied") else None
        check_saved(OutputHead, head)
        return cls.construct(table=table, position=position, head=make_head(tied_to, **head), **options)

    def forward(
        self,
        ids: Ids,
        *,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "*batch T V"]:
        """Logits of the next token at every place, `(T,)` or `(B, T)` to `(..., T, V)`; the arguments of `hidden`."""
        logits: Tensor = self.head(self.hidden(ids, positions=positions, attention_mask=attention_mask, cache=cache))
        return logits

    def loss(
        self,
        ids: Ids,
        targets: Int[Tensor, "*batch T"],
        *,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
        **options: Unpack[LossOptions],
    ) -> Float[Tensor, "*result"]:
        """Cross entropy of `targets`, the tokens that follow `ids`, in nats per token."""
        return self.head.loss(self.hidden(ids, positions=positions, attention_mask=attention_mask), targets, **options)

    def hidden(
        self,
        ids: Ids,
        *,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """What the head reads: the last block's output, normalised.

        Args:
            ids: Token IDs `(T,)` or `(B, T)`.
            positions: Where each token stands; by default from 0, or as the mask says, or on from the cached text.
            attention_mask: 0 for padding; 1, or 1, 2, 3, ... for packed documents, which do not see each other.
            cache: What was read before; `ids`, `positions` and `attention_mask` are then those of the new tokens.
        """
        if ids.dim() == 1:
            mask = None if attention_mask is None else attention_mask.unsqueeze(0)
            return self.hidden(ids.unsqueeze(0), positions=positions, attention_mask=mask, cache=cache).squeeze(0)
        if cache is not None:
            positions, attention_mask = cache.places_of(ids, positions, attention_mask)
        elif positions is None:
            positions = positions_of(ids, attention_mask)
        dropout = self.dropout.p if self.training else 0.0
        x = embed(ids, self.table, self.position, positions, dropout=dropout)
        seen = positions
        if cache is not None:  # only now: a bad ID or position above leaves the cache as it was
            cache.follow(self.position, positions)
            seen, attention_mask = cache.remember(positions, attention_mask)
        bias = self.position.bias(positions, seen)
        scores = attention_scores_bias(bias, attention_mask, ids.shape[-1], seen.shape[-1], device=ids.device)
        for number, block in enumerate(self.blocks):
            x = block(x, self.position, positions, scores, None if cache is None else cache.block(number))
        normalised: Tensor = self.norm(x)
        return normalised

    def check(self) -> None:
        """Wait for the device and raise the error of a bad ID or position since the last check."""
        self.table.check()
        self.position.check()


class Block(nn.Module):
    """One block: `x + attention(norm(x))`, then `x + swiglu(norm(x))`."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mlp_dim: int,
        *,
        dropout: float,
        norm_eps: float,
        depth: int,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=norm_eps)
        self.attention = Attention(width, num_heads, num_kv_heads, head_dim, depth=depth)
        self.mlp_norm = nn.RMSNorm(width, eps=norm_eps)
        self.mlp = SwiGLU(width, mlp_dim, depth=depth)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        position: Position,
        positions: Positions,
        scores: Float[Tensor, "*mask T S"] | None,
        past: BlockCache | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """One step of the residual stream."""
        x = x + self.dropout(self.attention(self.attention_norm(x), position, positions, scores, past))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class Attention(nn.Module):
    """Causal attention with H query heads and G key/value heads, whatever the position scheme."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int, *, depth: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(width, num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(num_heads * self.head_dim, width, bias=False)
        initialise([self.query, self.key, self.value], self.out, depth)

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        position: Position,
        positions: Positions,
        scores: Float[Tensor, "*mask T S"] | None,
        past: BlockCache | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """`softmax(q k^T / sqrt(K) + scores) v` over past and new tokens, causal where `scores` is `None`."""
        q_BHTK, k_BGTK, v_BGTK = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for part in (self.query, self.key, self.value)
        )
        q_BHTK, k_BGTK = position.rotate(q_BHTK, k_BGTK, positions)
        k_BGSK, v_BGSK = (k_BGTK, v_BGTK) if past is None else past.extend(k_BGTK, v_BGTK)
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=None if scores is None else scores.to(q_BHTK.dtype),
            is_causal=scores is None and q_BHTK.shape[-2] == k_BGSK.shape[-2],  # a single new token sees all
            enable_gqa=q_BHTK.shape[-3] != k_BGTK.shape[-3],
        )
        result: Tensor = self.out(y_BHTK.transpose(-2, -3).flatten(-2))
        return result


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, mlp_dim: int, *, depth: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, mlp_dim, bias=False)
        self.up = nn.Linear(width, mlp_dim, bias=False)
        self.down = nn.Linear(mlp_dim, width, bias=False)
        initialise([self.gate, self.up], self.down, depth)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """One step at every place by itself."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def initialise(inner: list[nn.Linear], outer: nn.Linear, depth: int) -> None:
    """N(0, 1 / fan_in) inside; on the way back to the residual stream smaller by sqrt(2 depth) (GPT-2)."""
    for linear in inner:
        draw_(linear.weight, std=linear.in_features**-0.5)
    draw_(outer.weight, std=(2 * depth * outer.in_features) ** -0.5)


def attention_scores_bias(
    bias: Float[Tensor, "rows H T S"] | None,
    documents: Int[Tensor, "*batch S"] | Bool[Tensor, "*batch S"] | None,
    queries: int,
    keys: int,
    *,
    device: torch.device,
) -> Float[Tensor, "*rows T S"] | None:
    """The position's bias with -inf wherever a token may not look.

    A token sees itself and earlier tokens of its own document. Padding sees itself only, so that no row is empty.

    Args:
        bias: What the position adds to the scores.
        documents: For each of the keys 0 for padding, else its document.
        queries: New tokens, T: the last of the keys.
        keys: All tokens, S.
        device: Where to make the result.

    Returns:
        `None` where only the future is to be hidden, and the queries are all of the keys or the last one alone.
    """
    if bias is None and documents is None and queries in (1, keys):
        return None
    allowed: Bool[Tensor, "*rows T S"] = torch.ones(queries, keys, dtype=torch.bool, device=device)
    allowed = allowed.tril(keys - queries)
    if documents is not None:
        asking = documents[..., keys - queries :].unsqueeze(-1)
        itself = torch.eye(keys, dtype=torch.bool, device=device)[keys - queries :]
        allowed = (allowed & (asking == documents.unsqueeze(-2)) & (asking != 0)) | itself
        allowed = allowed.unsqueeze(-3)
    start = torch.zeros((), device=device) if bias is None else bias
    return torch.where(allowed, start, float("-inf"))
