"""Rotary positions (RoPE): queries and keys are rotated by angles that are proportional to the position."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.computed_buffers import ComputedBuffers
from embedlayer.errors import ShapeError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.positions.position import Position
from embedlayer.positions.rotary_config import read_blocks, read_rotary
from embedlayer.positions.rotary_scaling import Length, RotaryScaling, rotary_frequencies
from embedlayer.positions.rotation import fused_apply_rotary
from embedlayer.shapes import Positions

UNITS_PER_ROTATION = 2**53
"""Phase units in one full rotation."""


def to_phase_increments(frequencies: Float[Tensor, " half"]) -> Int[Tensor, " half"]:
    """Convert frequencies from radians per position to integer phase increments, in units of 2^-53 rotations.

    A position times an increment, modulo one rotation, is an exact angle. Integers do not round at position 100,000, do
    not change under `.to(torch.bfloat16)`, and exist on every device.
    """
    return (frequencies.double() / (2 * math.pi) * UNITS_PER_ROTATION).round().long()


def rotary_angles(positions: Positions, phase_increments: Int[Tensor, " half"]) -> Float[Tensor, "*rows T half"]:
    """Return the rotation angle of each pair at each position, in radians from -pi to pi, in float32.

    Args:
        positions: Position of each token.
        phase_increments: Frequency of each pair in units of 2^-53 rotations per position, see `to_phase_increments`.
    """
    half_rotation = UNITS_PER_ROTATION // 2  # angles around 0, where float32 has the finest steps
    phase = (
        (positions.long().unsqueeze(-1) * phase_increments + half_rotation) & (UNITS_PER_ROTATION - 1)
    ) - half_rotation
    wide = torch.float32 if phase.device.type == "mps" else torch.float64  # float64 leaves a single rounding
    return (phase.to(wide) * (2 * math.pi / UNITS_PER_ROTATION)).float()


class RotaryEmbedding(Position, ComputedBuffers):
    """Rotary positions: `rotate(q, k)` rotates pair i of both by `positions * base^(-2i / rotary_dim)` radians.

    The score of a query and a key then depends only on their distance. There is no longest sequence.

    Args:
        head_dim: Width of a head, K.
        base: Base of the frequencies; the slowest pair needs `2 pi base^(1 - 2 / rotary_dim)` positions for a rotation.
        scaling: Change of the frequencies for sequences longer than in training: `LinearScaling`, `DynamicNTKScaling`,
            `YarnScaling`, `LongRopeScaling`, `Llama3Scaling`, `ProportionalScaling`, or `None`.
        interleaved: Pairs are channels (2i, 2i + 1) as in GPT-J and Meta's LLaMA, not (i, i + K/2) as in GPT-NeoX and
            transformers' LLaMA; `permute_qk` converts projection weights between the two layouts.
        rotary_dim: Number of channels of a head that are rotated, all if `None`; the others stay as they are (GPT-NeoX,
            Phi).

    Raises:
        SizeError: `rotary_dim` is odd or exceeds the head, the base is not positive, or the scaling does not fit.

    Example:
        >>> position = RotaryEmbedding(64, scaling=YarnScaling(factor=4.0, original_max_seq_len=2048))
        >>> q, k = position.rotate(torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64), torch.arange(5))

    Reference: Su et al., RoFormer, 2021. We differ: angles are reduced modulo one rotation in integers, so they are
    exact at any position and in any dtype of the model. Frequencies that depend on the length (`DynamicNTKScaling`,
    `LongRopeScaling`) follow the length rule of `embedlayer.positions.rotary_scaling`, without state between calls.
    """

    phase_increments: Int[Tensor, " half"]
    frequency_sets: Float[Tensor, "sets half"]

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
                f"Rotary positions rotate pairs of channels: {self.rotary_dim} of {head_dim} is not possible. "
                f"Choose an even head_dim (embed_dim / num_heads), or an even rotary_dim up to it."
            )
        if base <= 0:
            raise SizeError(f"base must be positive, not {base}.")
        self.recompute_buffers()

    @classmethod
    def from_config(  # type: ignore[override]
        cls,
        config: JsonObject,
        layer_type: str | None = None,
        *,
        interleaved: bool | None = None,
        default_base: float | None = None,
    ) -> Position:
        """Build the position scheme that a transformers configuration describes; unknown keys are errors.

        Args:
            config: The dictionary of a `config.json`: `rope_parameters`, flat or one for each layer type, or the older
                `rope_scaling`, `rope_theta`, `partial_rotary_factor`, `rotary_pct`, `type`. A dictionary with the key
                `base` is read as a `RotaryEmbedding.config`.
            layer_type: Type of layer in models with several, such as `"sliding_attention"` (Gemma 3, ModernBERT).
            interleaved: Layout of pairs; `None` for `rope_interleave` or the layout of the family (`model_type`).
            default_base: Base for a configuration that names none; `None` makes that an error.

        Returns:
            A `RotaryEmbedding`, or a neutral `Position` where `rope_parameters[layer_type]` is null (NoPE).
            `rotary_positions` also knows layers that have no positions for other reasons.

        Raises:
            CheckpointError: A key is unknown, missing, of the wrong type, or contradicts another.

        Example:
            >>> config = {"head_dim": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
            >>> RotaryEmbedding.from_config(config).scaling
            LinearScaling(factor=4.0)

        Reference: transformers/modeling_rope_utils.py. We differ: it warns about unknown keys, and fills in
        `rope_theta` and `original_max_position_embeddings` where they are missing.
        """
        if "base" in config:
            return cls.from_description(config)
        arguments = read_rotary(config, layer_type, interleaved=interleaved, default_base=default_base)
        return Position() if arguments is None else cls(**arguments)

    @classmethod
    def from_description(cls, arguments: JsonObject) -> "RotaryEmbedding":
        """Build the scheme from the arguments in its own `config`.

        Unlike `from_config`, it never reads them as a transformers configuration.
        """
        return super().from_config(arguments)

    @property
    def attention_scaling(self) -> float:
        """Return the factor on cosines and sines; 1 without a scaling.

        Queries and keys both get it, so attention scores are multiplied by its square.
        """
        return 1.0 if self.scaling is None else self.scaling.attention_scaling

    def buffer_values(self) -> dict[str, Tensor]:
        """Return the buffers `phase_increments` and, if frequencies depend on the sequence length, `frequency_sets`.

        `phase_increments` are those up to the trained length. `frequency_sets` are what `RotaryScaling.frequency_sets`
        returns.
        """
        if self.scaling is None:
            return {"phase_increments": to_phase_increments(rotary_frequencies(self.rotary_dim, self.base))}
        sets = self.scaling.frequency_sets(self.rotary_dim, self.base)
        tensors = {"phase_increments": to_phase_increments(self.scaling.select(sets, 0))}
        return tensors if self.scaling.limit is None else {**tensors, "frequency_sets": sets}

    def phase_increments_at(self, length: Length) -> Int[Tensor, " half"]:
        """Return the frequency of each pair for sequences of `length`, in units of 2^-53 rotations per position.

        These integers are the buffer `phase_increments`, unless the scaling depends on the length.
        """
        if self.scaling is None or self.scaling.limit is None:
            return self.phase_increments
        return to_phase_increments(self.scaling.select(self.frequency_sets, length))

    def frequencies(self, length: Length = 0) -> Float[Tensor, " half"]:
        """Return the frequency of each pair for sequences of `length` tokens, in radians per position, in float64."""
        return self.phase_increments_at(length).double() * (2 * math.pi / UNITS_PER_ROTATION)

    def cos_sin(
        self, positions: Positions, length: Length | None = None
    ) -> tuple[Float[Tensor, "*rows T half"], Float[Tensor, "*rows T half"]]:
        """Return the cosine and the sine of each pair's angle at each position, times `attention_scaling`, in float32.

        Args:
            positions: Position of each token.
            length: Sequence length that selects the frequencies; `None` for the fixed length of the scaling, or if that
                is `None` too, the longest position plus one.
        """
        length = self._length(positions) if length is None else length
        angles, scaling = rotary_angles(positions, self.phase_increments_at(length)), self.attention_scaling
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if scaling == 1 else (cos * scaling, sin * scaling)

    def _length(self, positions: Positions) -> Length:
        """Return the sequence length that selects the frequencies of a call with these positions.

        It is the fixed `length` of the scaling, else the longest position plus one; 0 if frequencies do not depend on
        it.
        """
        if self.scaling is None or self.scaling.limit is None:
            return 0
        if self.scaling.length is not None or positions.numel() == 0:
            return self.scaling.length or 0
        return positions.max() + 1

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: Positions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Return queries and keys with each pair rotated by its angle.

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
            fused_apply_rotary(q, cos, sin, interleaved=self.interleaved),
            fused_apply_rotary(k, cos, sin, interleaved=self.interleaved),
        )

    def rerotate(
        self, cached_keys: Float[Tensor, "*batch G T K"], positions: Positions, *, from_length: int, to_length: int
    ) -> Float[Tensor, "*batch G T K"]:
        """Return cached keys rotated by the frequencies for `to_length` instead of those for `from_length`.

        This is needed for scalings whose frequencies change with the length of the sequence. The keys are rotated once,
        by the difference of two integer phases, so the angle is exact at any position. Where both lengths have the same
        frequencies, the keys do not change by a bit.

        Args:
            cached_keys: Keys that `rotate` returned.
            positions: Position of each key.
            from_length: Longest position plus one in the call that rotated the keys.
            to_length: Longest position plus one of the queries that attend to them.

        Example:
            >>> position = RotaryEmbedding(8, scaling=DynamicNTKScaling(factor=2.0, original_max_seq_len=4))
            >>> keys = position.rotate(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), torch.arange(4))[1]
            >>> keys = position.rerotate(keys, torch.arange(4), from_length=4, to_length=5)
        """
        difference = self.phase_increments_at(to_length) - self.phase_increments_at(from_length)
        angles = rotary_angles(positions, difference).unsqueeze(-3)
        return fused_apply_rotary(cached_keys, angles.cos(), angles.sin(), interleaved=self.interleaved)

    def at_length(self, length: int) -> "RotaryEmbedding":
        """Return a copy that uses the frequencies for sequences of `length` in every call.

        Cached keys of the copy stay valid until a sequence is longer than `length`. A scheme that does not depend on
        the length keeps its frequencies.
        """
        scaling: Any = self.scaling
        if scaling is not None and scaling.limit is not None:
            scaling = replace(scaling, length=length)
        fixed = RotaryEmbedding(
            self.head_dim, self.base, scaling=scaling, interleaved=self.interleaved, rotary_dim=self.rotary_dim
        )
        fixed.recompute_buffers(self.phase_increments.device)
        return fixed

    def extra_repr(self) -> str:
        """Return sizes, layout and scaling, which `print` shows."""
        layout = "interleaved" if self.interleaved else "half-split"
        scaling = "" if self.scaling is None else f", {self.scaling}"
        return f"{self.head_dim}, base={self.base:g}, rotary_dim={self.rotary_dim}, {layout}{scaling}"


def rotary_positions(
    config: JsonObject,
    *,
    interleaved: bool | None = None,
    rotated: bool | Sequence[bool] | None = None,
    default_base: float | None = None,
) -> list[Position]:
    """Build the position scheme of each block of a transformers configuration; equal blocks share one object.

    Blocks without positions (NoPE: SmolLM3, LLaMA 4, Cohere 2, EXAONE 4, a null in `rope_parameters`) and blocks
    without attention have a neutral `Position`. Layer types with their own base or scaling (Gemma 3, ModernBERT) have
    their own `RotaryEmbedding`.

    Args:
        config: The dictionary of a `config.json`.
        interleaved: As in `RotaryEmbedding.from_config`.
        rotated: Whether blocks are rotated: one value for all blocks, or one for each. `None` for what the family and
            the configuration say.
        default_base: As in `RotaryEmbedding.from_config`.

    Raises:
        CheckpointError: The configuration is not understood, as in `RotaryEmbedding.from_config`.
    """
    blocks = read_blocks(config, interleaved=interleaved, rotated=rotated, default_base=default_base)
    schemes = {key: RotaryEmbedding(**arguments) for key, arguments in blocks.arguments.items()}
    no_positions = Position()
    return [schemes.get(key, no_positions) for key in blocks.keys]


def permute_qk(
    weight: Tensor, num_heads: int, *, to: Literal["interleaved", "half_split"], rotary_dim: int | None = None
) -> Tensor:
    """Convert query or key projection weights between the two layouts of rotary pairs, by permuting rows in each head.

    No number changes, so both directions in turn are the identity. Queries and keys that are permuted in the same way
    have the same scores.

    Args:
        weight: The projection, `(num_heads * K, D)`; or its bias, `(num_heads * K,)`; or a norm's `(K,)` with one head.
        num_heads: Heads of this projection: H for queries, G for keys.
        to: `"half_split"` for weights of Meta's LLaMA or GPT-J, to run with `interleaved=False`; `"interleaved"` for
            weights of transformers' LLaMA, to run with `interleaved=True`.
        rotary_dim: Number of rotated channels of a head, all if `None`; the others keep their order.

    Raises:
        SizeError: Rows do not divide into heads with `rotary_dim` channels in pairs, or `to` is neither layout.

    Reference: transformers/models/llama/convert_llama_weights_to_hf.py (`permute`), for `to="half_split"`.
    """
    if to not in ("interleaved", "half_split"):
        raise SizeError(f"to must be 'interleaved' or 'half_split', not {to!r}.")
    rows = weight.shape[0]
    head_dim = rows // num_heads if num_heads > 0 else 0
    width = head_dim if rotary_dim is None else rotary_dim
    if head_dim < 1 or rows % num_heads or width < 2 or width % 2 or width > head_dim:
        raise SizeError(
            f"{rows} rows cannot be {num_heads} heads in which {'all' if rotary_dim is None else rotary_dim} channels "
            f"rotate in pairs. Pass the number of heads of this projection (key/value heads for keys)."
        )
    order = torch.arange(width, device=weight.device)
    pairs = order.view(2, -1).T if to == "interleaved" else order.view(-1, 2).T
    order = torch.cat([pairs.flatten(), torch.arange(width, head_dim, device=weight.device)])
    permuted: Tensor = weight.unflatten(0, (num_heads, head_dim)).index_select(1, order).flatten(0, 1)
    return permuted
