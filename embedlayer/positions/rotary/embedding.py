"""Rotary positions (RoPE): queries and keys are rotated by angles that are proportional to the position."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.computed_buffers import ComputedBuffers
from embedlayer.core.devices import device_kind
from embedlayer.core.errors import CheckpointError, ShapeError, SizeError
from embedlayer.core.shapes import Positions, wide_dtype
from embedlayer.core.torch_state import is_unchanged
from embedlayer.io.files import JsonObject
from embedlayer.kernels.gpu.launch import launch
from embedlayer.kernels.operation import Operation
from embedlayer.positions.position import Position, PreparedPositions
from embedlayer.positions.rotary.axes import RotaryAxes
from embedlayer.positions.rotary.blocks import read_blocks
from embedlayer.positions.rotary.config import read_rotary
from embedlayer.positions.rotary.query import (
    QueryScaledPosition,
    QueryScaling,
    positions_before,
    query_factors,
)
from embedlayer.positions.rotary.rotation import (
    RotaryLayout,
    channel_tables,
    power_of_2,
    rotary_launches,
    rotate_heads,
)
from embedlayer.positions.rotary.scaling import Length, RotaryScaling, rotary_frequencies

UNITS_PER_ROTATION = 2**53
"""Phase units in one full rotation."""


def rotary_angles(
    positions: Int[Tensor, "*shape"],
    phase_increments: Int[Tensor, " angles"],
    axis: Int[Tensor, " angles"] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "... angles"]:
    """Return the rotation angle of each pair at each position, in radians from -pi to pi: `(..., T, angles)`."""
    half_rotation = UNITS_PER_ROTATION // 2  # angles around 0, where float32 has the finest steps
    own = positions.long().unsqueeze(-1) if axis is None else positions.long().movedim(0, -1).index_select(-1, axis)
    phase = ((own * phase_increments + half_rotation) & (UNITS_PER_ROTATION - 1)) - half_rotation
    wide = torch.float32 if device_kind(phase) == "mps" else torch.float64  # float64 leaves a single rounding
    return (phase.to(wide) * (2 * math.pi / UNITS_PER_ROTATION)).to(dtype)


ANGLES = Operation("cosines and sines of rotary angles", rotary_angles, gpu=rotary_launches, launches=["angle_tables"])


@ANGLES.operator()
def rotary_tables(
    positions: Tensor, increments: Tensor, axis: Tensor | None, layout: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines for `rotate_together` in one launch, `(..., T, 2 * P)` each.

    - `positions`: positions, `(..., T)`; with `axis` `(A, ..., T)`.
    - `increments`: phase of each pair per position, in units of 2^-53 rotations, `(P,)`.
    - `axis`: axis of each pair, or of each channel with `own_angles`; `None` for a single axis.
    """
    pairs, distance, _, own_angles = layout
    shape = positions.shape if axis is None else positions.shape[1:]
    cos, sin = (positions.new_empty(*shape, 2 * pairs, dtype=torch.float32) for _ in range(2))
    tensors = {"positions": positions.contiguous(), "increments": increments, "axis": axis, "cos": cos, "sin": sin}
    pair = {"PAIRS": pairs, "DISTANCE": distance, "OWN": bool(own_angles) and axis is not None}
    sizes = {"tokens": math.prod(shape), "scale": scale, "BLOCK": power_of_2(pairs)}
    launch(rotary_launches(), "angle_tables", **tensors, **pair, **sizes)
    return cos, sin


class RotaryAngles(NamedTuple):
    """Angles of all tokens of a forward pass: `RotaryEmbedding.prepare` returns them, and `rotate` accepts them.

    Attributes:
        cos: Cosine of each rotated channel's angle times `attention_scaling`, in float32.
        sin: Sine of the same angles times `attention_scaling`, negated for the first channel of each pair.
        query_factor: Factor of each query, in float32; `None` without `query_scaling`.
        positions: The positions, from which `rotate` computes the angles of float64 queries again in float64.
        scheme: What the scheme's angles depend on; `rotate` of a scheme with another text raises a `ShapeError`.
    """

    cos: Float[Tensor, "*rows 1 T channels"]
    sin: Float[Tensor, "*rows 1 T channels"]
    query_factor: Float[Tensor, "*rows 1 T 1"] | None
    positions: Positions
    scheme: str


class RotaryEmbedding(Position, ComputedBuffers):
    """Rotary positions: `rotate(q, k)` rotates pair i of both by `positions * base^(-2i / rotary_dim)` radians.

    The score of a query and a key then depends only on their distance, unless there is a `query_scaling`. There is no
    longest sequence.

    Args:
        head_dim: Width of a head, K.
        base: Base of the frequencies; the slowest pair needs `2 pi base^(1 - 2 / rotary_dim)` positions for a rotation.
        scaling: Change of the frequencies for sequences longer than in training: `LinearScaling`, `DynamicNTKScaling`,
            `NTKAlphaScaling`, `YarnScaling`, `LongRopeScaling`, `Llama3Scaling`, `ProportionalScaling`, or `None`.
        interleaved: Pairs are channels (2i, 2i + 1) as in GPT-J and Meta's LLaMA, not (i, i + rotary_dim / 2) as in
            GPT-NeoX and transformers' LLaMA; `permute_qk` converts projection weights between the two layouts.
        rotary_dim: Number of channels of a head that are rotated, all if `None`; the others stay as they are (GPT-NeoX,
            Phi).
        axes: How pairs are divided over several position axes: `ChunkedAxes`, `InterleavedAxes`, `AlternatingAxes`,
            `ChannelAxes`, `AxialAxes`; `None` for a single axis.
        query_scaling: Factor on rotated queries by position: `LogQueryScaling`, `PowerQueryScaling`, or `None`.
        reversed: Rotate by the negative angles (nanochat). Scores of the same weights differ from those of the usual
            direction; frequencies are then negative.
        trailing: The rotated channels are the last ones of a head, not the first (DeepSeek-V4).

    Positions have shape `(T,)` for all sequences alike, or `(B, T)`. With `axes`, `(A, B, T)` states the position of
    each token on each of the A axes, and the other two shapes mean that all axes are equal. The result then is that of
    the same scheme without `axes`, unless these have their own frequencies (`AxialAxes`).

    Example:
        >>> position = RotaryEmbedding(64, scaling=YarnScaling(factor=4.0, original_max_seq_len=2048))
        >>> q, k = position.rotate(torch.randn(1, 8, 5, 64), torch.randn(1, 2, 5, 64), torch.arange(5))

    Reference: Su et al., RoFormer, 2021. We differ: angles are reduced modulo one rotation in integers, so they are
    exact at any position and in any dtype of the model. They are rounded to float32, for float64 queries to float64.
    Frequencies that depend on the length (`DynamicNTKScaling`, `LongRopeScaling`) follow the length rule of
    `embedlayer.positions.rotary.scaling`, without state between calls.
    """

    phase_increments: Int[Tensor, " half"]
    frequency_sets: Float[Tensor, "sets half"]
    axis_index: Int[Tensor, " angles"]

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        *,
        scaling: RotaryScaling | None = None,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        axes: RotaryAxes | None = None,
        query_scaling: QueryScaling | None = None,
        reversed: bool = False,
        trailing: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.base = base
        self.scaling = scaling
        self.interleaved = interleaved
        self.axes = axes
        self.query_scaling = query_scaling
        self.reversed = reversed
        self.trailing = trailing
        self.rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > head_dim:
            raise SizeError(f"rotary_dim {self.rotary_dim} must be even and at most head_dim {head_dim}: pairs rotate.")
        if not 0 < base < math.inf:
            raise SizeError(f"base must be positive and finite, not {base}.")
        if axes is not None:
            if query_scaling is not None:
                raise SizeError(f"query_scaling is by a single position, but {axes} has {axes.num_axes}.")
            if axes.has_own_frequencies and scaling is not None:
                raise SizeError(f"{axes} has its own frequencies, which {scaling} is not defined for.")
            if axes.divides_channels and (interleaved or (scaling and scaling.limit)):
                raise SizeError(f"{axes} needs interleaved=False and a scaling that does not depend on the length.")
        self.num_axes = 1 if axes is None else axes.num_axes
        pairs = self.rotary_dim // 2
        within = 1 if axes is None or not axes.pairs_within_axis else axes.num_axes
        first, own_angles = head_dim - self.rotary_dim if trailing else 0, axes is not None and axes.divides_channels
        self._layout = RotaryLayout(pairs, 1 if interleaved else pairs // within, first, own_angles)
        self._angles_of = (
            f"base={float(base)}, rotary_dim={self.rotary_dim}, scaling={scaling}, axes={axes}, "
            f"query_scaling={query_scaling}, interleaved={interleaved}, reversed={reversed}"
        )
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
        """Build the position scheme that a transformers configuration describes; unknown rotary keys are errors.

        Args:
            config: The dictionary of a `config.json`: `rope_parameters`, flat or one for each layer type, or the older
                `rope_scaling`, `rope_theta`, `partial_rotary_factor`, `rotary_pct`, `type`. A dictionary with the key
                `base` is read as a `RotaryEmbedding.config`.
            layer_type: Type of layer in models with several, such as `"sliding_attention"` (Gemma 3, ModernBERT).
            interleaved: Layout of pairs; `None` for `rope_interleave` or the layout of the family (`model_type`). It
                must be stated for an unknown family, or without a `model_type`.
            default_base: Base for a configuration that names none; `None` makes that an error.

        Returns:
            A `RotaryEmbedding`. A neutral `Position` where `rope_parameters[layer_type]` is null (NoPE), and for a
            model without rotary positions: by its family (Jamba), or by its configuration (ESM, absolute positions).
            `rotary_positions` also knows single blocks without positions.

        Raises:
            CheckpointError: A key is unknown, missing, of the wrong type, or contradicts another; the width of a head
                is odd; or the family is unknown and `interleaved` is not stated.

        Warns:
            EmbedLayerWarning: A `partial_rotary_factor` is ignored, because the family's code does not read it.

        Example:
            >>> config = {"head_dim": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
            >>> RotaryEmbedding.from_config({"model_type": "llama", **config}).scaling
            LinearScaling(factor=4.0)

        Reference: transformers/modeling_rope_utils.py. We differ: it warns about unknown keys, and fills in
        `rope_theta` and `original_max_position_embeddings` where they are missing.
        """
        if "base" in config:
            return cls.from_description(config)
        arguments = read_rotary(config, layer_type, interleaved=interleaved, default_base=default_base)
        return Position() if arguments is None else rotary_scheme(arguments)

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
        """Return the buffers `phase_increments` and, where they are used, `frequency_sets` and `axis_index`.

        `phase_increments` are those up to the trained length. `frequency_sets` are what `RotaryScaling.frequency_sets`
        returns, if frequencies depend on the sequence length. `axis_index` is what `RotaryAxes.index` returns.
        """
        tensors = {} if self.axes is None else {"axis_index": self.axes.index(self.rotary_dim)}
        if self.scaling is None:
            source = rotary_frequencies if self.axes is None else self.axes.frequencies
            return {**tensors, "phase_increments": self._directed(source(self.rotary_dim, self.base))}
        sets = self.scaling.frequency_sets(self.rotary_dim, self.base)
        tensors["phase_increments"] = self._directed(self.scaling.select(sets, 0))
        return tensors if self.scaling.limit is None else {**tensors, "frequency_sets": sets}

    def _directed(self, frequencies: Float[Tensor, " half"]) -> Int[Tensor, " half"]:
        """Convert radians per position to integers in units of 2^-53 rotations, negative if `reversed`."""
        frequencies = -frequencies if self.reversed else frequencies
        return (frequencies.double() / (2 * math.pi) * UNITS_PER_ROTATION).round().long()

    def phase_increments_at(self, length: Length) -> Int[Tensor, " half"]:
        """Return the frequency of each pair for sequences of `length`, in units of 2^-53 rotations per position.

        These integers are the buffer `phase_increments`, unless the scaling depends on the length.
        """
        if self.scaling is None or self.scaling.limit is None:
            return self.phase_increments
        return self._directed(self.scaling.select(self.frequency_sets, length))

    def frequencies(self, length: Length = 0) -> Float[Tensor, " half"]:
        """Return the frequency of each pair for sequences of `length` tokens, in radians per position, in float64."""
        return self.phase_increments_at(length).double() * (2 * math.pi / UNITS_PER_ROTATION)

    def cos_sin(
        self, positions: Int[Tensor, "*shape"], length: Length | None = None, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "*rows T angles"], Float[Tensor, "*rows T angles"]]:
        """Return the cosine and the sine of each pair's angle at each position, times `attention_scaling`.

        Args:
            positions: Position of each token, `(T,)` or `(B, T)`; with `axes` also `(A, B, T)`.
            length: Sequence length that selects the frequencies; `None` for the fixed length of the scaling, or if that
                is `None` too, the longest position plus one.
            dtype: Dtype of the results, float32 or float64.

        Returns:
            Two tensors `(T, half)` or `(B, T, half)`. With `ChannelAxes` and `(A, B, T)` they have one angle for each
            channel, `(B, T, 2 * half)`.
        """
        self.check_positions(positions)
        length = self._length(positions) if length is None else length
        return self._cos_sin(positions, self.phase_increments_at(length), dtype, self.attention_scaling)

    def _cos_sin(
        self, positions: Int[Tensor, "*shape"], phase_increments: Int[Tensor, " half"], dtype: torch.dtype, scale: float
    ) -> tuple[Float[Tensor, "*rows T angles"], Float[Tensor, "*rows T angles"]]:
        """Return cosine and sine of the angle of each pair, or of each channel, at each position, times `scale`."""
        axis = None if self.axes is None or positions.dim() < 3 else self.axis_index
        if self.axes is not None and axis is not None and self.axes.divides_channels:
            phase_increments = phase_increments.repeat(2)
        angles = rotary_angles(positions, phase_increments, axis, dtype=dtype)
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if scale == 1 else (cos * scale, sin * scale)

    @property
    def depends_on_length(self) -> bool:
        """Return whether the frequencies of a call depend on its longest position; see `at_length`."""
        return self.scaling is not None and self.scaling.limit is not None and self.scaling.length is None

    def _length(self, positions: Int[Tensor, "*shape"]) -> Length:
        """Return the sequence length that selects the frequencies of a call with these positions."""
        if self.scaling is None or self.scaling.limit is None:
            return 0
        if self.scaling.length is not None or positions.numel() == 0:
            return self.scaling.length or 0
        return positions.max() + 1

    def pair_channels(self) -> Int[Tensor, "half 2"]:
        """Return the channels `(a, b)` of each pair: `a` becomes `a cos - b sin`, and `b` becomes `b cos + a sin`."""
        channels = self._layout.first + torch.arange(self.rotary_dim)
        return channels.view(-1, 2, self._layout.distance).transpose(1, 2).reshape(-1, 2)

    def prepare(self, positions: Positions) -> PreparedPositions:
        """Return the angles of these positions, which `rotate` accepts in place of them.

        A model computes them once for all blocks. A subclass that overrides `rotate` gets the positions themselves.

        Args:
            positions: As in `rotate`.

        Raises:
            PositionError: On the CPU, with `query_scaling`, a position is below 0.

        Example:
            >>> position, positions = RotaryEmbedding(8), torch.arange(5)
            >>> q = k = torch.randn(1, 2, 5, 8)
            >>> prepared = position.prepare(positions)  # once
            >>> torch.equal(position.rotate(q, k, prepared)[0], position.rotate(q, k, positions)[0])  # in each block
            True
        """
        if not is_unchanged(self, rotate=RotaryEmbedding.rotate):
            return positions
        self.check_positions(positions)
        return RotaryAngles(*self._angles(positions, torch.float32), positions, self._angles_of)

    def _angles(self, positions: Positions, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return cosines, sines and query factors of positions, in shapes that broadcast with queries and keys."""
        scale = 1.0 if self.scaling is None else self.scaling.attention_scaling
        cos, sin = self._tables(positions, self.phase_increments_at(self._length(positions)), dtype, scale)
        factor = None if self.query_scaling is None else query_factors(self.query_scaling, positions, dtype)
        return cos, sin, factor

    def _tables(
        self, positions: Int[Tensor, "*shape"], phase_increments: Int[Tensor, " half"], dtype: torch.dtype, scale: float
    ) -> tuple[Float[Tensor, "*rows 1 T channels"], Float[Tensor, "*rows 1 T channels"]]:
        """Return cosines and sines of all rotated channels times `scale`, on CUDA in one launch."""
        axis = self.axis_index if self.axes is not None and positions.dim() == 3 else None
        is_kernels = dtype == torch.float32 and device_kind(positions) == "cuda"
        if is_kernels and ANGLES.applies(positions, phase_increments, axis):
            cos, sin = rotary_tables(positions, phase_increments, axis, self._layout, scale)
        else:
            cos, sin = self._cos_sin(positions, phase_increments, dtype, scale)
            if cos.shape[-1] == self.rotary_dim:  # `ChannelAxes` have an angle for each channel
                first, second = sin.chunk(2, dim=-1)
                sin = torch.cat([-first, second], dim=-1)
            else:
                cos, sin = channel_tables(cos, sin, self._layout.distance)
        return cos.unsqueeze(-3), sin.unsqueeze(-3)

    def rotate(
        self, q: Float[Tensor, "*batch H T K"], k: Float[Tensor, "*batch G T K"], positions: PreparedPositions
    ) -> tuple[Float[Tensor, "*batch H T K"], Float[Tensor, "*batch G T K"]]:
        """Return queries and keys with each pair rotated by its angle, and queries times their factor if there is one.

        Args:
            q: Queries.
            k: Keys.
            positions: Position of each token: `(T,)` or `(B, T)`, with `axes` also `(A, B, T)`; or the result of
                `prepare`.

        Raises:
            ShapeError: Queries or keys are not `head_dim` wide, positions do not fit them, or are no integers, or were
                prepared by another scheme.
            PositionError: On the CPU, with `query_scaling`, a position is below 0.
        """
        counted = positions_before(positions, RotaryAngles, self._angles_of)
        self._check_heads(q, k, counted)
        if isinstance(positions, RotaryAngles) and q.dtype != torch.float64:
            cos, sin, factor = positions[:3]
        else:
            cos, sin, factor = self._angles(counted, wide_dtype(q.dtype))
        q, k = rotate_heads((q, k), cos, sin, factor, self._layout)
        return q, k

    def _check_heads(self, q: Tensor, k: Tensor, positions: Positions) -> None:
        """Raise a `ShapeError` unless queries and keys are `head_dim` wide, with a position for each token."""
        for x in (q, k):
            if x.shape[-1] != self.head_dim:  # a wider one would be rotated in part
                raise ShapeError(f"head_dim {self.head_dim} does not fit heads of width {x.shape[-1]}.")
        self.check_positions(positions, (*q.shape[:-3], q.shape[-2]))

    def rerotate(
        self,
        cached_keys: Float[Tensor, "*batch G T K"],
        positions: Positions,
        *,
        from_length: Length,
        to_length: Length,
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
        self._check_heads(cached_keys, cached_keys, positions)
        difference = self.phase_increments_at(to_length) - self.phase_increments_at(from_length)
        return self._rotated_on(cached_keys, positions, difference)

    def shift_keys(self, cached_keys: Float[Tensor, "*batch G T K"], steps: Positions) -> Float[Tensor, "*batch G T K"]:
        """Return cached keys rotated to positions that are larger by `steps`, once, by the difference of the angles.

        Args:
            cached_keys: Keys that `rotate` returned.
            steps: What is added to the position of each key, on each axis: `(T,)`, `(B, T)` or `(A, B, T)`.

        Raises:
            ShapeError: Keys are not `head_dim` wide, or `steps` do not fit them or are no integers.
            SizeError: The frequencies depend on the length, see `at_length`; or each axis of `ChannelAxes` has steps of
                its own: the two channels of a pair have different angles then.
        """
        if self.depends_on_length:
            raise SizeError(f"Keys rotated with {self.scaling} cannot be moved: decode with position.at_length(n).")
        if self.axes is not None and self.axes.divides_channels and steps.dim() == 3:
            # the two channels of a pair have angles of their own, which no rotation changes to those of other positions
            raise SizeError(f"Keys rotated with {self.axes} cannot be moved on each axis: pass one position for all.")
        self._check_heads(cached_keys, cached_keys, steps)
        return self._rotated_on(cached_keys, steps, self.phase_increments_at(self._length(steps)))

    def _rotated_on(self, keys: Tensor, positions: Positions, phase_increments: Int[Tensor, " half"]) -> Tensor:
        """Return keys rotated once more, by increments times positions."""
        tables = self._tables(positions, phase_increments, wide_dtype(keys.dtype), 1.0)
        (keys,) = rotate_heads((keys,), *tables, None, self._layout)
        return keys

    def at_length(self, length: int) -> "RotaryEmbedding":
        """Return a copy that uses the frequencies for sequences of `length` in every call.

        Cached keys of the copy stay valid until a sequence is longer than `length`. A scheme that does not depend on
        the length keeps its frequencies.
        """
        scaling: Any = self.scaling
        if scaling is not None and scaling.limit is not None:
            scaling = replace(scaling, length=length)
        arguments = {name: getattr(self, name) for name in inspect.signature(RotaryEmbedding).parameters}
        fixed = RotaryEmbedding(**arguments | {"scaling": scaling})
        fixed.recompute_buffers(self.phase_increments.device)
        return fixed


def rotary_positions(
    config: JsonObject,
    *,
    interleaved: bool | None = None,
    rotated: bool | Sequence[bool] | None = None,
    default_base: float | None = None,
) -> list[Position]:
    """Build the position scheme of each block of a transformers configuration; equal blocks share one object.

    Blocks without positions (NoPE: SmolLM3, Cohere 2, EXAONE 4, a null in `rope_parameters`) and blocks without
    attention have a neutral `Position`. The unrotated blocks of LLaMA 4 have a `QueryScaledPosition`, or a neutral
    `Position` if `attn_temperature_tuning` is off. Layer types with their own base or scaling (Gemma 3, ModernBERT)
    have their own `RotaryEmbedding`.

    Args:
        config: The dictionary of a `config.json`.
        interleaved: As in `RotaryEmbedding.from_config`.
        rotated: Whether blocks are rotated: one value for all blocks, or one for each. `None` for what the family and
            the configuration say. It must be stated for an unknown family, as must `interleaved`.
        default_base: As in `RotaryEmbedding.from_config`.

    Raises:
        CheckpointError, SizeError: As in `RotaryEmbedding.from_config`; or `rotated` does not have one value for each
            block.
    """
    blocks = read_blocks(config, interleaved=interleaved, rotated=rotated, default_base=default_base)
    schemes = {key: rotary_scheme(arguments) for key, arguments in blocks.arguments.items()}
    no_positions = Position()
    return [schemes.get(key, no_positions) for key in blocks.keys]


def rotary_scheme(arguments: dict[str, Any]) -> Position:
    """Build the scheme of the arguments in `RotaryBlocks.arguments`."""
    try:
        return RotaryEmbedding(**arguments) if "head_dim" in arguments else QueryScaledPosition(**arguments)
    except SizeError as error:
        raise CheckpointError(f"The configuration contradicts itself. {error}") from error


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

    Reference: transformers/models/llama/convert_llama_weights_to_hf.py (`permute`), for `to="half_split"`.
    """
    if to not in ("interleaved", "half_split"):
        raise SizeError(f"to must be 'interleaved' or 'half_split', not {to!r}.")
    head_dim = len(weight) // num_heads
    width = head_dim if rotary_dim is None else rotary_dim
    order = torch.arange(width, device=weight.device)
    pairs = order.view(2, -1).T if to == "interleaved" else order.view(-1, 2).T
    order = torch.cat([pairs.flatten(), torch.arange(width, head_dim, device=weight.device)])
    permuted: Tensor = weight.unflatten(0, (num_heads, head_dim)).index_select(1, order).flatten(0, 1)
    return permuted
