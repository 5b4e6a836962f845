"""The small decoder that the layer is trained inside: pre-norm blocks for any table, any position and any head."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from embedlayer.errors import CheckpointError, SizeError
from embedlayer.files import JsonObject
from embedlayer.layers.input import PositionName, as_position, embed, sequence_of
from embedlayer.layers.output import OutputHead
from embedlayer.losses.cross_entropy import LossOptions
from embedlayer.models.cache import BlockCache, KeyValueCache
from embedlayer.models.config import ModelConfig
from embedlayer.normal import NormalLinear
from embedlayer.positions.position import AttentionMask, Position, positions_of
from embedlayer.pretrained import Pretrained, build, check_saved, describe
from embedlayer.shapes import IdsLike, Positions
from embedlayer.tables.dense import as_table
from embedlayer.tables.table import TokenTable
from embedlayer.tracing import is_transformed


class CausalLMOutput(NamedTuple):
    """What a call by transformers' names returns.

    Attributes:
        loss: Cross entropy of the labels, in nats per token; `None` without labels.
        logits: Logits of the next token, `(..., T, V)`; `None` where a model in training has labels, since nothing
            needs them there.
    """

    loss: Float[Tensor, ""] | None
    logits: Float[Tensor, "*batch T V"] | None


class DecoderLM(Pretrained):
    """A decoder-only language model: `head(norm(blocks(dropout(position.add(table(ids))))))`.

    Blocks are of LLaMA's kind: RMSNorm before attention and before a SwiGLU, no biases, key/value heads that may be
    fewer than query heads.

    `model(ids)` returns logits. Called by transformers' names, `model(input_ids=..., labels=...)`, it returns a
    `CausalLMOutput`, so that transformers' `Trainer` trains it, and `config` has the attributes that such tools read.

    Args:
        table: What each token is: a table, or a plain `nn.Embedding`, whose weight is used.
        position: Where each token is: a `Position`, or the name of one, such as `"rotary"`; see
            `TransformerEmbedding`.
        head: The way out; tied to `table` if `None`.
        num_layers: Blocks.
        num_heads: Query heads, H.
        num_kv_heads: Key/value heads, G, a divisor of H; H if `None`.
        head_dim: Width of a head, K; the width divided by H if `None`.
        mlp_dim: Width inside the SwiGLU; 8/3 of the width, rounded up to 32, if `None`.
        dropout: Share of the numbers set to 0 in training, after the embedding and after each sublayer.
        norm_eps: Added to the mean square in RMSNorm.
        max_seq_len: Longest sequence of a position that is given by its name and has one.

    Raises:
        SizeError: The width does not divide into the heads, or the head or the position is of another size than the
            table.

    Example:
        >>> model = DecoderLM(TokenEmbedding(100, 32, scale="sqrt_dim"), "rotary", num_layers=2, num_heads=4)
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 100])

    Reference: Touvron et al., LLaMA, 2023, section 2.2.
    """

    accepts_loss_kwargs = True
    """transformers' Trainer then passes `num_items_in_batch`, so that accumulated gradients are exact."""

    loss_type = "ForCausalLM"
    """transformers' name for a loss that shifts the labels itself; its Trainer counts targets by it."""

    def __init__(
        self,
        table: TokenTable | nn.Embedding,
        position: Position | PositionName,
        head: OutputHead | None = None,
        *,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int | None = None,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        max_seq_len: int = 1024,
    ) -> None:
        super().__init__()
        table = as_table(table)
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
        position = as_position(
            position, max_seq_len=max_seq_len, embed_dim=width, num_heads=num_heads, head_dim=head_dim
        )
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
        self.head = head.follow(self) if head.table is table else head
        self._config_attributes: dict[str, Any] = {
            "model_type": "embedlayer",
            "is_encoder_decoder": False,
            "use_cache": False,
            "pad_token_id": table.padding_idx,
        }
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
    def config(self) -> ModelConfig:
        """The constructor's arguments, with the attributes that transformers' tools read."""
        arguments = {
            "table": describe(self.table),
            "position": describe(self.position),
            "head": {"tied": self.head.tied, **self.head.config},
            **self.sizes,
        }
        self._config_attributes.update(
            vocab_size=self.table.vocab_size,
            hidden_size=self.table.embed_dim,
            num_hidden_layers=self.sizes["num_layers"],
            num_attention_heads=self.sizes["num_heads"],
            num_key_value_heads=self.sizes["num_kv_heads"],
            head_dim=self.sizes["head_dim"],
            intermediate_size=self.sizes["mlp_dim"],
            max_position_embeddings=self.position.max_seq_len,
        )
        return ModelConfig(arguments, self._config_attributes)

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
        ids: IdsLike | None = None,
        *,
        inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KeyValueCache | None = None,
        input_ids: IdsLike | None = None,
        labels: Int[Tensor, "*batch T"] | None = None,
        num_items_in_batch: float | Shaped[Tensor, ""] | None = None,
    ) -> Float[Tensor, "*batch T V"] | CausalLMOutput:
        """Return the logits of the next token at every place, `(T,)` or `(B, T)` to `(..., T, V)`.

        Args:
            ids: Token IDs; this and the next four are the arguments of `hidden`.
            inputs_embeds: Vectors in place of `table(ids)`.
            positions: Where each token stands.
            attention_mask: 0 for padding; 1, or 1, 2, 3, ... for packed documents.
            cache: What was read before.
            input_ids: transformers' name of `ids`; passed by it, the result is a `CausalLMOutput`.
            labels: transformers' labels: the IDs themselves, -100 where there is no target. They are shifted here:
                the logits at t are compared with `labels[..., t + 1]`. The result is a `CausalLMOutput`, of a model in
                training without logits.
            num_items_in_batch: Number of targets in all accumulated batches, by which the summed loss is divided; the
                targets of this one if `None`.

        Raises:
            SizeError: Not exactly one of `ids`, `input_ids` and `inputs_embeds` is given, or a cache with labels.
        """
        if ids is not None and input_ids is not None:
            raise SizeError("Pass the token IDs once: model(ids), or model(input_ids=ids) as transformers' tools do.")
        if labels is not None and cache is not None:
            raise SizeError("A loss is computed over whole sequences: pass labels without a cache.")
        hidden = self.hidden(
            input_ids if ids is None else ids,
            inputs_embeds=inputs_embeds,
            positions=positions,
            attention_mask=attention_mask,
            cache=cache,
        )
        if labels is not None:
            loss = self._loss_of_labels(hidden, labels, num_items_in_batch)
            return CausalLMOutput(loss, None if self.training else self.head(hidden))
        logits: Tensor = self.head(hidden)
        return logits if input_ids is None else CausalLMOutput(None, logits)

    def _loss_of_labels(
        self, hidden: Float[Tensor, "*batch T D"], labels: Int[Tensor, "*batch T"], count: float | Tensor | None
    ) -> Float[Tensor, ""]:
        """Return the loss of `labels[..., 1:]`, as the mean over its targets or as the sum over `count`."""
        hidden, targets = hidden[..., :-1, :], labels[..., 1:]
        if count is None:
            return self.head.loss(hidden, targets)
        return self.head.loss(hidden, targets, reduction="sum") / count

    def loss(
        self,
        ids: IdsLike | None,
        targets: Int[Tensor, "*batch T"],
        *,
        inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
        **options: Unpack[LossOptions],
    ) -> Float[Tensor, "*result"]:
        """Cross entropy of `targets`, the tokens that follow `ids`, in nats per token; the arguments of `hidden`.

        With `inputs_embeds`, pass `None` for `ids`.
        """
        hidden = self.hidden(ids, inputs_embeds=inputs_embeds, positions=positions, attention_mask=attention_mask)
        return self.head.loss(hidden, targets, **options)

    def hidden(
        self,
        ids: IdsLike | None = None,
        *,
        inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """What the head reads: the last block's output, normalised.

        Args:
            ids: Token IDs `(T,)` or `(B, T)`.
            inputs_embeds: Vectors `(T, D)` or `(B, T, D)` in place of `table(ids)`, as in transformers.
            positions: Where each token stands; by default from 0, or as the mask says, or on from the cached text.
            attention_mask: 0 for padding; 1, or 1, 2, 3, ... for packed documents, which do not see each other.
            cache: What was read before; `ids`, `positions` and `attention_mask` are then those of the new tokens.

        Raises:
            SizeError: Both or neither of `ids` and `inputs_embeds` are given.
        """
        ids = sequence_of(ids, inputs_embeds, self.table)
        if ids.dim() == 1:
            mask = None if attention_mask is None else attention_mask.unsqueeze(0)
            single = (
                {"ids": ids.unsqueeze(0)} if inputs_embeds is None else {"inputs_embeds": inputs_embeds.unsqueeze(0)}
            )
            return self.hidden(**single, positions=positions, attention_mask=mask, cache=cache).squeeze(0)
        if cache is not None:
            positions, attention_mask = cache.places_of(ids, positions, attention_mask)
        elif positions is None:
            positions = positions_of(ids, attention_mask)
        tokens = ids if inputs_embeds is None else None
        x = embed(tokens, self.table, self.position, positions, inputs_embeds=inputs_embeds, dropout=self.dropout)
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

    def get_input_embeddings(self) -> nn.Module:
        """Return the table, or what PEFT has put in its place."""
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, or what PEFT has put in its place."""
        return self.head

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
        self.query = inner_linear(width, num_heads * self.head_dim)
        self.key = inner_linear(width, num_kv_heads * self.head_dim)
        self.value = inner_linear(width, num_kv_heads * self.head_dim)
        self.out = outer_linear(num_heads * self.head_dim, width, depth)

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
        y_BHTK = attend(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=None if scores is None else scores.to(q_BHTK.dtype),
            # a single new token sees all; sizes of a traced graph may be symbolic, these two must be plain booleans
            is_causal=scores is None and (past is None or bool(q_BHTK.shape[-2] == k_BGSK.shape[-2])),
            enable_gqa=bool(q_BHTK.shape[-3] != k_BGTK.shape[-3]),
        )
        result: Tensor = self.out(y_BHTK.transpose(-2, -3).flatten(-2))
        return result


def attend(
    q_BHTK: Float[Tensor, "*batch H T K"],
    k_BGSK: Float[Tensor, "*batch G S K"],
    v_BGSK: Float[Tensor, "*batch G S K"],
    *,
    attn_mask: Float[Tensor, "*mask T S"] | None,
    is_causal: bool,
    enable_gqa: bool,
) -> Float[Tensor, "*batch H T K"]:
    """Compute `torch.nn.functional.scaled_dot_product_attention`, also where its fused kernels cannot be transformed.

    They have no derivative in forward mode, no second derivative and no rule for `vmap`, so under these transforms the
    scores are computed by their definition, all at once.
    """
    if not is_transformed(q_BHTK, k_BGSK, v_BGSK, attn_mask):
        return F.scaled_dot_product_attention(
            q_BHTK, k_BGSK, v_BGSK, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=enable_gqa
        )
    heads_per_key = q_BHTK.shape[-3] // k_BGSK.shape[-3]
    k_BHSK, v_BHSK = (part.repeat_interleave(heads_per_key, dim=-3) for part in (k_BGSK, v_BGSK))
    scores_BHTS = q_BHTK @ k_BHSK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
    if is_causal:
        future = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q_BHTK.device).triu(1)
        scores_BHTS = scores_BHTS.masked_fill(future, float("-inf"))
    scores_BHTS = scores_BHTS if attn_mask is None else scores_BHTS + attn_mask
    return scores_BHTS.softmax(-1) @ v_BHSK


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, mlp_dim: int, *, depth: int) -> None:
        super().__init__()
        self.gate = inner_linear(width, mlp_dim)
        self.up = inner_linear(width, mlp_dim)
        self.down = outer_linear(mlp_dim, width, depth)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """One step at every place by itself."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def inner_linear(in_features: int, out_features: int) -> NormalLinear:
    """Return a linear map that starts as N(0, 1 / fan_in)."""
    return NormalLinear(in_features, out_features, init_std=in_features**-0.5)


def outer_linear(in_features: int, out_features: int, depth: int) -> NormalLinear:
    """Return one that writes to the residual stream: its start is smaller by sqrt(2 depth), as in GPT-2."""
    return NormalLinear(in_features, out_features, init_std=(2 * depth * in_features) ** -0.5)


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
    if bias is None and documents is None and queries in (keys, 1):
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
