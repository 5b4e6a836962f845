"""Rotary positions: queries and keys are turned by angles that grow with the position (RoPE)."""

import math
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.derived import Derived
from embedlayer.errors import ShapeError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.positions.position import Position
from embedlayer.positions.rotary_config import has_layer_types, layer_types, read_rotary, rotated_layers
from embedlayer.positions.rotary_scaling import DynamicNTK, Length, LongRope, RotaryScaling, rotary_frequencies
from embedlayer.positions.turn import turn
from embedlayer.pretrained import describe
from embedlayer.shapes import Positions

TURN = 2**53


def turns(frequencies: Float[Tensor, " half"]) -> Int[Tensor, " half"]:
    """Frequencies as whole numbers of 2^-53 turns per position.

    A position times such a number, modulo one turn, is an exact angle: integers neither round at position 100,000 nor
    change under `.to(torch.bfloat16)`, and every device has them.
    """
    return (frequencies.double() / (2 * math.pi) * TURN).round().long()


def rotary_angles(positions: Positions, turns_per_position: Int[Tensor, " half"]) -> Float[Tensor, "*rows T half"]:
    """`positions * frequencies` in radians, modulo one turn, from -pi to pi, in float32."""
    half_a_turn = TURN // 2  # around 0, where float32 is finest
    phase = ((positions.long().unsqueeze(-1) * turns_per_position + half_a_turn) & (TURN - 1)) - half_a_turn
    wide = torch.float32 if phase.device.type == "mps" else torch.float64  # so that one rounding remains
    return (phase.to(wide) * (2 * math.pi / TURN)).float()


class RotaryEmbedding(Position, Derived):
    """Rotary positions: `rotate(q, k)` turns pair i of both by `positions * base^(-2i / rotary_dim)` radians.

    The score of a query and a key then depends on their distance only. There is no longest sequence.

    Args:
        head_dim: Width of a head, K.
        base: The slowest pair needs 2 pi base^(1 - 2 / rotary_dim) positions for a turn.
        scaling: How the frequencies are changed for sequences longer than trained: `Linear`, `DynamicNTK`, `Yarn`,
            `LongRope`, `Llama3`, `Proportional`, or `None`.
        interleaved: Pairs are channels (2i, 2i + 1) as in GPT-J and Meta's LLaMA, not (i, i + K/2) as in GPT-NeoX and
            transformers' LLaMA; `permute_qk` turns projection weights of the one kind into the other.
        rotary_dim: How many channels of a head turn, all if `None`; the rest pass through (GPT-NeoX, Phi).

    Raises:
        SizeError: `rotary_dim` is odd or exceeds the head, the base is not positive, or the scaling does not fit.

    Example:
        >>> position = RotaryEmbedding(64, scaling=Yarn(factor=4.0, original_max_seq_len=2048))
        >>> q, k = position.rotate(torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64), torch.arange(5))

    Reference: Su et al., RoFormer, 2021. We differ: angles are taken modulo one turn in integers, so they are exact at
    any position and in any dtype of the model. Frequencies that depend on the length (`DynamicNTK`, `LongRope`) follow
    the length rule of `embedlayer.positions.rotary_scaling`, which remembers nothing between calls.
    """

    turns_per_position: Int[Tensor, " half"]
    regimes: Float[Tensor, "regimes half"]

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        scaling: RotaryScaling | None = None,
        interleaved: bool = False,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.scaling = scaling
        self.interleaved = interleaved
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > head_dim:
            raise SizeError(
                f"Rotary positions turn pairs of channels: {self.rotary_dim} of {head_dim} is not possible. "
                f"Choose an even head_dim (embed_dim / num_heads), or an even rotary_dim up to it."
            )
        if base <= 0:
            raise SizeError(f"base must be positive, not {base}.")
        self.derive()

    @classmethod
    def from_config(  # type: ignore[override]
        cls,
        config: JsonObject,
        layer_type: str | None = None,
        *,
        interleaved: bool | None = None,
        default_base: float | None = None,
    ) -> Position:
        """The position that a transformers configuration describes, read strictly; or one's own `config`.

        Args:
            config: The dictionary of a `config.json`: `rope_parameters`, flat or one for each layer type, or the older
                `rope_scaling`, `rope_theta`, `partial_rotary_factor`, `rotary_pct`, `type`. A dictionary with the key
                `base` is what `RotaryEmbedding.config` returned.
            layer_type: Which layers, where they differ, such as `"sliding_attention"` (Gemma 3, ModernBERT).
            interleaved: Layout of pairs; `None` for `rope_interleave` or what the family (`model_type`) does.
            default_base: Base to take where the configuration names none; `None` makes that an error.

        Returns:
            A `RotaryEmbedding`, or a neutral `Position` where `rope_parameters[layer_type]` is null (NoPE). Which
            layers have none for other reasons says `rotary_positions`.

        Raises:
            CheckpointError: A key is unknown, missing, of the wrong type, or contradicts another.

        Example:
            >>> config = {"head_dim": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
            >>> RotaryEmbedding.from_config(config).scaling
            Linear(factor=4.0)

        Reference: transformers/modeling_rope_utils.py. We differ: it warns about unknown keys, and fills in
        `rope_theta` and `original_max_position_embeddings` where they are missing.
        """
        if "base" in config:
            return cls.from_description(config)
        arguments = read_rotary(config, layer_type, interleaved=interleaved, default_base=default_base)
        return Position() if arguments is None else cls(**arguments)

    @classmethod
    def from_description(cls, arguments: JsonObject) -> "RotaryEmbedding":
        """One's own `config`, whatever its keys."""
        return super().from_config(arguments)

    @property
    def config(self) -> JsonObject:
        """The constructor's arguments."""
        return {
            "head_dim": self.head_dim,
            "base": self.base,
            "scaling": None if self.scaling is None else describe(self.scaling),
            "interleaved": self.interleaved,
            "rotary_dim": self.rotary_dim,
        }

    @property
    def magnitude(self) -> float:
        """The attention factor: what cosines and sines are multiplied by."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

    def derived(self) -> dict[str, Tensor]:
        """The frequencies as turns, and where they depend on the length, the float64 numbers they are made from."""
        if self.scaling is None:
            return {"turns_per_position": turns(rotary_frequencies(self.rotary_dim, self.base))}
        regimes = self.scaling.regimes(self.rotary_dim, self.base)
        tensors = {"turns_per_position": turns(self.scaling.choose(regimes, 0))}
        return tensors if self.scaling.limit is None else {**tensors, "regimes": regimes}

    def turns_at(self, length: Length) -> Int[Tensor, " half"]:
        """The frequencies of sequences of `length`, as whole numbers of 2^-53 turns per position."""
        if self.scaling is None or self.scaling.limit is None:
            return self.turns_per_position
        return turns(self.scaling.choose(self.regimes, length))

    def cos_sin(
        self, positions: Positions, length: Length | None = None
    ) -> tuple[Float[Tensor, "*rows T half"], Float[Tensor, "*rows T half"]]:
        """Cosine and sine of every pair's angle, times the attention factor, in float32.

        Args:
            positions: Where each token stands.
            length: Sequence length that chooses the frequencies; by default that of the scaling, or the longest
                position here plus one.
        """
        angles = rotary_angles(positions, self.turns_at(self._length(positions) if length is None else length))
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.magnitude == 1 else (cos * self.magnitude, sin * self.magnitude)

    def _length(self, positions: Positions) -> Length:
        if not isinstance(self.scaling, DynamicNTK | LongRope):
            return 0
        if self.scaling.length is not None or positions.numel() == 0:
            return self.scaling.length or 0
        return positions.max() + 1

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: Positions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Queries and keys, each pair turned by its angle.

        Raises:
            ShapeError: Queries or keys are not `head_dim` wide.
        """
        if q.shape[-1] != self.head_dim or k.shape[-1] != self.head_dim:
            raise ShapeError(
                f"These rotary positions are for heads of width {self.head_dim}; queries have {q.shape[-1]} and keys "
                f"{k.shape[-1]}. Build RotaryEmbedding with head_dim {q.shape[-1]} (embed_dim / num_heads)."
            )
        cos, sin = (table.unsqueeze(-3) for table in self.cos_sin(positions))
        return (
            turn(q, cos, sin, interleaved=self.interleaved),
            turn(k, cos, sin, interleaved=self.interleaved),
        )

    def rerotate(
        self, cached_keys: Float[Tensor, "*batch G T K"], positions: Positions, *, from_length: int, to_length: int
    ) -> Float[Tensor, "*batch G T K"]:
        """Keys that were turned in sequences of `from_length`, as `rotate` would have turned them in `to_length`.

        Back and forth is one turn, by the difference of two whole numbers of turns: its angle is exact, whatever the
        position. Where both lengths have the same frequencies, the keys stay as they are bit for bit.

        Args:
            cached_keys: Turned keys.
            positions: Where each of them stands.
            from_length: Longest position plus one of the call that turned them.
            to_length: The same of the queries that will meet them.

        Example:
            >>> position = RotaryEmbedding(8, scaling=DynamicNTK(factor=2.0, original_max_seq_len=4))
            >>> keys = position.rotate(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), torch.arange(4))[1]
            >>> keys = position.rerotate(keys, torch.arange(4), from_length=4, to_length=5)
        """
        difference = self.turns_at(to_length) - self.turns_at(from_length)
        angles = rotary_angles(positions, difference).unsqueeze(-3)
        return turn(cached_keys, angles.cos(), angles.sin(), interleaved=self.interleaved)

    def at_length(self, length: int) -> "RotaryEmbedding":
        """These positions with the frequencies of `length` in every call, so that a cache stays valid up to there.

        For schemes that do not depend on the length: the same frequencies as before.
        """
        scaling = self.scaling
        if isinstance(scaling, DynamicNTK | LongRope):
            scaling = replace(scaling, length=length)
        pinned = RotaryEmbedding(
            self.head_dim, self.base, scaling=scaling, interleaved=self.interleaved, rotary_dim=self.rotary_dim
        )
        pinned.derive(self.turns_per_position.device)
        return pinned

    def extra_repr(self) -> str:
        """Sizes and options, for `print`."""
        layout = "interleaved" if self.interleaved else "half-split"
        scaling = "" if self.scaling is None else f", {self.scaling}"
        return f"{self.head_dim}, base={self.base:g}, rotary_dim={self.rotary_dim}, {layout}{scaling}"


def rotary_positions(
    config: JsonObject, *, interleaved: bool | None = None, default_base: float | None = None
) -> list[Position]:
    """The position of each layer of a transformers configuration; layers that are alike share one object.

    Layers without positions (NoPE: SmolLM3, LLaMA 4, Cohere 2, EXAONE 4, a null in `rope_parameters`) have a neutral
    `Position`; layer types with bases or scalings of their own (Gemma 3, ModernBERT) have each their `RotaryEmbedding`.

    Args:
        config: The dictionary of a `config.json`.
        interleaved: As in `RotaryEmbedding.from_config`.
        default_base: As in `RotaryEmbedding.from_config`.

    Raises:
        CheckpointError: The configuration is not understood, as in `RotaryEmbedding.from_config`.
    """
    kinds = layer_types(config) if has_layer_types(config) else [None] * len(layer_types(config))
    made: dict[str | None, Position] = {}
    nope = Position()
    layers = []
    for kind, rotated in zip(kinds, rotated_layers(config), strict=True):
        if rotated and kind not in made:
            made[kind] = RotaryEmbedding.from_config(config, kind, interleaved=interleaved, default_base=default_base)
        layers.append(made[kind] if rotated else nope)
    return layers


def permute_qk(
    weight: Tensor, num_heads: int, *, to: Literal["interleaved", "half_split"], rotary_dim: int | None = None
) -> Tensor:
    """Query or key projection weights of the one layout of pairs, for the other: the rows of each head in a new order.

    Numbers are moved, never changed, so both ways are the identity bit for bit; queries and keys permuted alike have
    the same scores.

    Args:
        weight: The projection, `(num_heads * K, D)`; or its bias, `(num_heads * K,)`; or a norm's `(K,)` with one head.
        num_heads: Heads of this projection: H for queries, G for keys.
        to: `"half_split"` for weights of Meta's LLaMA or GPT-J that are to run with `interleaved=False`;
            `"interleaved"` for weights of transformers' LLaMA that are to run with `interleaved=True`.
        rotary_dim: Channels of a head that turn, all if `None`; the rest stay where they are.

    Raises:
        SizeError: Rows do not divide into heads with `rotary_dim` channels in pairs, or `to` is neither layout.

    Reference: transformers/models/llama/convert_llama_weights_to_hf.py (`permute`), the way to half-split.
    """
    if to not in ("interleaved", "half_split"):
        raise SizeError(f"to must be 'interleaved' or 'half_split', not {to!r}.")
    rows = weight.shape[0]
    head_dim = rows // num_heads if num_heads > 0 else 0
    width = head_dim if rotary_dim is None else rotary_dim
    if head_dim < 1 or rows % num_heads or width < 2 or width % 2 or width > head_dim:
        raise SizeError(
            f"{rows} rows cannot be {num_heads} heads in which {'all' if rotary_dim is None else rotary_dim} channels "
            f"turn in pairs. Pass the number of heads of this projection (key/value heads for keys)."
        )
    order = torch.arange(width, device=weight.device)
    pairs = order.view(2, -1).T if to == "interleaved" else order.view(-1, 2).T
    order = torch.cat([pairs.flatten(), torch.arange(width, head_dim, device=weight.device)])
    permuted: Tensor = weight.unflatten(0, (num_heads, head_dim)).index_select(1, order).flatten(0, 1)
    return permuted
