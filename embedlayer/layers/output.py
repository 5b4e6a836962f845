"""The way out: hidden states to logits and loss, through the input's table or one of its own."""

from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embedlayer.errors import SizeError
from embedlayer.files import JsonObject
from embedlayer.losses.linear_cross_entropy import (
    LogitOptions,
    LossOptions,
    ScoreOptions,
    finish_logits,
    linear_cross_entropy,
)
from embedlayer.normal import draw_
from embedlayer.overrides import is_unchanged
from embedlayer.pretrained import Pretrained
from embedlayer.tables.dense import as_table
from embedlayer.tables.table import TokenTable, check_sizes, check_width, loss_of_logits


class OutputHead(Pretrained, nn.Linear):
    """Hidden states to a score for each token: `finish_logits(hidden @ weight.T)`.

    Given a table it is tied: it refers to the table and owns no rows, so there is one parameter and one key in the
    state, and `head.weight is table.weight`. Given sizes it is untied, an `nn.Linear` with a weight of its own:
    `OutputHead(embed_dim, vocab_size)` in the order of `nn.Linear(in_features, out_features)`.

    Args:
        table: The table to tie to; or for an untied head its `in_features`, the width of the hidden state, D.
        out_features: Tokens, V, of an untied head.
        in_features: As the first argument.
        vocab_size: Another name of `out_features`.
        embed_dim: Another name of `in_features`.
        bias: Learn one number per token that is added to its logit.
        softcap: `softcap * tanh(logits / softcap)`; `None` for none.
        logit_scale: Factor on the products.
        mask_padding: Make the logit of the padding token -inf.
        padding_idx: Padding token of a free head; a tied head takes its table's.
        init_std: Standard deviation of a free head's normal initialisation.
        device: Where to put the rows of an untied head, and the bias.
        dtype: In which type.

    Raises:
        SizeError: Neither a table nor both sizes are given, or both are; or the table is row-sparse, or a plain
            `nn.Embedding`.

    Example:
        >>> table = TokenEmbedding(100, 8)
        >>> head = OutputHead(table)
        >>> head.weight is table.weight, len(list(head.parameters()))
        (True, 0)
        >>> head(table(torch.tensor([[1, 2, 3]]))).shape
        torch.Size([1, 3, 100])
        >>> OutputHead(8, 100)
        OutputHead(8, 100, free)

    Reference: Press and Wolf, Using the output embedding to improve language models, 2017.
    """

    def __init__(
        self,
        table: TokenTable | int | None = None,
        out_features: int | None = None,
        *,
        in_features: int | None = None,
        vocab_size: int | None = None,
        embed_dim: int | None = None,
        bias: bool = False,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        mask_padding: bool = False,
        padding_idx: int | None = None,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if isinstance(table, int):
            table, in_features = None, _one_of(table, in_features, "in_features")
        embed_dim = _one_of(embed_dim, in_features, "in_features (embed_dim)")
        vocab_size = _one_of(vocab_size, out_features, "out_features (vocab_size)")
        if softcap is not None and softcap <= 0:
            raise SizeError(f"softcap must be positive, not {softcap}.")
        self.init_std = init_std
        self.softcap = softcap
        self.logit_scale = logit_scale
        self.mask_padding = mask_padding
        if table is None:
            if vocab_size is None or embed_dim is None:
                raise SizeError(
                    "OutputHead needs a table to tie to, or vocab_size and embed_dim for an untied head: "
                    "OutputHead(table) or OutputHead(embed_dim, vocab_size)."
                )
            padding_idx = check_sizes(padding_idx=padding_idx, vocab_size=vocab_size, embed_dim=embed_dim)
            nn.Linear.__init__(self, embed_dim, vocab_size, bias=bias, device=device, dtype=dtype)
            self.padding_idx = padding_idx
        else:
            table = as_table(table, registered=False)
            if (vocab_size, embed_dim, padding_idx) != (None, None, None):
                raise SizeError("A tied OutputHead takes its sizes and padding from the table: give only the table.")
            if table.row_sparse:
                raise SizeError(
                    "A head cannot be tied to a row-sparse table: the loss sends a gradient to every row.\n"
                    "Give the model a head of its own (OutputHead(vocab_size=..., embed_dim=...)), or build the table "
                    "with row_sparse=False."
                )
            nn.Module.__init__(self)
            self.in_features, self.out_features = table.embed_dim, table.vocab_size
            self.padding_idx = table.padding_idx
            zeros = nn.Parameter(torch.zeros(table.vocab_size, device=device, dtype=dtype)) if bias else None
            self.register_parameter("bias", zeros)
        self.__dict__["table"] = table  # past Module.__setattr__: referred to, not registered

    @property
    def tied(self) -> bool:
        """Whether the rows are the table's."""
        return self.__dict__.get("table") is not None  # the constructor of nn.Linear asks before there is one

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments, without the table of a tied head."""
        options: JsonObject = {
            "bias": self.bias is not None,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "mask_padding": self.mask_padding,
        }
        if self.tied:
            return options
        sizes = {"vocab_size": self.out_features, "embed_dim": self.in_features}
        return {**sizes, **options, "padding_idx": self.padding_idx, "init_std": self.init_std}

    def reset_parameters(self) -> None:
        """Draw the weight of an untied head from N(0, init_std^2); a bias starts at 0. A tied head owns no rows."""
        if not self.tied:
            draw_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def __getattr__(self, name: str) -> Any:
        table = self.__dict__.get("table")
        return table.weight if name == "weight" and table is not None else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        table = self.__dict__.get("table")
        if name != "weight" or table is None:
            super().__setattr__(name, value)
        elif value is not getattr(table, "weight", None):
            raise SizeError(
                "This head is tied: its weight is the table's. Assign the table's weight (table.weight = ...), which "
                "the head reads too, or give the model an untied head: OutputHead(embed_dim, vocab_size)."
            )

    def forward(self, hidden: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        """A score for each token, `(..., D)` to `(..., V)`."""
        table: TokenTable | None = self.__dict__["table"]
        if table is not None:
            return table.logits(hidden, **self.logit_options())
        check_width(hidden, self.in_features)
        return finish_logits(nn.functional.linear(hidden, self.weight), **self.logit_options())

    def loss(
        self, hidden: Float[Tensor, "*batch D"], targets: Int[Tensor, "*batch"], **options: Unpack[LossOptions]
    ) -> Float[Tensor, "*result"]:
        """Return the cross entropy of `targets` under `softmax(head(hidden))`, in nats per token.

        Where `forward` is overridden or replaced, it is the loss of its logits; options of the logits are then its own.

        Args:
            hidden: What the last block gives.
            targets: Token IDs, or `ignore_index`.
            **options: See `LossOptions`.
        """
        table: TokenTable | None = self.__dict__["table"]
        if not is_unchanged(self, **_FORWARD):
            return loss_of_logits(self.forward, hidden, targets, self.out_features, options)
        options = {**self.logit_options(), **options}
        if table is not None:
            return table.loss(hidden, targets, **options)
        check_width(hidden, self.in_features)
        return linear_cross_entropy(hidden, self.weight, targets, **options)

    def token_log_probs(
        self, hidden: Float[Tensor, "*batch D"], tokens: Int[Tensor, "*batch"], **options: Unpack[ScoreOptions]
    ) -> Float[Tensor, "*batch"]:
        """Log-probability of each given token under `softmax(head(hidden))`, in nats, without logits."""
        return -self.loss(hidden, tokens, **options, reduction="none")

    def logit_options(self) -> LogitOptions:
        """What stands between the products and the logits of this head."""
        return {
            "logit_scale": self.logit_scale,
            "bias": self.bias,
            "softcap": self.softcap,
            "padding_idx": self.padding_idx,
            "mask_padding": self.mask_padding,
        }

    def extra_repr(self) -> str:
        """Sizes and options, for `print`."""
        parts = [f"{self.in_features}, {self.out_features}", "tied" if self.tied else "free"]
        parts += [f"softcap={self.softcap:g}"] if self.softcap is not None else []
        parts += [f"logit_scale={self.logit_scale:g}"] if self.logit_scale != 1.0 else []
        return ", ".join(parts)


def _one_of(value: int | None, other: int | None, name: str) -> int | None:
    """Return the one of two names for the same size that was passed, or `None`."""
    if value is not None and other is not None:
        raise SizeError(f"{name} was passed twice: {value} and {other}.")
    return other if value is None else value


_FORWARD = {"forward": OutputHead.forward}
"""What the fused loss stands for."""
