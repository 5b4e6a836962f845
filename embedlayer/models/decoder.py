"""A small decoder-only language model: pre-norm blocks for any table, any position scheme and any head."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from embedlayer.core.documents import AttentionMask, check_mask, shifted_targets
from embedlayer.core.errors import CheckpointError, ShapeError, SizeError
from embedlayer.core.initialization import NormalLinear
from embedlayer.core.option_docs import show_options
from embedlayer.core.shapes import IdsLike, Positions
from embedlayer.core.torch_state import is_unchanged
from embedlayer.families import OWN_MODEL_TYPE
from embedlayer.heads.output import OutputHead
from embedlayer.heads.prediction import PredictionHead, build_head, describe_head
from embedlayer.inputs.embedding import (
    InputOptions,
    PositionName,
    as_position,
    embed,
    sequence_of,
    trace_embed,
)
from embedlayer.inputs.injection import (
    EmbeddingInjection,
    add_to_input,
    add_to_stream,
    add_to_values,
    look_up_injections,
)
from embedlayer.inputs.steps import TracedStep
from embedlayer.io.files import JsonObject
from embedlayer.losses.options import LogitOptions, LossOptions, Reduction, ScoreOptions, check_options
from embedlayer.losses.targets import require_token_weights
from embedlayer.models.attention import AddedScores, scaled_dot_product
from embedlayer.models.cache import BlockCache, KeyValueCache
from embedlayer.positions.position import Position, PreparedPositions, positions_of
from embedlayer.saving import Pretrained, build, describe
from embedlayer.tables.conversions import as_table
from embedlayer.tables.table import TokenTable

AddToValues = Callable[[Tensor, Tensor], Tensor]
"""Function from the values `(B, G, T, K)` and the input `(B, T, D)` of an attention to the values that it uses."""


class CausalLMOutput(NamedTuple):
    """Result of a `DecoderLM` that was called with transformers' argument names.

    Attributes:
        loss: Cross entropy of the labels, in nats per token; `None` without labels.
        logits: Logits of the next token, `(..., T, V)`; `None` in training mode with labels, where the loss is computed
            without them.
    """

    loss: Float[Tensor, ""] | None
    logits: Float[Tensor, "*batch T V"] | None


class ModelConfig(dict[str, Any]):
    """Constructor arguments of a model as a mapping, and as attributes the names that transformers' tools expect.

    `from_config` builds the model from the mapping, and `save_pretrained` writes the mapping only. The attributes have
    the names of `transformers.PreTrainedConfig`: `model_type`, `vocab_size`, `hidden_size`, `num_hidden_layers`,
    `num_attention_heads`, `num_key_value_heads`, `head_dim`, `intermediate_size`, `max_position_embeddings`,
    `pad_token_id`, `is_encoder_decoder`, `use_cache`. The model keeps attributes that a tool sets
    (`model.config.pad_token_id = 0`); they do not change the model and are not saved.

    There is no `tie_word_embeddings`: a tied head has no weight of its own, so a tool has nothing to tie.

    Args:
        arguments: Constructor arguments.
        attributes: Attributes. The dictionary itself is used, so that all configurations of a model share them.

    Example:
        >>> config = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=2).config
        >>> config["num_layers"], config.num_hidden_layers, config.hidden_size
        (2, 2, 32)
    """

    def __init__(self, arguments: dict[str, Any] | None = None, attributes: dict[str, Any] | None = None) -> None:
        super().__init__(arguments or {})
        self.__dict__ = {} if attributes is None else attributes

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the constructor's arguments in one plain dictionary."""
        return {**vars(self), **self}

    def to_json_string(self, use_diff: bool = True) -> str:
        """Return `to_dict()` as JSON; a value that JSON cannot represent is written as its `repr`.

        Args:
            use_diff: Argument of transformers; it has no effect.
        """
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, default=repr) + "\n"

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ModelConfig":
        """Return this configuration: transformers asks multimodal models for that of their text model.

        The arguments of transformers have no effect.
        """
        return self


class DecoderLM(Pretrained):
    """Decoder-only language model: `head(norm(blocks(dropout(position.add(table(ids))))))`.

    The blocks are those of LLaMA: RMSNorm before attention and before a SwiGLU, no biases, and grouped-query attention.

    `model(ids)` returns logits. With transformers' argument names, `model(input_ids=..., labels=...)` returns a
    `CausalLMOutput`, so that transformers' `Trainer` can train it. `config` has the attributes that such tools read.

    Args:
        table: Token table, or a plain `nn.Embedding`; the model then uses its weight.
        position: A `Position`, or the name of one, such as `"rotary"`; see `TransformerEmbedding`.
        head: LM head; `None` for one that is tied to `table`.
        num_layers: Number of blocks.
        num_heads: Number of query heads, H.
        num_kv_heads: Number of key/value heads, G, a divisor of H; `None` for H.
        head_dim: Width of a head, K; `None` for the width of the model divided by H.
        mlp_dim: Width inside the SwiGLU; `None` for 8/3 of the width of the model, rounded up to a multiple of 32.
        dropout: Dropout probability after the embedding and after each sublayer.
        norm_eps: Term that RMSNorm adds to the mean square.
        query_scale: Factor on queries, beside 1 / sqrt(K); see `embedlayer.optim.WidthScaling`.
        max_seq_len: Longest sequence, for position schemes that have a maximum and are passed by name.
        injections: Additional tables whose vectors enter at the input, in the residual stream or in attention: value
            embeddings, hashed n-gram tables, per-layer tables, in any number. See `EmbeddingInjection`.

    Example:
        >>> model = DecoderLM(TokenEmbedding(100, 32, scale="sqrt_dim"), "rotary", num_layers=2, num_heads=4)
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 100])

    Reference: Touvron et al., LLaMA, 2023, section 2.2.
    """

    accepts_loss_kwargs = True
    """Tell transformers' Trainer to pass `num_items_in_batch`, so that accumulated gradients are exact."""

    loss_type = "ForCausalLM"
    """transformers' name of a loss that shifts the labels itself; its Trainer uses the name to count targets."""

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
        query_scale: float = 1.0,
        max_seq_len: int = 1024,
        injections: Sequence[EmbeddingInjection] = (),
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
        if not 0 < query_scale < math.inf:
            raise SizeError(f"query_scale must be positive, not {query_scale}.")
        position = as_position(
            position, max_seq_len=max_seq_len, embed_dim=width, num_heads=num_heads, head_dim=head_dim
        )
        if (head.in_features, head.out_features) != (width, table.vocab_size):
            shapes = f"{(head.in_features, head.out_features)}, the table has {(width, table.vocab_size)}"
            raise SizeError(f"The head maps {shapes}: build OutputHead({width}, {table.vocab_size}).")
        sizes = BlockSizes(num_layers, num_heads, num_kv_heads, head_dim, mlp_dim, dropout, norm_eps, query_scale)
        self.sizes = sizes._asdict()
        self.table = table
        self.position = position
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, sizes) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, eps=norm_eps)
        self.head = head.follow(self) if head.table is table else head
        self.injections = nn.ModuleList(injections)
        for injection in injections:
            injection.require_sizes(width=width, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        names: dict[nn.Parameter, str] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):  # a file could not say so
            if (other := names.setdefault(parameter, name)) != name and name.startswith("injections."):
                raise SizeError(f"{name} and {other} are one parameter: pass the injection a table of its own.")
        self._config_attributes: dict[str, Any] = {
            "model_type": OWN_MODEL_TYPE,
            "is_encoder_decoder": False,
            "use_cache": False,
            "pad_token_id": table.padding_idx,
        }

    @property
    def config(self) -> ModelConfig:
        """Return the constructor's arguments, with the attributes that transformers' tools read."""
        arguments = {
            "table": describe(self.table),
            "position": describe(self.position),
            "head": describe_head(self.head),
            **self.sizes,
            **({"injections": [describe(each) for each in self._injections]} if len(self.injections) else {}),
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
        make_head: Callable[[JsonObject, TokenTable], OutputHead | PredictionHead] = build_head,
    ) -> "DecoderLM":
        """Build the model that `config` describes, with initial weights; a tied head is tied to the new table.

        Args:
            config: Value of the property `config`.
            make_head: Function that builds a head from its description and the table that a tied head is tied to.

        Raises:
            CheckpointError: The configuration describes another thing than a table or a position there, or an argument
                does not fit.
            KeyError: `table`, `position` or `head` is missing; `from_pretrained` raises a `CheckpointError` then.
        """
        options = dict(config)
        table, position = build(options.pop("table")), build(options.pop("position"))
        description = options.pop("head")
        if not isinstance(table, TokenTable) or not isinstance(position, Position):
            raise CheckpointError(f"A decoder needs a table and a position, not {type(table)} and {type(position)}.")
        parts = {"table": table, "position": position, "head": make_head(description, table)}
        injections = [build(each) for each in options.pop("injections", ())]
        return cls.construct(**parts, injections=injections, **options)

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
        token_weights: Float[Tensor, "*batch T"] | None = None,
    ) -> Float[Tensor, "*batch T V"] | CausalLMOutput:
        """Return the logits of the next token after every token, `(T,)` or `(B, T)` to `(..., T, V)`.

        Args:
            ids: Token IDs; this and the next four are the arguments of `hidden`.
            inputs_embeds: Vectors in place of `table(ids)`.
            positions: Position of each token.
            attention_mask: 0 for padding; 1, or 1, 2, 3, ... for packed documents. A label is no target of padding or
                of a token of another document.
            cache: Keys and values of earlier tokens.
            input_ids: transformers' name of `ids`; with it the result is a `CausalLMOutput`.
            labels: transformers' labels: the IDs themselves, -100 for no target. The model shifts them: the logits at t
                are compared with `labels[..., t + 1]`, if it is in the same document. The result is a `CausalLMOutput`,
                without logits in training.
            num_items_in_batch: Number of targets in all accumulated batches, by which the summed loss is divided;
                `None` for the number of targets in this batch. Without any target the loss is then 0.
            token_weights: Weight of the loss of each label, shifted as the labels are; see `LossOptions`.

        Raises:
            SizeError: Not exactly one of `ids`, `input_ids` and `inputs_embeds` is passed, labels with a cache, or
                `token_weights` without labels; the other errors are those of `hidden` and, with labels, of
                `shifted_targets` and the head's `loss`.
        """
        if ids is not None and input_ids is not None:
            raise SizeError("Pass the token IDs once: model(ids), or model(input_ids=ids) as transformers' tools do.")
        if labels is not None and cache is not None:
            raise SizeError("A loss is computed over whole sequences: pass labels without a cache.")
        if token_weights is not None:
            if labels is None:
                raise SizeError("token_weights are those of labels: pass labels too.")
            require_token_weights(token_weights, labels, "labels")
            token_weights = token_weights[..., 1:]
        hidden = self.hidden(
            input_ids if ids is None else ids,
            inputs_embeds=inputs_embeds,
            positions=positions,
            attention_mask=attention_mask,
            cache=cache,
        )
        if labels is not None:
            reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
            targets = shifted_targets(labels, attention_mask)
            loss = self.head.loss(hidden[..., :-1, :], targets, reduction=reduction, token_weights=token_weights)
            loss = loss if num_items_in_batch is None else loss / num_items_in_batch
            return CausalLMOutput(loss, None if self.training else self.head(hidden))
        logits: Tensor = self.head(hidden)
        return logits if input_ids is None else CausalLMOutput(None, logits)

    @show_options(LogitOptions, ScoreOptions, LossOptions)
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
        """Return the cross entropy of `targets`, the tokens that follow `ids`, in nats; by default their mean.

        The mean over no target is 0.

        Args:
            ids: Token IDs; `None` with `inputs_embeds`.
            targets: Token ID that follows each token, or `ignore_index`. Of packed documents, ignore those that follow
                the last token of one: `embedlayer.core.shifted_targets` returns them.
            inputs_embeds: As in `hidden`.
            positions: As in `hidden`.
            attention_mask: As in `hidden`.
            **options: See `LossOptions`.
        """
        check_options(options, LossOptions, f"{type(self).__name__}.loss")
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
        """Return the normalised output of the last block, which is the input of the head.

        Args:
            ids: Token IDs `(T,)` or `(B, T)`.
            inputs_embeds: Vectors `(T, D)` or `(B, T, D)` in place of `table(ids)`, as in transformers.
            positions: Position of each token, `(T,)` or `(B, T)`; `(A, B, T)` for rotary positions with A axes. By
                default positions count from 0 in each document, skip padding, and continue a cached text.
            attention_mask: 0 for padding; 1, or 1, 2, 3, ... for packed documents, which do not attend to each other.
            cache: Keys and values of earlier tokens, to which the new ones are added; `None` for none. With a cache,
                `ids`, `positions` and `attention_mask` describe the new tokens only.

        Raises:
            ShapeError: IDs or positions are no integers, positions or the mask do not fit the IDs, or these do not fit
                the cache; see `check_positions`, `embedlayer.core.check_mask` and `KeyValueCache.next_positions`.
            TokenIdError: On the CPU, an ID is outside the table. On an accelerator, the next `check()` raises it.
            PositionError: On the CPU, a position is outside what the scheme covers. On an accelerator, the next
                `check()` raises it.
        """
        states = self.hidden_states(
            ids, inputs_embeds=inputs_embeds, positions=positions, attention_mask=attention_mask, cache=cache
        )
        for state in states:
            last = state
        normalised: Tensor = self.norm(last)
        return normalised

    def hidden_states(
        self,
        ids: IdsLike | None = None,
        *,
        inputs_embeds: Float[Tensor, "*batch T D"] | None = None,
        positions: Positions | None = None,
        attention_mask: AttentionMask | None = None,
        cache: KeyValueCache | None = None,
    ) -> Iterator[Float[Tensor, "*batch T D"]]:
        """Yield the input of the first block, then the output of each block: `num_layers + 1` tensors.

        Each tensor is the residual stream, with what injections add there. The final norm is applied to none of them:
        `norm` of the last is `hidden`. In transformers the last of `output_hidden_states` is after that norm. A block
        is computed when its output is requested, so errors are raised there. The arguments and errors are those of
        `hidden`.

        Example:
            >>> model = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=2, num_heads=4)
            >>> [state.shape for state in model.hidden_states(torch.tensor([1, 2, 3]))]
            [torch.Size([3, 32]), torch.Size([3, 32]), torch.Size([3, 32])]
        """
        ids = self._sequence_of(ids, inputs_embeds)
        if attention_mask is not None:
            check_mask(attention_mask, ids.shape)
        is_single = ids.dim() == 1
        if is_single:
            ids = ids.unsqueeze(0)
            inputs_embeds = None if inputs_embeds is None else inputs_embeds.unsqueeze(0)
            attention_mask = None if attention_mask is None else attention_mask.unsqueeze(0)
        if positions is not None:
            self.position.check_positions(positions, ids.shape)
        if cache is not None:
            positions, attention_mask = cache.next_positions(ids, positions, attention_mask)
        elif positions is None:
            positions = positions_of(ids, attention_mask)
        tokens, dropout = ids if inputs_embeds is None else None, None if len(self.injections) else self.dropout
        x = embed(tokens, self.table, self.position, positions, inputs_embeds=inputs_embeds, dropout=dropout)
        states = None if cache is None else [dict(cache.injections[number]) for number in range(len(self.injections))]
        injected = look_up_injections(self._injections, x, ids, attention_mask, states)
        if dropout is None:
            x = self.dropout(add_to_input(x, injected))
        queried = seen = positions
        if cache is not None:  # only now: a bad ID or position above leaves the cache as it was
            again = cache.read_again(self.position, self.table, ids, inputs_embeds, positions, attention_mask)
            if again is not None:
                if again["inputs_embeds"] is not None and not len(self.injections):
                    again["ids"] = None  # zeros
                for x in self.hidden_states(**again, cache=cache):
                    x = x[:, -ids.shape[-1] :]
                    yield x.squeeze(0) if is_single else x
                return
            earlier = dict(cache.injections)
            cache.injections.update(enumerate(states or ()))
            seen, attention_mask = cache.append(positions, attention_mask)
            queried = positions.expand(*seen.shape[:-1], -1)
        slots = None if cache is None else cache.attended_slots
        is_plain = attention_mask is None and slots is None and ids.shape[-1] in (seen.shape[-1], 1)
        scores = None
        if not is_plain or not is_unchanged(self.position, bias=Position.bias):
            scores = AddedScores(self.position, queried, seen, attention_mask, slots, self.sizes["num_heads"])
        prepared = self.position.prepare(positions)  # rotary angles: once, not in every block
        x = add_to_stream(x, injected, 0)
        yield x.squeeze(0) if is_single else x
        for number, block in enumerate(self.blocks):
            past = None if cache is None else cache.blocks[number]
            values = partial(add_to_values, injected=injected, block=number) if injected else None
            x = add_to_stream(block(x, self.position, prepared, scores, past, values), injected, number + 1)
            yield x.squeeze(0) if is_single else x
        if cache is not None:
            cache.keep_in_place(earlier)

    @property
    def _injections(self) -> list[EmbeddingInjection]:
        return [cast(EmbeddingInjection, each) for each in self.injections]

    def _sequence_of(self, ids: IdsLike | None, inputs_embeds: Tensor | None) -> Int[Tensor, "*batch T"]:
        """Return the token IDs as a tensor, or zeros in their place if a model without injections gets vectors."""
        if inputs_embeds is None or not len(self.injections):
            return sequence_of(ids, inputs_embeds, self.table)
        if ids is None:
            kinds = ", ".join(type(each).__name__ for each in self.injections)
            raise SizeError(f"This model looks token IDs up in {kinds}: pass ids too, not inputs_embeds alone.")
        ids = sequence_of(ids, None, self.table)
        if ids.shape != sequence_of(None, inputs_embeds, self.table).shape:
            raise ShapeError(f"ids {tuple(ids.shape)} and inputs_embeds {tuple(inputs_embeds.shape)} do not fit.")
        return ids

    def trace(self, ids: IdsLike | None = None, **options: Unpack[InputOptions]) -> Iterator[TracedStep]:
        """Yield the vectors after each step of the input embedding, as `TransformerEmbedding.trace` does.

        Args:
            ids: Token IDs `(T,)` or `(B, T)`; `None` with `inputs_embeds`.
            **options: `inputs_embeds`, `positions` and `attention_mask` of `hidden`.
        """
        return trace_embed(ids, self.table, self.position, self.dropout, injections=self._injections, **options)

    def get_input_embeddings(self) -> nn.Module:
        """Return the table, or the module that PEFT has put in its place; tools of transformers call this."""
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, or the module that PEFT has put in its place; tools of transformers call this."""
        return self.head


class BlockSizes(NamedTuple):
    """Hold the arguments of `DecoderLM` that its blocks need, under the same names."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    dropout: float
    norm_eps: float
    query_scale: float


class Block(nn.Module):
    """Pre-norm transformer block: `x + dropout(attention(norm(x)))`, then `x + dropout(swiglu(norm(x)))`."""

    def __init__(self, width: int, sizes: BlockSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=sizes.norm_eps)
        self.attention = Attention(width, sizes)
        self.mlp_norm = nn.RMSNorm(width, eps=sizes.norm_eps)
        self.mlp = SwiGLU(width, sizes.mlp_dim, depth=sizes.num_layers)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        position: Position,
        prepared: PreparedPositions,
        scores: AddedScores | None,
        past: BlockCache | None = None,
        add_to_values: AddToValues | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """Return the output of the block; the arguments after `x` are passed to `Attention.forward`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), position, prepared, scores, past, add_to_values))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


class Attention(nn.Module):
    """Causal grouped-query attention with H query heads and G key/value heads, for any position scheme."""

    def __init__(self, width: int, sizes: BlockSizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.scale = None if sizes.query_scale == 1.0 else sizes.query_scale * sizes.head_dim**-0.5
        self.query = inner_linear(width, sizes.num_heads * self.head_dim)
        self.key = inner_linear(width, sizes.num_kv_heads * self.head_dim)
        self.value = inner_linear(width, sizes.num_kv_heads * self.head_dim)
        self.out = outer_linear(sizes.num_heads * self.head_dim, width, sizes.num_layers)

    def forward(
        self,
        x: Float[Tensor, "*batch T D"],
        position: Position,
        prepared: PreparedPositions,
        scores: AddedScores | None,
        past: BlockCache | None = None,
        add_to_values: AddToValues | None = None,
    ) -> Float[Tensor, "*batch T D"]:
        """Compute `softmax(query_scale * q k^T / sqrt(K) + scores) v` over past and new tokens.

        `scores` are the attention bias and mask together, which already contain the bias of `position`; `None` for a
        plain causal mask, or for a single new token that attends to all others. `prepared` is the position of each new
        token, or the result of `position.prepare`. Keys and values of the new tokens are appended to `past`.
        `add_to_values` adds value embeddings to the values.
        """
        q_BHTK, k_BGTK, v_BGTK = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)
            for project in (self.query, self.key, self.value)
        )
        q_BHTK, k_BGTK = position.rotate(q_BHTK, k_BGTK, prepared)
        v_BGTK = v_BGTK if add_to_values is None else add_to_values(v_BGTK, x)
        k_BGSK, v_BGSK = (k_BGTK, v_BGTK) if past is None else past.extend(k_BGTK, v_BGTK)
        if scores is None:
            is_causal = past is None or bool(q_BHTK.shape[-2] == k_BGSK.shape[-2])  # a single new token sees all
            y_BHTK = scaled_dot_product(q_BHTK, k_BGSK, v_BGSK, is_causal=is_causal, scale=self.scale)
        else:
            y_BHTK = scores.attend(q_BHTK, k_BGSK, v_BGSK, self.scale)
        result: Tensor = self.out(y_BHTK.transpose(-2, -3).flatten(-2))
        return result


class SwiGLU(nn.Module):
    """Gated feed-forward layer: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, width: int, mlp_dim: int, *, depth: int) -> None:
        super().__init__()
        self.gate = inner_linear(width, mlp_dim)
        self.up = inner_linear(width, mlp_dim)
        self.down = outer_linear(mlp_dim, width, depth)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Return `down(silu(gate(x)) * up(x))`, which is computed for each token separately."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def inner_linear(in_features: int, out_features: int) -> NormalLinear:
    """Return a projection without bias, with weights from N(0, 1 / in_features)."""
    return NormalLinear(in_features, out_features, init_std=in_features**-0.5)


def outer_linear(in_features: int, out_features: int, depth: int) -> NormalLinear:
    """Return a projection without bias whose output is added to the residual stream.

    Its weights are from N(0, 1 / (2 * depth * in_features)): each of `depth` blocks adds two such outputs, and their
    sum stays small (GPT-2).
    """
    return NormalLinear(in_features, out_features, init_std=(2 * depth * in_features) ** -0.5)
